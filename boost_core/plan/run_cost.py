"""What a run costs: days, GPU-hours, money and energy, checkpoints and their best interval, and what failures cost.

Llama 3 405B had 419 unexpected interruptions in 54 days on 16,384 H100s, on a file system that sustains 2 TB/s
(arXiv 2407.21783, sections 3.3.1 and 3.3.4): these are the failure rate and the store where nothing else is known.

With failures M apart on average, checkpoints that hold up the loop for δ and restarts that take R, J. T. Daly ("A
higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22,
2006) gives the share of time that is useful with checkpoints τ apart, and the τ that loses least:

    τ / (M · e^(R/M) · (e^((τ + δ)/M) − 1)),    √(2δM) · (1 + √(δ/2M)/3 + δ/18M) − δ    (M, if δ ≥ 2M)

of which √(2δM) is J. W. Young's ("A first order approximation to the optimum checkpoint interval", Communications of
the ACM 17, 1974). Three things are different here. A checkpoint is written while training goes on, so δ is what of
the copy to the host's memory no pass hides, and what is done while it is written has to be repeated as well. A copy
that passes hide has δ = 0, and would be due all the time; but it takes bandwidth of both memories and the network,
nobody has measured how much. So the best τ is that of a copy that hides nothing, the most that it can cost, or of
what steps wait where the next copy waits for the store, and at least twice the time of writing, after which a store
that is half as fast as planned is done. And where peers' memory has the state, only the few steps since its newest
copy are repeated.
"""

from collections.abc import Callable, Iterator
from math import ceil, exp, expm1, inf, sqrt
from typing import Annotated

from pydantic import Field

from boost_core.architecture import block_matrix_parameters, parameter_count
from boost_core.config.base import Config, counted
from boost_core.config.job import JobSpec
from boost_core.config.parallelism import Layout
from boost_core.hardware import BYTES, device_named
from boost_core.plan.machine import Machine, kind_of_gpu
from boost_core.plan.memory import state_copies
from boost_core.plan.throughput import StepParts
from boost_core.terminal import duration_in_words, rounded, size_in_words

GPU_MTBF_HOURS = 54 * 24 * 16_384 / 419
GPU_STORE_BYTES_PER_SECOND = 2e12 / 16_384
_MOST_EXPONENT = 700.0  # of a double
_ROUND_STEPS = [first * 10**zeros for zeros in range(12) for first in (1, 2, 5)]
_LITTLE_LESS = 0.005  # of the time: what a practical interval between checkpoints may cost
_MOST_LOST_SECONDS = 4 * 3600.0  # between two checkpoints that are advised: what one failure may lose
_PRACTICAL = f"within {_LITTLE_LESS:.1%} of the highest goodput, at most {duration_in_words(_MOST_LOST_SECONDS)} apart"
_LEAST_WRITES = 2  # times of writing a checkpoint between two that are advised
_RESTART_SECONDS = 4.1  # from a lost node to the next step, besides loading: docs/figures/recovery.md, on CPUs


class RunConditions(Config):
    """What a run's price, checkpoints and failures are planned with."""

    gpu_hour_price: float | None = Field(None, ge=0, le=1e6, description="Price of a GPU-hour, in any currency.")
    mtbf_hours: Annotated[float, Field(ge=1e-3, le=1e12)] | None = Field(
        None,
        description="Mean hours between failures of one GPU that interrupt the job, or of one rank without GPUs; "
        f"default: {GPU_MTBF_HOURS:,.0f} of a GPU, as in Llama 3's training, and unknown without GPUs.",
    )
    store_gigabytes_per_second: Annotated[float, Field(ge=1e-3, le=1e6)] | None = Field(
        None,
        description="Rate at which all ranks together write a checkpoint to the store. Default: the service's "
        "measurement of an earlier checkpoint of the tenant in this store; otherwise "
        f"{8 * GPU_STORE_BYTES_PER_SECOND / 1e9:.2g} per node of 8 GPUs, their share of Llama 3's file system.",
    )


CONDITIONS = RunConditions()


class PlannedCheckpoint(Config):
    """A checkpoint of a job."""

    bytes: int = Field(description="Its size: masters and moments in fp32.")
    gigabytes_per_second: float = Field(description="Rate at which all ranks together write it.")
    write_seconds: float = Field(description="Seconds to write it, while training goes on.")
    stall_seconds: float = Field(description="Seconds for which it holds up the steps.")
    interval_seconds: float = Field(description="Seconds from one to the next: checkpoint.every_steps.")
    best_every_steps: int | None = Field(
        description="The checkpoint.every_steps that loses least to failures, by Daly's formula, as though steps "
        "waited for all of the copy to the host, and at least twice as long as writing one takes; null where failures "
        "are unknown."
    )
    practical_every_steps: int | None = Field(
        None,
        description="The job's own interval if its goodput is within 0.5 % of the highest and it, or the job, takes at "
        "most 4 hours; else the longest of round numbers of steps for which that holds, up to the longer of the job's "
        "and best_every_steps; else best_every_steps.",
    )


