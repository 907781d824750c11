"""Plans of jobs on CPUs: ranges that hold, and a job's own steps measured for a second."""

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import boost_core.bench.profile as bench
from boost_core.bench.profile import measure_job
from boost_core.bench.rank import alone, step_of
from boost_core.bench.results import wall_seconds
from boost_core.config import JobSpec, Layout
from boost_core.plan.machine import machine_of, of_cores
from boost_core.plan.report import plan, step_seconds
from tests.jobs import tiny_job
from tests.service.command_line import boost_at, job_file

CPU = torch.device("cpu")
SIZES: dict[str, dict[str, Any]] = {
    "narrow": {"model": {"hidden_size": 128, "intermediate_size": 344, "rank": 32}},
    "wide": {"model": {"hidden_size": 512, "intermediate_size": 1376, "rank": 128, "num_attention_heads": 8}},
    "dense": {"model": {"hidden_size": 256, "intermediate_size": 688, "rank": None, "family": "dense"}},
}


@pytest.fixture(autouse=True)
def same_number_of_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def on_one_core(folder: Path, **sections: Any) -> JobSpec:
    training = {"sequence_length": 128, "global_batch_size": 8, "micro_batch_size": 4}
    return tiny_job(folder, folder, parallelism={"tensor_parallel_size": 1}, training=training, **sections)


class Step(NamedTuple):
    """A step that does nothing but take time."""

    run: Callable[[], None]


def test_rates_are_divided_by_what_a_jobs_own_steps_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed, now = list[JobSpec](), 0.0

    def lasting(job: JobSpec, *_: object) -> Step:
        def step() -> None:
            nonlocal now
            now += 0.05

        timed.append(job)
        return Step(step)

    monkeypatch.setattr(bench, "step_of", lasting)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now)
    job = on_one_core(tmp_path)
    measured = measure_job(job)
    (short,) = timed
    assert (short.training.global_batch_size, short.training.micro_batch_size) == (4, 4)
    assert short.model == job.model
    assert step_seconds(short, Layout(1, 1, 1), machine_of(short, measured)) == pytest.approx(0.05)
    assert plan(job, machine_of(job, measured)).provenance == "measured"
    # Long steps are shortened, first in sequences and then in blocks.
    long = on_one_core(tmp_path, model={"num_hidden_layers": 500, "hidden_size": 128, "rank": 32})
    measure_job(long)
    assert 1 <= timed[-1].model.num_hidden_layers < 500
    assert step_seconds(timed[-1], Layout(1, 1, 1)) <= 4
    # Blocks that are recomputed in several ways are so in the commonest, however many are left.
    for recompute, mode in (("auto", "none"), ([{"latent": 2}], "latent")):
        parallelism = {"tensor_parallel_size": 1, "recompute": recompute}
        measure_job(tiny_job(tmp_path, tmp_path, parallelism=parallelism))
        assert timed[-1].parallelism.recompute == mode
    wide = {"hidden_size": 4096, "intermediate_size": 11008, "rank": 1024, "vocab_size": 32_000}
    huge = on_one_core(tmp_path, model=wide)
    with pytest.raises(ValueError, match="too long to be measured"):
        measure_job(huge)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SIZES)
def test_both_ranges_hold_for_real_steps(name: str, tmp_path: Path) -> None:
    job = on_one_core(tmp_path, **SIZES[name])
    measured = measure_job(job)
    with alone(1):
        took = statistics.median(wall_seconds(step_of(job, CPU, name).run, CPU, 5))
    for machine in (machine_of(job), machine_of(job, measured)):
        low, high = plan(job, machine).shapes[0].step_seconds_range
        assert low < took < high


def test_the_nominal_range_has_what_was_measured(tmp_path: Path) -> None:
    """43 s were planned for steps that took 5.9 s, with a hidden size of 512."""
    job = on_one_core(tmp_path)
    seconds = step_seconds(job, Layout(1, 1, 1))
    low, high = machine_of(job).range_of(job, seconds, 0.0)
    assert low < seconds * 5.9 / 43 < seconds < high
    assert "--measure" in of_cores(1).description


@pytest.mark.nightly
def test_the_command_line_measures_and_plans(tmp_path: Path) -> None:
    boost = boost_at("http://127.0.0.1:1")  # nobody listens there
    job = job_file(tmp_path, on_one_core(tmp_path).model_dump(mode="json", exclude_defaults=True))
    shown = boost("plan", job, "--measure")
    assert shown.exit_code == 0, shown.output
    assert "1 of this machine's cores, measured 20" in shown.output
    both = boost("plan", job, "--measure", "--service")
    assert (both.exit_code, "--measure is for jobs without GPUs" in both.stderr) == (2, True)
