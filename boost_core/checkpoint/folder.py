"""The layout of a job's checkpoint folder and what makes a checkpoint count.

::

    <url>/step-00000100/__0_0.distcp …   shards, one or more files a rank
    <url>/step-00000100/.metadata        torch.distributed.checkpoint's index of them
    <url>/step-00000100/manifest.json    written last, in one piece: from then on the checkpoint exists

A reader looks for manifests only, so it never sees half of a checkpoint.
"""

import re
from datetime import datetime
from typing import Any, ClassVar

import fsspec

from boost_core.config import JobSpec, ParallelismConfig
from boost_core.config.base import Config

MANIFEST = "manifest.json"
_STEP = re.compile(rf"step-(\d+)/{re.escape(MANIFEST)}$")


class Manifest(Config):
    """What a committed checkpoint says about itself."""

    format: int = 1
    step: int
    samples: int  # the data cursor: samples of the job consumed so far
    parallelism: ParallelismConfig
    job: JobSpec
    versions: dict[str, str]
    saved_at: datetime
    files: dict[str, int]  # name → bytes

    @property
    def bytes(self) -> int:
        """Size of all shards."""
        return sum(self.files.values())


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

    def shard_sizes(self, step: int) -> dict[str, int]:
        """Name and bytes of each file that a save has written."""
        listing = self._filesystem.ls(f"{self._path}/{_name(step)}", detail=True)
        return {entry["name"].rsplit("/", 1)[-1]: int(entry["size"]) for entry in listing if entry["type"] == "file"}

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest in one piece; the checkpoint exists from then on."""
        path = f"{self._path}/{_name(manifest.step)}/{MANIFEST}"
        # fsspec holds the bytes back until commit: a rename on disk, a completed upload on S3.
        with self._filesystem.open(path, "wb", autocommit=False) as stream:
            stream.write(manifest.model_dump_json(indent=1).encode())
        stream.commit()


def _name(step: int) -> str:
    return f"step-{step:08d}"
