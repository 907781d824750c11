"""Text that a model generates while it trains: greedy continuations of some prompts.

Each token takes a forward pass over whole sequences, as in evaluation, so that it works in every layout: there is no
cache of keys and values. Nothing is drawn at random, and no state changes.

Shape suffixes: b prompts, t = s + 1 tokens of each.
"""

from collections.abc import Callable, Iterator, Sequence

import tokenizers
import torch

from boost_core.config import JobSpec
from boost_core.config.legality import too_long_a_prompt
from boost_core.data.tokenizers import job_tokenizer
from boost_core.messages import Sample
from boost_core.train.batch import Batch
from boost_core.train.state import TrainState
from boost_core.train.step import forward

_LONGEST = 2000  # characters kept of a text


class Prompts:
    """A job's prompts as tokens, and its tokenizer.

    Args:
        spec: The job.

    Raises:
        ValueError: A prompt is too long, or the job's tokenizer cannot be read.
    """

    def __init__(self, spec: JobSpec) -> None:
        config, training = spec.training.sample, spec.training
        self.prompts = config.prompts if config else ()
        self._every, self._steps = config.every_steps if config else 0, training.steps
        if config is None:
            return
        self._new_tokens = config.max_new_tokens
        try:
            tokenizer = job_tokenizer(spec.data, spec.model)
        except OSError as error:
            raise ValueError(f"training.sample needs the job's tokenizer: {error}; or leave sample out") from error
        self._end, self._tokenizer = tokenizer.end_of_document, tokenizers.Tokenizer.from_str(tokenizer.content)
        self._tokens = [
            self._tokenizer.encode(prompt, add_special_tokens=False).ids or [self._end] for prompt in self.prompts
        ]
        room = training.sequence_length - self._new_tokens
        for number, tokens in enumerate(self._tokens):
            if len(tokens) > room:
                raise ValueError(f"training.sample: {too_long_a_prompt(number, len(tokens), room)}")

    def is_due(self, step: int) -> bool:
        """Return whether text is to be generated after a step."""
        return bool(self.prompts) and (step % self._every == 0 or step == self._steps)

    def take(self, state: TrainState, refuse_aborted: Callable[[], None]) -> tuple[Sample, ...]:
        """Continue each prompt. All ranks call it and get the same; arguments as for ``continued``."""
        size = state.spec.training.micro_batch_size  # as in evaluation, so it fits into memory
        batches = (self._tokens[begin : begin + size] for begin in range(0, len(self._tokens), size))
        generated = [
            tokens
            for batch in batches
            for tokens in continued(state, batch, self._new_tokens, self._end, refuse_aborted)
        ]
        samples = []
        for prompt, tokens in zip(self.prompts, generated, strict=True):
            known = [token for token in tokens if self._tokenizer.id_to_token(token) is not None]
            text: str = self._tokenizer.decode(known, skip_special_tokens=False)
            # Databases do not accept NUL.
            samples.append(Sample(prompt=prompt, text=text[:_LONGEST].replace("\0", "\ufffd")))
        return tuple(samples)


@torch.no_grad()
def continued(
    state: TrainState, prompts: Sequence[Sequence[int]], new_tokens: int, end: int,
    refuse_aborted: Callable[[], None] = lambda: None,
) -> Iterator[list[int]]:  # fmt: skip
    """Yield the most likely tokens after each prompt, up to but excluding the end of the document.

    Args:
        state: The model; all ranks of a replica take part.
        prompts: Tokens of each; none empty, and each short enough for the new ones to fit into a sequence.
        new_tokens: Maximum number of new tokens.
        end: The token that ends a document.
        refuse_aborted: Called once a token is there, before the next is made from it.
    """
    length, pipeline = state.spec.training.sequence_length, state.process_groups.pipeline
    token_bt = torch.full((len(prompts), length + 1), int(end == 0))  # padding that is not the end of a document
    for row, prompt in enumerate(prompts):
        token_bt[row, : len(prompt)] = torch.tensor(prompt)
    token_bt = token_bt.to(state.mesh.device)
    rows = torch.arange(len(prompts), device=state.mesh.device)
    last_b = torch.tensor([len(prompt) - 1 for prompt in prompts], device=state.mesh.device)
    ended_b = torch.zeros_like(last_b, dtype=torch.bool)
    begins = [len(prompt) for prompt in prompts]
    for _ in range(new_tokens):
        with state.model.predicting():
            sequences = token_bt.numpy(force=True)
            likeliest_T = forward(state, Batch.of(sequences, state.end_of_document, state.mesh.device), sequences)
        # Ranks without the head get the tokens from the one that has it.
        next_b = torch.zeros_like(last_b) if likeliest_T is None else likeliest_T.view(-1, length)[rows, last_b]
        pipeline.all_reduce_(next_b, "samples")
        last_b += 1
        token_bt[rows, last_b] = next_b
        ended_b |= next_b == end
        ended = bool(ended_b.all())
        refuse_aborted()
        if ended:
            break
    for row, begin in enumerate(begins):
        new = token_bt[row, begin : int(last_b[row]) + 1].tolist()
        yield new[: new.index(end)] if end in new else new
