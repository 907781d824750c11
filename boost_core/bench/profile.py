"""This device's speed at each kind of work, for the plan (``plan.machine``).

Timed are the products of the forward pass and of the weight gradients, for every weight of a dense and of low-rank
blocks at two numbers of tokens, attention, copies, transfers to and from the host, and training steps of a few blocks
on one rank, without the other ranks' work. Of repeated times the median counts, as it does of the steps of jobs that
predictions are compared with.
"""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial

import numpy as np
import torch

from boost_core.architecture import block_parameters
from boost_core.bench.rank import RunShape, Variant, alone, block_seconds, step_of
from boost_core.bench.results import Environment, kernel_seconds
from boost_core.config import JobSpec, Layout
from boost_core.hardware import BYTES
from boost_core.model.attention import dense_attention
from boost_core.parallel.activation_offload import page_locked_like
from boost_core.plan.machine import MeasuredProfile, Profile, Work, computed_in, machine_for
from boost_core.plan.report import at, step_seconds
from boost_core.plan.throughput import block_products, block_work

Sample = tuple[Work, float]

_COPIED_BYTES = [1 << power for power in (22, 24, 26)]
_TRANSFERRED_BYTES = 1 << 28
_FEW_TOKENS = 16  # in a sequence that takes no longer than its kernels' launches
_VARIANTS = (
    Variant("dense, fullrank", "dense", {"strategy": "fullrank"}),
    # One product and one exchange per projection, like pairs that know nothing of each other.
    Variant("cola, vanilla", "cola", {"strategy": "vanilla", "group_projections": False}),
    Variant("cola, btp", "cola", {"strategy": "btp"}),
    Variant("cola, btp, recompute latent", "cola", {"strategy": "btp", "recompute": "latent"}),
)


