"""Event files for TensorBoard, in a folder beside a job's checkpoints.

A file's content follows from the job's events alone, and how many bytes of it are there is noted after each batch. What
a process has written and not noted before it died is written again, byte by byte, in the same place: a reader that has
the file open sees it grow, and no point twice. Object stores know no appending, so files end after ``_FILE_BYTES`` and
the last one is put there anew.
"""

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec

from boost_core.config.parsing.urls import StorageOptions, giving_up_soon, options_at
from service.jobs.model import JobRecord
from service.trackers.curves import Batch, Entry, NotYet, settings_of

FOLDER = "tensorboard"

_FILE_BYTES = 2**20
_VERSION = "brain.Event:2"  # of the format


def has_tensorboard() -> bool:
    """Whether event files can be written on this installation."""
    return find_spec("tensorboard") is not None


class TensorBoard:
    """Writes a job's event files.

    Args:
        checkpoint_url: Folder of the job's checkpoints.
        storage_options: What ``s3://`` is reached with; default: the process's own means.
    """

    def __init__(self, checkpoint_url: str, storage_options: StorageOptions | None) -> None:
        options = options_at(checkpoint_url, giving_up_soon(storage_options))
        self._filesystem, folder = fsspec.url_to_fs(checkpoint_url, **options)
        self._folder = f"{folder}/{FOLDER}"

    def send(self, batch: Batch, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Write a batch to the newest file, or to another one if that is large or gone.

        Raises:
            NotYet: The job has no folder, and no step.
            OSError: The store or the disk did not take it, for example because it is full.
        """
        if not kept and not self._may_begin(batch.job):
            if batch.job.finished:  # without a step: there is nothing to look at
                return {}
            raise NotYet
        first = batch.entries[0]
        name, written = kept.get("file"), kept.get("bytes", 0)
        if name is not None and written < _FILE_BYTES:
            records = b"".join(_records(batch.entries))
            if self._write(name, written, records):
                return {"file": name, "bytes": written + len(records)}
        # Readers take files in the order of their names, which begin with ten digits of seconds.
        name = f"events.out.tfevents.{int(first.time.timestamp())}.{batch.job.id}.{first.event_id:012d}"
        records = b"".join([*_head(batch, with_spec=not kept), *_records(batch.entries)])
        self._write(name, 0, records)
        return {"file": name, "bytes": len(records)}

    def _may_begin(self, job: JobRecord) -> bool:
        """Whether a job's folder is there, or its ranks have had the time to make it, as the user that they are."""
        return job.progress is not None or self._filesystem.protocol[0] != "file" or Path(self._folder).parent.is_dir()

    def _write(self, name: str, at: int, content: bytes) -> bool:
        """Have a file end with this from there on; say whether it was as long as that."""
        path = f"{self._folder}/{name}"
        if self._filesystem.protocol[0] == "file":
            return _write_local(Path(path), at, content)
        before = b""
        if at:
            try:
                before = self._filesystem.cat_file(path, start=0, end=at)
            except FileNotFoundError:
                return False
        if len(before) < at:
            return False
        self._filesystem.pipe_file(path, before + content)
        return True


def _write_local(path: Path, at: int, content: bytes) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A link here would lead the service out of what the job's tenant may use.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        file = os.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644, dir_fd=folder)
        try:
            if os.fstat(file).st_size < at:
                return False
            while content:
                written = os.pwrite(file, content, at)
                content, at = content[written:], at + written
            os.fsync(file)
        finally:
            os.close(file)
    finally:
        os.close(folder)
    return True


def _head(batch: Batch, *, with_spec: bool) -> Iterator[bytes]:
    """What a file begins with; the first one says what the job is, which all jobs can be compared by."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    job, time = batch.job, batch.entries[0].time.timestamp()
    yield _record(Event(wall_time=time, file_version=_VERSION))
    if with_spec:
        begun = job.submitted_at.timestamp()
        settings = hparams_pb(settings_of(job.spec), trial_id=job.id, start_time_secs=begun)
        yield _record(Event(wall_time=time, summary=settings))
        spec = json.dumps(job.spec.model_dump(mode="json"), indent=2)
        about = (
            f"**{job.name}**, job `{job.id}` of {job.tenant}, submitted by {job.submitted_by}\n\n```json\n{spec}\n```"
        )
        yield _record(Event(wall_time=time, summary={"value": [_text("job", about)]}))


def _records(entries: Sequence[Entry]) -> Iterator[bytes]:
    for entry in entries:
        if entry.values or entry.text:
            yield _record_of(entry)


def _record_of(entry: Entry) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in entry.values.items()]
    if entry.text:
        values.append(_text("state", entry.text))
    return _record(Event(wall_time=entry.time.timestamp(), step=entry.step, summary=Summary(value=values)))


def _text(tag: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.metadata import create_summary_metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    metadata = create_summary_metadata(display_name=None, description=None)
    return Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(text.encode()))


def _record(event: Any) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    with closing(io.BytesIO()) as buffer:
        RecordWriter(buffer).write(event.SerializeToString())
        return buffer.getvalue()
