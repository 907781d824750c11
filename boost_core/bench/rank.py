"""The exact work of one rank: real training steps among absent ranks.

Torch's ``fake`` process group stands in for the others; its collectives return at once, and their results are written
as if all ranks had sent the same. Their duration is modelled from the ledger's counts, and kept apart from what was
measured.
"""

import gc
import logging
import math
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
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from boost_core.architecture import SplitAxes, WeightSpec, model_flops_per_token
from boost_core.bench.results import Row, Spread, Variant, wall_seconds
from boost_core.config import JobSpec, ModelConfig
from boost_core.data.corpus import Corpus, Sampler, Stream, TokenStream
from boost_core.hardware import LINKS
from boost_core.kernels.launch import always
from boost_core.kernels.rotary import rotary
from boost_core.model.attention import Rotation, dense_attention
from boost_core.optim.build import COMPUTE_TYPES
from boost_core.parallel.communicator import CommunicationLedger, Communicator, Pending, copy_to_tp, reduce_from_tp
from boost_core.parallel.shard import replace_weights, shard_shape
from boost_core.plan.throughput import collective_seconds
from boost_core.train.state import TrainState, attention_backend
from boost_core.train.step import training_step
from boost_core.train.step_graph import StepGraph

# Where the time of a profiled step went.

PARTS = ("gemm", "attention", "elementwise", "head", "optimizer", "unattributed")

# Names of torch's operations on CPU, and of the kernels of cuBLAS, cuDNN and flash attention on a GPU.
_ATTENTION = re.compile(r"attention|flash|fmha|sdpa", re.IGNORECASE)
_GEMM = re.compile(r"gemm|cutlass|nvjet|xmma|cublas|split_?k|aten::(add|b|baddb)?mm|mkl", re.IGNORECASE)


