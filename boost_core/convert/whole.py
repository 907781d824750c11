"""Whole weights in and out of checkpoints, in one process."""

from collections.abc import Mapping

import torch

from boost_core.architecture.families import model_weights
from boost_core.architecture.roles import moments_of
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.shards import load_whole, save_whole
from boost_core.config import JobSpec, ModelConfig, ParallelismConfig


def empty_weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    """A model's whole weights, fp32, not yet filled."""
    return {name: torch.empty(spec.shape) for name, spec in model_weights(model).items()}


def read_weights(folder: CheckpointFolder, step: int) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """The model of a committed checkpoint and its whole master weights.

    Raises:
        FileNotFoundError: That step has no committed checkpoint.
        CheckpointDamaged: It is not what was written.
        ValueError: This version knows no such model.
    """
    manifest = folder.manifest(step)
    model = manifest.read_model()
    weights = empty_weights(model)
    load_whole(folder, manifest, {f"{name}.master": weight for name, weight in weights.items()})
    return model, weights


def write_start(folder: CheckpointFolder, job: JobSpec, weights: Mapping[str, torch.Tensor]) -> None:
    """Commit weights as a checkpoint of step 0, from which a job can start."""
    masters = {f"{name}.master": weight for name, weight in weights.items()}
    specs = model_weights(job.model)
    moments = {
        f"{name}.{moment}": torch.zeros_like(weight)
        for name, weight in weights.items()
        for moment in ("first_moment", "second_moment")[: moments_of(specs[name], job.optimizer)]
    }
    checksums = save_whole(folder, 0, masters | moments)
    folder.commit_written(job, ParallelismConfig(), 0, 0, checksums)