class LostNode(Config):
    """How a job goes on after it has lost a node that is not replaced."""

    world_size: int
    share: float = Field(description="Tokens per second as a share of those with all nodes.")


class PlannedGoodput(Config):
    """The expected share of time that goes into new steps."""

    failures: float = Field(description="Expected number of failures during all steps.")
    hours_between_failures: float = Field(description="Mean hours between failures of the whole gang.")
    without_failures: float = Field(description="The share if nothing fails.")
    from_memory: float | None = Field(
        description="The share if each failure leaves a copy of the state in peers' memory; null if none is kept."
    )
    from_checkpoints: float = Field(description="The share if each failure goes back to the newest checkpoint.")
    from_best_checkpoints: float = Field(0, description="The same with checkpoints every best_every_steps.")
    from_practical_checkpoints: float = Field(0, description="The same with checkpoints every practical_every_steps.")
    expected_seconds: float | None = Field(
        None,
        description="Expected seconds of all steps with waits for checkpoints and with failures that go back to the "
        "newest one: total_seconds / from_checkpoints; null if that is 0.",
    )
    expected_gpu_hours: float | None = Field(None, description="GPU-hours of these seconds.")
    expected_price: float | None = Field(None, description="Price of these GPU-hours; null without a price of one.")
    lost_seconds_from_memory: float | None = Field(description="Seconds that a failure costs in the former case.")
    lost_seconds_from_checkpoint: float = Field(description="Seconds that a failure costs in the latter case.")
    without_a_node: LostNode | None = Field(
        description="The largest gang of whole replicas that is left by the loss of one node, if elasticity allows it; "
        "null if none is legal and fits."
    )


class PlannedRun(Config):
    """What all steps of a job take in a layout."""

    total_seconds: float = Field(0, description="Predicted seconds of all steps, without waits and failures.")
    gpu_hours: float = Field(0, description="GPU-hours of total_seconds; 0 on CPUs.")
    kilowatt_hours: float | None = Field(
        None, description="Energy of these if each GPU drew all that its board may; null if that is not known."
    )
    price: float | None = Field(None, description="Price of these GPU-hours; null without a price of one.")
    checkpoint: PlannedCheckpoint | None = None
    goodput: PlannedGoodput | None = Field(None, description="Null where the rate of failures is unknown.")
    words: tuple[str, ...] = Field((), description="All of this as sentences for people.")


def checkpoint_bytes(spec: JobSpec) -> int:
    """Return the size of a job's checkpoint: a master and its moments for each weight, in fp32."""
    elements = 3 * parameter_count(spec.model)
    if spec.optimizer.muon is not None:  # its factors have one moment
        elements -= spec.model.num_hidden_layers * block_matrix_parameters(spec.model)
    return elements * BYTES["fp32"]


