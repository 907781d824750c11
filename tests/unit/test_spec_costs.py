"""What the largest legal specs cost to check: each in a fraction of a second, whatever fields are at their ends."""

import random
import time
from collections import Counter
from statistics import median
from typing import Any

import pytest
from pydantic import ValidationError

from boost_core.architecture import _cut
from boost_core.config import JobSpec
from boost_core.config import job as job_spec
from boost_core.config.parallelism import MOST_LAYOUTS
from boost_core.hardware import ACCELERATOR_LABEL
from boost_core.plan import memory, report, resolve, throughput
from boost_core.plan.memory import _largest_weight, _weights, activations
from boost_core.plan.replay import _of_two_stages
from boost_core.plan.report import plan
from service.gang.status import NodeCapacity
from service.scheduler import demand
from service.scheduler.decisions import decide
from tests.scheduling import job

CHECK_COST, PLAN_COST = (
    4.0,
    20.0,
)  # in units of one_million: 0.2 s and 1 s of a core that adds a million squares in 50 ms
MOST_DIVISORS = 735_134_400  # has 1344 divisors, more than any smaller number
CLUSTER = [
    NodeCapacity(f"node-{kind}", {"CPU": 1e9, "GPU": 1e9}, {"CPU": 1e9, "GPU": 1e9}, {ACCELERATOR_LABEL: kind})
    for kind in ("A100-40G", "A100", "H200")
]
CACHES = (
    job_spec.legal_layouts, job_spec.divisors, _of_two_stages, _cut, _weights, _largest_weight, memory._extremes,
    memory._alike_with_lax, activations, throughput._block_work, demand._remembered,
    demand._known, report._resolved,
)  # fmt: skip
WAITING = job("a", 1)
STRESSING = [32, 30, 28, 26, 24, 22, 21, 20, 18, 17, 16, 15, 14, 13, 12, 11]  # divide the batch, and differ


