"""Continuation of a prompt by a model."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import TextStreamer

from boost_core.inference.loaded import LoadedModel

DEFAULT_NEW_TOKENS = 100
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # what a terminal would act on


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
        self._write(_CONTROL.sub("\ufffd", text) + ("\n" if stream_end else ""))


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
    end = loaded.model.config.eos_token_id
    tokens = loaded.tokenizer(prompt, add_special_tokens=False)["input_ids"] or [end]
    room = loaded.sequence_length - len(tokens)
    wanted = how.max_new_tokens or min(DEFAULT_NEW_TOKENS, room)
    if room < 1:
        raise ValueError(
            f"the prompt has {len(tokens):,} tokens, and the model was trained on sequences of "
            f"{loaded.sequence_length:,}; give at most {loaded.sequence_length - 1:,}"
        )
    if wanted > room:
        raise ValueError(
            f"the prompt has {len(tokens):,} tokens, and the model was trained on sequences of "
            f"{loaded.sequence_length:,}; ask for at most {room:,} with --max-new-tokens, not {wanted:,}"
        )
    if how.seed is not None:
        torch.manual_seed(how.seed)
    drawn = {"do_sample": True, "temperature": how.temperature, "top_p": how.top_p, "top_k": 0}
    token_bs = torch.tensor([tokens], device=loaded.model.device)
    made_bs = loaded.model.generate(
        token_bs, attention_mask=torch.ones_like(token_bs), max_new_tokens=wanted, eos_token_id=end, pad_token_id=end,
        streamer=_Streamer(loaded, write), **(drawn if how.temperature else {"do_sample": False}),
    )  # fmt: skip
    return int(made_bs.shape[1]) - len(tokens)
