"""A model in a local folder: safetensors and ``config.json``."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from boost_core.config import ModelConfig
from boost_core.convert.names import Tensors
from boost_core.convert.published_config import OWN_TYPE, TrainedOn, model_type, published_config
from boost_core.convert.read_config import model_of

_CONFIG = "config.json"
_TENSORS = "model.safetensors"
# Published classes look for their file by its name, so that none fills itself from this one, whatever class is named.
_OWN_TENSORS = "boost.safetensors"


def write_model(folder: Path, model: ModelConfig, published: Tensors, trained_on: TrainedOn) -> None:
    """Write a model under its published names.

    Raises:
        ValueError: The folder has other safetensors, which would be read with the new ones.
    """
    tensors = folder / (_OWN_TENSORS if model_type(model) == OWN_TYPE else _TENSORS)
    if others := sorted(path.name for path in folder.glob("*.safetensors") if path != tensors):
        raise ValueError(f"{folder} holds another model ({others[0]}); give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(published, tensors, metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(published_config(model, trained_on), indent=2))


def read_model(folder: Path) -> tuple[ModelConfig, Tensors]:
    """A model's shape and its tensors in fp32; several safetensors files are read as one.

    Raises:
        ValueError: The folder holds no model that can be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / _CONFIG).exists():
        raise ValueError(f"{folder} holds no {_CONFIG} with safetensors beside it; give the folder of a model")
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / _CONFIG} is not valid JSON: {error}") from error
    model = model_of(config)
    tensors: Tensors = {}
    for file in files:
        for name, tensor in _loaded(file).items():
            if name in tensors:
                raise ValueError(f"{name} is in {file} and in another file of {folder}; leave one model there")
            tensors[name] = _full_precision(name, tensor)
    if model.tie_embeddings:
        tensors.pop("lm_head.weight", None)  # some writers store it twice
    return model, tensors


def _loaded(file: Path) -> Tensors:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}; copy it again") from error


def _full_precision(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        raise ValueError(f"{name} is quantized ({tensor.dtype}); give the model in fp32, fp16 or bf16")
    return tensor.float()
