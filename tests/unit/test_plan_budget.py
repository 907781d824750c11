"""What all steps take: checkpoints, the interval that loses least, and the goodput that failures leave."""

import random
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from boost_core.config import JobSpec, load_job
from boost_core.config.parallelism import Layout
from boost_core.plan import report
from boost_core.plan.machine import Basis, machine_of
from boost_core.plan.report import PUBLISHED, plan, presets, step_seconds
from boost_core.plan.run_cost import GPU_MTBF_HOURS, PlannedGoodput, PlannedRun, RunConditions
from boost_core.plan.search import PlanSearch, search_report
from boost_core.terminal import duration_in_words, rounded, size_in_words
from tests.unit.test_plan_report import job

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
FAILING = RunConditions(mtbf_hours=100, store_gigabytes_per_second=1000)  # a gang of 4 fails once in 25 hours


def run_of(spec: JobSpec, conditions: RunConditions = FAILING, host_bandwidth: float | None = None) -> PlannedRun:
    """The plan of a job's only layout, on hosts that are as fast as this."""
    machine = machine_of(spec)
    if host_bandwidth is not None:
        machine = replace(machine, profile=replace(machine.profile, host_bandwidth=host_bandwidth))
    (shape,) = plan(spec, machine, conditions).shapes
    return shape


def goodput_of(run: PlannedRun) -> PlannedGoodput:
    assert run.goodput is not None
    return run.goodput


def test_all_steps_cost_gpu_hours_in_one_place_for_plans_and_searches() -> None:
    spec, price = job(), RunConditions(gpu_hour_price=2.5)
    run = run_of(spec, price)
    assert run.gpu_hours == pytest.approx(4 * run.total_seconds / 3600)
    assert run.price == pytest.approx(2.5 * run.gpu_hours)
    goodput = goodput_of(run)
    assert goodput.expected_gpu_hours is not None and goodput.expected_seconds is not None
    assert goodput.expected_seconds == pytest.approx(run.total_seconds / goodput.from_checkpoints)
    assert goodput.expected_gpu_hours == pytest.approx(run.gpu_hours / goodput.from_checkpoints)
    assert goodput.expected_price == pytest.approx(2.5 * goodput.expected_gpu_hours)
    first = search_report(spec, PlanSearch(gpus=4), conditions=price).choices[0]
    assert first.price == pytest.approx(2.5 * first.world_size * first.total_seconds / 3600)
    assert run.words[0].startswith("all steps: ") and " without waits and failures, " in run.words[0]
    assert run.words[1].startswith(
        f"expected: {duration_in_words(goodput.expected_seconds)} with waits for checkpoints "
    )
    assert f", {rounded(goodput.expected_price or 0)} at 2.5 a GPU-hour, " in run.words[1]
    assert run.words[0].endswith(" a GPU-hour, at most " + run.words[0].rpartition("at most ")[2])


def test_a_checkpoint_is_written_at_the_stores_rate_and_holds_up_what_is_not_hidden() -> None:
    spec = job(checkpoint={"every_steps": 10})
    run = run_of(spec, RunConditions(store_gigabytes_per_second=2))
    assert run.checkpoint is not None
    parameters = plan(spec).parameters
    assert run.checkpoint.bytes == 12 * parameters
    assert run.checkpoint.write_seconds == pytest.approx(12 * parameters / 2e9)
    assert run.checkpoint.interval_seconds == pytest.approx(10 * step_seconds(spec, Layout(4, 1, 1)))
    assert run.checkpoint.stall_seconds == 0  # 8 GB a rank cross the bus while a step computes
    slow = run_of(spec, host_bandwidth=1e8).checkpoint
    assert slow is not None
    assert slow.stall_seconds == pytest.approx(3 * parameters / 1e8 - step_seconds(spec, Layout(4, 1, 1)), rel=0.02)
    # The next copy waits for a slow store, but not longer than the job allows.
    often = job(
        checkpoint={"every_steps": 10, "store_wait_seconds": 30}, fault_tolerance={"memory_copy_every_steps": 1}
    )
    waiting = run_of(often, RunConditions(store_gigabytes_per_second=0.01)).checkpoint
    assert waiting is not None
    assert waiting.stall_seconds == pytest.approx(30 - step_seconds(often, Layout(4, 1, 1)))


