"""The exact work of one rank: real training steps among absent ranks.

Torch's ``fake`` process group stands in for the others; its collectives return at once, and their results are written
as if all ranks had sent the same. Their duration is modelled from the ledger's counts, and kept apart from what was
measured.
"""

import gc
import logging
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from boost_core.architecture.roles import SplitAxes, WeightSpec
from boost_core.bench.breakdown import PARTS, launches, seconds_by_part
from boost_core.bench.published import PublishedRun
from boost_core.bench.results import Row
from boost_core.bench.timing import Spread, wall_seconds
from boost_core.bench.variants import Variant
from boost_core.config import JobSpec
from boost_core.data.corpus import Corpus, Stream
from boost_core.data.sampler import Sampler
from boost_core.data.stream import TokenStream
from boost_core.hardware import LINKS
from boost_core.kernels.dispatch import always
from boost_core.optim.build import COMPUTE_TYPES
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.ledger import CommunicationLedger, Pending
from boost_core.parallel.shard import replace_weights, shard_shape
from boost_core.plan.collectives import collective_seconds
from boost_core.plan.flops import model_flops_per_token
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from boost_core.train.step_graph import StepGraph

logger = logging.getLogger(__name__)

_FEW_WORDS = 1024  # so that embeddings and logits add little to a difference between two steps
_WARM_STEPS = 3


class _Step(NamedTuple):
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
        blocks = "" if self.layers is None else f", {self.layers} layers"
        return (
            f"{self.model} tp {self.tensor_parallel_size}, micro-batch {self.micro_batch_size} × "
            f"{self.sequence_length}{blocks}"
        )

    def job(self, variant: Variant, device: torch.device) -> JobSpec:
        """Return the job whose rank 0 is timed.

        Raises:
            pydantic.ValidationError: The variant does not fit the shape.
        """
        model = {"preset": self.model, "family": variant.family, "vocab_size": self.vocab_size}
        if self.layers is not None:
            model["num_hidden_layers"] = self.layers
        on_gpu = "fp8" if variant.fp8 else "bf16"
        return JobSpec.model_validate(
            {
                "name": "bench",
                "model": model,
                "parallelism": {"tensor_parallel_size": self.tensor_parallel_size, **variant.parallelism},
                "training": {
                    "steps": 1_000_000,
                    "sequence_length": self.sequence_length,
                    "global_batch_size": self.micro_batch_size,
                    "micro_batch_size": self.micro_batch_size,
                    "precision": on_gpu if device.type == "cuda" else "fp32",
                },
                "resources": {"gpus_per_worker": int(device.type == "cuda")},
            }
        )


def rank_rows(
    shape: RunShape, variant: Variant, device: torch.device, steps: int, rate: float, interconnects: list[str]
) -> list[Row]:
    """Measure all figures of one variant.

    Args:
        shape: The model and the batch.
        variant: How it is trained.
        device: Where it is trained.
        steps: Number of timed steps.
        rate: The device's measured matrix rate in FLOPs per second, the reference for utilization.
        interconnects: Names of those on which communication is modelled.

    Raises:
        FloatingPointError: It diverges.
    """
    case = f"{shape}: {variant.name}"
    try:
        with alone(shape.tensor_parallel_size), always(variant.kernels) if variant.kernels else nullcontext():
            return list(_measured(shape, variant, device, steps, rate, interconnects, case))
    except torch.OutOfMemoryError:
        return [Row.single("rank", case, "out of memory at", "bytes", torch.cuda.mem_get_info(device)[1])]
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def block_seconds(shape: RunShape, variant: Variant, device: torch.device, repeats: int) -> float:
    """Return the time that each block adds to a step, from steps with few and with more blocks."""
    few, more = 2, 4
    seconds = []
    for layers in (few, more):
        with alone(shape.tensor_parallel_size):
            step = uncaptured_step(replace(shape, layers=layers, vocab_size=_FEW_WORDS), variant, device)
            for _ in range(_WARM_STEPS):
                step()
            seconds.append(statistics.median(wall_seconds(step, device, repeats)))
    return (seconds[1] - seconds[0]) / (more - few)


