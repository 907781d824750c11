"""Continuation of a prompt by a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TextStreamer
from transformers.initialization import no_init_weights

from boost_core.architecture import is_dense
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.resharding import LoadChunks, load_alone
from boost_core.config.training import DataConfig
from boost_core.convert.model_folder import damage_named, published_slots, removal_named
from boost_core.convert.modeling_boost import BoostConfig, BoostForCausalLM, ColaConfig, ColaForCausalLM
from boost_core.convert.published_config import COLA, TrainedOn, model_type, published_config
from boost_core.data.tokenizers import TokenizerDiffers, job_tokenizer
from boost_core.terminal import CONTROL

# A checkpoint as a transformers model, filled directly from its files.


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
        data = DataConfig.model_validate(manifest.job["data"])
        try:
            exported = job_tokenizer(data, model, tokenizer)
        except TokenizerDiffers:
            raise
        except Exception as error:  # a store's client raises errors of its own
            remedy = "check --tokenizer" if tokenizer else "give its tokenizer.json with --tokenizer"
            raise ValueError(f"the job's tokenizer cannot be read ({error}); {remedy}") from error
        config = published_config(model, TrainedOn(manifest.sequence_length, exported.end_of_document))
        kind = model_type(model)
        with no_init_weights():
            if is_dense(model):
                instance = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind).from_dict(config))
            elif kind == COLA:
                instance = ColaForCausalLM(ColaConfig.from_dict(config))
            else:
                instance = BoostForCausalLM(BoostConfig.from_dict(config))
        instance.tie_weights()  # skipped along with the initialization
        round_weights(instance, dtype)
        tensors = instance.state_dict()
        chunks = [slot.chunk(tensors[name]) for name, slot in published_slots(model).items()]
        load_alone(folder, manifest, LoadChunks(chunks))
    plain = tokenizers.Tokenizer.from_str(exported.content)
    for_transformers = PreTrainedTokenizerFast(tokenizer_object=plain, **exported.settings)
    return LoadedModel(step, instance.to(device).eval(), for_transformers, manifest.sequence_length)


def round_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert a model's weights to a type. Its buffers are kept, because rotary frequencies have to be precise."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)


DEFAULT_NEW_TOKENS = 100


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    Attributes:
        max_new_tokens: Maximum number of new tokens; ``None`` for 100, or as many as fit the model's sequences.
        temperature: Divides the logits; 0 takes the likeliest token each time.
        top_p: Tokens are sampled from the likeliest ones with this total probability.
        seed: Seed for sampling; ``None`` for a different one each time.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"--temperature {self.temperature:g} is not from 0 to 100; 1 is what the model has learnt")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p:g} is not above 0 and up to 1; 1 leaves no token out")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {self.max_new_tokens} generates nothing; ask for 1 or more")


class _Streamer(TextStreamer):  # type: ignore[misc]
    def __init__(self, loaded: LoadedModel, write: Callable[[str], object]) -> None:
        super().__init__(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass on text that is final."""
        self._write(CONTROL.sub("\ufffd", text) + ("\n" if stream_end else ""))


def generate(loaded: LoadedModel, prompt: str, how: Sampling, write: Callable[[str], object]) -> int:
    """Continue a prompt until the document ends or the maximum number of tokens is reached.

    Args:
        loaded: The model.
        prompt: The beginning of a document; an empty one asks for a new document.
        how: How tokens are sampled.
        write: Called with the text as it is generated, without the prompt and control characters.

    Returns:
        The number of tokens generated.

    Raises:
        ValueError: The prompt and new tokens are longer than the sequences that the model was trained on.
    """
    end, length = loaded.model.config.eos_token_id, loaded.sequence_length
    tokens = loaded.tokenizer(prompt, add_special_tokens=False)["input_ids"] or [end]
    room = length - len(tokens)
    count = how.max_new_tokens or min(DEFAULT_NEW_TOKENS, room)
    lengths = f"the prompt has {len(tokens):,} tokens, and the model was trained on sequences of {length:,}"
    if room < 1:
        raise ValueError(f"{lengths}; give at most {length - 1:,}")
    if count > room:
        raise ValueError(f"{lengths}; ask for at most {room:,} with --max-new-tokens, not {count:,}")
    if how.seed is not None:
        torch.manual_seed(how.seed)
    sampling = {"do_sample": True, "temperature": how.temperature, "top_p": how.top_p, "top_k": 0}
    token_bs = torch.tensor([tokens], device=loaded.model.device)
    output_bs = loaded.model.generate(
        token_bs, attention_mask=torch.ones_like(token_bs), max_new_tokens=count, eos_token_id=end, pad_token_id=end,
        streamer=_Streamer(loaded, write), **(sampling if how.temperature else {"do_sample": False}),
    )  # fmt: skip
    return int(output_bs.shape[1]) - len(tokens)