@pytest.mark.parametrize("every", [20, 200])
def test_goodput_from_checkpoints_is_that_of_simulated_failures(every: int) -> None:
    spec = job(checkpoint={"every_steps": every}, fault_tolerance={"memory_copy_every_steps": None})
    run = run_of(spec, host_bandwidth=2e8)  # a copy takes longer than a step
    checkpoint, goodput = run.checkpoint, goodput_of(run)
    assert checkpoint is not None
    assert goodput.from_memory is goodput.lost_seconds_from_memory is None
    stall, apart = checkpoint.stall_seconds, checkpoint.interval_seconds
    assert stall > 10
    restart = goodput.lost_seconds_from_checkpoint - apart / 2
    between, chance = 3600 * goodput.hours_between_failures, random.Random(1)
    now, useful, failure = 0.0, 0.0, chance.expovariate(1 / between)
    while useful < 200_000 * apart:
        if now + apart + stall <= failure:
            now, useful = now + apart + stall, useful + apart
            continue
        now = failure  # and back to the newest checkpoint, which may fail, too
        failure += chance.expovariate(1 / between)
        while now + restart > failure:
            now, failure = failure, failure + chance.expovariate(1 / between)
        now += restart
    assert goodput.from_checkpoints == pytest.approx(useful / now, rel=2e-3)


