"""Event files for TensorBoard, in a folder next to a job's checkpoints.

A file's content depends only on the job's events, and its size is recorded after each batch. What
a process wrote but did not record before it died is written again, byte for byte, in the same place: a reader that has
the file open sees it grow, and no point twice. Object stores cannot append, so files end after ``_FILE_BYTES``, and
the last one is uploaded again.
"""

import io
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import fsspec

from boost_core.config.storage import Disk, StorageOptions, giving_up_soon, options_at
from service.jobs.model import JobRecord
from service.trackers.curves import Batch, NotYet, settings_of


class TrackerFolder:
    """The files of one tracker for one job, next to its checkpoints, on a disk or in an object store.

    Args:
        checkpoint_url: Folder of the job's checkpoints.
        name: Name of the tracker's folder in it.
        storage_options: Credentials for ``s3://``; default: those of the process.
    """

    def __init__(self, checkpoint_url: str, name: str, storage_options: StorageOptions | None) -> None:
        options = options_at(checkpoint_url, giving_up_soon(storage_options))
        self._filesystem, folder = fsspec.url_to_fs(checkpoint_url, **options)
        self._folder = f"{folder}/{name}"

    def may_begin(self, job: JobRecord) -> bool:
        """Whether the job's folder exists, or its ranks have had time to create it under their own user."""
        if job.progress is not None or not isinstance(self._filesystem, Disk):
            return True
        return self._filesystem.isdir(self._folder.rpartition("/")[0])

    def write(self, name: str, at: int, content: bytes) -> bool:
        """Write ``content`` at offset ``at`` and end the file there; return whether the file reached up to ``at``.

        If it is there already, the file stays as it is, since a service that has taken over may have continued it.

        Raises:
            OSError: The store or the disk refused it, for example because it is full.
        """
        path = f"{self._folder}/{name}"
        if isinstance(self._filesystem, Disk):
            self._filesystem.makedirs(self._folder, exist_ok=True)
            # A link would lead the service outside of what the job's tenant may use.
            with ExitStack() as opened:
                folder = self._filesystem.descriptor(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                opened.callback(os.close, folder)
                file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644, dir_fd=folder)
                opened.callback(os.close, file)
                if os.fstat(file).st_size < at:
                    return False
                if os.pread(file, len(content), at) != content:
                    while content:
                        written = os.pwrite(file, content, at)
                        content, at = content[written:], at + written
                    os.ftruncate(file, at)  # what was written before may have been longer
                os.fsync(file)
            return True
        present = b""
        with suppress(FileNotFoundError):
            present = self._filesystem.cat_file(path)
        if len(present) < at:
            return False
        if present[at : at + len(content)] != content:
            self._filesystem.pipe_file(path, present[:at] + content)
        return True


FOLDER = "tensorboard"

_FILE_BYTES = 2**20
_VERSION = "brain.Event:2"  # of the format


@cache  # each submission asks, and it searches the folders of all packages
def has_tensorboard() -> bool:
    """Whether event files can be written in this installation."""
    return find_spec("tensorboard") is not None


@dataclass(frozen=True)
class TensorBoard:
    """Writes a job's event files.

    Attributes:
        folder: Where they are.
    """

    folder: TrackerFolder

    def send(self, batch: Batch, previous: Mapping[str, Any]) -> dict[str, Any]:
        """Write a batch to the newest file, or to a new one if that is large or gone.

        Raises:
            NotYet: The job has no folder and no step yet.
            OSError: The store or the disk refused it, for example because it is full.
        """
        if not previous and not self.folder.may_begin(batch.job):
            if batch.job.finished:  # without a step: there is nothing to show
                return {}
            raise NotYet
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        records = b""
        for entry in batch.entries:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in entry.values.items()]
            if entry.text:
                values.append(_text("state", entry.text))
            if values:
                event = Event(wall_time=entry.time.timestamp(), step=entry.step, summary=Summary(value=values))
                records += _record(event)
        first, job = batch.entries[0], batch.job
        name, written = previous.get("file"), previous.get("bytes", 0)
        if name is not None and written < _FILE_BYTES and self.folder.write(name, written, records):
            return {"file": name, "bytes": written + len(records)}
        # Readers take files in order of their names, which begin with ten digits of seconds.
        time = first.time.timestamp()
        name = f"events.out.tfevents.{int(time)}.{job.id}.{first.event_id:012d}"
        head = _record(Event(wall_time=time, file_version=_VERSION))
        if not previous:  # the first file describes the job, so that jobs can be compared
            from tensorboard.plugins.hparams.summary_v2 import hparams_pb

            begun = job.submitted_at.timestamp()
            settings = hparams_pb(settings_of(job.spec), trial_id=job.id, start_time_secs=begun)
            head += _record(Event(wall_time=time, summary=settings))
            spec = json.dumps(job.spec.model_dump(mode="json"), indent=2)
            about = f"**{job.name}**, job `{job.id}` of {job.tenant}, submitted by {job.submitted_by}"
            text = _text("job", f"{about}\n\n```json\n{spec}\n```")
            head += _record(Event(wall_time=time, summary={"value": [text]}))
        records = head + records
        self.folder.write(name, 0, records)
        return {"file": name, "bytes": len(records)}


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
