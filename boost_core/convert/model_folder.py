"""A model's published tensors: where each is within the trainer's weights, and how they become a checkpoint.

They are in memory or in a local folder, as safetensors in one or several files with a ``config.json``.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from boost_core.architecture import WeightSpec, factors_std, is_dense, is_low_rank, model_weights, moments_of
from boost_core.checkpoint.folder import CheckpointFolder, located
from boost_core.checkpoint.manifest import CheckpointDamaged
from boost_core.checkpoint.resharding import LoadChunks, load_alone
from boost_core.checkpoint.shards import ChecksummingWriter, Chunk, SaveChunks, Sizes, in_words
from boost_core.config import Activation, JobSpec, ModelConfig, ParallelismConfig
from boost_core.config.base import INTERRUPTED, hear_interrupts, in_lines, stores_in_words
from boost_core.config.storage import Disk, Unreadable, read_small, refuse_irregular
from boost_core.convert.published_config import described, model_of
from boost_core.terminal import print_lines

_CONFIG = "config.json"
_LARGEST_CONFIG_BYTES = 2**20
_LOCAL = Disk()
_HEAD, _TABLE = "lm_head.weight", "model.embed_tokens.weight"
_ROWS = 4096  # compared at once
_DTYPES = {"F64", "F32", "F16", "BF16"}


Tensors = dict[str, torch.Tensor]

# The location of each published tensor of a model within the trainer's weights.


class Slot(NamedTuple):
    """A part of one of the trainer's weights.

    Attributes:
        weight: The weight's name.
        spec: The weight.
        place: The index of the slice along the weight's axis.
    """

    weight: str
    spec: WeightSpec
    place: int

    @property
    def published_shape(self) -> Sizes:
        """The shape of the published tensor."""
        part = tuple(size for axis, size in enumerate(self.spec.shape) if axis != self.spec.axis)
        return part[::-1] if self.spec.transposed else part

    def of(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The part, as a view in the published form."""
        weight = weights[self.weight]
        part = weight if self.spec.axis is None else weight.select(self.spec.axis, self.place)
        return part.T if self.spec.transposed else part

    def chunk(self, published: torch.Tensor, kind: str = "master") -> Chunk:
        """The published tensor as a box of one of the weight's tensors in a checkpoint: its master or a moment."""
        part, name, shape = published.T if self.spec.transposed else published, f"{self.weight}.{kind}", self.spec.shape
        if self.spec.axis is None:
            return Chunk.whole(name, part)
        offsets = tuple(self.place if axis == self.spec.axis else 0 for axis in range(len(shape)))
        return Chunk(name, shape, offsets, part.unsqueeze(self.spec.axis))


def published_slots(model: ModelConfig) -> dict[str, Slot]:
    """The slot of every published tensor."""
    weights = model_weights(model).items()
    return {each: Slot(name, spec, place) for name, spec in weights for place, each in enumerate(spec.published)}


