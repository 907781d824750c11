"""Reading models from checkpoints and writing them to checkpoints, in a single process."""

from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from boost_core.architecture.families import model_weights
from boost_core.architecture.roles import moments_of
from boost_core.checkpoint.chunks import SaveChunks
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.shards import load_whole, save_one_by_one
from boost_core.config import JobSpec, ModelConfig, ParallelismConfig
from boost_core.convert.model_folder import Source
from boost_core.convert.names import published_slots

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
    load_whole(folder, manifest, {f"{name}.{_MASTER}": weight for name, weight in weights.items()})
    return model, weights


def write_start(folder: CheckpointFolder, job: JobSpec, published: Source) -> None:
    """Commit a model as a checkpoint of step 0, from which a job can start, with one tensor in memory at a time.

    Raises:
        ValueError: The tensors are not those of the job's model.
    """
    _refuse_other_tensors(job.model, published)
    checksums = save_one_by_one(folder, 0, _SaveSource(job, published))
    folder.commit_written(job, ParallelismConfig(), 0, 0, checksums)


class _SaveSource(SaveChunks):
    """Writes tensors in their source's order, each read on demand, along with zero moments."""

    def __init__(self, job: JobSpec, published: Source) -> None:
        self._slots, self._published, specs = published_slots(job.model), published, model_weights(job.model)
        nothing = {name: torch.empty(shape, device="meta") for name, shape in published.shapes.items()}
        chunks = {
            (name, kind): self._slots[name].chunk(empty, kind)
            for name, empty in nothing.items()
            for kind in (_MASTER, *_MOMENTS[: moments_of(specs[self._slots[name].weight], job.optimizer)])
        }
        super().__init__(chunks.values())
        self._of = {chunk.index: key for key, chunk in chunks.items()}

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The box of an item."""
        name, kind = self._of[write_item.index]
        tensor = self._published.read(name) if kind == _MASTER else torch.zeros(self._published.shapes[name])
        return self._slots[name].chunk(tensor, kind).tensor.contiguous()


def _refuse_other_tensors(model: ModelConfig, published: Source) -> None:
    slots = published_slots(model)
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
