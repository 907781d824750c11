"""A job that is changed while it trains: at one step on all ranks, and bit-equal to one that knew of it before."""

import pickle
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec
from boost_core.messages import SampleReport, Steer, SteeredReport, StepReport
from boost_core.optim.schedule import learning_rate
from boost_core.train import Outcome
from boost_core.train.loop import _prompts_or_problem
from service.jobs.patch import JobPatch, changed_spec
from tests.distributed.recording import losses, train_and_record
from tests.elastic.test_memory import Told, job, run
from tests.jobs import write_corpus
from tests.ranks import Ranks

WHEN = datetime(2026, 1, 31, tzinfo=UTC)
FOUR, TWO, ONE = (2, 1, 2, 1), (1, 1, 2, 0), (1, 1, 1, 0)  # tensor, pipeline and data parallel ranks, ZeRO stage
COLDER = {"optimizer": {"learning_rate": 1e-3, "schedule": "linear"}, "training": {"steps": 10}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def steer(spec: JobSpec, number: int, changes: dict[str, Any]) -> Steer:
    wanted = changed_spec(JobPatch.model_validate(changes), spec)
    return Steer(number=number, by="alice", requested_at=WHEN, steering=wanted.steering)


def known_before(spec: JobSpec, made: Steer, step: int, folder: Path) -> JobSpec:
    """The job that is told from the start what changes after a step, with another folder."""
    spec = spec.steered_after(step, made.steering, "", None)
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"url": str(folder)})})


@pytest.mark.full
def test_all_ranks_change_at_the_same_step_and_a_resized_gang_goes_on_so(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = job(corpus, tmp_path / "steered", FOUR)
    change = steer(spec, 1, COLDER)
    # The last rank hears of it after step 2, so that all tell each other in step 3.
    first = run(ranks, spec, Told("aabb", halt=(2, 4), steers=((change, (1, 2, 1, 0)),)))
    (report,) = [each for each in first.reports if isinstance(each, SteeredReport)]
    assert (report.number, report.step, report.by, report.requested_at) == (1, 3, "alice", WHEN)
    assert report.changes == {
        "training.steps": {"from": 8, "to": 10},
        "optimizer.learning_rate": {"from": 0.01, "to": 1e-3},
        "optimizer.schedule": {"from": "cosine", "to": "linear"},
    }
    steered = report.applied_to(spec)
    after = report.applied_to(job(corpus, tmp_path / "steered", TWO))
    rates = {each.step: each.learning_rate for each in first.reports if isinstance(each, StepReport)}
    assert rates == {
        step: learning_rate(step, 8, spec.optimizer) if step <= 3 else learning_rate(step, 10, steered.optimizer)
        for step in range(1, 6)
    }
    resized = run(ranks, after, Told("ab", stores=pickle.dumps(first.stores), generation=2))
    assert max(resized.losses) == 10

    calm = run(ranks, known_before(spec, change, 3, tmp_path / "calm"), Told("aabb", halt=(2, 4)))
    assert calm.losses == first.losses
    assert not [each for each in calm.reports if isinstance(each, SteeredReport)]
    followed = known_before(job(corpus, tmp_path, TWO), change, 3, tmp_path / "calm")
    assert run(ranks, followed, Told("ab", stores=pickle.dumps(calm.stores), generation=2)).losses == resized.losses


@pytest.mark.full
def test_steps_that_a_lost_gang_repeats_have_the_values_that_they_had(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = job(corpus, tmp_path / "killed", TWO)
    change = steer(spec, 1, COLDER)
    killed = run(ranks, spec, Told("ab", halt=(0, 6), refuse=True, steers=((change, (3, 4)),)))
    (report,) = [each for each in killed.reports if isinstance(each, SteeredReport)]
    assert report.step == 5
    expected, *_ = ranks.run(2, train_and_record, known_before(spec, change, 5, tmp_path / "calm"))
    for step in (4, 6):
        CheckpointFolder(str(tmp_path / "killed")).remove(step)
    repeated, *_ = ranks.run(2, train_and_record, report.applied_to(spec))
    assert min(losses(repeated)) == 3
    assert killed.losses | losses(repeated) == losses(expected)


@pytest.mark.full
def test_a_change_is_found_in_a_checkpoint_if_it_was_lost_with_its_report(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = job(corpus, tmp_path / "lost", ONE)
    changes = steer(spec, 1, COLDER), steer(spec, 2, {"optimizer": {"learning_rate": 2e-3}})
    halted = run(ranks, spec, Told(halt=(0, 6), store=True, steers=((changes[0], (1,)), (changes[1], (3,)))))
    made = [each for each in halted.reports if isinstance(each, SteeredReport)]
    assert [each.step for each in made] == [2, 4]
    again, *_ = ranks.run(1, train_and_record, spec)
    assert [each for each in again if isinstance(each, SteeredReport)] == made
    for each in made:
        spec = each.applied_to(spec)
    calm = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"url": str(tmp_path / "calm")})})
    assert halted.losses | losses(again) == losses(ranks.run(1, train_and_record, calm)[0])


