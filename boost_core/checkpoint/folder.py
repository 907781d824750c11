"""The layout of a job's checkpoint folder, and what makes a checkpoint valid.

::

    <url>/step-00000100/__0_0.distcp …   shards, one or more files per rank
    <url>/step-00000100/.metadata        torch.distributed.checkpoint's index of them
    <url>/step-00000100/manifest.json    written last and atomically: from then on the checkpoint exists
    <url>/step-00000100/committed        an empty file, written after the manifest
    <url>/pins/step-00000100             while this exists, the checkpoint is never removed
    <url>/profiles/step-00000100/…       traces of steps; see ``boost_core.train.profiling``

Readers look only for manifests, so they never see a partial checkpoint. Shards without a manifest are left over from an
interrupted save and can be ignored. ``committed`` tells these apart from a checkpoint that has lost its manifest: such
a checkpoint is damaged, and a job that has no other stops instead of starting over. The file is written after the
manifest, so an interrupted save has never written it, whenever it was interrupted; and it is kept while its step is
saved again, so that interrupting that save is not mistaken for interrupting a first one.
"""

import io
import logging
import math
import os
import pickle
import re
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from boost_core import __version__
from boost_core.checkpoint.manifest import CheckpointDamaged, Manifest, StoredFile, WriterLayout, decode, model_facts
from boost_core.config import JobSpec, Layout, ParallelismConfig
from boost_core.config.base import UnfitField, counted
from boost_core.config.job import CheckpointConfig
from boost_core.config.storage import StorageOptions, Unreadable, literal, options_at, read_small

# Which checkpoints a job no longer needs. Does not import torch.


def prunable(
    steps: Sequence[int], keep_last: int | None, keep_every: int | None, pinned: Collection[int] = (),
    damaged: Collection[int] = (),
) -> list[int]:  # fmt: skip
    """Steps whose checkpoints may be removed, ascending.

    Args:
        steps: Steps with a committed checkpoint, ascending.
        keep_last: Number of newest checkpoints to keep; ``None``: all.
        keep_every: Checkpoints at multiples of this many steps are kept as well.
        pinned: Steps that are always kept.
        damaged: Steps that do not count among the newest, so that checkpoints to resume from are kept.
    """
    intact = [step for step in steps if step not in damaged]
    if keep_last is None or len(intact) < keep_last:
        return []
    older = [step for step in steps if step < intact[-keep_last]]
    return [step for step in older if step not in pinned and (not keep_every or step % keep_every)]


# The files named by torch's index of a checkpoint, read without torch and without executing anything in it.

INDEX = ".metadata"


def files_named(index: bytes) -> set[str]:
    """Names of the files that hold the tensors according to torch's index, which is a pickle.

    Raises:
        ValueError: The content is not such an index.
    """
    try:
        stored = _Reader(io.BytesIO(index)).load().state["storage_data"]
        return {str(place.state["relative_path"]) for place in stored.values()}
    except Exception as error:  # a pickle can raise anything
        raise ValueError(f"is not a torch checkpoint index: {type(error).__name__}: {error}") from error


class _Anything:
    """Stands in for any class that a pickle names, and keeps the state given to it."""

    state: Any = None

    def __new__(cls, *_: object) -> "_Anything":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def find_class(self, _module: str, _name: str) -> type[_Anything]:
        return _Anything


logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
COMMITTED = "committed"
_COMMITS = {MANIFEST, COMMITTED}  # a step with either file has been committed
PINS = "pins"
_READ_BYTES = 8 * 2**20
_LARGEST_MANIFEST_BYTES = 16 * 2**20  # enough for 65,536 files in a checkpoint, with room to spare
# The same beside other work, by what is in the checkpoint: its job, of up to 1 MiB, which escapes of other letters make
# up to three times as long, and an entry for each file.
_MANIFEST_BYTES, _ENTRY_BYTES = 4 * 2**20, 128
_FILE = re.compile(r"/(step-\d+)/([^/]+)")


class CheckpointPinned(ValueError):
    """A checkpoint is pinned and must not be removed."""


class StoredCheckpoint(NamedTuple):
    """A committed checkpoint, as far as its manifest and its files' sizes tell.

    Attributes:
        step: Its step.
        manifest: Its manifest; ``None`` if it cannot be read.
        damage: The first problem found; empty if there is none.
    """

    step: int
    manifest: Manifest | None
    damage: str