def seconds_by_part(profile: Any) -> dict[str, float]:
    """Return the seconds spent in each part: on a GPU in its kernels, without one in the CPU's operations.

    Args:
        profile: A finished ``torch.profiler.profile``. Work on a GPU that is not linked to an operation is
            ``unattributed``; so is the time the CPU spent between operations.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    events = profile.events()
    on_device = [event for event in events if event.device_type.name == "CUDA"]
    host = [event for event in events if event.device_type.name == "CPU"]
    if not on_device:
        for event in host:
            seconds[_part(event, event.name)] += event.self_cpu_time_total / 1e6
        return seconds
    for event in host:
        for kernel in event.kernels:
            seconds[_part(event, kernel.name)] += kernel.duration / 1e6
    total = sum(event.time_range.elapsed_us() for event in on_device if not event.is_user_annotation) / 1e6
    seconds["unattributed"] += max(0.0, total - sum(seconds.values()))
    return seconds


def _part(event: Any, name: str) -> str:
    """Return the part that an operation's work under a name belongs to: a kernel's name, or its own."""
    around, ancestor = [], event
    while ancestor is not None:
        around.append(ancestor.name)
        ancestor = ancestor.cpu_parent
    if any("_HeadLoss" in each for each in around):
        return "head"
    if "optimizer" in around:
        return "optimizer"
    if _ATTENTION.search(name) or any("attention" in each for each in around):
        return "attention"
    if _GEMM.search(name):
        return "gemm"
    return "unattributed" if event.name == name and not name.startswith("aten::") else "elementwise"


# One rank's step as run by the code published with BOOST under its 7B configuration (arXiv 2512.12131): a baseline.
#
# What that configuration does, line by line, each operation in the order and on the memory of that code:
#
# - micro-batches of one sequence, gradients accumulated over several; nothing is recomputed in the backward pass;
# - ``rmsnorm_type`` is left unset: each rank norms its own shard of the residual, and no statistic is exchanged, so
#   that on several ranks the model differs from a single rank's;
# - the embedding is split along the vocabulary, summed over the ranks whole, and sliced; the head is tied to it;
# - queries, keys and values come from one einsum; keys and values are concatenated, permuted and copied before the
#   rotary embedding;
# - the last block's output is gathered by way of two transpositions; logits are made whole, in fp32;
# - every all-reduce is waited for where it starts;
# - gradients are bf16, and added to fp32 sums one by one after each micro-batch; the norm, clipping, torch's fused
#   AdamW on fp32 masters and rounding are separate passes.
#
# Where that code uses Flash Attention's kernels, this one uses torch's RMSNorm, torch's attention and our rotary
# embedding, which takes one kernel less. Shape suffixes: T tokens, d hidden (this rank's shard), r rank, c = g·r for g
# projections, f wide (shard), V this rank's part of the vocabulary, h heads, e head size.

LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP_NORM = 3e-4, (0.9, 0.95), 0.01, 1.0
INITIAL_STD = 0.025


class PublishedBlock(nn.Module):
    """A decoder block.

    Args:
        model: The model's shape; with as many key heads as query heads.
        ranks: The tensor parallel group.
        rotation: The rotary embedding.
    """

    def __init__(self, model: ModelConfig, ranks: Communicator, rotation: Rotation) -> None:
        super().__init__()
        d, f, r = model.hidden_size // ranks.size, model.intermediate_size // ranks.size, model.bottleneck_rank
        self.ranks, self.rotation, self.head_size, self.epsilon = ranks, rotation, model.head_size, model.norm_epsilon
        self.attention_scale, self.mlp_scale = _empty(d), _empty(d)
        self.qkv_down, self.qkv_up = _empty(3 * r, d), _empty(3, d, r)
        self.output_down, self.output_up = _empty(r, d), _empty(d, r)
        self.gate_up_down, self.gate_up_up = _empty(2 * r, d), _empty(2, f, r)
        self.down_down, self.down_up = _empty(r, f), _empty(d, r)

    def forward(self, x_Td: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the stream."""
        normed_Td = functional.rms_norm(x_Td, x_Td.shape[1:], self.attention_scale, self.epsilon)
        query_Td, key_Td, value_Td = self._batched(normed_Td, self.qkv_down, self.qkv_up).unbind(0)
        both_2Td = torch.cat([key_Td.unsqueeze(0), value_Td.unsqueeze(0)], dim=0)
        both_T2d = both_2Td.permute(1, 0, 2).contiguous()
        parts = [query_Td.unsqueeze(0), both_T2d[:, :1].transpose(0, 1), both_T2d[:, 1:].transpose(0, 1)]
        rotated = rotary(parts, *self.rotation.angles(x_Td.dtype))
        query_bhse, key_bhse, value_bhse = (
            each_Td.view(1, len(x_Td), -1, self.head_size).transpose(1, 2) for each_Td in rotated
        )
        out_bhse = dense_attention(query_bhse, key_bhse, value_bhse)
        z_Tr = self._latents(out_bhse.transpose(1, 2).reshape(len(x_Td), -1), self.output_down)
        x_Td = functional.linear(copy_to_tp(z_Tr, self.ranks, "latent"), self.output_up) + x_Td

        normed_Td = functional.rms_norm(x_Td, x_Td.shape[1:], self.mlp_scale, self.epsilon)
        gate_Tf, up_Tf = self._batched(normed_Td, self.gate_up_down, self.gate_up_up).unbind(0)
        z_Tr = self._latents(gate_Tf * up_Tf, self.down_down)
        return functional.linear(copy_to_tp(z_Tr, self.ranks, "latent"), self.down_up) + x_Td

    def _latents(self, x_Td: torch.Tensor, down_cd: torch.Tensor) -> torch.Tensor:
        return functional.silu(reduce_from_tp(functional.linear(x_Td, down_cd), self.ranks, "latent"))

    def _batched(self, x_Td: torch.Tensor, down_cd: torch.Tensor, up_gfr: torch.Tensor) -> torch.Tensor:
        z_gTr = self._latents(x_Td, down_cd).view(len(x_Td), len(up_gfr), -1).transpose(0, 1)
        return torch.einsum("gtr,gfr->gtf", copy_to_tp(z_gTr, self.ranks, "latent"), up_gfr)


