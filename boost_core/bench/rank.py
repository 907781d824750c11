"""The exact work of one rank: real training steps among absent ranks.

Torch's ``fake`` process group stands in for the others; its collectives return at once, and their results are written
as if all ranks had sent the same.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from boost_core.architecture import SplitAxes, WeightSpec
from boost_core.bench.results import wall_seconds
from boost_core.config import JobSpec
from boost_core.data.corpus import Corpus, Sampler, Stream, TokenStream
from boost_core.parallel.communicator import CommunicationLedger, Communicator, Pending
from boost_core.parallel.shard import replace_weights, shard_shape
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from boost_core.train.step_graph import StepGraph

_FEW_WORDS = 1024  # so that embeddings and logits add little to a difference between two steps
WARM_STEPS = 3


class Step(NamedTuple):
    """A step, the ledger of its collectives, and the graph that captures it, if any."""

    run: Callable[[], None]
    ledger: CommunicationLedger
    graph: StepGraph | None


@dataclass(frozen=True)
class RunShape:
    """The shape at which a rank is timed.

    Attributes:
        model: A preset.
        tensor_parallel_size: Ranks that share the model.
        micro_batch_size: Sequences per micro-batch; one micro-batch per optimizer step.
        sequence_length: Tokens per sequence.
        layers: Number of blocks; ``None`` for the preset's.
        vocab_size: Number of tokens in the vocabulary.
    """

    model: str
    tensor_parallel_size: int
    micro_batch_size: int
    sequence_length: int
    layers: int | None = None
    vocab_size: int = 32_000

    def __str__(self) -> str:
        batch = f"micro-batch {self.micro_batch_size} × {self.sequence_length}"
        blocks = "" if self.layers is None else f", {self.layers} layers"
        return f"{self.model} tp {self.tensor_parallel_size}, {batch}{blocks}"


@dataclass(frozen=True)
class Variant:
    """A family under a strategy with its options.

    Attributes:
        name: For tables.
        family: The model's family.
        parallelism: The job's ``parallelism`` without the sizes.
    """

    name: str
    family: str
    parallelism: dict[str, Any]

    def job(self, shape: RunShape, device: torch.device) -> JobSpec:
        """Return the job whose rank 0 is timed.

        Raises:
            pydantic.ValidationError: The variant does not fit the shape.
        """
        model = {"preset": shape.model, "family": self.family, "vocab_size": shape.vocab_size}
        if shape.layers is not None:
            model["num_hidden_layers"] = shape.layers
        parallelism = {"tensor_parallel_size": shape.tensor_parallel_size, **self.parallelism}
        batch = dict.fromkeys(("global_batch_size", "micro_batch_size"), shape.micro_batch_size)
        precision = "bf16" if device.type == "cuda" else "fp32"
        training = {"steps": 1_000_000, "sequence_length": shape.sequence_length, "precision": precision, **batch}
        resources = {"gpus_per_worker": int(device.type == "cuda")}
        parts = {"model": model, "parallelism": parallelism, "training": training, "resources": resources}
        return JobSpec.model_validate({"name": "bench", **parts})


def block_seconds(shape: RunShape, variant: Variant, device: torch.device, repeats: int) -> float:
    """Return the time that each block adds to a step, from steps with few and with more blocks, not captured."""
    few, more = 2, 4
    seconds = []
    for layers in (few, more):
        with alone(shape.tensor_parallel_size):
            few_words = replace(shape, layers=layers, vocab_size=_FEW_WORDS)
            step, _, graph = step_of(variant.job(few_words, device), device, f"{few_words}: {variant.name}")
            if graph is not None:
                graph.release("it is to be launched kernel by kernel")
            for _ in range(WARM_STEPS):
                step()
            seconds.append(statistics.median(wall_seconds(step, device, repeats)))
    return (seconds[1] - seconds[0]) / (more - few)


def step_of(spec: JobSpec, device: torch.device, name: str) -> Step:
    """Return the training step of a job's rank 0, which raises ``FloatingPointError`` if it diverges.

    Args:
        spec: The job.
        device: Where it is trained.
        name: Name of the job for the error.
    """
    state = TrainState.initial(spec, device, draw_weights, communicator=LoneCommunicator)
    sampler = random_batches(spec)

    def step() -> None:
        result = training_step(state, sampler)
        if result.diverged:  # its update was skipped, and would be missing from the time
            raise FloatingPointError(
                f"{name} diverges, with a loss of {result.loss:g} and a gradient norm of {result.gradient_norm:g}; no "
                "more of it is timed"
            )

    return Step(step, state.ledger, state.graph)


def random_batches(spec: JobSpec) -> Sampler:
    """Return batches of random tokens for a job."""
    training, ids = spec.training, min(256, spec.model.vocab_size)
    length = (training.global_batch_size + 1) * training.sequence_length + 1
    tokens = TokenStream([np.random.default_rng(0).integers(1, ids, length, dtype=np.uint8)])
    return Sampler(Corpus((Stream(tokens, tokens, 1.0),), end_of_document=0), training.sequence_length, seed=0)


def draw_weights(model: nn.Module, axes: SplitAxes, rank: int, size: int, seed: int, device: torch.device) -> None:
    """Draw one rank's shards on the device itself; like a ``WeightMaker``, but the values depend on the layout."""
    generator, numbers = torch.Generator(device).manual_seed(seed), count()

    def shard(_: str, spec: WeightSpec) -> torch.Tensor:
        generator.manual_seed(seed + next(numbers) * size + rank)
        weight = torch.empty(shard_shape(spec, axes, size), device=device)
        if isinstance(spec.start, float):
            return weight.fill_(spec.start)
        return weight.normal_(0.0, spec.start[0], generator=generator)

    replace_weights(model, shard)


class LoneCommunicator(Communicator):
    """Collectives of a rank whose others are absent: each of them is taken to send what this one sends.

    Torch's fake process group leaves some results unwritten; which ones depends on its version.
    """

    def _start(
        self, kind: str, collective: Callable[..., Any], out: torch.Tensor, payload: torch.Tensor, purpose: str
    ) -> Pending:
        pending = super()._start(kind, collective, out, payload, purpose)
        sent, received = payload.reshape(-1), out.view(-1)
        if len(received) > len(sent):
            received.view(-1, len(sent)).copy_(sent.expand(self.size, -1))
        else:
            received.copy_(sent[: len(received)])
        return pending


@contextmanager
def alone(world_size: int) -> Iterator[None]:
    """Be rank 0 of a process group whose other ranks are absent."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
