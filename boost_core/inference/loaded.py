"""A checkpoint as a transformers model, filled directly from its files."""

from dataclasses import dataclass
from typing import Any

import tokenizers
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from boost_core.architecture.families import is_dense
from boost_core.checkpoint.chunks import LoadChunks
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.shards import load_alone
from boost_core.config import ModelConfig
from boost_core.config.data import DataConfig
from boost_core.convert.chosen import damage_named, removal_named
from boost_core.convert.modeling_boost import BoostConfig, BoostForCausalLM, ColaConfig, ColaForCausalLM
from boost_core.convert.names import published_slots
from boost_core.convert.published_config import COLA, TrainedOn, model_type, published_config
from boost_core.data.tokenizer_files import ExportedTokenizer, TokenizerDiffers, job_tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model that can be run.

    Attributes:
        step: Step of the checkpoint.
        model: The model in its transformers class, in evaluation mode and on its device.
        tokenizer: The tokenizer it was trained with.
        sequence_length: Tokens per training sequence; it has not learned longer ones.
    """

    step: int
    model: Any
    tokenizer: PreTrainedTokenizerFast
    sequence_length: int


def load_model(folder: CheckpointFolder, step: int, tokenizer: str | None) -> LoadedModel:
    """Load a checkpoint's model, in bf16 on a GPU if there is one, otherwise in fp32 on the CPU.

    Args:
        folder: The job's checkpoints.
        step: Step of the checkpoint.
        tokenizer: Path or URL of the tokenizer, if it is not where the job says.

    Raises:
        CheckpointDamaged: The checkpoint is not what was written.
        CheckpointRemoved: The checkpoint was removed meanwhile.
        ValueError: This version does not support the model, or its tokenizer is missing.
        OSError: The checkpoint cannot be read.
    """
    on_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    with removal_named(folder, step), damage_named(folder, step):
        manifest = folder.manifest(step)
        model = manifest.read_model()
        found = _tokenizer(DataConfig.model_validate(manifest.job["data"]), model, tokenizer)
        made = _without_weights(model, TrainedOn(manifest.sequence_length, found.end_of_document))
        round_weights(made, dtype)
        tensors = made.state_dict()
        chunks = [slot.chunk(tensors[name]) for name, slot in published_slots(model).items()]
        load_alone(folder, manifest, LoadChunks(chunks))
    for_transformers = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(found.content), **found.settings
    )
    return LoadedModel(step, made.to(device).eval(), for_transformers, manifest.sequence_length)


def round_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert a model's weights to a type. Its buffers are kept, because rotary frequencies have to be precise."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)


def _without_weights(model: ModelConfig, about: TrainedOn) -> Any:
    """An instance of the class that computes a model, with uninitialized weights."""
    config, kind = published_config(model, about), model_type(model)
    with no_init_weights():
        if is_dense(model):
            made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind).from_dict(config))
        elif kind == COLA:
            made = ColaForCausalLM(ColaConfig.from_dict(config))
        else:
            made = BoostForCausalLM(BoostConfig.from_dict(config))
    made.tie_weights()  # skipped along with the initialization
    return made


def _tokenizer(data: DataConfig, model: ModelConfig, name: str | None) -> ExportedTokenizer:
    try:
        return job_tokenizer(data, model, name)
    except TokenizerDiffers:
        raise
    except Exception as error:  # a store's client raises errors of its own
        remedy = "check --tokenizer" if name else "give its tokenizer.json with --tokenizer"
        raise ValueError(f"the job's tokenizer cannot be read ({error}); {remedy}") from error