def uncaptured_step(shape: RunShape, variant: Variant, device: torch.device) -> Callable[[], None]:
    """Return a variant's training step whose kernels are launched one by one; call it while ``alone``."""
    make = _published_step if variant.published else _trainer_step
    step, _, graph = make(shape.job(variant, device), shape, device, f"{shape}: {variant.name}")
    if graph is not None:
        graph.release("it is to be launched kernel by kernel")
    return step


def _measured(
    shape: RunShape,
    variant: Variant,
    device: torch.device,
    steps: int,
    rate: float,
    interconnects: list[str],
    case: str,
) -> Iterator[Row]:
    spec = shape.job(variant, device)
    step, ledger, graph = (_published_step if variant.published else _trainer_step)(spec, shape, device, case)
    for _ in range(_WARM_STEPS):
        step()
    seconds = Spread.of(wall_seconds(step, device, steps))
    yield Row.spread("rank", case, "step", "s", seconds)
    if device.type == "cuda" and graph is not None and graph.obstacle is not None:
        logger.warning("%s: steps are not captured as a CUDA graph: %s", case, graph.obstacle)
    if graph is not None and graph.obstacle is None:
        graph.release("a replayed step does not report its operations and their memory")
        yield Row.spread("rank", case, "step, not captured", "s", Spread.of(wall_seconds(step, device, steps)))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        yield Row.single("rank", case, "peak memory", "bytes", torch.cuda.max_memory_allocated(device))

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiled:
        step()
    parts = seconds_by_part(profiled)
    for part in PARTS:
        yield Row.single("rank", case, part, "s", parts[part])
    if device.type == "cuda":
        yield Row.single("rank", case, "launches", "count", launches(profiled))

    tokens = shape.micro_batch_size * shape.sequence_length
    useful = model_flops_per_token(spec.model, shape.sequence_length) * tokens / shape.tensor_parallel_size
    with FlopCounterMode(display=False) as counter:
        step()
    yield Row.single("rank", case, "MFU", "share", useful / seconds.p50 / rate)
    yield Row.single("rank", case, "HFU", "share", counter.get_total_flops() / seconds.p50 / rate)

    ledger.clear()
    step()
    for name in interconnects:
        yield Row.single("rank", case, f"modelled {name}", "s", _communication(ledger, name, shape))


def _trainer_step(spec: JobSpec, shape: RunShape, device: torch.device, case: str) -> _Step:
    state = TrainState.initial(spec, device, draw_weights, communicator=LoneCommunicator)
    sampler = Sampler(_random_corpus(spec), shape.sequence_length, seed=0)

    def step() -> None:
        result = training_step(state, sampler)
        if result.diverged:  # its update was skipped, and would be missing from the time
            raise _diverges(case, f"a loss of {result.loss:g} and a gradient norm of {result.gradient_norm:g}")

    return _Step(step, state.ledger, state.graph)


def _published_step(spec: JobSpec, shape: RunShape, device: torch.device, case: str) -> _Step:
    ledger = CommunicationLedger()
    ranks = LoneCommunicator(dist.group.WORLD, "tp", ledger)
    run = PublishedRun(spec.model, ranks, shape.sequence_length, COMPUTE_TYPES[spec.training.precision], device)
    sampler = Sampler(_random_corpus(spec), shape.sequence_length, seed=0)

    def step() -> None:
        loss = run.step(torch.from_numpy(sampler.sequences(0, shape.micro_batch_size)))
        if not math.isfinite(loss):
            raise _diverges(case, f"a loss of {loss:g}")

    return _Step(step, ledger, None)


def _diverges(case: str, figures: str) -> FloatingPointError:
    return FloatingPointError(f"{case} diverges, with {figures}; no more of it is timed")


def _communication(ledger: CommunicationLedger, interconnect: str, shape: RunShape) -> float:
    """Return how long the last step's collectives would take one after the other, none of it hidden."""
    link = LINKS[interconnect]
    return sum(
        collective_seconds(link, entry.kind, shape.tensor_parallel_size, totals.bytes, totals.calls)
        for entry, totals in ledger.totals().items()
        if entry.group in ("tp", "all")
    )


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


def _random_corpus(spec: JobSpec) -> Corpus:
    training = spec.training
    length = (training.micro_batch_size + 1) * training.sequence_length + 1
    tokens = TokenStream([np.random.default_rng(0).integers(1, 256, length, dtype=np.uint8)])
    return Corpus((Stream(tokens, tokens, 1.0),), end_of_document=0)


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