def largest(random: random.Random) -> dict[str, Any]:
    """A spec with most fields at one end of what they may be."""
    choice = random.choice
    family = choice(["dense", "svd", "cola", "lax", "lax"])
    schedule = choice(["1f1b", "interleaved_1f1b", "zero_bubble"]) if family != "dense" else "1f1b"
    model = {
        "family": family, "hidden_size": 65_536, "intermediate_size": 262_144, "num_hidden_layers": 512,
        "num_attention_heads": choice([1, 1024]), "vocab_size": choice([256, 999_424]),
    }  # fmt: skip
    if family != "dense":
        model["rank"] = choice([64, 65_536])
    if family == "lax":
        model["lax"] = {"gate": choice(["identity", "dense", "tensor"]), "chain_length": choice([None, 1, 3, 7, 511])}
    pairs = choice([[(1, 1)], [(1, size) for size in STRESSING], [(1, size) for size in (1, 2, 4, 8, 16, 32)]])
    divisors = [number for number in range(1, 1000) if MOST_DIVISORS % number == 0]
    data = {"mixture": [source(random, 39) for _ in range(256)]} if choice([True, False]) else {}
    return {
        "name": "x" * 100,
        "model": model,
        "parallelism": {
            "tensor_parallel_size": pairs[0][0], "pipeline_parallel_size": pairs[0][1],
            "pipeline_schedule": schedule if pairs[0][1] > 1 else "1f1b", "zero_stage": choice([0, 1, 2]),
            "recompute": choice(["none", "full", "auto"]),
        },
        "data": data or {"source": {"kind": "text", "paths": ["s3://bucket/*/" + "x" * 30] * 10_000}},
        "training": {
            "steps": 100_000_000, "global_batch_size": MOST_DIVISORS, "micro_batch_size": 1,
            "sequence_length": choice([2, 1_048_576]), "precision": choice(["fp32", "bf16"]),
        },
        "resources": {
            "gpus_per_worker": 1, "accelerator_type": choice([None, "A100", "H200"]),
            "node_labels": {},
        },
        "elasticity": {
            "data_parallel_size": {"min": 1, "max": divisors[MOST_LAYOUTS // len(pairs) - 1]},
            "layouts": [list(pair) for pair in pairs],
        },
    }  # fmt: skip


def source(random: random.Random, paths: int) -> dict[str, Any]:
    return {"kind": "text", "paths": [f"/data/{random.random()}/*"] * paths, "weight": 1.0}


def check(content: dict[str, Any]) -> JobSpec:
    """What the door and one pass of the scheduler do with a spec."""
    spec = JobSpec.model_validate(content)
    if report.nothing_fits(spec) is None:
        decide([WAITING.model_copy(update={"spec": spec})], CLUSTER)
    return spec


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often what is worked out for one layout is."""
    counted: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        counting = getattr(module, name)

        def counted_call(*arguments: Any, **options: Any) -> Any:
            counted[name] += 1
            return counting(*arguments, **options)

        monkeypatch.setattr(module, name, counted_call)

    for module in (resolve, report):
        count(module, "rank_memory")
    count(report, "step_parts")
    count(job_spec, "layout_problems")
    return counted


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_the_largest_specs_are_checked_in_a_bounded_number_of_steps(seed: int, calls: Counter[str]) -> None:
    spec = check(largest(random.Random(seed)))
    assert len(spec.layouts()) <= MOST_LAYOUTS
    assert calls["layout_problems"] <= MOST_LAYOUTS + 1
    ways = 3 if spec.parallelism.recompute == "auto" else 0
    assert calls["rank_memory"] <= (2 + ways) * MOST_LAYOUTS  # at the door, and for the scheduler
    assert calls["step_parts"] <= MOST_LAYOUTS
    again = WAITING.model_copy(update={"spec": JobSpec.model_validate(spec.model_dump(mode="json"))})
    decide([again], CLUSTER)
    worked_out = calls.copy()
    for _ in range(3):
        decide([again], CLUSTER)
    assert calls == worked_out, "a pass works out anew what the last one has"


def test_layouts_that_were_chosen_are_checked_in_as_few_steps_and_none_is_searched(calls: Counter[str]) -> None:
    divisors = [number for number in range(1, 1000) if MOST_DIVISORS % number == 0][:MOST_LAYOUTS]
    left = {"layouts": "auto", "gpus": {"max": 65_536}}
    content = largest(random.Random(0)) | {"parallelism": {"recompute": "auto"}, "elasticity": left}
    resolved = left | {"resolved": [[1, 1, number] for number in divisors]}
    begin = time.process_time()
    assert len(JobSpec.model_validate(content).layouts()) == 1
    spec = check(content | {"elasticity": resolved})
    assert time.process_time() - begin <= CHECK_COST * one_million()
    assert len(spec.layouts()) == MOST_LAYOUTS
    assert calls["layout_problems"] <= MOST_LAYOUTS + 2
    assert calls["step_parts"] <= MOST_LAYOUTS


def one_million() -> float:
    """Seconds in which this machine, as busy as it is, adds a million squares."""
    times = []
    for _ in range(3):
        begin = time.process_time()
        sum(number * number for number in range(10**6))
        times.append(time.process_time() - begin)
    return median(times)


@pytest.mark.full
def test_the_largest_specs_cost_little_time() -> None:
    # Each time beside that of a million squares, as this machine may be several times slower a moment later.
    checked, planned = [], []
    for seed in range(6):
        content = largest(random.Random(seed))
        checks, plans = [], []
        for _ in range(3):
            for cache in CACHES:
                cache.cache_clear()
            begin = time.process_time()
            spec = check(content)
            checked_at = time.process_time()
            plan(spec)
            planned_at, unit = time.process_time(), one_million()
            checks.append((checked_at - begin) / unit)
            plans.append((planned_at - checked_at) / unit)
        checked.append(min(checks))
        planned.append(min(plans))
    assert max(checked) <= CHECK_COST, [round(each, 2) for each in checked]
    assert max(planned) <= PLAN_COST, [round(each, 2) for each in planned]


def test_plans_of_long_context_cost_little_time_however_many_sizes_there_are() -> None:
    sizes = [[tensor, 1, context] for tensor in (1, 2, 4, 8) for context in (64, 32, 16, 8)]
    spec = JobSpec.model_validate({
        "name": "x", "model": {"preset": "7b", "vocab_size": 32_000},
        "data": {"source": {"kind": "tokenized", "paths": ["/x"]}},
        "parallelism": {"context_parallel_size": 64, "context": {"pool": "tasks"}},
        "training": {
            "steps": 1, "global_batch_size": 65_536, "micro_batch_size": 1, "sequence_length": 1 << 20,
            "precision": "bf16",
        },
        "elasticity": {"layouts": sizes, "data_parallel_size": {"min": 1, "max": 2}},
        "resources": {"gpus_per_worker": 1, "accelerator_type": "H200"},
    })  # fmt: skip
    begin = time.process_time()
    planned = plan(spec)
    assert time.process_time() - begin <= PLAN_COST * one_million()
    assert len(planned.shapes) == MOST_LAYOUTS


@pytest.mark.full
@pytest.mark.parametrize(
    ("section", "content", "words"),
    [
        (
            "elasticity", {"data_parallel_size": {"min": 1, "max": 65_536}, "layouts": [[1, 1], [2, 1]]},
            "may allow at most 32: narrow the range, or list fewer kinds",
        ),
        ("data", {"mixture": [{"kind": "text", "paths": ["/a"], "weight": 1}] * 4096}, "give at most 256 sources"),
        (
            "data", {"mixture": [{"kind": "text", "paths": ["/a/*"] * 5001, "weight": 1}] * 2},
            "its sources have 10002 paths; give at most 10000",
        ),
        ("parallelism", {"pipeline_parallel_size": 33}, "less than or equal to 32"),
    ],
)  # fmt: skip
def test_what_would_cost_more_is_refused_at_once(section: str, content: dict[str, Any], words: str) -> None:
    spec = {
        "name": "x", "model": {"preset": "7b", "vocab_size": 32_000},
        "training": {"steps": 1, "global_batch_size": MOST_DIVISORS, "micro_batch_size": 1}, section: content,
    }  # fmt: skip
    begin = time.process_time()
    with pytest.raises(ValidationError, match=words):
        JobSpec.model_validate(spec)
    assert time.process_time() - begin <= CHECK_COST * one_million()