class CheckpointFolder:
    """One job's checkpoints under a path, ``file://`` or ``s3://`` URL.

    Args:
        url: The folder; it need not exist yet.
        storage_options: Options for ``s3://``, by s3fs's names; default: the process's own.
        deadline: When, by ``time.monotonic``, nobody waits any more. In a process with other work, which waits while
            Python parses a manifest: with a deadline, only those are that are as large as their checkpoint's files
            call for.

    Attributes:
        url: The folder.
        storage_options: Options to pass to fsspec along with the URL.
        is_local: Whether the folder is on a local disk.
    """

    def __init__(self, url: str, storage_options: StorageOptions | None = None, deadline: float = math.inf) -> None:
        self.url, self._deadline = url.rstrip("/"), deadline
        self.storage_options = options_at(self.url, storage_options)
        self._filesystem, self._path = fsspec.url_to_fs(self.url, **self.storage_options)
        self.is_local = bool(self._filesystem.protocol[0] == "file")

    def step_url(self, step: int) -> str:
        """The URL of a step's checkpoint."""
        return f"{self.url}/{_name(step)}"

    def steps(self) -> list[int]:
        """Steps whose checkpoint has been committed, ascending, whether or not it is intact."""
        return sorted(step for step, files in self._found().items() if files.keys() & _COMMITS)

    def checkpoints(self) -> Iterator[StoredCheckpoint]:
        """Yield all committed checkpoints, newest first; each is examined only when reached.

        Raises:
            TimeoutError: Nobody waits any more.
        """
        committed = {step: sizes for step, sizes in self._found().items() if sizes.keys() & _COMMITS}
        for step, sizes in sorted(committed.items(), reverse=True):
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"looking at the checkpoints in {self.url} took too long")
            with suppress(FileNotFoundError):  # removed meanwhile
                yield self.checkpoint(step, sizes)

    def newest_intact(self) -> int | None:
        """The newest step whose checkpoint looks intact, from which a job would resume."""
        return next((checkpoint.step for checkpoint in self.checkpoints() if not checkpoint.damage), None)

    def checkpoint(self, step: int, sizes: Mapping[str, int] | None = None) -> StoredCheckpoint:
        """The committed checkpoint of a step.

        Args:
            step: The step.
            sizes: The sizes of its files by name, if they are known.

        Raises:
            FileNotFoundError: That step has no committed checkpoint.
        """
        sizes = self._sizes(step) if sizes is None else sizes
        most = _LARGEST_MANIFEST_BYTES if self._deadline == math.inf else _MANIFEST_BYTES + _ENTRY_BYTES * len(sizes)
        try:
            manifest = self.manifest(step, most)
        except CheckpointDamaged as damage:
            return StoredCheckpoint(step, None, str(damage))
        problems = self._unlisted(step, manifest, sizes)
        for name, file in manifest.files.items():
            size = sizes.get(name)
            wrong = "is missing" if size is None else file.difference(size, file.crc32)
            problems += [f"{self._file(step, name)} {wrong}"] if wrong else []
        return StoredCheckpoint(step, manifest, problems[0] if problems else "")

    def pinned(self) -> set[int]:
        """Steps whose checkpoints are pinned."""
        try:
            paths = self._filesystem.ls(f"{self._path}/{PINS}", detail=False)
        except FileNotFoundError:
            return set()
        return {step for path in paths if (step := step_named(path.rpartition("/")[2])) is not None}

    def manifest(self, step: int, most_bytes: int = _LARGEST_MANIFEST_BYTES) -> Manifest:
        """The manifest of a committed checkpoint; one of more bytes counts as damaged.

        Raises:
            FileNotFoundError: That step has no committed checkpoint.
            CheckpointDamaged: Its manifest is gone, is not what was written, or is from a newer version.
        """
        path = self._file(step, MANIFEST)
        try:
            content = read_small(self._filesystem, path, most_bytes)
        except FileNotFoundError:
            if self._filesystem.exists(self._file(step, COMMITTED)):
                raise CheckpointDamaged(f"{path} is missing") from None
            raise
        except Unreadable as error:
            raise CheckpointDamaged(str(error)) from error
        except OSError as error:
            raise self._unreadable(path, error) from error
        try:
            return decode(content, step)
        except CheckpointDamaged as damage:
            raise CheckpointDamaged(f"{path} {damage}") from damage

    def prepare(self, step: int) -> None:
        """Prepare a step's folder for shards, removing what an earlier save left there, complete or not.

        Where nothing may be removed, it is emptied instead. A symbolic link is removed, and not what it leads to.
        """
        self._clear(step)
        self._filesystem.makedirs(f"{self._path}/{_name(step)}", exist_ok=True)

    def _clear(self, step: int) -> None:
        """Remove all files of a step except the marker that it has been committed."""
        if self._is_link(step):  # perhaps to another job's
            self._filesystem.rm_file(f"{self._path}/{_name(step)}")
            return
        left = self._sizes(step).keys() - {COMMITTED}
        if MANIFEST in left:  # first, so that no reader sees a partial checkpoint
            try:
                with suppress(FileNotFoundError):
                    self._filesystem.rm_file(self._file(step, MANIFEST))
            except PermissionError:
                if self.is_local:
                    raise
                self._filesystem.pipe_file(self._file(step, MANIFEST), b"")
        paths = [self._file(step, name) for name in sorted(left - {MANIFEST})]
        if not paths:
            return
        try:
            self._filesystem.rm([literal(self._filesystem, path) for path in paths])
        except PermissionError:
            if self.is_local:
                raise
            for path in paths:
                self._filesystem.pipe_file(path, b"")

    def discard(self, step: int) -> None:
        """Remove what a failed save left of a step; a committed checkpoint is kept."""
        if MANIFEST not in self._sizes(step):
            self._clear(step)

    def damage(self, step: int, part: int = 0, parts: int = 1) -> list[str]:
        """Problems of a committed checkpoint, found by reading its files in full; empty if it is intact.

        Args:
            step: The checkpoint's step.
            part: Which of ``parts`` equal parts of the files to check; the manifest itself is checked with the first.
            parts: Number of parts into which the files are divided.
        """
        try:
            manifest = self.manifest(step)
        except (CheckpointDamaged, FileNotFoundError) as error:
            return [str(error)] if part == 0 else []
        problems = self._unlisted(step, manifest, self._sizes(step)) if part == 0 else []
        if part == 0 and INDEX not in manifest.files:
            problems.append(f"{self._file(step, MANIFEST)} lists no {INDEX}")
        return problems + self.damage_of(manifest, sorted(manifest.files)[part::parts])

    def damage_of(self, manifest: Manifest, names: Iterable[str]) -> list[str]:
        """Problems of some files of a committed checkpoint, found by reading them in full; empty if intact."""
        problems = []
        for name in names:
            path, size, checksum = self._file(manifest.step, name), 0, 0
            try:
                with self._filesystem.open(path, "rb") as stream:
                    while block := stream.read(_READ_BYTES):
                        size, checksum = size + len(block), zlib.crc32(block, checksum)
            except FileNotFoundError:
                problems.append(f"{path} is missing")
            except Unreadable as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(str(self._unreadable(path, error)))
            else:
                if wrong := manifest.files[name].difference(size, checksum):
                    problems.append(f"{path} {wrong}")
                elif name == INDEX:
                    try:
                        if missing := files_named(self._filesystem.cat_file(path)) - manifest.files.keys():
                            problems.append(f"{path} names {min(missing)}, which is not in the manifest")
                    except ValueError as error:
                        problems.append(f"{path} {error}")
        return problems

    def _unlisted(self, step: int, manifest: Manifest, sizes: Mapping[str, int]) -> list[str]:
        """Report files written by torch, other than emptied ones, that the manifest does not list."""
        written = {name for name, size in sizes.items() if size and (name == INDEX or name.endswith(".distcp"))}
        return [f"{self._file(step, name)} is not in the manifest" for name in sorted(written - manifest.files.keys())]

    def _unreadable(self, path: str, error: OSError) -> CheckpointDamaged:
        """Treat a disk's read error as damage; a store may only be unavailable, so its error is re-raised."""
        if not self.is_local or isinstance(error, PermissionError):
            raise error
        return CheckpointDamaged(f"{path} cannot be read: {error.strerror}")

    def pin(self, step: int) -> None:
        """Keep a committed checkpoint until it is unpinned; harmless if it is already pinned.

        Raises:
            FileNotFoundError: That step has no committed checkpoint, or it was just being removed.
        """
        self._refuse_uncommitted(step)
        self._filesystem.makedirs(f"{self._path}/{PINS}", exist_ok=True)
        self._filesystem.pipe_file(f"{self._path}/{PINS}/{_name(step)}", b"pinned\n")
        try:
            # Pin first and then check; ``remove`` does the reverse, so one of the two notices the other.
            self._refuse_uncommitted(step)
        except FileNotFoundError:
            self.unpin(step)
            raise

    def unpin(self, step: int) -> None:
        """Unpin a checkpoint; harmless if it is not pinned."""
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{self._path}/{PINS}/{_name(step)}")

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its manifest first, so that no reader ever sees a partial one.

        Raises:
            CheckpointPinned: It is pinned, and is kept.
            FileNotFoundError: That step has no committed checkpoint.
        """
        self._refuse_pinned(step)
        self._refuse_uncommitted(step)
        if self._is_link(step):
            self._clear(step)
            return
        removed = {}
        for name in (COMMITTED, MANIFEST):  # without both, it counts as never committed
            path = self._file(step, name)
            with suppress(FileNotFoundError):
                removed[path] = read_small(self._filesystem, path, _LARGEST_MANIFEST_BYTES)
                self._filesystem.rm_file(path)
        try:
            self._refuse_pinned(step)
        except CheckpointPinned:  # pinned meanwhile; everything else is still there
            for path, content in reversed(removed.items()):
                self._write_in_one_piece(path, content)
            raise
        with suppress(FileNotFoundError):  # an object store has no empty folders
            self._filesystem.rm(literal(self._filesystem, f"{self._path}/{_name(step)}"), recursive=True)

    def _refuse_pinned(self, step: int) -> None:
        if self._filesystem.exists(f"{self._path}/{PINS}/{_name(step)}"):
            raise CheckpointPinned(f"the checkpoint of step {step} in {self.url} is pinned; unpin it to remove it")

    def _refuse_uncommitted(self, step: int) -> None:
        if not any(self._filesystem.exists(path) for path in (self._file(step, MANIFEST), self._file(step, COMMITTED))):
            raise FileNotFoundError(f"{self.url} holds no committed checkpoint of step {step}")

    def prune(
        self, keep_last: int | None, keep_every: int | None, read_files: bool = False, newest: int | None = None
    ) -> list[int]:  # fmt: skip
        """Remove the unpinned checkpoints that ``prunable`` names, and return their steps.

        Damaged ones do not count among the newest, nor do those that the job has left out, since it is behind them.
        While it trains, what is left of saves that never ended is removed as well.

        Args:
            keep_last: Number of newest checkpoints to keep; ``None``: all.
            keep_every: Checkpoints at multiples of this many steps are kept as well.
            read_files: Whether to check for damage by reading the files of those kept, rather than only their
                manifests and file sizes.
            newest: The step that the job has just saved; ``None`` if it does not train.
        """
        found = self._found()
        for step, files in found.items():
            if newest is not None and step < newest and any(files.values()) and not files.keys() & _COMMITS:
                try:
                    self._clear(step)
                except OSError as error:  # retention does not depend on it
                    logger.warning("what a save has left of %s cannot be removed: %s", self.step_url(step), error)
        steps = sorted(step for step, files in found.items() if files.keys() & _COMMITS)
        if keep_last is None or len(steps) <= keep_last:
            return []
        # The damaged ones among the newest, down to the ``keep_last``-th intact one.
        damaged, intact = list[int](), 0
        for checkpoint in self.checkpoints():
            left_out = newest is not None and checkpoint.step > newest
            if left_out or checkpoint.damage or (read_files and self.damage(checkpoint.step)):
                damaged.append(checkpoint.step)
            else:
                intact += 1
            if intact == keep_last:
                break
        removed = []
        for step in prunable(steps, keep_last, keep_every, self.pinned(), damaged):
            with suppress(CheckpointPinned, FileNotFoundError):  # pinned or removed by someone else meanwhile
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
            step: Number of optimizer steps done.
            samples: Number of samples consumed.
            checksums: CRC-32 of each file by name.
        """
        sizes = self._sizes(step)
        manifest = Manifest(
            step=step,
            samples=samples,
            model=model_facts(job.model),
            sequence_length=job.training.sequence_length,
            parallelism=WriterLayout(**Layout.of(parallelism).sizes),
            versions={"boost": __version__, "torch": version("torch")},
            saved_at=datetime.now(UTC),
            job=job.model_dump(mode="json"),
            files={name: StoredFile(bytes=sizes[name], crc32=checksum) for name, checksum in checksums.items()},
        )
        self.commit(manifest)
        return manifest

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest atomically; the checkpoint exists from then on."""
        self._write_in_one_piece(self._file(manifest.step, MANIFEST), manifest.to_json().encode())
        try:
            self._filesystem.pipe_file(self._file(manifest.step, COMMITTED), b"")
        except Exception as error:  # stores raise types of their own
            # Without the marker, only a lost manifest goes unnoticed.
            logger.warning("%s cannot be written: %s", self._file(manifest.step, COMMITTED), error)

    def _write_in_one_piece(self, path: str, content: bytes) -> None:
        if not self.is_local:
            self._filesystem.pipe_file(path, content)  # visible once the upload is complete
            return
        temporary = f"{path}.tmp"  # in the same file system, where renaming is atomic
        with self._filesystem.open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        self._filesystem.mv(temporary, path)

    def _found(self) -> dict[int, dict[str, int]]:
        """File sizes by name of each step, committed or not."""
        if self.is_local:  # where fsspec's listing would leave out symbolic links, and folders that cannot be listed
            try:
                names = [entry.name for entry in self._filesystem.entries(self._path)]
            except (FileNotFoundError, NotADirectoryError):
                return {}
            found = {}
            for step in [step for name in names if (step := step_named(name)) is not None]:
                path = f"{self._path}/{_name(step)}"
                # Left out: a symbolic link that is broken, or leads to where it may not be followed.
                if not self._is_link(step) or (Path(path).exists() and self._filesystem.allows(path)):
                    found[step] = self._sizes(step)
            return found
        sizes: dict[str, dict[str, int]] = {}
        # An object store needs one flat listing, where a pattern would take one per step.
        for path, entry in self._filesystem.find(self._path, detail=True).items():
            if match := _FILE.fullmatch(path.removeprefix(self._path)):
                sizes.setdefault(match.group(1), {})[match.group(2)] = int(entry["size"] or 0)
        return {step: files for name, files in sizes.items() if (step := step_named(name)) is not None}

    def _is_link(self, step: int) -> bool:
        return self.is_local and Path(f"{self._path}/{_name(step)}").is_symlink()

    def _sizes(self, step: int) -> dict[str, int]:
        """File sizes of a step by name."""
        path = f"{self._path}/{_name(step)}"
        try:
            listing = self._filesystem.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {entry["name"]: int(entry["size"] or 0) for entry in listing}
        # Some S3 servers list the folder itself, too.
        return {name.rsplit("/", 1)[-1]: size for name, size in sizes.items() if name.rstrip("/") != path.rstrip("/")}

    def _file(self, step: int, name: str) -> str:
        return f"{self._path}/{_name(step)}/{name}"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def located(
    url: str, storage_options: StorageOptions | None = None, deadline: float = math.inf
) -> tuple[CheckpointFolder, int | None]:
    """Return a folder of checkpoints and, if the URL is that of one of them, its step.

    Args:
        url: The URL or path.
        storage_options: Options for ``s3://``, by s3fs's names; default: the process's own.
        deadline: As of ``CheckpointFolder``.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    step = step_named(name)
    return CheckpointFolder(url if step is None else parent or ".", storage_options, deadline), step


