"""A model in a local folder: ``model.safetensors`` and ``config.json``."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from boost_core.config import ModelConfig
from boost_core.convert.names import Tensors
from boost_core.convert.published_config import model_of, published_config

_TENSORS, _CONFIG = "model.safetensors", "config.json"


def write_model(folder: Path, model: ModelConfig, published: Tensors) -> None:
    """Write a model under its published names."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(published, folder / _TENSORS, metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(published_config(model), indent=2))


def read_model(folder: Path) -> tuple[ModelConfig, Tensors]:
    """A model's shape and its tensors in fp32; several safetensors files are read as one.

    Raises:
        ValueError: The folder holds no model that can be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / _CONFIG).exists():
        raise ValueError(f"{folder} holds no {_CONFIG} with safetensors beside it; give the folder of a model")
    tensors = {name: tensor.float() for file in files for name, tensor in load_file(file).items()}
    model = model_of(json.loads((folder / _CONFIG).read_text()))
    if model.tie_embeddings:
        tensors.pop("lm_head.weight", None)  # some writers store it twice
    return model, tensors