class PublishedModel(nn.Module):
    """Embedding, blocks, final norm, tied head and the loss of each token.

    Args:
        model: The model's shape.
        ranks: The tensor parallel group.
        rotation: The rotary embedding for the length of a sequence.
    """

    def __init__(self, model: ModelConfig, ranks: Communicator, rotation: Rotation) -> None:
        super().__init__()
        self.ranks, self.epsilon = ranks, model.norm_epsilon
        self.embedding = _empty(model.vocab_size // ranks.size, model.hidden_size)
        self.blocks = nn.ModuleList(PublishedBlock(model, ranks, rotation) for _ in range(model.num_hidden_layers))
        self.scale = _empty(model.hidden_size)

    def forward(self, token_T: torch.Tensor, target_T: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token of one sequence in nats, ``[T]``."""
        if self.ranks.size == 1:
            x_Td = functional.embedding(token_T, self.embedding)
        else:
            rows, columns = len(self.embedding), self.scale.numel() // self.ranks.size
            local_T, elsewhere_T = _local(token_T, self.ranks.rank * rows, rows)
            whole_Td = functional.embedding(local_T, self.embedding) * (~elsewhere_T).unsqueeze(-1)
            whole_Td = copy_to_tp(reduce_from_tp(whole_Td, self.ranks, "embedding"), self.ranks, "embedding")
            x_Td = whole_Td[:, self.ranks.rank * columns : (self.ranks.rank + 1) * columns]
        for block in self.blocks:
            x_Td = block(x_Td)
        if self.ranks.size > 1:
            x_Td = _GatherColumns.apply(x_Td, self.ranks)  # type: ignore[no-untyped-call]
        x_Td = functional.rms_norm(x_Td, x_Td.shape[1:], self.scale, self.epsilon)
        logits_TV = functional.linear(copy_to_tp(x_Td, self.ranks, "hidden"), self.embedding)
        precise = torch.promote_types(logits_TV.dtype, torch.float32)
        return _HeadLossOfLogits.apply(logits_TV.to(precise), target_T, self.ranks)  # type: ignore[no-any-return, no-untyped-call]


class PublishedRun:
    """Optimizer steps of one rank.

    Args:
        model: The model's shape.
        ranks: The tensor parallel group.
        length: Tokens of a sequence.
        dtype: The compute type.
        device: Where it is computed.

    Raises:
        ValueError: The model has grouped-query attention.
    """

    def __init__(
        self, model: ModelConfig, ranks: Communicator, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if model.key_value_heads != model.num_attention_heads:
            raise ValueError("the published step has as many key heads as query heads; leave num_key_value_heads out")
        self._ranks, self._device = ranks, device
        self.model = PublishedModel(model, ranks, Rotation(length, model.head_size, model.rope_theta, device))
        self.model.to_empty(device=device).to(dtype)
        for weight in self.model.parameters():
            nn.init.normal_(weight, std=INITIAL_STD) if weight.ndim > 1 else nn.init.ones_(weight)
        self._weights, precise = list(self.model.parameters()), torch.promote_types(dtype, torch.float32)
        self._masters = [nn.Parameter(weight.detach().to(precise, copy=True)) for weight in self._weights]
        flat = torch.zeros(sum(weight.numel() for weight in self._weights), dtype=precise, device=device)
        sizes = [weight.numel() for weight in self._weights]
        self._sums = [
            sums.view_as(master) for master, sums in zip(self._masters, torch.split(flat, sizes), strict=True)
        ]
        for master, sums in zip(self._masters, self._sums, strict=True):
            master.grad = sums
        self._optimizer = torch.optim.AdamW(self._masters, LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    def step(self, token_bt: torch.Tensor) -> float:
        """Run one step over ``[b, s + 1]`` tokens, a sequence at a time; returns the loss, which the host waits for."""
        token_bt, losses = token_bt.to(self._device), list[torch.Tensor]()
        for token_t in token_bt:
            with record_function("forward"):
                loss_T, counts_T = self.model(token_t[:-1], token_t[1:]), torch.ones_like(token_t[1:], dtype=torch.bool)
                loss = (loss_T * counts_T).sum(dtype=loss_T.dtype) / counts_T.sum() / len(token_bt)
            with record_function("backward"):
                loss.backward()
                self._accumulate()
            losses.append(loss.detach())
        with record_function("optimizer"), torch.no_grad():
            norms = torch.stack([torch.linalg.vector_norm(sums) for sums in self._sums])
            square = torch.linalg.vector_norm(norms).pow(2.0)
            norm = self._ranks.all_reduce_(square, "gradient norm").pow_(0.5)
            clip = torch.clamp(CLIP_NORM / (norm + 1e-6), max=1.0)
            for sums in self._sums:
                sums.mul_(clip)
            self._optimizer.step()
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)
            for sums in self._sums:
                sums.zero_()
        return float(torch.stack(losses).sum())

    @torch.no_grad()
    def _accumulate(self) -> None:
        for weight, sums in zip(self._weights, self._sums, strict=True):
            if weight.grad is None:
                raise AssertionError("no gradient reached a weight")
            sums.add_(weight.grad)
            weight.grad = None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Td: torch.Tensor, ranks: Communicator) -> torch.Tensor:
        ctx.columns, ctx.ranks = x_Td.shape[1], ranks
        gathered_pdT = ranks.all_gather(x_Td.transpose(0, 1).contiguous(), "hidden")
        return gathered_pdT.flatten(0, 1).transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return torch.split(gradients[0], ctx.columns, dim=1)[ctx.ranks.rank].contiguous(), None


class _HeadLossOfLogits(torch.autograd.Function):
    """Cross entropy of whole logits, whose softmax is kept."""

    @staticmethod
    def forward(ctx: Any, logits_TV: torch.Tensor, target_T: torch.Tensor, ranks: Communicator) -> torch.Tensor:
        maximum_T = ranks.all_reduce_(logits_TV.max(dim=-1)[0], "loss maximum", dist.ReduceOp.MAX)
        shifted_TV = logits_TV - maximum_T.unsqueeze(-1)
        local_T, elsewhere_T = _local(target_T, ranks.rank * logits_TV.shape[1], logits_TV.shape[1])
        row_T = torch.arange(len(local_T), device=local_T.device)
        predicted_T = shifted_TV[row_T, local_T].clone()
        predicted_T[elsewhere_T] = 0.0
        ranks.all_reduce_(predicted_T, "loss target")
        softmax_TV = torch.exp(shifted_TV, out=shifted_TV)
        sum_T = ranks.all_reduce_(softmax_TV.sum(dim=-1), "loss sum")
        loss_T = torch.log(sum_T) - predicted_T
        softmax_TV.div_(sum_T.unsqueeze(-1))
        ctx.save_for_backward(softmax_TV, elsewhere_T, local_T, row_T)
        return loss_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax_TV, elsewhere_T, local_T, row_T = ctx.saved_tensors
        softmax_TV[row_T, local_T] -= 1.0 - elsewhere_T.to(softmax_TV.dtype)
        return softmax_TV.mul_(gradients[0].unsqueeze(-1)), None, None


def _local(id_T: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids relative to this rank's own, 0 for others; and which ones are others."""
    elsewhere_T = (id_T < first) | (id_T >= first + count)
    local_T = id_T.clone() - first
    local_T[elsewhere_T] = 0
    return local_T, elsewhere_T


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


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
            return list(_measured(shape, variant, device, steps, rate, interconnects))
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
    step, _, graph = _step(shape, variant, device)
    if graph is not None:
        graph.release("it is to be launched kernel by kernel")
    return step


def _sum_flops(_sum: torch.Size, x_shape: torch.Size, dy_shape: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x_shape.numel() * dy_shape[-1]


def _measured(
    shape: RunShape, variant: Variant, device: torch.device, steps: int, rate: float, interconnects: list[str]
) -> Iterator[Row]:
    case, (step, ledger, graph) = f"{shape}: {variant.name}", _step(shape, variant, device)
    for _ in range(_WARM_STEPS):
        step()
    seconds = Spread.of(wall_seconds(step, device, steps))
    yield Row.spread("rank", case, "step", "s", seconds)
    yield Row.single("rank", case, f"attention by {attention_backend(shape.job(variant, device), device)}", "count", 1)
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


def _step(shape: RunShape, variant: Variant, device: torch.device) -> _Step:
    """A variant's training step, which raises ``FloatingPointError`` if it diverges."""
    spec, name = shape.job(variant, device), f"{shape}: {variant.name}"
    if not variant.published:
        return step_of(spec, device, name)
    sampler, ledger = _random_batches(spec), CommunicationLedger()
    ranks, dtype = LoneCommunicator(dist.group.WORLD, "tp", ledger), COMPUTE_TYPES[spec.training.precision]
    run = PublishedRun(spec.model, ranks, shape.sequence_length, dtype, device)

    def published_step() -> None:
        loss = run.step(torch.from_numpy(sampler.sequences(0, shape.micro_batch_size)))
        if not math.isfinite(loss):
            raise FloatingPointError(f"{name} diverges, with a loss of {loss:g}; no more of it is timed")

    return _Step(published_step, ledger, None)


def step_of(spec: JobSpec, device: torch.device, name: str) -> _Step:
    """Return the training step of a job's rank 0, which raises ``FloatingPointError`` if it diverges.

    Args:
        spec: The job.
        device: Where it is trained.
        name: Name of the job for the error.
    """
    state = TrainState.initial(spec, device, draw_weights, communicator=LoneCommunicator)
    sampler = _random_batches(spec)

    def step() -> None:
        result = training_step(state, sampler)
        if result.diverged:  # its update was skipped, and would be missing from the time
            raise FloatingPointError(
                f"{name} diverges, with a loss of {result.loss:g} and a gradient norm of {result.gradient_norm:g}; no "
                "more of it is timed"
            )

    return _Step(step, state.ledger, state.graph)


def _random_batches(spec: JobSpec) -> Sampler:
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