def planned_run(
    job: JobSpec, layout: Layout, seconds: StepParts, copies: int, machine: Machine, conditions: RunConditions,
    without_a_node: Callable[[JobSpec, Layout, float, Machine], LostNode | None],
) -> PlannedRun:  # fmt: skip
    """Plan what all steps take.

    Args:
        job: The job in its layout, with nothing left open (``report.at``).
        layout: The layout.
        seconds: Its step.
        copies: Bytes of a rank's copies of the state in the host's memory (``Memory``).
        machine: What it runs on.
        conditions: Prices, failures and the store.
        without_a_node: ``report.without_a_node``, which plans other layouts.
    """
    training, saves, step = job.training, job.checkpoint, seconds.total
    total = step * training.samples(training.steps) / training.global_batch_size
    gpus = layout.world_size * job.resources.gpus_per_worker
    gpu_hours, node = total * gpus / 3600, machine.cluster.levels[0].fan_out
    price = None if conditions.gpu_hour_price is None else conditions.gpu_hour_price * gpu_hours
    kind = kind_of_gpu(job.resources) if machine.device_bytes is None else None  # descriptions say nothing about power
    device = device_named(kind) if kind else None

    # A checkpoint: how long it is written, and for how long steps wait for it.
    size, nodes = checkpoint_bytes(job), ceil(layout.world_size / node)
    known = conditions.store_gigabytes_per_second
    rate = min(8, node) * GPU_STORE_BYTES_PER_SECOND * nodes if known is None else known * 1e9
    written, every = size / rate, saves.every_steps * step
    copied = copies / state_copies(job)
    waits = copied  # bytes whose copy holds up the steps; on a GPU, those that its passes do not hide
    if gpus:
        on_host = job.parallelism.optimizer_offload * copied
        hidden = (step - seconds.update) * machine.profile.host_bandwidth
        waits = on_host + max(0.0, copied - on_host - hidden)
    copying = waits / machine.profile.host_bandwidth
    remembers = job.fault_tolerance.memory_copy_every_steps if layout.world_size > 1 else None

    def stalls(every_steps: int) -> tuple[float, float]:
        """Seconds for which a checkpoint holds up the steps, and for which all copies do per second of steps."""
        # The next copy waits for a checkpoint being written, as long as the job allows; then none is made.
        until_copy = step * (every_steps if remembers is None else min(every_steps, remembers))
        stall = copying + max(0.0, min(written, saves.store_wait_seconds) - until_copy)
        a_step = 1 / every_steps  # copies of the state
        if remembers is not None:
            a_step = 1 / remembers + (a_step if every_steps % remembers else 0.0)
        return stall, (copying * a_step + (stall - copying) / every_steps) / step

    stall, stalled = stalls(saves.every_steps)

    # Failures of the whole gang, and what one costs.
    hours = GPU_MTBF_HOURS if conditions.mtbf_hours is None and gpus else conditions.mtbf_hours
    goodput = best = practical = None
    if hours is not None and step < inf:
        between = 3600 * hours / (gpus or layout.world_size)
        delta = max(copied / machine.profile.host_bandwidth, stalls(training.steps)[0])
        ratio, interval = delta / (2 * between), between
        if delta < 2 * between:  # Daly's interval, in seconds
            interval = sqrt(2 * delta * between) * (1 + sqrt(ratio) / 3 + ratio / 9) - delta
        best = max(ceil(max(_LEAST_WRITES * written, step) / step), round(interval / step))
        restart = _RESTART_SECONDS + size / rate + written  # what was done while it was written is repeated

        def useful(every_steps: int) -> float:
            apart, (_, stalled) = max(min(every_steps, training.steps) * step, written), stalls(every_steps)
            failing = expm1(min(apart * (1 + stalled) / between, _MOST_EXPONENT))
            return apart / between * exp(-restart / between) / failing

        # An interval longer than the job's own is advised only if it loses less, none longer than a failure may lose.
        own, most_steps = saves.every_steps, _MOST_LOST_SECONDS / step
        fewest = best if best <= most_steps else _LEAST_WRITES * written / step
        rounds = (each for each in _ROUND_STEPS if fewest <= each <= max(best, own))
        shares = {each: useful(each) for each in (best, own, *rounds)}
        enough = (1 - _LITTLE_LESS) * max(shares.values())
        good = [each for each in shares if shares[each] >= enough > 0 and min(each, training.steps) <= most_steps]
        practical = own if own in good else max(good, default=best)
        apart = max(min(every, total), written)
        longer = 1 / shares[own] if shares[own] > 0 else inf
        from_memory = lost = None
        if remembers is not None:
            unkept = min(written, apart) if written > saves.store_wait_seconds else 0.0
            repeated = (unkept**2 + (apart - unkept) * remembers * step) / (2 * apart)
            lost = _RESTART_SECONDS + copied / machine.cluster.levels[-1].link.bytes_per_second + repeated
            from_memory = max(0.0, 1 - lost / between) / (1 + stalled)
        goodput = PlannedGoodput(
            failures=total / between,
            hours_between_failures=between / 3600,
            without_failures=1 / (1 + stalled),
            from_memory=from_memory,
            from_checkpoints=shares[own],
            expected_seconds=total * longer,
            expected_gpu_hours=gpu_hours * longer if gpus else 0,
            expected_price=price and price * longer,
            from_best_checkpoints=shares[best],
            from_practical_checkpoints=shares[practical],
            lost_seconds_from_memory=lost,
            lost_seconds_from_checkpoint=restart + apart / 2,
            without_a_node=without_a_node(job, layout, step, machine),
        )
    run = PlannedRun(
        total_seconds=total,
        gpu_hours=gpu_hours,
        kilowatt_hours=device.watts * gpu_hours / 1000 if device and device.watts else None,
        price=price,
        checkpoint=PlannedCheckpoint(
            bytes=size, gigabytes_per_second=rate / 1e9, write_seconds=written, stall_seconds=stall,
            interval_seconds=every, best_every_steps=best, practical_every_steps=practical,
        ),
        goodput=goodput,
    )  # fmt: skip
    return run.model_copy(update={"words": tuple(_in_words(run, job, layout, step, known is None))})