def to_published(model: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Tensors:
    """A model's whole weights under their published names, as views in the published form."""
    return {name: slot.of(weights) for name, slot in published_slots(model).items()}


# Sources of published tensors, each read on demand.


class InMemory:
    """Tensors that are all in memory."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        return self._tensors[name]


class ModelFolder:
    """A folder of safetensors; several files are read as one.

    Args:
        folder: The folder.

    Attributes:
        model: The model that its ``config.json`` describes.
        shapes: Shapes of all tensors by name.

    Raises:
        ValueError: The folder holds no readable model.
    """

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        # Mistral publishes a second copy, consolidated.safetensors, under names of its own.
        files = [file for file in files if not file.name.startswith("consolidated")] or files
        if not files or not (folder / _CONFIG).exists():
            raise ValueError(f"{folder} holds no {_CONFIG} with safetensors beside it; give the folder of a model")
        try:
            config = json.loads(read_small(_LOCAL, str(folder / _CONFIG), _LARGEST_CONFIG_BYTES))
        except Unreadable:
            raise
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{folder / _CONFIG} is not valid JSON: {error}") from error
        self.model: ModelConfig = model_of(config)
        self.shapes: dict[str, Sizes] = {}
        self._files: dict[str, Path] = {}
        for path in files:
            file = _opened(path)
            for name in file.keys():  # noqa: SIM118  # not a mapping
                if name.endswith("rotary_emb.inv_freq"):  # in Llama 2; config.json determines the frequencies
                    continue
                if name in self.shapes:
                    raise ValueError(f"{name} is in {path} and in another file of {folder}; leave one model there")
                stored = file.get_slice(name)
                dtype = stored.get_dtype()
                if dtype not in _DTYPES:
                    raise ValueError(f"{name} is quantized ({dtype}); give the model in fp32, fp16 or bf16")
                self.shapes[name], self._files[name] = tuple(stored.get_shape()), path
        if self.model.tie_embeddings and self.shapes.pop(_HEAD, None) is not None and _TABLE in self.shapes:
            # Some writers store the head twice.
            head, table = (_opened(self._files[name]).get_slice(name) for name in (_HEAD, _TABLE))
            rows = range(0, head.get_shape()[0], _ROWS)
            same = head.get_shape() == table.get_shape()
            if not (same and all(torch.equal(head[row : row + _ROWS], table[row : row + _ROWS]) for row in rows)):
                raise ValueError(
                    f"{folder / _CONFIG} has tie_word_embeddings=true, but {_HEAD} and {_TABLE} differ; remove "
                    f"{_HEAD}, or set tie_word_embeddings to false, whichever is the model that was trained"
                )

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor in fp32.

        Raises:
            ValueError: It holds values that are not finite.
        """
        # Reopened each time, because a file kept open and memory-mapped would keep what was read of it in memory.
        tensor: torch.Tensor = _opened(self._files[name]).get_tensor(name).float()
        if not tensor.isfinite().all():
            raise ValueError(f"{name} in {self._files[name]} holds values that are not finite; give another model")
        return tensor


def _opened(path: Path) -> Any:
    refuse_irregular(_LOCAL, str(path))
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}; copy it again") from error


# The choice of a checkpoint, and errors that explain if it is gone or damaged.


class CheckpointRemoved(ValueError):
    """A checkpoint was removed while it was being read."""


def exit_status(command: Callable[[], None]) -> int:
    """Run a program's command; return 0, or else print why it failed and return 2, or 130 after Ctrl-C."""
    hear_interrupts()
    # A single process reads the checkpoint, as intended.
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        with stores_in_words():
            command()
    except KeyboardInterrupt:
        print_lines("\ninterrupted", to=sys.stderr)
        return INTERRUPTED
    except (OSError, ValueError) as error:
        print_lines(in_lines(error), to=sys.stderr)
        return 2
    return 0


def chosen_checkpoint(url: str, step: int | None) -> tuple[CheckpointFolder, int]:
    """Find a folder of checkpoints, by its URL or that of one of them, and a step: the given one or the newest.

    Raises:
        ValueError: The checkpoint does not exist.
    """
    folder, step = located(url) if step is None else (CheckpointFolder(url), step)
    steps = folder.steps()
    if not steps:
        raise ValueError(f"{folder.url} holds no checkpoint; check it")
    if step not in (None, *steps):
        raise ValueError(
            f"{folder.url} holds no checkpoint of step {step}; there are: {', '.join(map(str, steps))}; if its job is "
            "still training, it may have removed it: run the command again, or pin one first (boost ckpt pin)"
        )
    return folder, steps[-1] if step is None else step


@contextmanager
def damage_named(folder: CheckpointFolder, step: int) -> Iterator[None]:
    """Make errors about damage name the checkpoint and list the others."""
    try:
        yield
    except CheckpointDamaged as damage:
        others = ", ".join(str(other) for other in folder.steps() if other != step) or "none"
        remedy = f"restore it, or choose another with --step: {others}"
        raise CheckpointDamaged(f"the checkpoint of step {step} is damaged: {damage}; {remedy}") from damage