def step_named(name: str) -> int | None:
    """The step whose folder has this name; ``None`` if it is not a step's folder.

    Args:
        name: The folder's name.
    """
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdecimal() and _name(int(digits)) == name else None


# The other job's checkpoint that a new job starts from.
#
# A job *resumes* from its own newest checkpoint whenever it has one. Until then it may *continue* from another job's,
# with all that is in it (weights, moments, step, data cursor), or *start from its weights* alone: at step 0, with a new
# optimizer, schedule and data cursor.

# The facts about a model that may be others where only its weights are kept: how far they see, and not what they are.
_CONTEXT = frozenset({"rope_theta", "rope_scaling", "sliding_window"})
_FROM_WEIGHTS = "start from the weights alone: checkpoint.weights_from"


class UnfitOrigin(UnfitField):
    """A job cannot start from the checkpoint that it names."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class Origin(NamedTuple):
    """Where a job starts while it has no checkpoint of its own.

    Attributes:
        field: The job's field that names it.
        folder: The other job's checkpoints.
        step: The checkpoint's step; ``None``: the newest intact one.
        weights_only: Whether only its weights are taken.
    """

    field: str
    folder: CheckpointFolder
    step: int | None
    weights_only: bool

    @classmethod
    def of(
        cls, checkpoint: CheckpointConfig, storage_options: StorageOptions | None = None, deadline: float = math.inf
    ) -> "Origin | None":
        """The origin that a job names; ``None`` if it starts from scratch.

        Args:
            checkpoint: The job's section.
            storage_options: Options for ``s3://``, by s3fs's names; default: the process's own.
            deadline: As of ``CheckpointFolder``.
        """
        if checkpoint.origin is None:
            return None
        field, url = checkpoint.origin
        folder, step = located(url, storage_options, deadline)
        return cls(f"checkpoint.{field}", folder, step, weights_only=field == "weights_from")

    def absent(self) -> UnfitOrigin:
        """Return the error for a checkpoint that does not exist."""
        where = self.folder.url if self.step is None else self.folder.step_url(self.step)
        return UnfitOrigin(self.field, f"no committed checkpoint is at {where!r}; check the URL")

    def refuse_unfit(self, spec: JobSpec, manifest: Manifest) -> None:
        """Refuse a job that could not start from a checkpoint, or would have nothing to train.

        Raises:
            UnfitOrigin: The checkpoint is of another model, continuing from it leaves no step to train, or its moments
                are of other steps than this optimizer would take them for, or fewer than it needs.
        """
        url = self.folder.step_url(manifest.step)
        try:
            different = manifest.differences(spec.model)
        except ValueError as error:
            raise UnfitOrigin(self.field, str(error)) from error
        if self.weights_only:
            different = {name: what for name, what in different.items() if name not in _CONTEXT}
        if different:
            advice = "use the same model, or another checkpoint"
            if different.keys() <= _CONTEXT:
                advice = f"to change it, {_FROM_WEIGHTS}"
            problem = f"the checkpoint at {url} is of another model: {', '.join(different.values())}; {advice}"
            raise UnfitOrigin(self.field, problem)
        if self.weights_only:
            return
        steps = spec.training.steps
        if manifest.step >= steps:
            problem = (
                f"{self.field} is at step {manifest.step} ({url}), which leaves nothing to train of "
                f"training.steps={steps}; set training.steps above {manifest.step}, or {_FROM_WEIGHTS}"
            )
            raise UnfitOrigin("training.steps", problem)
        theirs = manifest.job.get("optimizer") or {}
        if theirs.get("kind") == "muon" and spec.optimizer.kind != "muon":
            problem = (
                f"the checkpoint at {url} is of optimizer.kind=muon, which keeps one moment of each low-rank factor, "
                f"and {spec.optimizer.kind} needs two; use muon, or {_FROM_WEIGHTS}"
            )
            raise UnfitOrigin("optimizer.kind", problem)
        # Steps that the checkpoint's moments are of, and that the job would correct their bias for.
        every = (theirs.get("loro") or {}).get("exact_every_steps") if theirs.get("kind") == "loro" else None
        ours = None if spec.optimizer.loro is None else spec.optimizer.loro.exact_every_steps
        ages = [manifest.step if each is None else manifest.step % each for each in (every, ours)]
        if ages[0] != ages[1]:
            there, here = (counted(age, "step") for age in ages)
            problem = (
                f"the moments at {url} are of {there}, and this optimizer would take them for those of {here}, since "
                "LORO's start from zero after each exact step; use the same optimizer.kind and exact_every_steps, or "
                f"{_FROM_WEIGHTS}"
            )
            raise UnfitOrigin("optimizer.kind", problem)


def refuse_unfit_origin(
    spec: JobSpec, storage_options: StorageOptions | None = None, deadline: float = math.inf
) -> None:  # fmt: skip
    """Refuse a job that could not start from the checkpoint that it names, by its manifest and its files' sizes.

    Args:
        spec: The job.
        storage_options: Options for ``s3://``, by s3fs's names; default: the process's own.
        deadline: As of ``CheckpointFolder``.

    Raises:
        UnfitOrigin: It is absent, damaged or of another model, or the job cannot continue from it.
    """
    origin = Origin.of(spec.checkpoint, storage_options, deadline)
    if origin is None:
        return
    try:
        stored = origin.folder.checkpoints() if origin.step is None else [origin.folder.checkpoint(origin.step)]
    except FileNotFoundError:
        raise origin.absent() from None
    damage = ""
    for checkpoint in stored:
        if checkpoint.manifest is not None and not checkpoint.damage:
            origin.refuse_unfit(spec, checkpoint.manifest)
            return
        damage = damage or f"step {checkpoint.step}: {checkpoint.damage}"
    if damage:
        problem = f"no checkpoint in {origin.folder.url} is intact: {damage}; restore its files, or name another"
        raise UnfitOrigin(origin.field, problem)
    raise origin.absent()
