"""How long an optimizer step of a job would take in a layout, to tell layouts apart before any of them runs.

A step is (m + idle) micro-batches of the slowest pipeline rank, and then the exchange of gradients and weights:

* arithmetic: what the tensor parallel ranks compute of its stages' blocks, which is the model's FLOPs and, under
  vanilla, the attention of all heads on every rank;
* tensor parallel exchanges: what ``architecture.sharding`` says they carry, over the link inside the node;
* idle, in micro-batches: p − 1 under 1f1b; half of that where a rank has two stages; a third of that half where weight
  gradients fill it (arXiv 2104.04473, 2401.10241);
* data parallel: gradients in fp32 and, under ZeRO, the gathering of weights, over the fabric between nodes.

Nothing is taken to be hidden behind anything else, and sends between stages are left out; memory is not looked at.
Only the ranking of a job's layouts is meant to be right; the seconds are not. ``tests/unit/test_published_times.py``
holds them against the BOOST paper's: btp comes first by about as much as published. Passes over wide vectors outside
matrix products are not counted, of which vanilla has most: at tp 2, and at 30B, it was behind full-rank where this puts
it ahead.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

from boost_core.architecture.sharding import micro_batch_payloads
from boost_core.config.job import JobSpec, ResourcesConfig
from boost_core.config.layout import Layout
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig
from boost_core.config.training import TrainingConfig
from boost_core.hardware import BYTES, LINKS, LOOPBACK, Link, device_named
from boost_core.plan.collectives import collective_seconds
from boost_core.plan.flops import RECOMPUTED, computed_block_flops_per_token, head_flops_per_token
from boost_core.plan.parameters import parameter_count
from boost_core.plan.stages import Stage, cut

# What a step reaches of the nominal rate of dense bf16 products: an assumption, and the same for all layouts.
EFFICIENCY = 0.4
_IDLE_SHARE = {"1f1b": 1.0, "interleaved_1f1b": 1 / 2, "zero_bubble": 1 / 6}
_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class Machine:
    """What ranks run on.

    Attributes:
        flops_per_second: Of one rank.
        block_seconds: A block takes this long for a micro-batch however small it is: its kernels must be launched.
        tensor_link: Between ranks of a node.
        fabric_link: Between nodes.
        description: What it stands for and where its figures are from.
    """

    flops_per_second: float
    block_seconds: float
    tensor_link: Link
    fabric_link: Link
    description: str


def _gpu(name: str, tensor_link: str) -> Machine:
    """A GPU by its nominal rate of dense bf16 products."""
    device = device_named(name)
    assert device is not None
    peak = device.tflops["bf16"]
    description = f"{peak:g} TFLOP/s of dense bf16 ({device.source}) at {EFFICIENCY:.0%}; 0.5 ms a block, assumed"
    fabric = LINKS["fabric-200g"]
    return Machine(EFFICIENCY * peak * 1e12, 5e-4, LINKS[tensor_link], fabric, description)


# A CPU's figures are of one core.
CPU = Machine(2e10, 2e-3, LOOPBACK, LOOPBACK, "20 GFLOP/s a core and 2 ms a block, both assumed")

MACHINES = {
    "A100": _gpu("A100", "nvlink-a100"),
    "H100": _gpu("H100", "nvlink-h200"),
    "H200": _gpu("H200", "nvlink-h200"),
}
_UNKNOWN_GPU = "A100"


def machine_for(resources: ResourcesConfig) -> Machine:
    """The machine that a job's workers run on, as far as the job says.

    A GPU of another kind, or of none in particular, is taken for an A100: kinds differ less in how they rank layouts
    than a GPU does from a CPU.
    """
    if resources.gpus_per_worker:
        return MACHINES.get(resources.accelerator_type or _UNKNOWN_GPU, MACHINES[_UNKNOWN_GPU])
    return replace(CPU, flops_per_second=CPU.flops_per_second * resources.cpus_per_worker)


def step_seconds(spec: JobSpec, layout: Layout, machine: Machine | None = None) -> float:
    """Predicted seconds of one optimizer step.

    Args:
        spec: The job.
        layout: One of ``spec.layouts()``.
        machine: What it runs on; by default what ``machine_for`` says.
    """
    machine = machine or machine_for(spec.resources)
    job = spec.at(layout)
    parallelism, training = job.parallelism, job.training
    micro_batch = _micro_batch_seconds(job.model, parallelism, training, machine)
    idle = (layout.pp - 1) * _IDLE_SHARE[parallelism.pipeline_schedule]
    return (training.micro_batches(layout.dp) + idle) * micro_batch + _reduction_seconds(job, machine.fabric_link)


def _micro_batch_seconds(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig, machine: Machine
) -> float:
    """What the slowest pipeline rank takes for a micro-batch, forward and backward."""
    tokens = training.micro_batch_size * training.sequence_length
    rate = parallelism.tensor_parallel_size * machine.flops_per_second
    computed = computed_block_flops_per_token(model, parallelism, training.sequence_length)
    block = max(tokens * computed * (1 + RECOMPUTED[parallelism.recompute]) / rate, machine.block_seconds)
    block += _exchange_seconds(model, parallelism, tokens * BYTES[training.precision], machine.tensor_link)
    head = tokens * head_flops_per_token(model) / rate
    return max(
        sum(len(stage.layers) * block + stage.last * head for stage in stages)
        for stages in _stages_of_ranks(model, parallelism, training.sequence_length)
    )


def _stages_of_ranks(model: ModelConfig, parallelism: ParallelismConfig, sequence_length: int) -> list[list[Stage]]:
    ranks: dict[int, list[Stage]] = defaultdict(list)
    for stage in cut(model, parallelism, sequence_length):
        ranks[stage.index % parallelism.pipeline_parallel_size].append(stage)
    return list(ranks.values())


def _exchange_seconds(model: ModelConfig, parallelism: ParallelismConfig, token_bytes: int, link: Link) -> float:
    """One block's tensor parallel exchanges of a micro-batch; ``token_bytes`` are of one element of each token."""
    payloads = micro_batch_payloads(model, parallelism)
    payload_bytes = token_bytes * sum(payload.total for payload in payloads)
    return collective_seconds(link, "all_reduce", parallelism.tensor_parallel_size, payload_bytes, len(payloads))


def _reduction_seconds(job: JobSpec, link: Link) -> float:
    """The exchange of gradients between replicas, and of the weights that each of them has updated."""
    parallelism, training = job.parallelism, job.training
    replicas = parallelism.data_parallel_size
    weights = parameter_count(job.model) / (parallelism.tensor_parallel_size * parallelism.pipeline_parallel_size)
    if parallelism.zero_stage == 0:
        return collective_seconds(link, "all_reduce", replicas, weights * _GRADIENT_BYTES)
    rounds = training.micro_batches(replicas) if parallelism.zero_stage == 2 else 1
    reduce = collective_seconds(link, "reduce_scatter", replicas, weights * _GRADIENT_BYTES * rounds, rounds)
    return reduce + collective_seconds(link, "all_gather", replicas, weights / replicas * BYTES[training.precision])