@contextmanager
def removal_named(folder: CheckpointFolder, step: int) -> Iterator[None]:
    """Replace errors caused by the removal of a checkpoint with one that says so.

    Raises:
        CheckpointRemoved: The checkpoint is gone.
    """
    try:
        yield
    except (OSError, CheckpointDamaged) as error:
        if step not in folder.steps():
            raise CheckpointRemoved(
                f"the checkpoint of step {step} was removed while it was being read; choose another with --step, and "
                "pin it first (boost ckpt pin) if the job is still training"
            ) from error
        raise


# Reading models from checkpoints and writing them to checkpoints, in a single process.

_MASTER, _MOMENTS = "master", ("first_moment", "second_moment")


def empty_weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    """A model's whole weights in fp32, uninitialized."""
    return {name: torch.empty(spec.shape) for name, spec in model_weights(model).items()}


def read_weights(folder: CheckpointFolder, step: int) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Read the model of a committed checkpoint and its whole master weights.

    Raises:
        FileNotFoundError: That step has no committed checkpoint.
        CheckpointDamaged: The checkpoint is not what was written.
        ValueError: This version does not support the model.
    """
    manifest = folder.manifest(step)
    model = manifest.read_model()
    weights = empty_weights(model)
    chunks = (Chunk.whole(f"{name}.{_MASTER}", weight) for name, weight in weights.items())
    load_alone(folder, manifest, LoadChunks(chunks))
    return model, weights


def write_start(folder: CheckpointFolder, job: JobSpec, published: "Source") -> None:
    """Commit a model as a checkpoint of step 0, from which a job can start, with one tensor in memory at a time.

    Raises:
        ValueError: The tensors are not those of the job's model, or one cannot be read.
        OSError: The store does not accept them.
    """
    model, slots = job.model, published_slots(job.model)
    if different := slots.keys() ^ published.shapes.keys():
        raise ValueError(
            f"the tensors are not those of a {model.family} model of {model.num_hidden_layers} layers: "
            f"{', '.join(sorted(different)[:3])}{' …' if len(different) > 3 else ''} is on one side only; "
            "make the job's model the same"
        )
    for name, slot in slots.items():
        if slot.published_shape != published.shapes[name]:
            there, here = list(published.shapes[name]), list(slot.published_shape)
            raise ValueError(f"{name} is {there} there and {here} in the job; make the job's model the same")
    planner, url = _SaveSource(job, published), folder.step_url(0)
    folder.prepare(0)
    # Each chunk has its own file, because torch keeps all tensors of a file until it is complete.
    writer = ChecksummingWriter(url, folder.is_local, single_file=False, **folder.storage_options)
    try:
        save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as failure:  # not a subclass of Exception
        cause, _ = next(iter(failure.failures.values()))
        if isinstance(cause.__cause__, ValueError):  # from reading a tensor
            raise cause.__cause__ from failure
        raise OSError(f"{url} cannot be written: {in_words(cause)}") from failure
    folder.commit_written(job, ParallelismConfig(), 0, 0, writer.checksums)


class _SaveSource(SaveChunks):
    """Writes tensors in their source's order, each read on demand, along with zero moments."""

    def __init__(self, job: JobSpec, published: "Source") -> None:
        self._slots, self._published = published_slots(job.model), published
        nothing = {name: torch.empty(shape, device="meta") for name, shape in published.shapes.items()}
        chunks = {
            (name, kind): self._slots[name].chunk(empty, kind)
            for name, empty in nothing.items()
            for kind in (_MASTER, *_MOMENTS[: moments_of(self._slots[name].spec, job.optimizer)])
        }
        super().__init__(chunks.values())
        self._of = {chunk.index: key for key, chunk in chunks.items()}

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The box of an item."""
        name, kind = self._of[write_item.index]
        tensor = self._published.read(name) if kind == _MASTER else torch.zeros(self._published.shapes[name])
        return self._slots[name].chunk(tensor, kind).tensor.contiguous()


# Factoring of a dense model's projections to low rank by truncated singular value decomposition.


class Factored:
    """A dense model as a low-rank one whose A·B is the best approximation of each projection at a given rank.

    The singular values are split evenly between the two factors.

    Args:
        dense: The dense model.
        rank: Width of every bottleneck.

    Attributes:
        shapes: Shapes of all tensors by name; the two factors of a projection are adjacent.
    """

    def __init__(self, dense: InMemory | ModelFolder, rank: int) -> None:
        self._dense, self._rank = dense, rank
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self.shapes: dict[str, Sizes] = {}
        for name, shape in dense.shapes.items():
            if name.endswith("_proj.weight"):
                projection, (wide_out, wide_in) = name.removesuffix(".weight"), shape
                self.shapes |= {f"{projection}.cola_a": (wide_in, rank), f"{projection}.cola_b": (rank, wide_out)}
            else:
                self.shapes[name] = shape

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor in fp32; a projection is factored when the first of its two factors is read."""
        if name in self._dense.shapes:
            return self._dense.read(name)
        projection, _, factor = name.rpartition(".")
        if self._last[0] != projection:
            a_dr, b_rf = truncated_svd(self._dense.read(f"{projection}.weight").T, self._rank)
            self._last = projection, {"cola_a": a_dr, "cola_b": b_rf}
        return self._last[1][factor]


