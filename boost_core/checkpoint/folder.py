"""The layout of a job's checkpoint folder and what makes a checkpoint count.

::

    <url>/step-00000100/__0_0.distcp …   shards, one or more files a rank
    <url>/step-00000100/.metadata        torch.distributed.checkpoint's index of them
    <url>/step-00000100/manifest.json    written last, in one piece: from then on the checkpoint exists
    <url>/pins/step-00000100             while it is there, nobody removes that checkpoint
    <url>/profiles/step-00000100/…       traces of steps, which are no checkpoint's; see ``boost_core.train.profiling``

A reader looks for manifests only, so it never sees half of a checkpoint.
"""

import os
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import fsspec

from boost_core import __version__
from boost_core.checkpoint.retention import expendable
from boost_core.config import JobSpec, ParallelismConfig
from boost_core.config.base import Config
from boost_core.config.urls import StorageOptions, options_at

MANIFEST = "manifest.json"
PINS = "pins"
_READ_BYTES = 8 * 2**20
_COMMITTED = re.compile(rf"step-(\d+)/{re.escape(MANIFEST)}$")
_PINNED = re.compile(rf"{PINS}/step-(\d+)$")


class CheckpointPinned(ValueError):
    """A checkpoint that is not to be removed."""


class StoredFile(Config):
    """What was written of one file."""

    bytes: int
    crc32: int


class Manifest(Config):
    """What a committed checkpoint says about itself."""

    format: int = 2
    step: int
    samples: int  # the data cursor: samples of the job consumed so far
    parallelism: ParallelismConfig
    job: JobSpec
    versions: dict[str, str]
    saved_at: datetime
    files: dict[str, StoredFile]  # by name

    @property
    def bytes(self) -> int:
        """Size of all shards."""
        return sum(file.bytes for file in self.files.values())


