"""Export of a checkpoint as a model for Hugging Face's tools, without holding the model in memory.

The checkpoint's files are read once, from start to end, and verified along the way; each box of a weight is written to
its place in the model's files as it arrives. So at any time, memory holds only one box, both as stored and as a tensor,
and one weight of the model.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import ReadItem

from boost_core.architecture.families import is_dense
from boost_core.checkpoint.chunks import LoadChunks
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import Manifest
from boost_core.checkpoint.shards import load_alone
from boost_core.config import ModelConfig
from boost_core.config.data import DataConfig
from boost_core.convert.chosen import removal_named
from boost_core.convert.destination import Destination, Hub
from boost_core.convert.merge import merged_model, multiply_out
from boost_core.convert.model_card import Losses, model_card
from boost_core.convert.names import published_slots
from boost_core.convert.published_config import MODELING, TrainedOn, published_config
from boost_core.convert.tensor_files import TensorFiles
from boost_core.data.tokenizer_files import ExportedTokenizer, TokenizerDiffers, job_tokenizer
from boost_core.plan.parameters import parameter_count
from boost_core.temporary import TemporaryFolder

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_SHARD_SIZE = "5GB"
_SMALL_FILES = 2**20  # bytes reserved for files other than tensors and tokenizer


@dataclass(frozen=True)
class Export:
    """Options of an export.

    Attributes:
        dtype: Type of the tensors.
        max_shard_size: Maximum size of a file, such as ``5GB``.
        merge: Whether to multiply out low-rank products.
        tokenizer: Path or URL of the tokenizer, if it is not where the job says.
        losses: The losses that the job last reported, for the model card.
        scores: The checkpoint's scores on tasks, as text by task and metric, also for the card.
    """

    dtype: torch.dtype = torch.float32
    max_shard_size: str = MAX_SHARD_SIZE
    merge: bool = False
    tokenizer: str | None = None
    losses: Losses = field(default_factory=dict)
    scores: Mapping[str, str] = field(default_factory=dict)


def export_model(folder: CheckpointFolder, step: int, destination: Destination, how: Export, hub: Hub | None) -> None:
    """Export a checkpoint's model.

    Args:
        folder: The job's checkpoints.
        step: Step of the checkpoint.
        destination: Where to write the model.
        how: Options.
        hub: The repository to push it to afterwards, if any.

    Raises:
        CheckpointDamaged: The checkpoint is not what was written; nothing is exported.
        CheckpointRemoved: The checkpoint was removed meanwhile; nothing is exported.
        ValueError: This version does not support the model, no class computes it, it cannot be merged, or the tokenizer
            is another model's.
        OSError: The checkpoint cannot be read, or the destination or the hub does not accept the model.
    """
    manifest = folder.manifest(step)
    model = manifest.read_model()
    exported = merged_model(model) if how.merge else model
    tokenizer = job_tokenizer_or_none(manifest, model, how.tokenizer)
    about = TrainedOn(manifest.sequence_length, None if tokenizer is None else tokenizer.end_of_document)
    files_of_model = model_files(exported, about, how.dtype)
    factors = 4 * parameter_count(model) if how.merge else 0
    besides = _SMALL_FILES + (len(tokenizer.content) if tokenizer else 0)
    needed = parameter_count(exported) * how.dtype.itemsize + factors + besides
    with destination.staging(needed) as staged:
        with removal_named(folder, step):
            if how.merge:
                _write_merged(folder, manifest, model, exported, staged, how)
            else:
                _write_tensors(folder, manifest, model, staged, how.dtype, how.max_shard_size)
        texts = {
            **(tokenizer.files(manifest.sequence_length) if tokenizer else {}),
            "generation_config.json": json.dumps(
                dict.fromkeys(("eos_token_id", "pad_token_id"), about.end_of_document), indent=2
            ),
            "README.md": model_card(manifest, model, how.merge, how.losses, how.scores),
            **files_of_model,
        }
        for name, text in texts.items():
            (staged / name).write_text(text, encoding="utf-8")
        local = destination.publish(staged)
        if hub is not None:
            hub.push(local, f"{manifest.job.get('name', 'model')}, step {step}")


def model_files(model: ModelConfig, about: TrainedOn, dtype: torch.dtype) -> dict[str, str]:
    """The files that say which class computes a model, including the class if it is ours: content by file name."""
    config = published_config(model, about, str(dtype).removeprefix("torch."))
    code = {} if is_dense(model) else {MODELING: files("boost_core.convert").joinpath(MODELING).read_text("utf-8")}
    return code | {"config.json": json.dumps(config, indent=2)}


def job_tokenizer_or_none(manifest: Manifest, model: ModelConfig, name: str | None) -> ExportedTokenizer | None:
    """The tokenizer that a checkpoint's model was trained with; ``None``, with a warning, if the job's is gone.

    Raises:
        ValueError: The tokenizer is another model's, or the given file is not a tokenizer.
        OSError: The given file cannot be read.
    """
    try:
        return job_tokenizer(DataConfig.model_validate(manifest.job["data"]), model, name)
    except TokenizerDiffers:
        raise
    except Exception as error:  # a store's client raises errors of its own
        if name is not None:
            raise
        logger.warning(
            "the export gets no tokenizer and no eos_token_id, because the job's cannot be read (%s); give it with "
            "--tokenizer", error,
        )  # fmt: skip
        return None


class _FillFiles(LoadChunks):
    """Fills tensors in files, which occupy memory only while they are written to."""

    def __init__(self, model: ModelConfig, into: TensorFiles) -> None:
        chunks = {name: slot.chunk(into.tensors[name]) for name, slot in published_slots(model).items()}
        super().__init__(chunks.values())
        self._into, self._published = into, {chunk.index: name for name, chunk in chunks.items()}

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:  # noqa: ARG002
        """Release the tensor's memory, leaving it to the system to write it to disk."""
        self._into.release(self._published[read_item.dest_index])


def _write_tensors(
    folder: CheckpointFolder, manifest: Manifest, model: ModelConfig, to: Path, dtype: torch.dtype, max_shard_size: str
) -> TensorFiles:
    shapes = {name: slot.published_shape for name, slot in published_slots(model).items()}
    written = TensorFiles(to, shapes, dtype, max_shard_size)
    load_alone(folder, manifest, _FillFiles(model, written))
    written.flush()
    return written


def _write_merged(
    folder: CheckpointFolder, manifest: Manifest, model: ModelConfig, merged: ModelConfig, to: Path, how: Export
) -> None:
    with TemporaryFolder(".factors-", to.parent) as beside:
        factors = _write_tensors(folder, manifest, model, beside, torch.float32, how.max_shard_size)
        shapes = {name: slot.published_shape for name, slot in published_slots(merged).items()}
        written = TensorFiles(to, shapes, how.dtype, how.max_shard_size)
        for name, tensor in written.tensors.items():
            for used in multiply_out(name, tensor, factors.tensors):
                factors.release(used)
            written.release(name)
        written.flush()