def _in_words(run: PlannedRun, job: JobSpec, layout: Layout, step: float, assumed: bool) -> Iterator[str]:
    """A run as sentences; ``assumed``: whether the store's rate is."""
    on_gpu, checkpoint, goodput = job.resources.gpus_per_worker > 0, run.checkpoint, run.goodput
    totals = [("all steps", "without waits and failures", 1.0)]
    if goodput is not None and goodput.from_checkpoints > 1e-4:  # else it would hardly ever finish
        including = "with waits for checkpoints and with failures that go back to one"
        totals.append(("expected", including, 1 / goodput.from_checkpoints))
    for name, including, ratio in totals:
        amounts = [f"{duration_in_words(ratio * run.total_seconds)} {including}"]
        if on_gpu:
            amounts.append(f"{rounded(ratio * run.gpu_hours)} GPU-hours")
        if run.price is not None and on_gpu:
            amounts.append(f"{rounded(ratio * run.price)} at {rounded(run.price / run.gpu_hours)} a GPU-hour")
        if run.kilowatt_hours is not None:
            amounts.append(f"at most {rounded(max(ratio * run.kilowatt_hours, 1e-4))} kWh")
        yield f"{name}: {', '.join(amounts)}"
    if checkpoint is None:
        return
    rate = f"{rounded(checkpoint.gigabytes_per_second, 2)} GB/s{' (assumed)' if assumed else ''}"
    waits = f"steps wait {duration_in_words(checkpoint.stall_seconds)}" if checkpoint.stall_seconds else "no step waits"
    steps, every, keep = job.training.steps, counted(job.checkpoint.every_steps, "step"), job.checkpoint.keep_last
    apart, written = duration_in_words(checkpoint.interval_seconds), duration_in_words(checkpoint.write_seconds)
    only = ", longer than the job, so at its end alone" if job.checkpoint.every_steps > steps else ""
    yield (
        f"checkpoints: {size_in_words(checkpoint.bytes)} every {every} ({apart}{only}), written in {written} at {rate} "
        f"while training goes on; {waits} for it"
    )
    best, practical = checkpoint.best_every_steps, checkpoint.practical_every_steps
    if goodput is None or best is None or practical is None:
        return
    ranks, between = counted(layout.world_size, "GPU" if on_gpu else "rank"), 3600 * goodput.hours_between_failures
    own, apart = job.checkpoint.every_steps, "every step" if best == 1 else f"every {best:,} steps"
    kept = practical == own <= best  # longer intervals than the job's own gain too little to advise one
    if min(best, practical) >= steps:
        advice = f"one at the end is enough, as the interval that loses least, {best:,} steps, is longer than the job"
    else:
        limit = ", twice what writing takes," if (best - 1) * step < _LEAST_WRITES * checkpoint.write_seconds else ""
        advice = f"{apart} ({duration_in_words(best * step)}){limit} would lose least by Daly's formula"
        if kept or practical != best:
            whose = "one at the end" if practical >= steps else f"every {counted(practical, 'step')}"
            whose += ", as in the job, is practical" if practical == own else " is practical"
            apart_seconds = min(practical, steps) * step
            rule = f"; {_PRACTICAL}" if apart_seconds <= _MOST_LOST_SECONDS else ""
            advice = ("" if kept else f"{advice}; ") + f"{whose} ({duration_in_words(apart_seconds)}{rule})"
        number = min(ceil(steps / practical), keep or steps)
        advice += f"; {number:,} then fill {size_in_words(number * checkpoint.bytes)}"
        if keep is None:
            advice += ", as checkpoint.keep_last is unset and all are kept"
    yield (
        f"failures: one in {duration_in_words(between)} on {ranks}, if each has one in "
        f"{duration_in_words(between * layout.world_size)}; {rounded(goodput.failures, 2)} during all "
        f"steps; checkpoints: {advice}"
    )
    parts = [f"{goodput.without_failures:.2%} without failures"]
    if goodput.from_memory is not None and goodput.lost_seconds_from_memory is not None:
        lost = duration_in_words(goodput.lost_seconds_from_memory)
        parts.append(f"{goodput.from_memory:.2%} if the state is in peers' memory after each ({lost} lost)")
    lost = duration_in_words(goodput.lost_seconds_from_checkpoint)
    parts.append(f"{goodput.from_checkpoints:.2%} if each goes back to a checkpoint ({lost} lost)")
    if best < steps and not kept:
        parts.append(f"{goodput.from_best_checkpoints:.2%} likewise with checkpoints {apart}")
    if practical not in (best, own):
        parts.append(f"{goodput.from_practical_checkpoints:.2%} with checkpoints every {practical:,}")
    yield f"goodput: {', '.join(parts)}"
    if (left := goodput.without_a_node) is not None:
        yield (
            f"a node less: until it is replaced, {left.world_size:,} of {ranks}, the most whose replicas divide the "
            f"batch, go on at {left.share:.0%} of the tokens per second, if elasticity allows it"
        )
