"""The best plan by brute force: every size, schedule, micro-batch, mode and cut of small models on few GPUs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from math import inf
from random import Random

from boost_core.architecture import Stage, cut
from boost_core.config import JobSpec, Layout
from boost_core.config.job import layout_problems
from boost_core.plan.machine import SPARE, Machine, NetworkConfig, machine_of
from boost_core.plan.memory import PipelineRank, lacking, most_of, node_bytes
from boost_core.plan.report import at
from boost_core.plan.throughput import Step, StepParts

SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble")
MODES = tuple(product(("none", "latent", "shared", "full", "offload"), (1, 2)))


@dataclass(frozen=True)
class Instance:
    """A small question for the planner.

    Attributes:
        job: The job.
        gpus: How many there are.
        machine: What they are.
        device_bytes: Memory of each.
    """

    job: JobSpec
    gpus: int
    machine: Machine
    device_bytes: float


def drawn(seed: int, layers: int = 8, gpus: int = 16, hosts: bool = False) -> Instance:
    """A random instance of at most so many blocks and GPUs, over two or three levels.

    With ``hosts``, whose memory is known, sequences are long enough to be copied behind a block's passes.
    """
    random = Random(seed)
    hidden, family = random.choice((1024, 2048, 4096)), random.choice(("cola", "dense", "svd"))
    model = {
        "family": family, "hidden_size": hidden, "intermediate_size": random.choice((2, 3)) * hidden,
        "num_hidden_layers": random.randint(2, layers), "num_attention_heads": 16,
        "vocab_size": random.choice((4096, 32_000)),
    } | ({} if family == "dense" else {"rank": hidden // 4})  # fmt: skip
    training = {
        "steps": 10, "sequence_length": random.choice((1024, 4096)), "precision": "bf16", "micro_batch_size": 1,
        "global_batch_size": random.choice((16, 24, 32, 48)),
    }  # fmt: skip
    job = JobSpec.model_validate(
        {"name": "small", "model": model, "training": training,
         "resources": {"gpus_per_worker": 1, "accelerator_type": "H100"}}
    )  # fmt: skip
    node, rack = random.choice((2, 4, 8)), random.choice((2, 4))
    bandwidths = [random.choice((100, 450)), random.choice((12.5, 50)), random.choice((3, 12.5))]
    fan_outs = [node, rack, 64] if random.random() < 0.5 else [node, 64]
    levels = [
        {"name": f"level {number}", "fan_out": fan_out, "gigabytes_per_second": bandwidth}
        for number, (fan_out, bandwidth) in enumerate(zip(fan_outs, bandwidths, strict=False))
    ]
    network = NetworkConfig.model_validate({"levels": levels}).cluster()
    machine, number = machine_of(job, cluster=network), random.randint(2, gpus)
    # Blocks this small would be bound by the host, whatever the network is.
    machine = replace(machine, profile=replace(machine.profile, block_seconds=5e-4, step_seconds=0.0))
    device_bytes = 10 ** random.uniform(9.3, 10.8)
    if hosts:
        machine = replace(machine, node_memory_bytes=int(10 ** random.uniform(10.5, 12)))
        job = job.model_copy(update={"training": job.training.model_copy(update={"sequence_length": 16_384})})
    return Instance(job, number, machine, device_bytes)


def replayed_parts(spec: JobSpec, layout: Layout, machine: Machine) -> StepParts:
    """A step's seconds, with the pipeline simulated pass by pass."""
    return Step(at(spec, layout, machine), layout, machine).replayed()


def offload_seconds(spec: JobSpec, layout: Layout, machine: Machine) -> float:
    """A step's seconds of exposed copies to and from the host's memory, with the correction."""
    copies = Step(at(spec, layout, machine), layout, machine).host_copies
    return copies.state + copies.exposed


def fastest(instance: Instance, below: float = inf, all_cuts: bool = True) -> float:
    """Played seconds of the fastest way that fits, or ``below`` if none is faster.

    Args:
        instance: The question.
        below: Ways that cannot be faster are left out: whose ranks, evenly loaded, would compute for longer.
        all_cuts: Whether to try every cut into stages, or the default one.
    """
    best, limit = below, instance.device_bytes * (1 - SPARE)
    for job in _ways(instance):
        layout = Layout.of(job.parallelism)
        step = Step(job, layout, instance.machine)
        if job.training.micro_batches(layout.dp) * step.of_a_micro_batch()[0] / layout.pp >= best:
            continue
        for stages in _cuts(job) if all_cuts else [cut(job.model, job.parallelism, job.training.sequence_length)]:
            step = Step(job, layout, instance.machine)
            step._stages = [list(stages[rank :: layout.pp]) for rank in range(layout.pp)]
            if (seconds := step.played()) < best and _fits(job, stages, limit, instance.machine):
                best = seconds
    return best


def _ways(instance: Instance) -> Iterator[JobSpec]:
    job, gpus, node = instance.job, instance.gpus, instance.machine.cluster.levels[0].fan_out
    layers = job.model.num_hidden_layers
    for tensor, pipeline, replicas in product(range(1, node + 1), range(1, layers + 1), range(1, gpus + 1)):
        if tensor * pipeline * replicas > gpus or job.model.hidden_size % tensor:
            continue
        layout = Layout(tensor, pipeline, replicas)
        for micro_batch, schedule, (recompute, zero) in product(range(1, 33), SCHEDULES, MODES):
            if job.training.global_batch_size % (micro_batch * replicas):
                continue
            if recompute == "offload" and instance.machine.node_memory_bytes is None:
                continue
            changes = {**layout.sizes, "pipeline_schedule": schedule, "recompute": recompute, "zero_stage": zero}
            parallelism = job.parallelism.model_copy(update=changes)
            training = job.training.model_copy(update={"micro_batch_size": micro_batch})
            if not layout_problems(job.model, parallelism, training, job.optimizer, 1):
                yield job.model_copy(update={"parallelism": parallelism, "training": training})


def _cuts(job: JobSpec) -> Iterator[Sequence[Stage]]:
    count, layers = job.parallelism.stages, job.model.num_hidden_layers
    for inner in combinations(range(1, layers), count - 1):
        yield [
            Stage(number, range(begin, end), number == 0, number == count - 1)
            for number, (begin, end) in enumerate(pairwise((0, *inner, layers)))
        ]


def _fits(job: JobSpec, stages: Sequence[Stage], limit: float, machine: Machine) -> bool:
    size = job.parallelism.pipeline_parallel_size
    found = [PipelineRank(job, rank, stages[rank::size]).memory() for rank in range(size)]
    of_node = node_bytes(most_of(found), Layout.of(job.parallelism), machine)
    return max(each.total for each in found) <= limit and not lacking(of_node, machine)
