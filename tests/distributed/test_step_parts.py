"""The parts of a step on real ranks: they add up, and what takes long is found in the part that it is in."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from boost_core.config import JobSpec
from boost_core.data.corpus import Sampler, load_corpus
from boost_core.messages import Report
from boost_core.train import Membership, StepParts, StepTimes, train
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from tests.distributed.recording import Recorder
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

DELAY_SECONDS = 0.3
LAYOUTS = {
    "alone": {"tensor_parallel_size": 1},
    "tp 2": {"tensor_parallel_size": 2},
    "dp 2": {"tensor_parallel_size": 1, "data_parallel_size": 2},
    "pp 2": {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
    "pp 2 zero bubble": {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 2, "pipeline_schedule": "zero_bubble",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def a_job(corpus: Path, folder: Path, layout: str) -> JobSpec:
    return tiny_job(corpus, folder, parallelism=LAYOUTS[layout], model={"num_hidden_layers": 4})


def train_and_time(spec: JobSpec) -> tuple[list[Report], list[StepTimes]]:
    recorder, steps = Recorder(), []
    train(spec, recorder, Membership(after_step=steps.append))
    return [report for report in recorder.reports if report.kind == "progress"], steps


SOME = ("tp 2", "pp 2 zero bubble")


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=() if each in SOME else pytest.mark.nightly) for each in LAYOUTS]
)
def test_the_parts_add_up_and_communication_is_the_ledgers(
    ranks: Ranks, corpus: Path, tmp_path: Path, layout: str
) -> None:
    spec = a_job(corpus, tmp_path, layout)
    measured = ranks.run(spec.parallelism.world_size, train_and_time, spec)
    for _, steps in measured:
        assert [times.step for times in steps] == list(range(1, 9))
        for times in steps:
            parts = times.parts
            assert min(parts.data, parts.forward, parts.backward, parts.optimizer, parts.other) > 0
            waited = sum(totals.exposed_seconds for totals in times.communication.values())
            assert parts.exposed_communication == pytest.approx(waited)
            assert (parts.exposed_communication > 0) == (layout != "alone")
            assert 0 < parts.seconds <= times.seconds
            assert times.busy_seconds == pytest.approx(times.seconds - parts.exposed_communication)
    reports, steps = measured[0]
    for report, times in zip(reports, steps, strict=True):
        parts = times.parts
        assert report.step_seconds == pytest.approx(parts.seconds)
        assert report.exposed_communication_seconds == pytest.approx(parts.exposed_communication)
        assert (report.data_seconds, report.forward_seconds) == (parts.data, parts.forward)
        assert (report.backward_seconds, report.optimizer_seconds) == (parts.backward, parts.optimizer)
        assert report.communication_bytes == sum(totals.bytes for totals in times.communication.values())
        assert report.communication_seconds == pytest.approx(
            sum(totals.seconds for totals in times.communication.values())
        )
        assert (report.model_flops_utilization, report.hardware_flops_utilization) == (None, None)


def largest_with_delay(spec: JobSpec, part: str) -> str:
    """The largest part of a step of this rank, when the last rank takes long over one."""
    state = TrainState.initial(spec, torch.device("cpu"))
    sampler = Sampler(load_corpus(spec.data, 32), 32, spec.training.seed)
    training_step(state, sampler)
    if dist.get_rank() == dist.get_world_size() - 1:
        delay(state, sampler, part)
    dist.barrier()
    state.ledger.clear()
    training_step(state, sampler)
    parts: StepParts = state.clock.end()
    return max(vars(parts), key=vars(parts).get)


def delay(state: TrainState, sampler: Sampler, part: str) -> None:
    match part:
        case "data":
            sampler.sequences = late(sampler.sequences)
        case "forward":
            state.model.losses = late(state.model.losses)
        case "backward":
            # The last norm's: gradients of the weights of products do not pass through autograd.
            next(state.model.head.parameters()).register_hook(lambda _: time.sleep(DELAY_SECONDS))
        case "optimizer":
            state.optimizer.step = late(state.optimizer.step)


def late(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        time.sleep(DELAY_SECONDS)
        return function(*arguments, **named)

    return called


@pytest.mark.full
@pytest.mark.parametrize("part", ["data", "forward", "backward", "optimizer"])
def test_what_takes_long_is_in_its_part(ranks: Ranks, corpus: Path, tmp_path: Path, part: str) -> None:
    assert ranks.run(1, largest_with_delay, a_job(corpus, tmp_path, "alone"), part) == [part]


@pytest.mark.full
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_who_waits_for_another_rank_is_not_at_work(ranks: Ranks, corpus: Path, tmp_path: Path, part: str) -> None:
    tensor = ranks.run(2, largest_with_delay, a_job(corpus, tmp_path, "tp 2"), part)
    assert tensor == ["exposed_communication", part]
    # The last stage is waited for by the one before it, which is no collective.
    pipeline = ranks.run(2, largest_with_delay, a_job(corpus, tmp_path, "pp 2"), part)
    assert pipeline == ["other", part]


def train_profiled(spec: JobSpec) -> int:
    recorder = Recorder()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        train(spec, recorder)
    return sum(report.kind == "progress" for report in recorder.reports)


@pytest.mark.nightly
def test_ranks_with_many_collectives_under_way_may_be_profiled(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """Under torch's profiler, gloo's threads need the interpreter whenever a collective ends, so none may keep it."""
    sizes = {"tensor_parallel_size": 2, "context_parallel_size": 2, "recompute": "latent"}
    spec = tiny_job(corpus, tmp_path, parallelism=sizes, training={"sequence_length": 256, "micro_batch_size": 1})
    assert ranks.run(4, train_profiled, spec) == [spec.training.steps, 0, 0, 0]  # rank 0 reports