Source = InMemory | ModelFolder | Factored  # a model's published tensors, each read on demand


def truncated_svd(w_df: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Approximate W by A B, with A d × r and B r × f. If W is narrower than the rank, both are padded.

    B is padded with zeros, so that the product is the same, and A with CoLA's initial values: if both were zero,
    neither would ever get a gradient, and the latents beyond W's width would stay zero.
    """
    left, values, right = torch.linalg.svd(w_df.double(), full_matrices=False)
    values = values[:rank]
    size, root = len(values), values.sqrt()
    a_dr, b_rf = w_df.new_zeros(w_df.shape[0], rank), w_df.new_zeros(rank, w_df.shape[1])
    a_dr.normal_(std=factors_std(rank, *w_df.shape), generator=torch.Generator().manual_seed(0))
    a_dr[:, :size], b_rf[:size] = left[:, :size] * root, root.unsqueeze(-1) * right[:size]
    return a_dr, b_rf


# Whether a job's model computes the same function as a given one, weights aside.

# Fields that have other names in published configurations than in a job.
_PUBLISHED_NAMES = {
    "norm_epsilon": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings", "family": "model_type and hidden_act",
    "gate_activation": "hidden_act and only_lr_act", "rope_theta": "rope_theta or rope_parameters",
    "rope_scaling": "rope_scaling or rope_parameters",
}  # fmt: skip


def refuse_another_function(there: ModelConfig, job: ModelConfig) -> None:
    """Refuse a model that computes a different function from a job's model with the same weights.

    Raises:
        ValueError: The functions differ. The message lists each differing field with both values.
    """
    theirs, ours = described(there), described(job)
    is_cut = is_dense(there) and is_low_rank(job)  # it is factored to low rank for the job
    changed = {"family", "rank"} if is_cut else set()
    if is_cut and job.bottleneck_activation is not Activation.LINEAR:
        # With CoLA's activation the factors are only a starting point, so the job may choose the gate.
        changed.add("gate_activation")
    different = []
    for name in ours:
        if name not in changed and theirs[name] != ours[name]:
            published = f" (published as {_PUBLISHED_NAMES[name]})" if name in _PUBLISHED_NAMES else ""
            different.append(f"{name}{published} is {theirs[name]} there and {ours[name]} in the job")
    if different:
        raise ValueError(f"{'; '.join(different)}; make the job's model the same, or start from another")
