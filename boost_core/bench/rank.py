"""The exact work of one rank: real training steps among absent ranks.

Torch's ``fake`` process group stands in for the others; its collectives return at once, and their results are written
as if all ranks had sent the same. Their duration is modelled from the ledger's counts, and kept apart from what was
measured.
"""

import gc
import logging
import re
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

from boost_core.architecture import SplitAxes, WeightSpec, model_flops_per_token
from boost_core.bench.results import Row, Spread, Variant, wall_seconds
from boost_core.config import JobSpec
from boost_core.data.corpus import Corpus, Sampler, Stream, TokenStream
from boost_core.hardware import LINKS
from boost_core.kernels.launch import always
from boost_core.parallel.communicator import CommunicationLedger, Communicator, Pending
from boost_core.parallel.shard import replace_weights, shard_shape
from boost_core.plan.throughput import collective_seconds
from boost_core.train.state import TrainState, attention_backend
from boost_core.train.step import training_step
from boost_core.train.step_graph import StepGraph

# Where the time of a profiled step went.

# Names of torch's operations on CPU, and of the kernels of cuBLAS, cuDNN and flash attention on a GPU.
_ATTENTION = re.compile(r"attention|flash|fmha|sdpa", re.IGNORECASE)
_GEMM = re.compile(r"gemm|cutlass|nvjet|xmma|cublas|split_?k|aten::(add|b|baddb)?mm|mkl", re.IGNORECASE)


def seconds_by_part(profile: Any) -> dict[str, float]:
    """Return the seconds spent in each part: on a GPU in its kernels, without one in the CPU's operations.

    Args:
        profile: A finished ``torch.profiler.profile``. Work on a GPU that is not linked to an operation is
            ``unattributed``; so is the time the CPU spent between operations.
    """
    seconds = dict.fromkeys(("gemm", "attention", "elementwise", "head", "optimizer", "unattributed"), 0.0)
    events = profile.events()
    on_device = [event for event in events if event.device_type.name == "CUDA"]
    host = [event for event in events if event.device_type.name == "CPU"]
    work = [(event, event.name, event.self_cpu_time_total) for event in host]  # under the operation's own name
    if on_device:
        work = [(event, kernel.name, kernel.duration) for event in host for kernel in event.kernels]
    for event, name, microseconds in work:
        around, ancestor = [], event
        while ancestor is not None:
            around.append(ancestor.name)
            ancestor = ancestor.cpu_parent
        part = "elementwise"
        if any("_HeadLoss" in each for each in around):
            part = "head"
        elif "optimizer" in around:
            part = "optimizer"
        elif _ATTENTION.search(name) or any("attention" in each for each in around):
            part = "attention"
        elif _GEMM.search(name):
            part = "gemm"
        elif event.name == name and not name.startswith("aten::"):
            part = "unattributed"
        seconds[part] += microseconds / 1e6
    if on_device:
        total = sum(event.time_range.elapsed_us() for event in on_device if not event.is_user_annotation) / 1e6
        seconds["unattributed"] += max(0.0, total - sum(seconds.values()))
    return seconds


logger = logging.getLogger(__name__)

