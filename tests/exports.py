"""Tiny models with all that makes a model compute something else, their exports, and what our decoder computes."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec, ModelConfig, ParallelismConfig
from boost_core.config.model import PRESETS
from boost_core.convert.export import Destination, Export, export_model, model_files
from boost_core.convert.model_folder import InMemory, Tensors, to_published, write_start
from boost_core.convert.published_config import TrainedOn
from boost_core.model.attention import Rotation
from boost_core.model.decoder import build
from boost_core.parallel.communicator import CommunicationLedger, Communicator
from boost_core.parallel.shard import make_weights
from tests.numerics.sharded import full_weights

SIZES = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
TOKENS = torch.randint(0, SIZES["vocab_size"], (12,), generator=torch.Generator().manual_seed(3))

_LOW_RANK = {"rank": 8}
_CHANGES = {
    "rope base": {"rope_theta": 500.0},
    "epsilon": {"norm_epsilon": 0.05},
    "tied": {"tie_embeddings": True},
    "gate": {"gate_activation": True},
    "no gate": {"gate_activation": False},
}
_SCALINGS = {
    rope_type: {"rope_scaling": {"rope_type": rope_type, "factor": 4.0, "original_max_position_embeddings": 24}}
    for rope_type in ("llama3", "yarn")
}

# What CoLA's published class computes.
COLA: dict[str, dict[str, Any]] = {
    **{f"preset {name}": {"family": "cola", "preset": name} | _LOW_RANK for name in PRESETS},
    **{f"cola, {name}": {"family": "cola"} | _LOW_RANK | change for name, change in _CHANGES.items()},
    "svd, no gate": {"family": "svd", "gate_activation": False} | _LOW_RANK,
}
# What it does not.
OWN: dict[str, dict[str, Any]] = {
    "svd": {"family": "svd"} | _LOW_RANK,
    "svd, tied": {"family": "svd", "tie_embeddings": True} | _LOW_RANK,
    "svd, grouped queries": {"family": "svd", "gate_activation": False, "num_key_value_heads": 2} | _LOW_RANK,
    "cola, grouped queries": {"family": "cola", "num_key_value_heads": 2} | _LOW_RANK,
    **{
        f"lax, {gate}": {"family": "lax", "lax": {"gate": gate}} | _LOW_RANK for gate in ("identity", "dense", "tensor")
    },
    **{f"cola, {name}": {"family": "cola"} | _LOW_RANK | change for name, change in _SCALINGS.items()},
    "dense, QK-norm": {"family": "dense", "qk_norm": True},
    "cola, QK-norm": {"family": "cola", "qk_norm": True} | _LOW_RANK,
    "dense, window": {"family": "dense", "sliding_window": 3},
    "cola, window": {"family": "cola", "sliding_window": 3} | _LOW_RANK,
    "lax of svd, chains": {"family": "lax", "lax": {"base": "svd", "chain_length": 2}} | _LOW_RANK,
}
DENSE: dict[str, dict[str, Any]] = {
    "dense": {"family": "dense"},
    "dense, grouped queries": {"family": "dense", "num_key_value_heads": 2},
    **{f"dense, {name}": {"family": "dense"} | change for name, change in (_CHANGES | _SCALINGS).items()},
}


def model_with(changes: dict[str, Any]) -> ModelConfig:
    """The model, by its sizes alone, so that presets that differ in nothing else are one."""
    return ModelConfig.model_validate(SIZES | changes).model_copy(update={"preset": None})


def weights_of(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Weights far enough from zero that every activation matters, fp32."""
    return {name: 2 * weight for name, weight in full_weights(model, torch.float32).items()}


def checkpoint_of(model: ModelConfig, weights: dict[str, torch.Tensor], url: str) -> CheckpointFolder:
    """A folder whose checkpoint, of step 0, has these weights."""
    training = {"steps": 1, "sequence_length": 48}
    job = JobSpec.model_validate({"name": "exported", "model": model.model_dump(), "training": training})
    folder = CheckpointFolder(url)
    write_start(folder, job, InMemory(to_published(model, weights)))
    return folder


def export_to(folder: Path, model: ModelConfig, **how: Any) -> None:
    with tempfile.TemporaryDirectory() as checkpoints:
        export_model(
            checkpoint_of(model, weights_of(model), checkpoints), 0, Destination(str(folder)), Export(**how), None
        )


def write_published(folder: Path, model: ModelConfig, published: Tensors) -> None:
    """A model as somebody else's tools write it: the library's own writer, in one file."""
    folder.mkdir(exist_ok=True)
    dense = {name: tensor.contiguous() for name, tensor in published.items()}
    save_file(dense, folder / "model.safetensors", metadata={"format": "pt"})
    for name, text in model_files(model, TrainedOn(32, 0), torch.float32).items():
        (folder / name).write_text(text)


@functools.cache
def log_probabilities(model: ModelConfig) -> torch.Tensor:
    """Our decoder's logarithms of each next token's probabilities after ``TOKENS``, ``[s, V]``, in float64."""
    device, length, vocabulary = torch.device("cpu"), len(TOKENS), model.vocab_size
    decoder, axes = build(model, ParallelismConfig(), Communicator(None, "tp", CommunicationLedger()))
    make_weights(decoder, axes, 0, 1, 0, device, torch.float64)
    weights = weights_of(model)
    for name, weight in decoder.named_parameters():
        weight.data.copy_(weights[name])
    # The decoder gives the loss of one target a token, so every token is its target in turn.
    targets = torch.arange(vocabulary).repeat_interleave(length)
    with torch.no_grad():
        losses = decoder(TOKENS.repeat(vocabulary), targets, Rotation.of(model, length, device))
    return -losses.view(vocabulary, length).T