def measure(shape: RunShape, device: torch.device, repeats: int) -> MeasuredProfile:
    """Measure a profile with the blocks of a model.

    Args:
        shape: The model, how many ranks share it, and its micro-batches.
        device: The device to measure.
        repeats: Repetitions of each measurement.
    """
    jobs = [variant.job(shape, device) for variant in _VARIANTS]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    samples = []
    for size in _COPIED_BYTES:
        source = torch.zeros(size, dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        seconds = statistics.median(kernel_seconds(partial(target.copy_, source), device, repeats))
        samples.append((Work(moved_bytes=2 * size, starts=1), seconds))
    samples += [sample for job in jobs for sample in _products(job, dtype, device, repeats)]
    rate, bandwidth, start = fit(samples)
    attention = _attention_rate(jobs[0], dtype, device, repeats)
    few = replace(shape, sequence_length=_FEW_TOKENS, micro_batch_size=1)
    in_turn = device.type == "cpu"
    rates = Profile(rate, attention, bandwidth, start, 0.0, 0.0, 0.0, True, "as fitted", launches_in_turn=in_turn)
    # What a block with few tokens takes is its launches; where these come in turn, less its work.
    launches = [
        block_seconds(few, variant, device, repeats) - (_planned(variant.job(few, device), rates) if in_turn else 0.0)
        for variant in _VARIANTS
    ]
    launched = max(0.0, min(launches))
    profile = replace(rates, block_seconds=launched)
    of_jobs = zip(_VARIANTS, jobs, strict=True)
    ratios = {each.name: block_seconds(shape, each, device, repeats) / _planned(job, profile) for each, job in of_jobs}
    if min(ratios.values()) <= 0:
        raise ValueError("steps do not take longer with more blocks: give --repeats more, or a larger shape")
    logs = [math.log(ratio) for ratio in ratios.values()]
    host_bandwidth = None
    if device.type == "cuda":  # to and from locked pages of the host, in the slower direction
        here = torch.zeros(_TRANSFERRED_BYTES, dtype=torch.int8, device=device)
        (there,) = page_locked_like([here])
        there.zero_()
        ways = partial(there.copy_, here, non_blocking=True), partial(here.copy_, there, non_blocking=True)
        slower = max(statistics.median(kernel_seconds(way, device, repeats)) for way in ways)
        host_bandwidth = _TRANSFERRED_BYTES / slower
    return MeasuredProfile(
        **asdict(Environment.of(device)), measured_at=datetime.now(UTC).replace(microsecond=0),
        precision=jobs[0].training.precision, cores=torch.get_num_threads(),
        cases=(f"{len(samples)} products and copies; {shape}",
               *(f"{name}: {ratio:.3f} of its work's time" for name, ratio in ratios.items())),
        product_flops=rate, attention_flops=attention, bandwidth=bandwidth, start_seconds=start,
        block_seconds=launched, correction=math.exp(statistics.mean(logs)), spread=statistics.stdev(logs),
        host_bandwidth=host_bandwidth,
    )  # fmt: skip


def fit(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Fit FLOPs per second, bytes per second and seconds per start to the times of some products and copies.

    Raises:
        ValueError: No fit has figures above 0; a start's may be 0.
    """
    terms = np.array([(work.product_flops, work.moved_bytes, work.starts) for work, _ in samples], dtype=float)
    terms /= np.array([seconds for _, seconds in samples])[:, None]
    scale = terms.max(axis=0)
    for chosen in ([0, 1, 2], [0, 1]):
        solution, *_ = np.linalg.lstsq(terms[:, chosen] / scale[chosen], np.ones(len(samples)), rcond=None)
        if (solution > 0).all():
            a_flop, a_byte, *a_start = (solution / scale[chosen]).tolist()
            return 1 / a_flop, 1 / a_byte, a_start[0] if a_start else 0.0
    raise ValueError("products and copies do not take longer the larger they are: is something else running here?")


def _products(job: JobSpec, dtype: torch.dtype, device: torch.device, repeats: int) -> Iterator[Sample]:
    tokens = job.training.micro_batch_size * job.training.sequence_length
    for rows in {max(tokens // 4, 1), tokens}:
        for product in block_products(job.model, job.parallelism, rows):
            # Input, weight and output gradient; matrices with a common input form a wide one together.
            batch = product.matrices if product.inputs == product.matrices else 1
            outer = product.outer * product.matrices // batch
            shapes = (product.rows, product.inner), (product.inner, outer), (product.rows, outer)
            inputs, weights, outputs = (torch.randn(batch, *shape, device=device).to(dtype) for shape in shapes)
            for left, right in ((inputs, weights), (inputs.transpose(1, 2), outputs)):
                seconds = statistics.median(kernel_seconds(partial(torch.bmm, left, right), device, repeats))
                yield replace(product, starts=1).passes(dtype.itemsize).forward, seconds


def _attention_rate(job: JobSpec, dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    """Return FLOPs per second forward and backward, as counted by ``plan.throughput``."""
    training, ranks = job.training, job.parallelism.tensor_parallel_size
    shape = training.micro_batch_size, job.model.num_attention_heads // ranks, training.sequence_length
    parts = [torch.randn(*shape, job.model.head_size, device=device).to(dtype).requires_grad_() for _ in range(3)]

    def both() -> None:
        query, key, value = parts
        out = dense_attention(query, key, value)
        torch.autograd.grad(out, parts, out.detach())

    ((mode, _),) = job.parallelism.modes(0, 1)  # of the only block
    passes = block_work(job, mode)
    flops = passes.forward.attention_flops + passes.backward.attention_flops
    return flops / statistics.median(kernel_seconds(both, device, repeats))


def _planned(job: JobSpec, profile: Profile) -> float:
    """Return a block's part of a step according to the plan, without its exchanges."""
    weights = block_parameters(job.model, crossed=False) / job.parallelism.tensor_parallel_size
    update = profile.update_seconds(weights, BYTES[job.training.precision])
    ((mode, _),) = job.parallelism.modes(0, 1)
    return profile.of_a_block(block_work(job, mode).all) + update


# A job's own steps for about a second, where its plan is for this machine's CPUs.

_LONGEST_SECONDS = 4.0  # of a step, by nominal rates, which are low
_JOB_SPREAD = 0.5  # docs/planning.md, "On this machine's CPUs"


def measure_job(job: JobSpec, seconds: float = 1.0) -> MeasuredProfile:
    """Measure a job without GPUs on this machine's CPUs: a rank's steps with one micro-batch.

    They are shortened, to few sequences and blocks, if they are long. The nominal rates of a core are divided by how
    much longer these steps take than the plan predicts from them.

    Args:
        job: The job.
        seconds: About how long to measure, once its model is built.

    Raises:
        ValueError: A step with one block would take too long.
        FloatingPointError: It diverges.
    """
    cores, device = job.resources.cpus_per_worker, torch.device("cpu")
    torch.set_num_threads(max(1, int(cores)))
    nominal, training = machine_for(job.resources, job.training.precision), job.training
    layout = Layout(job.parallelism.tensor_parallel_size, 1, 1)
    resolved = at(job, Layout.of(job.parallelism))
    modes = resolved.parallelism.modes_of_all(job.model.num_hidden_layers)
    rank = resolved.at(layout).with_parallelism(
        pipeline_schedule="1f1b", pipeline_layers_per_stage=None, recompute=max(modes, key=lambda mode: modes[mode])
    )

    def shortened(sequences: int, blocks: int) -> JobSpec:
        batch = {"global_batch_size": sequences, "micro_batch_size": sequences, "batch_size_warmup": ()}
        model = job.model.model_copy(update={"num_hidden_layers": blocks})
        return rank.model_copy(update={"model": model, "training": training.model_copy(update=batch)})

    sequences = training.micro_batch_size
    while (one := step_seconds(shortened(sequences, 1), layout, nominal)) > _LONGEST_SECONDS and sequences > 1:
        sequences //= 2
    if one > _LONGEST_SECONDS:
        raise ValueError("its steps take too long to be measured in a second")
    of_a_block = step_seconds(shortened(sequences, 2), layout, nominal) - one
    few = shortened(sequences, min(job.model.num_hidden_layers, 1 + int((_LONGEST_SECONDS - one) / of_a_block)))
    with alone(layout.tp):
        step = step_of(few, device, job.name).run
        step()
        taken = list[float]()
        while sum(taken) < seconds:
            started = time.perf_counter()
            step()
            taken.append(time.perf_counter() - started)
    took = statistics.median(taken)
    ratio, rates = took / step_seconds(few, layout, nominal), nominal.profile
    return MeasuredProfile(
        **asdict(replace(Environment.of(device), device=f"{cores:g} of this machine's cores")),
        measured_at=datetime.now(UTC).replace(microsecond=0),
        precision=computed_in(training.precision),
        cores=max(1, int(cores)),
        cases=(f"a step of {few.model.num_hidden_layers} blocks in {took:.3g} s",),
        product_flops=rates.product_flops,
        attention_flops=rates.attention_flops,
        bandwidth=rates.bandwidth,
        start_seconds=rates.start_seconds,
        block_seconds=ratio * rates.block_seconds,
        correction=ratio,
        spread=_JOB_SPREAD,
    )