@pytest.mark.parametrize(
    ("memory_copy", "bandwidth", "conditions"),
    [(None, 2e7, FAILING), (1, None, RunConditions(mtbf_hours=10_000, store_gigabytes_per_second=1))],
)
def test_the_best_interval_loses_least(
    memory_copy: int | None, bandwidth: float | None, conditions: RunConditions
) -> None:
    """Passes hide next to nothing of a copy, or each step's copy in memory waits for the store."""

    def at(every: int) -> PlannedRun:
        spec = job(
            training={"steps": 100_000},
            checkpoint={"every_steps": every, "store_wait_seconds": 60},
            fault_tolerance={"memory_copy_every_steps": memory_copy},
        )
        return run_of(spec, conditions, bandwidth)

    checkpoint = at(100).checkpoint
    assert checkpoint is not None
    best = checkpoint.best_every_steps
    assert best is not None
    assert best > 10
    most = goodput_of(at(best)).from_checkpoints
    for every in (best // 2, best - best // 10, best + best // 10, 2 * best):
        assert goodput_of(at(every)).from_checkpoints <= most == goodput_of(at(every)).from_best_checkpoints
    assert goodput_of(at(best // 2)).from_checkpoints < most


def test_what_the_store_takes_limits_how_often_checkpoints_pay() -> None:
    spec = job()
    hidden = run_of(spec, RunConditions(mtbf_hours=100, store_gigabytes_per_second=0.1))
    assert hidden.checkpoint is not None
    assert hidden.checkpoint.best_every_steps is not None
    step = step_seconds(spec, Layout(4, 1, 1))
    assert step * (hidden.checkpoint.best_every_steps - 1) < 2 * hidden.checkpoint.write_seconds
    assert step * hidden.checkpoint.best_every_steps >= 2 * hidden.checkpoint.write_seconds
    assert any("twice what writing takes" in line for line in hidden.words)


def test_the_best_interval_of_a_hidden_copy_is_that_of_one_that_hides_nothing() -> None:
    run = run_of(job(training={"steps": 10_000}))
    assert run.checkpoint is not None and run.checkpoint.stall_seconds == 0
    best, step = run.checkpoint.best_every_steps, step_seconds(job(), Layout(4, 1, 1))
    copy = run.checkpoint.bytes / 4 / machine_of(job()).profile.host_bandwidth
    assert best == pytest.approx((2 * copy * 25 * 3600) ** 0.5 / step, abs=1)
    (said,) = [line for line in run.words if line.startswith("failures: one in 1 day 1 h on 4 GPUs, ")]
    assert run.checkpoint.practical_every_steps == 100  # the job's own, within 0.5 % of the best
    goodput = goodput_of(run)
    assert goodput.from_best_checkpoints > goodput.from_practical_checkpoints > goodput.from_best_checkpoints - 0.005
    assert "; every 100 steps, as in the job, is practical (" in said
    filled = f"100 then fill {100 * run.checkpoint.bytes / 2**30:,.1f} GiB"
    assert said.endswith(f"{filled}, as checkpoint.keep_last is unset and all are kept")
    assert f"% likewise with checkpoints every {best} steps" in run.words[-1]
    kept = run_of(job(training={"steps": 10_000}, checkpoint={"keep_last": 2})).words[3]
    assert kept.endswith(f"; 2 then fill {2 * run.checkpoint.bytes / 2**30:.1f} GiB")


def test_longer_intervals_than_the_jobs_own_are_advised_only_where_they_lose_less() -> None:
    def advice(every: int, steps: int = 10**6, bandwidth: float | None = None) -> tuple[int, int, PlannedRun]:
        spec = job(
            training={"steps": steps}, checkpoint={"every_steps": every},
            fault_tolerance={"memory_copy_every_steps": None},
        )  # fmt: skip
        run = run_of(spec, RunConditions(mtbf_hours=20_000, store_gigabytes_per_second=10), bandwidth)
        checkpoint = run.checkpoint
        assert checkpoint is not None and checkpoint.best_every_steps and checkpoint.practical_every_steps
        return checkpoint.best_every_steps, checkpoint.practical_every_steps, run

    best, practical, run = advice(20)  # no step waits, so the job's own interval loses less than Daly's
    assert practical == 20 < best
    assert "; checkpoints: every 20 steps, as in the job, is practical (" in run.words[3]
    assert "Daly" not in run.words[3] and "likewise" not in run.words[4]
    best, practical, run = advice(10**5)  # 11 days; a failure may lose 4 hours, though ten times as much costs little
    assert best < practical == 1000 and 10.0 < run.total_seconds / 10**6 < 4 * 3600 / 1000
    assert "; every 1,000 steps is practical (2 h " in run.words[3]
    best, practical, run = advice(10**5, steps=1000)
    assert best < 1000 < practical == 10**5
    assert "; one at the end, as in the job, is practical (2 h " in run.words[3]
    best, practical, run = advice(10, bandwidth=2e7)  # steps wait for most of each copy
    assert practical == best > 100 and goodput_of(run).from_checkpoints < 0.9 * goodput_of(run).from_best_checkpoints


def test_a_job_that_is_shorter_than_the_best_interval_is_told_so() -> None:
    run = run_of(job(checkpoint={"every_steps": 1000}), RunConditions())
    assert ", longer than the job, so at its end alone), written in " in run.words[2]
    assert "; checkpoints: one at the end is enough, as the interval that loses least, " in run.words[3]
    assert "likewise" not in run.words[4]
    goodput = goodput_of(run)
    assert goodput.lost_seconds_from_checkpoint < run.total_seconds, "not half of an interval that is never reached"


def test_peers_memory_loses_a_few_steps_and_a_checkpoint_its_interval() -> None:
    goodput = goodput_of(run_of(job(training={"steps": 10_000}, checkpoint={"every_steps": 1000})))
    assert goodput.from_memory is not None
    assert goodput.lost_seconds_from_memory is not None
    assert goodput.from_checkpoints < goodput.from_memory < goodput.without_failures == 1
    step = step_seconds(job(), Layout(4, 1, 1))
    assert 5 * step < goodput.lost_seconds_from_memory < 5 * step + 30
    assert 500 * step < goodput.lost_seconds_from_checkpoint < 500 * step + 300


def test_failures_are_those_of_llama_3_unless_the_plan_says_otherwise() -> None:
    assert pytest.approx(54 * 24 * 16_384 / 419) == GPU_MTBF_HOURS
    goodput = goodput_of(run_of(job(), RunConditions()))
    assert goodput.hours_between_failures == pytest.approx(GPU_MTBF_HOURS / 4)
    assert goodput_of(run_of(job())).hours_between_failures == pytest.approx(25)
    on_cpus = job(resources={"gpus_per_worker": 0, "accelerator_type": None})
    assert run_of(on_cpus, RunConditions()).goodput is None
    assert goodput_of(run_of(on_cpus)).hours_between_failures == pytest.approx(25)
    for hours in (0.5, 1e-3):
        hopeless = run_of(job(), RunConditions(mtbf_hours=hours))
        assert hopeless.checkpoint is not None and hopeless.checkpoint.best_every_steps is not None
        assert hopeless.checkpoint.practical_every_steps <= 3 * hopeless.checkpoint.best_every_steps
    assert (goodput_of(hopeless).from_memory, goodput_of(hopeless).from_checkpoints) == (0, pytest.approx(0))


def test_a_single_rank_has_no_peer() -> None:
    alone = job(parallelism={"tensor_parallel_size": 1, "data_parallel_size": 1}, model={"preset": "60m"})
    assert goodput_of(run_of(alone)).from_memory is None


def test_a_lost_node_leaves_the_largest_legal_number_of_replicas() -> None:
    spec = job(parallelism={"data_parallel_size": 8})  # 32 GPUs on four nodes; 64 sequences do not divide among six
    left = goodput_of(run_of(spec)).without_a_node
    assert left is not None
    assert left.world_size == 16
    assert left.share == pytest.approx(step_seconds(spec, Layout(4, 1, 8)) / step_seconds(spec, Layout(4, 1, 4)))
    assert goodput_of(run_of(job())).without_a_node is None  # all ranks are on one


@pytest.mark.parametrize(("placement", "pipeline", "left"), [("PACK", 1, 4), ("STRICT_PACK", 1, 4), ("PACK", 2, None)])
def test_what_a_lost_node_leaves_is_counted_in_what_shares_a_node(
    placement: str, pipeline: int, left: int | None
) -> None:
    """Nodes of 6 GPUs, of which groups of 4 use 4: a node that is lost takes one group, not 6 GPUs."""
    spec = job(
        parallelism={"data_parallel_size": 2 // pipeline, "pipeline_parallel_size": pipeline},
        resources={"placement": placement},
    )
    on = Basis(node_gpus=6).machine(spec)
    lost = goodput_of(plan(spec, on).shapes[0]).without_a_node
    assert (lost and lost.world_size) == left


def test_only_numbers_of_replicas_that_divide_the_batch_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job(parallelism={"data_parallel_size": 4093}, training={"global_batch_size": 4 * 4093})
    tried, problems = list[int](), report.layout_problems

    def watched(model: Any, parallelism: Any, *others: Any) -> Any:
        tried.append(parallelism.data_parallel_size)
        return problems(model, parallelism, *others)

    monkeypatch.setattr(report, "layout_problems", watched)
    left = goodput_of(run_of(spec)).without_a_node
    assert left is not None
    assert tried == [left.world_size // 4]


def test_recipes_have_the_published_hyperparameters() -> None:
    recipes = {path.stem: load_job(path) for path in RECIPES.glob("*.yaml")}
    assert {published.model.lower().replace(" ", "-") for published in PUBLISHED.values()} == recipes.keys()
    rows = {
        line.split("|")[1].split("]")[0].strip(" ["): line
        for line in (RECIPES / "README.md").open()
        if line.startswith("| [")
    }
    for name, spec in recipes.items():
        planned, training, optimizer = plan(spec), spec.training, spec.optimizer
        published = planned.published
        assert published is not None
        assert published.model.lower().replace(" ", "-") == name
        assert (training.global_batch_size, training.sequence_length, training.steps) == (
            published.global_batch_size, published.sequence_length, published.steps,
        )  # fmt: skip
        assert (optimizer.learning_rate, optimizer.warmup_steps) == (published.learning_rate, published.warmup_steps)
        assert f"| {published.learning_rate:g} | {published.steps:,} ({published.warmup_steps:,})" in rows[name]


def test_a_job_is_compared_with_what_is_published_for_its_family_and_size() -> None:
    (note,) = [note for note in plan(job()).notes if "published" in note]
    assert note == (
        "published for CoLA 7B (arXiv 2502.10940): learning rate 0.001 at 131,072 tokens per step (512 sequences of "
        "256), warm-up over 15,000 of 150,000 steps; this job: learning rate 0.003 at 262,144 tokens per step (64 "
        "sequences of 4,096), warm-up over 0 of 100 steps"
    )
    for unpublished in (job("3b"), job(model={"family": "lax"}), job(optimizer={"kind": "muon"})):
        assert plan(unpublished).published is None
    assert {preset for *_, preset in PUBLISHED} <= {preset.name for preset in presets().presets}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.35, "350 ms"), (45.06, "45.1 s"), (59.7, "1 min"), (125, "2 min 5 s"), (48_720, "13 h 32 min"),
        (3600, "1 h"), (86_400, "1 day"), (8 * 86_400 + 7 * 3600, "8 days 7 h"),
        (193.4 * 86_400, "193 days"), (1e300, "forever"), (inf, "forever"),
    ],
)  # fmt: skip
def test_durations_are_said_in_their_two_largest_units(seconds: float, words: str) -> None:
    assert duration_in_words(seconds) == words


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [
        (7580.4, 3, "7,580"), (140, 2, "140"), (0.01234, 3, "0.0123"), (0.000123, 3, "0.000123"), (0.0, 3, "0"),
        (7.52e-5, 3, "less than 0.0001"), (9.83e10, 3, "98,300,000,000"), (99_950, 3, "100,000"), (-2.5, 2, "-2.5"),
    ],
)  # fmt: skip
def test_numbers_have_no_exponents(number: float, digits: int, text: str) -> None:
    assert rounded(number, digits) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(512, "512 B"), (2**20, "1 MiB"), (1.5 * 2**30, "1.5 GiB"), (7e12, "6,519.3 GiB")],
)
def test_sizes_have_the_unit_of_memory(size: float, text: str) -> None:
    assert size_in_words(size) == text


def test_a_short_run_needs_little_and_no_exponent() -> None:
    training = {"steps": 1, "sequence_length": 16, "global_batch_size": 1, "micro_batch_size": 1}
    tiny = run_of(job(model={"preset": "60m"}, training=training, parallelism={"tensor_parallel_size": 1}))
    assert tiny.kilowatt_hours is not None and tiny.kilowatt_hours < 1e-4
    assert tiny.words[0].endswith(", at most 0.0001 kWh")
