"""The plan's times beside published throughputs of other trainers (``tests/benchmarks/published_runs.csv``).

Every second run was used to choose what ``plan.machine`` and ``hardware`` take of data sheets, the others were not. All
are dense models in bf16 on A100s and H100s: torchtitan, llm-foundry, nanotron, Megatron-LM, Korthikanti et al.
(arXiv 2205.05198) and fms-fsdp. A network's name has the Gb/s of each GPU between nodes, of which 80 % are counted.
"""

import csv
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from boost_core.config import JobSpec, Layout
from boost_core.optim import zero
from boost_core.plan import throughput
from boost_core.plan.machine import NetworkConfig
from boost_core.plan.report import step_parts

RUNS = Path(__file__).parents[1] / "benchmarks" / "published_runs.csv"


def job(run: dict[str, str]) -> JobSpec:
    sizes = {name: int(run[name]) for name in ("tp", "pp", "dp", "micro_batch", "accumulation", "seq")}
    recompute: Any = json.loads(run["recompute"]) if run["recompute"].startswith("[") else run["recompute"]
    return JobSpec.model_validate(
        {
            "name": "published",
            "model": {
                "family": "dense", "hidden_size": int(run["hidden"]), "intermediate_size": int(run["intermediate"]),
                "num_hidden_layers": int(run["layers"]), "num_attention_heads": int(run["heads"]),
                "num_key_value_heads": int(run["kv_heads"]), "vocab_size": int(run["vocab"]),
                "tie_embeddings": run["tied"] == "True" and sizes["pp"] == 1,
            },
            "parallelism": {
                "tensor_parallel_size": sizes["tp"], "pipeline_parallel_size": sizes["pp"],
                "data_parallel_size": sizes["dp"], "zero_stage": int(run["zero"]), "recompute": recompute,
            },
            "training": {
                "steps": 1, "sequence_length": sizes["seq"], "micro_batch_size": sizes["micro_batch"],
                "global_batch_size": sizes["micro_batch"] * sizes["accumulation"] * sizes["dp"], "precision": "bf16",
            },
            "resources": {"gpus_per_worker": 1, "accelerator_type": run["device"]},
        }
    )  # fmt: skip


def network(name: str) -> NetworkConfig:
    kind, gigabits = name.removesuffix("g").split("-")
    node = {"a100": 240, "h100": 360}[kind]
    return NetworkConfig.model_validate(
        {
            "levels": [
                {"name": "node", "fan_out": 8, "gigabytes_per_second": node, "microseconds": 3.4},
                {"name": "fabric", "fan_out": 8192, "gigabytes_per_second": int(gigabits) / 10, "microseconds": 14},
            ]
        }
    )


@cache
def compared(cudnn: bool = False) -> list[tuple[float, bool]]:
    """Of each run the error of the step's predicted seconds, and whether the measured ones are within their range.

    These trainers used FlashAttention-2; with ``cudnn``, as ``boost plan`` predicts the runs.
    """
    found = []
    for run in csv.DictReader(RUNS.open()):
        spec = job(run)
        machine = network(run["network"]).machine(spec)
        if not cudnn:
            machine = replace(machine, profile=replace(machine.profile, cudnn=()))
        parts = step_parts(spec, Layout.of(spec.parallelism), machine)
        tokens = spec.training.global_batch_size * spec.training.sequence_length / int(run["gpus"])
        measured = tokens / float(run["tokens_per_gpu_second"])
        least, most = machine.range_of(spec, parts.total, parts.communication)
        found.append((abs(parts.total / measured - 1), least <= measured <= most))
    return found


@pytest.mark.parametrize("cudnn", [False, True])
def test_predictions_come_near_published_runs(cudnn: bool) -> None:
    errors = [error for error, _ in compared(cudnn)]
    assert median(errors) < 0.07
    assert sum(error <= 0.10 for error in errors) >= 0.7 * len(errors)


def test_those_that_were_not_used_are_predicted_as_well() -> None:
    used, others = ([error for error, _ in compared()[first::2]] for first in (0, 1))
    assert median(others) < 0.08
    assert median(used) < 0.07


@pytest.mark.parametrize("cudnn", [False, True])
def test_ranges_contain_what_they_say(cudnn: bool) -> None:
    within = [within for _, within in compared(cudnn)]
    assert 0.75 <= sum(within) / len(within) <= 0.90


SMALL: dict[str, Any] = {
    "name": "small", "model": {"preset": "1b", "family": "dense", "vocab_size": 32_000},
    "training": {
        "steps": 1, "sequence_length": 4096, "micro_batch_size": 4, "global_batch_size": 64, "precision": "bf16",
    },
    "resources": {"gpus_per_worker": 1, "accelerator_type": "H100"},
}  # fmt: skip


def test_gradients_are_sent_while_the_backward_pass_computes() -> None:
    spec = JobSpec.model_validate(SMALL | {"parallelism": {"data_parallel_size": 16, "zero_stage": 1}})
    fast, slow = (network(f"h100-{gigabits}g").machine(spec) for gigabits in (400, 10))
    layout = Layout.of(spec.parallelism)
    hidden = step_parts(spec, layout, fast).reduction
    bare = replace(fast, profile=replace(fast.profile, long_overlap=0.0))
    exposed = step_parts(spec, layout, bare).reduction
    assert hidden < 0.6 * exposed  # what is left is the weights' gathering, the last bucket, and a part of the rest
    # What outlasts the backward pass is exposed however much is hidden.
    assert step_parts(spec, layout, slow).reduction > 10 * hidden


def test_the_plan_counts_the_trainers_buckets() -> None:
    assert throughput.BUCKET_ELEMENTS == zero.BUCKET_ELEMENTS


def test_steps_that_are_not_captured_launch_every_block() -> None:
    training = SMALL["training"] | {"micro_batch_size": 1, "sequence_length": 1024}
    captured, launched = (
        JobSpec.model_validate(SMALL | {"training": training | {"cuda_graphs": graphs}}) for graphs in ("auto", "off")
    )
    blocks = launched.model.num_hidden_layers * launched.training.global_batch_size
    layout = Layout.of(launched.parallelism)
    assert step_parts(launched, layout).arithmetic >= blocks * 4.6e-3 > step_parts(captured, layout).arithmetic