_FEW_WORDS = 1024  # so that embeddings and logits add little to a difference between two steps
_WARM_STEPS = 3


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

    def job(self, variant: Variant, device: torch.device) -> JobSpec:
        """Return the job whose rank 0 is timed.

        Raises:
            pydantic.ValidationError: The variant does not fit the shape.
        """
        model = {"preset": self.model, "family": variant.family, "vocab_size": self.vocab_size}
        if self.layers is not None:
            model["num_hidden_layers"] = self.layers
        parallelism = {"tensor_parallel_size": self.tensor_parallel_size, **variant.parallelism}
        batch = dict.fromkeys(("global_batch_size", "micro_batch_size"), self.micro_batch_size)
        training = {"steps": 1_000_000, "sequence_length": self.sequence_length, "precision": "fp32", **batch}
        if device.type == "cuda":
            training["precision"] = "fp8" if variant.fp8 else "bf16"
        resources = {"gpus_per_worker": int(device.type == "cuda")}
        parts = {"model": model, "parallelism": parallelism, "training": training, "resources": resources}
        return JobSpec.model_validate({"name": "bench", **parts})


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
            return list(_measured(shape, variant, device, steps, rate, interconnects))
    except torch.OutOfMemoryError:
        return [Row.single("rank", case, "out of memory at", "bytes", torch.cuda.mem_get_info(device)[1])]
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def block_seconds(shape: RunShape, variant: Variant, device: torch.device, repeats: int) -> float:
    """Return the time that each block adds to a step, from steps with few and with more blocks, not captured."""
    few, more = 2, 4
    seconds = []
    for layers in (few, more):
        with alone(shape.tensor_parallel_size):
            step, _, graph = _step(replace(shape, layers=layers, vocab_size=_FEW_WORDS), variant, device)
            if graph is not None:
                graph.release("it is to be launched kernel by kernel")
            for _ in range(_WARM_STEPS):
                step()
            seconds.append(statistics.median(wall_seconds(step, device, repeats)))
    return (seconds[1] - seconds[0]) / (more - few)


def _sum_flops(_sum: torch.Size, x_shape: torch.Size, dy_shape: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x_shape.numel() * dy_shape[-1]


def _measured(
    shape: RunShape, variant: Variant, device: torch.device, steps: int, rate: float, interconnects: list[str]
) -> Iterator[Row]:
    case, (step, ledger, graph) = f"{shape}: {variant.name}", _step(shape, variant, device)
    for _ in range(_WARM_STEPS):
        step()
    seconds = Spread.of(wall_seconds(step, device, steps))
    yield Row("rank", case, "step", "s", *seconds)
    yield Row.single("rank", case, f"attention by {attention_backend(shape.job(variant, device), device)}", "count", 1)
    if device.type == "cuda" and graph is not None and graph.obstacle is not None:
        logger.warning("%s: steps are not captured as a CUDA graph: %s", case, graph.obstacle)
    if graph is not None and graph.obstacle is None:
        graph.release("a replayed step does not report its operations and their memory")
        yield Row("rank", case, "step, not captured", "s", *Spread.of(wall_seconds(step, device, steps)))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        yield Row.single("rank", case, "peak memory", "bytes", torch.cuda.max_memory_allocated(device))

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiled:
        step()
    for part, part_seconds in seconds_by_part(profiled).items():
        yield Row.single("rank", case, part, "s", part_seconds)
    if device.type == "cuda":  # of kernels and copies
        launches = sum(event.device_type.name == "CUDA" and not event.is_user_annotation for event in profiled.events())
        yield Row.single("rank", case, "launches", "count", launches)

    tokens = shape.micro_batch_size * shape.sequence_length
    model = shape.job(variant, device).model
    useful = model_flops_per_token(model, shape.sequence_length) * tokens / shape.tensor_parallel_size
    # torch's own formulas do not take the type of the sums that weights' gradients are added to.
    sums = {torch.ops.aten.addmm: _sum_flops, torch.ops.aten.baddbmm: _sum_flops}
    with FlopCounterMode(display=False, custom_mapping=sums) as counter:
        step()
    yield Row.single("rank", case, "MFU", "share", useful / seconds.p50 / rate)
    yield Row.single("rank", case, "HFU", "share", counter.get_total_flops() / seconds.p50 / rate)

    ledger.clear()
    step()
    for name in interconnects:  # the step's collectives one after the other, none of them hidden
        modelled = sum(
            collective_seconds(LINKS[name], entry.kind, shape.tensor_parallel_size, totals.bytes, totals.calls)
            for entry, totals in ledger.totals().items()
            if entry.group in ("tp", "all")
        )
        yield Row.single("rank", case, f"modelled {name}", "s", modelled)


def _step(shape: RunShape, variant: Variant, device: torch.device) -> Step:
    """A variant's training step, which raises ``FloatingPointError`` if it diverges."""
    spec, name = shape.job(variant, device), f"{shape}: {variant.name}"
    return (variant.step or step_of)(spec, device, name)


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