@pytest.mark.full
def test_prompts_are_found_in_a_checkpoint_too(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = job(corpus, tmp_path / "prompts", ONE)
    sample = {"every_steps": 1, "prompts": ["The"], "max_new_tokens": 2}
    change = steer(spec, 1, {"training": {"sample": sample}})
    run(ranks, spec, Told(halt=(0, 4), store=True, steers=((change, (1,)),)))
    again, *_ = ranks.run(1, train_and_record, spec)
    assert [each.step for each in again if isinstance(each, SampleReport)] == [
        each.step for each in again if isinstance(each, StepReport)
    ]


@pytest.mark.full
def test_a_forming_gang_makes_the_changes_that_it_is_given_before_its_first_step(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = job(corpus, tmp_path / "given", TWO)
    changes = steer(spec, 1, COLDER), steer(spec, 2, {"training": {"steps": 4}})
    ended = run(ranks, spec, Told(steers=tuple((change, (0, 0)) for change in changes)))
    assert [each.step for each in ended.reports if isinstance(each, SteeredReport)] == [0, 0]
    assert (ended.outcomes, list(ended.losses)) == ({Outcome.FINISHED}, [1, 2, 3, 4])


@pytest.mark.full
def test_a_job_that_is_at_its_end_takes_more_steps_and_one_that_is_past_it_one(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = job(corpus, tmp_path / "longer", TWO)
    longer, shorter = steer(spec, 1, {"training": {"steps": 20}}), steer(spec, 2, {"training": {"steps": 2}})
    ended = run(ranks, spec, Told(steers=((longer, (7, 7)), (shorter, (9, 10)))))
    made = [each for each in ended.reports if isinstance(each, SteeredReport)]
    assert [(each.step, each.changes["training.steps"]["to"]) for each in made] == [(8, 20), (11, 12)]
    assert max(ended.losses) == 12
    assert CheckpointFolder(str(tmp_path / "longer")).steps()[-1] == 12


@pytest.mark.full
def test_a_change_that_comes_with_the_last_step_adds_none(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = job(corpus, tmp_path / "last", TWO)
    ended = run(ranks, spec, Told(steers=((steer(spec, 1, {"optimizer": {"learning_rate": 1e-3}}), (7, 7)),)))
    assert (ended.outcomes, max(ended.losses)) == ({Outcome.FINISHED}, 8)
    assert not [each for each in ended.reports if isinstance(each, SteeredReport)]


def test_a_store_that_a_rank_cannot_reach_is_a_problem_of_its_prompts(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoRoute(Exception):
        """As of an object store's client."""

    def unreachable(*_: object) -> None:
        raise NoRoute("bucket")

    spec, sample = job(corpus, tmp_path / "unreachable", ONE), {"every_steps": 1, "prompts": ["The"]}
    sampled, _ = steer(spec, 1, {"training": {"sample": sample | {"max_new_tokens": 2}}}).made(spec, 1)
    monkeypatch.setattr("boost_core.train.step.job_tokenizer", unreachable)
    assert _prompts_or_problem(sampled) == (None, "NoRoute: bucket")


@pytest.mark.full
def test_intervals_and_prompts_change_and_prompts_that_do_not_fit_end_nothing(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = job(corpus, tmp_path / "sampled", TWO)
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"evaluate_at_start": True})})
    sample = {"every_steps": 1, "prompts": ["The"], "max_new_tokens": 2}
    often = {"training": {"evaluate_every_steps": 1, "sample": sample}, "checkpoint": {"every_steps": 1}}
    first, second = steer(spec, 1, often), steer(spec, 2, often)
    # As of a tokenizer whose tokens the door cannot count.
    training = second.steering.training
    sample_of_too_much = training.sample.model_copy(update={"prompts": ("too long " * 9,)})
    training = training.model_copy(update={"sample": sample_of_too_much, "evaluate_every_steps": 2})
    second = second.model_copy(update={"steering": second.steering.model_copy(update={"training": training})})
    ended = run(ranks, spec, Told(steers=((first, (3, 3)), (second, (5, 5)))))
    assert (ended.outcomes, max(ended.losses)) == ({Outcome.FINISHED}, 8)
    made = [each for each in ended.reports if isinstance(each, SteeredReport)]
    assert [each.step for each in made] == [4, 6]
    assert list(made[1].changes) == ["training.evaluate_every_steps"]
    assert [each.step for each in ended.reports if isinstance(each, SampleReport)] == [5, 6, 7, 8]
    assert [each.step for each in ended.reports if each.kind == "evaluation"] == [0, 4, 5, 6, 8]
    assert CheckpointFolder(str(tmp_path / "sampled")).steps() == [2, 4, 5, 6, 7, 8]
