"""The layout of a job's checkpoint folder and what makes a checkpoint count.

::

    <url>/step-00000100/__0_0.distcp …   shards, one or more files a rank
    <url>/step-00000100/.metadata        torch.distributed.checkpoint's index of them
    <url>/step-00000100/manifest.json    written last, in one piece: from then on the checkpoint exists

A reader looks for manifests only, so it never sees half of a checkpoint.
"""

import re
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, ClassVar

import fsspec

from boost_core import __version__
from boost_core.checkpoint.retention import expendable
from boost_core.config import JobSpec, ParallelismConfig
from boost_core.config.base import Config

MANIFEST = "manifest.json"
_READ_BYTES = 8 * 2**20
_STEP = re.compile(rf"step-(\d+)/{re.escape(MANIFEST)}$")


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
    """

    # Another process writes to the same place, so a cached listing would be a wrong one.
    STORAGE_OPTIONS: ClassVar[dict[str, Any]] = {"use_listings_cache": False}

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._filesystem, self._path = fsspec.url_to_fs(self.url, **self.STORAGE_OPTIONS)

    @property
    def is_local(self) -> bool:
        """Whether the folder is on a local disk."""
        return bool(self._filesystem.protocol[0] == "file")

    def step_url(self, step: int) -> str:
        """Where the checkpoint of a step is."""
        return f"{self.url}/{_name(step)}"

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, ascending."""
        found = self._filesystem.glob(f"{self._path}/step-*/{MANIFEST}")
        return sorted(int(match.group(1)) for path in found if (match := _STEP.search(path)))

    def manifest(self, step: int) -> Manifest:
        """The manifest of a committed checkpoint.

        Raises:
            FileNotFoundError: That step has no committed checkpoint.
        """
        return Manifest.model_validate_json(self._filesystem.cat_file(f"{self._path}/{_name(step)}/{MANIFEST}"))

    def prepare(self, step: int) -> None:
        """Make room for a step's shards: remove what an interrupted save left there."""
        path = f"{self._path}/{_name(step)}"
        if self._filesystem.exists(path):
            self._filesystem.rm(path, recursive=True)
        self._filesystem.makedirs(path, exist_ok=True)

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

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its manifest first, so that no reader ever sees half of it."""
        path = f"{self._path}/{_name(step)}"
        self._filesystem.rm(f"{path}/{MANIFEST}")
        self._filesystem.rm(path, recursive=True)

    def prune(self, keep_last: int | None, keep_every: int | None) -> list[int]:
        """Remove the checkpoints that ``expendable`` names, and say which."""
        steps = expendable(self.steps(), keep_last, keep_every)
        for step in steps:
            self.remove(step)
        return steps

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
        path = f"{self._path}/{_name(manifest.step)}/{MANIFEST}"
        # fsspec holds the bytes back until commit: a rename on disk, a completed upload on S3.
        with self._filesystem.open(path, "wb", autocommit=False) as stream:
            stream.write(manifest.model_dump_json(indent=1).encode())
        stream.commit()


def _name(step: int) -> str:
    return f"step-{step:08d}"