class CheckpointFolder:
    """One job's checkpoints under a path, ``file://`` or ``s3://`` URL.

    Args:
        url: The folder; it need not exist yet.
        storage_options: What ``s3://`` is reached with, by s3fs's names; default: the process's own means.

    Attributes:
        url: The folder.
        storage_options: What fsspec is to be told besides the URL.
    """

    def __init__(self, url: str, storage_options: StorageOptions | None = None) -> None:
        self.url = url.rstrip("/")
        self.storage_options = options_at(self.url, storage_options)
        self._filesystem, self._path = fsspec.url_to_fs(self.url, **self.storage_options)

    @property
    def is_local(self) -> bool:
        """Whether the folder is on a local disk."""
        return bool(self._filesystem.protocol[0] == "file")

    def step_url(self, step: int) -> str:
        """Where the checkpoint of a step is."""
        return f"{self.url}/{_name(step)}"

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, ascending."""
        return sorted(self._found(f"step-*/{MANIFEST}", _COMMITTED))

    def pinned(self) -> set[int]:
        """Steps whose checkpoints are not to be removed."""
        return set(self._found(f"{PINS}/step-*", _PINNED))

    def _found(self, pattern: str, expression: re.Pattern[str]) -> list[int]:
        paths = self._filesystem.glob(f"{self._path}/{pattern}")
        return [int(match.group(1)) for path in paths if (match := expression.search(path))]

    def manifest(self, step: int) -> Manifest:
        """The manifest of a committed checkpoint.

        Raises:
            FileNotFoundError: That step has no committed checkpoint.
        """
        return Manifest.model_validate_json(self._filesystem.cat_file(self._manifest(step)))

    def prepare(self, step: int) -> None:
        """Make room for a step's shards: remove what an interrupted save left there."""
        path = f"{self._path}/{_name(step)}"
        if self._filesystem.exists(path):
            self._filesystem.rm(path, recursive=True)
        self._filesystem.makedirs(path, exist_ok=True)

    def discard(self, step: int) -> None:
        """Remove what a failed save has left of a step; a committed checkpoint stays."""
        path = f"{self._path}/{_name(step)}"
        if self._filesystem.exists(path) and not self._filesystem.exists(self._manifest(step)):
            self._filesystem.rm(path, recursive=True)

    def stored_files(self, step: int, checksums: Mapping[str, int]) -> dict[str, StoredFile]:
        """Each file that a save has written, by name, with its size as the store has it and the checksum given."""
        listing = self._filesystem.ls(f"{self._path}/{_name(step)}", detail=True)
        sizes = {entry["name"].rsplit("/", 1)[-1]: int(entry["size"]) for entry in listing}
        return {name: StoredFile(bytes=sizes[name], crc32=checksum) for name, checksum in checksums.items()}

    def damage(self, step: int, part: int = 0, parts: int = 1) -> list[str]:
        """What is wrong with the files of a committed checkpoint, each read whole; empty if they are intact.

        Args:
            step: The checkpoint's step.
            part: Which of ``parts`` equal parts of the files to look at.
            parts: In how many parts they are looked at.
        """
        files = sorted(self.manifest(step).files.items())[part::parts]
        return [
            problem for name, file in files if (problem := self._damage(f"{self._path}/{_name(step)}/{name}", file))
        ]

    def _damage(self, path: str, file: StoredFile) -> str | None:
        found, checksum = 0, 0
        try:
            with self._filesystem.open(path, "rb") as stream:
                while block := stream.read(_READ_BYTES):
                    found, checksum = found + len(block), zlib.crc32(block, checksum)
        except FileNotFoundError:
            return f"{path} is missing"
        if found != file.bytes:
            return f"{path} has {found} bytes of {file.bytes}"
        return None if checksum == file.crc32 else f"{path} is not what was written (CRC-32 differs)"

    def pin(self, step: int) -> None:
        """Have a committed checkpoint stay until it is unpinned; harmless if it is pinned already.

        Raises:
            FileNotFoundError: That step has no committed checkpoint, or it was just being removed.
        """
        self._refuse_uncommitted(step)
        self._filesystem.makedirs(f"{self._path}/{PINS}", exist_ok=True)
        self._filesystem.pipe_file(self._pin(step), b"pinned\n")
        try:
            # Pinned first and looked for then, while ``remove`` does it the other way round: one notices the other.
            self._refuse_uncommitted(step)
        except FileNotFoundError:
            self.unpin(step)
            raise

    def unpin(self, step: int) -> None:
        """Let a checkpoint go again; harmless if it is not pinned."""
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(self._pin(step))

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its manifest first, so that no reader ever sees half of it.

        Raises:
            CheckpointPinned: It is pinned, and stays.
            FileNotFoundError: That step has no committed checkpoint.
        """
        self._refuse_pinned(step)
        manifest = self._filesystem.cat_file(self._manifest(step))
        self._filesystem.rm_file(self._manifest(step))
        try:
            self._refuse_pinned(step)
        except CheckpointPinned:  # between the two lines before: all else is still there
            self._write_in_one_piece(self._manifest(step), manifest)
            raise
        self._filesystem.rm(f"{self._path}/{_name(step)}", recursive=True)

    def _refuse_pinned(self, step: int) -> None:
        if self._filesystem.exists(self._pin(step)):
            raise CheckpointPinned(f"the checkpoint of step {step} in {self.url} is pinned; unpin it to remove it")

    def _refuse_uncommitted(self, step: int) -> None:
        if not self._filesystem.exists(self._manifest(step)):
            raise FileNotFoundError(f"{self.url} holds no committed checkpoint of step {step}")

    def prune(self, keep_last: int | None, keep_every: int | None) -> list[int]:
        """Remove the checkpoints that ``expendable`` names and that nobody has pinned, and say which."""
        removed = []
        for step in expendable(self.steps(), keep_last, keep_every, self.pinned()):
            with suppress(CheckpointPinned, FileNotFoundError):  # pinned or removed by somebody else meanwhile
                self.remove(step)
                removed.append(step)
        return removed

    def commit_written(
        self, job: JobSpec, parallelism: ParallelismConfig, step: int, samples: int, checksums: Mapping[str, int]
    ) -> Manifest:
        """Commit the files that a save has written.

        Args:
            job: The job whose state it is.
            parallelism: The layout that wrote it.
            step: Optimizer steps done.
            samples: Samples consumed.
            checksums: CRC-32 of each file by name.
        """
        manifest = Manifest(
            step=step,
            samples=samples,
            parallelism=parallelism,
            job=job,
            versions={"boost": __version__, "torch": version("torch")},
            saved_at=datetime.now(UTC),
            files=self.stored_files(step, checksums),
        )
        self.commit(manifest)
        return manifest

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest in one piece; the checkpoint exists from then on."""
        self._write_in_one_piece(self._manifest(manifest.step), manifest.model_dump_json(indent=1).encode())

    def _write_in_one_piece(self, path: str, content: bytes) -> None:
        if not self.is_local:
            self._filesystem.pipe_file(path, content)  # seen once the upload is complete
            return
        temporary = Path(f"{path}.tmp")  # beside it, because only within a file system is a rename one step
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)

    def _manifest(self, step: int) -> str:
        return f"{self._path}/{_name(step)}/{MANIFEST}"

    def _pin(self, step: int) -> str:
        return f"{self._path}/{PINS}/{_name(step)}"


def _name(step: int) -> str:
    return f"step-{step:08d}"
