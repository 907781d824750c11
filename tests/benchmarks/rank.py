"""The whole step of one rank, without the other ranks' work: ``python -m tests.benchmarks.rank``.

The duration of collectives is modelled from the ledger's counts, and kept apart from what is measured.
"""

import argparse
import gc
import logging
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from boost_core.architecture import model_flops_per_token
from boost_core.bench import rank
from boost_core.bench.__main__ import positive
from boost_core.bench.rank import WARM_STEPS, RunShape, Step, alone
from boost_core.bench.results import Environment, Row, kernel_seconds, table, wall_seconds
from boost_core.config import JobSpec
from boost_core.config.base import in_lines
from boost_core.config.model import PRESETS
from boost_core.hardware import LINKS
from boost_core.kernels.fp8_product import unavailable
from boost_core.kernels.launch import Implementation, always
from boost_core.plan.throughput import collective_seconds
from boost_core.terminal import columns_here, print_lines
from boost_core.train.state import attention_backend
from tests.benchmarks.kernels import PUBLISHED_SIZES, add_common, append, run_checked

logger = logging.getLogger(__name__)

# The ways to train a model that are compared, and the shapes at which they are compared.

_AS_PUBLISHED = {"strategy": "btp", "norm": "online_paper", "recompute": "full"}


@dataclass(frozen=True)
class Variant(rank.Variant):
    """A family under a strategy with its options.

    Attributes:
        kernels: The implementation to use; ``None`` for the device's default.
        make_step: Makes a step to run in place of the trainer's, as ``boost_core.bench.rank.step_of`` does.
        fp8: Whether products are in 8 bits, on devices that support it.
    """

    kernels: Implementation | None = None
    make_step: Callable[[JobSpec, torch.device, str], Step] = rank.step_of
    fp8: bool = False

    def job(self, shape: RunShape, device: torch.device) -> JobSpec:
        """As the base class's, which has no products in 8 bits; without a GPU just that."""
        spec = super().job(shape, device)
        if not self.fp8 or device.type != "cuda":
            return spec
        parts = spec.model_dump(exclude_unset=True)
        return JobSpec.model_validate(parts | {"training": parts["training"] | {"precision": "fp8"}})

    def step(self, shape: RunShape, device: torch.device) -> Step:
        """Return its training step, which raises ``FloatingPointError`` if it diverges."""
        return self.make_step(self.job(shape, device), device, f"{shape}: {self.name}")


VARIANTS = [
    Variant("dense, fullrank", "dense", {"strategy": "fullrank"}),
    # One product and one exchange per projection, like pairs that know nothing of each other.
    Variant("cola, vanilla", "cola", {"strategy": "vanilla", "group_projections": False}),
    # BOOST's choices (arXiv 2512.12131): statistics in all-reduces of their own, whole blocks recomputed.
    Variant("cola, btp as published", "cola", _AS_PUBLISHED),
    Variant("cola, btp as published, eager", "cola", _AS_PUBLISHED, kernels="naive"),
    Variant("cola, btp", "cola", {"strategy": "btp"}),
    Variant("cola, btp, eager", "cola", {"strategy": "btp"}, kernels="naive"),
    Variant("cola, btp, fp8", "cola", {"strategy": "btp"}, fp8=True),
    Variant("cola, btp, recompute latent", "cola", {"strategy": "btp", "recompute": "latent"}),
]


def matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOPs per second of a large square matrix product."""
    width = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return 2 * width**3 / statistics.median(kernel_seconds(lambda: left @ right, device, repeats=10))


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
        return [Row.of(case, "out of memory at", "bytes", torch.cuda.mem_get_info(device)[1])]
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _sum_flops(_sum: torch.Size, x_shape: torch.Size, dy_shape: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x_shape.numel() * dy_shape[-1]


def _measured(
    shape: RunShape, variant: Variant, device: torch.device, steps: int, rate: float, interconnects: list[str]
) -> Iterator[Row]:
    case, (step, ledger, graph) = f"{shape}: {variant.name}", variant.step(shape, device)
    for _ in range(WARM_STEPS):
        step()
    seconds = Row.of(case, "step", "s", *wall_seconds(step, device, steps))
    yield seconds
    yield Row.of(case, f"attention by {attention_backend(variant.job(shape, device), device)}", "count", 1)
    if device.type == "cuda" and graph is not None and graph.obstacle is not None:
        logger.warning("%s: steps are not captured as a CUDA graph: %s", case, graph.obstacle)
    if graph is not None and graph.obstacle is None:
        graph.release("a replayed step does not report its operations and their memory")
        yield Row.of(case, "step, not captured", "s", *wall_seconds(step, device, steps))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        yield Row.of(case, "peak memory", "bytes", torch.cuda.max_memory_allocated(device))

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiled:
        step()
    for part, part_seconds in seconds_by_part(profiled).items():
        yield Row.of(case, part, "s", part_seconds)
    if device.type == "cuda":  # of kernels and copies
        launches = sum(event.device_type.name == "CUDA" and not event.is_user_annotation for event in profiled.events())
        yield Row.of(case, "launches", "count", launches)

    tokens = shape.micro_batch_size * shape.sequence_length
    model = variant.job(shape, device).model
    useful = model_flops_per_token(model, shape.sequence_length) * tokens / shape.tensor_parallel_size
    # torch's own formulas do not take the type of the sums that weights' gradients are added to.
    sums = {torch.ops.aten.addmm: _sum_flops, torch.ops.aten.baddbmm: _sum_flops}
    with FlopCounterMode(display=False, custom_mapping=sums) as counter:
        step()
    yield Row.of(case, "MFU", "share", useful / seconds.p50 / rate)
    yield Row.of(case, "HFU", "share", counter.get_total_flops() / seconds.p50 / rate)

    ledger.clear()
    step()
    for name in interconnects:  # the step's collectives one after the other, none of them hidden
        modelled = sum(
            collective_seconds(LINKS[name], entry.kind, shape.tensor_parallel_size, totals.bytes, totals.calls)
            for entry, totals in ledger.totals().items()
            if entry.group in ("tp", "all")
        )
        yield Row.of(case, f"modelled {name}", "s", modelled)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the variants; returns 0 on success, 1 for wrong results or a step that diverges, 2 if not measurable."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.rank", description="Time one rank's whole step.")
    parser.add_argument("--model", choices=PRESETS, help="a preset (default: all in BOOST's systems runs)")
    parser.add_argument("--tp", type=positive, help="tensor parallel ranks (default: as in BOOST's systems runs)")
    parser.add_argument("--family", choices=sorted({variant.family for variant in VARIANTS}))
    parser.add_argument("--strategy", choices=sorted({variant.parallelism["strategy"] for variant in VARIANTS}))
    sequences = "sequences per micro-batch; give several to compare them"
    parser.add_argument("--micro-batch", type=positive, nargs="+", default=[1, 4], help=sequences)
    parser.add_argument("--layers", type=positive, help="decoder blocks (default: the preset's)")
    links = list(LINKS)
    among = f"interconnects to model communication on, of {', '.join(links)} (default: all)"
    parser.add_argument("--interconnect", choices=links, nargs="+", default=links, metavar="LINK", help=among)
    add_common(parser)
    return run_checked(parser.parse_args(arguments), _rank)


def _rank(options: argparse.Namespace, device: torch.device) -> None:
    if options.tp and not options.model:
        raise ValueError("--tp is for one model, and each of BOOST's runs has its own; give --model, or leave --tp out")
    variants = [
        variant
        for variant in VARIANTS
        if options.family in (None, variant.family)
        and options.strategy in (None, variant.parallelism["strategy"])
        and (device.type == "cuda" or variant.kernels is None)  # without a GPU everything is eager
        and not (variant.fp8 and unavailable(device))
    ]
    if not variants:
        raise ValueError(f"no variant is of family {options.family} under {options.strategy}; leave one of the two out")
    rate = matrix_rate(torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    environment = Environment.of(device)
    sizes = {options.model: options.tp or PUBLISHED_SIZES.get(options.model, 1)} if options.model else PUBLISHED_SIZES
    for (model, ranks), sequences in product(sizes.items(), options.micro_batch):
        shape = RunShape(model, ranks, sequences, options.sequence, options.layers)
        results: list[Row] = []
        for variant in variants:
            if variant.fp8:
                try:
                    variant.job(shape, device)
                except ValueError as error:  # the model's sizes do not fit
                    print_lines(f"{shape}: {variant.name} is skipped: {in_lines(error)}")
                    continue
            rows = rank_rows(shape, variant, device, options.repeats, rate, options.interconnect)
            append(options.results, "rank", environment, rows)
            results += rows
        sys.stdout.write(f"{table(results, columns_here())}\n")
        sys.stdout.flush()
    print_lines(
        f"{environment.device}, {rate / 1e12:.3g} TFLOP/s in a large matrix product, the reference for MFU and HFU."
    )
    print_lines("Steps exclude communication. Its time, with none of it hidden, is modelled for")
    for name in options.interconnect:
        print_lines(f"  {name}: {LINKS[name].description}")


if __name__ == "__main__":
    sys.exit(main())
