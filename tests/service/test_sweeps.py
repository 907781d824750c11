"""Sweeps in the record and over HTTP, with jobs that do as the test says; test_sweeps_end_to_end has real ones."""

import errno
import itertools
import json
import math
import random
import shutil
import sqlite3
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import httpx
import pytest
import yaml
from playwright.sync_api import expect
from pydantic import ValidationError
from sqlalchemy import Connection, event, text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import IntegrityError

import service.scheduler.sweeps
from boost_core.config.base import StoreUnusable
from boost_core.config.data_files import UnfitData
from boost_core.plan.search_process import SearchFailed, TooLong
from service.api.errors import InvalidJob, StoreUnavailable
from service.api.limits import THREADS_PER_TENANT
from service.api.routes.sweeps import trial_submitter
from service.client import ApiError, Client
from service.jobs import sweep_study
from service.jobs.leases import LeaseLost, Leases
from service.jobs.model import JobRecord, Owner, TooManyJobs
from service.jobs.states import JobState, Reason
from service.jobs.store import JobStore
from service.jobs.sweep_study import Studies
from service.jobs.sweeps import MOST_RUNNING, SweepConflict, SweepStore
from service.models.access import Scope
from service.models.problems import job_errors
from service.models.sweeps import IllegalTrial, Sweep, SweepRequest, SweepState, SweepTrial, TrialState
from service.scheduler.sweeps import SweepDriver, SweepLoop
from service.security.secrets import SecretUnusable
from tests.service.browser import Visit
from tests.service.command_line import boost_at
from tests.service.conftest import RunningApi, With
from tests.service.records import (
    GOOD,
    a_checkpoint,
    a_step,
    an_evaluation,
    finish,
    numbered,
    start,
    write_checkpoints,
)
from tests.service.routes import GOOD_FOR_ALL

JOB = GOOD | {"data": {}, "training": {"steps": 9, "sequence_length": 64, "evaluate_every_steps": 3}}
RATES = {"optimizer.learning_rate": {"log_uniform": [1e-4, 1e-1]}, "model.rank": {"choices": [8, 16]}}
GRID = {"optimizer.learning_rate": {"choices": [0.01, 0.001]}, "model.rank": {"choices": [8, 16, 32]}}
HALVING = {"kind": "successive_halving", "first_step": 1, "reduction_factor": 3}
BOTH = pytest.mark.parametrize("database", ["sqlite", "postgresql"])


CONNECTIONS: list[Any] = []  # of the driver's process


def request(**changes: Any) -> dict[str, Any]:
    return {"name": "rates", "job": JOB, "space": RATES, "budget": {"trials": 6}, "parallel": 2} | changes


def loss_of(job: JobRecord, step: int) -> float:
    """What a job's loss is said to be: best at a learning rate of 0.01, and with crossing curves."""
    rate = job.spec.optimizer.learning_rate
    return 5 - math.log(1 + step) + abs(math.log10(rate) + 2) * (1 + 0.1 * step) - 0.01 * job.spec.model.rank


def plain_submit(store: JobStore) -> Callable[..., JobRecord]:
    def submit(
        sweep: Sweep, number: int, parameters: Mapping[str, Any], alongside: Callable[[Connection], None]
    ) -> JobRecord:
        spec, owner = sweep.spec.trial(number, parameters), Owner(sweep.tenant, sweep.submitted_by)
        return store.create(spec, "/checkpoints", owner, trial=(sweep.id, number), alongside=alongside)

    return submit


@dataclass
class Lab:
    """A record, jobs that train a few steps a turn, and the driver, which may be replaced by a new one."""

    url: str
    loss: Callable[[JobRecord, int], float] = loss_of
    speed: Callable[[JobRecord], int] = lambda _: 1  # steps a turn
    fails: dict[int, tuple[int, str]] = field(default_factory=dict)  # by trial: after which step, and why
    paused_at: dict[str, int] = field(default_factory=dict)
    begins: int = 0  # the step that jobs continue from

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin as a new process does."""
        self.store = JobStore(self.url)
        self.sweeps = SweepStore(self.store)
        self.studies = Studies(self.store.engine)
        self.driver = SweepDriver(self.sweeps, self.studies, plain_submit(self.store))

    def create(self, **changes: Any) -> Sweep:
        return self.sweeps.create(SweepRequest.model_validate(request(**changes)), Owner("default", "tester"))

    def drive(self) -> None:
        for sweep in self.sweeps.unfinished():
            self.driver.drive(sweep)

    def train(self) -> None:
        """Let each job go on: begin, train, pause, end."""
        for job in self.store.active():
            number = int(next(tag for tag in job.spec.tags if tag.startswith("trial-")).removeprefix("trial-"))
            if job.state is JobState.QUEUED:
                start(self.store, job.id)
                continue
            done = job.progress.step if job.progress else self.begins
            if job.pause_requested:
                if job.state is not JobState.PAUSED:
                    self.paused_at[job.id] = done
                    self.store.change(job.id, Reason.PAUSED_BY_USER, "paused")
                continue
            ends_at, why = self.fails.get(number, (10**9, ""))
            reports, steps = [], min(job.spec.training.steps, ends_at, done + self.speed(job))
            for step in range(done + 1, steps + 1):
                reports.append(a_step(step, loss=self.loss(job, step)))
                if step % job.spec.training.evaluate_every_steps == 0:
                    reports.append(an_evaluation(step, self.loss(job, step) + 0.1, sets=("web",)))
            first = self.store.last_sequences([job.id])[job.id] + 1
            self.store.append_reports(job.id, job.attempt, numbered(*reports, first=first))
            if steps == ends_at:
                self.store.change(job.id, Reason.TRAINING_FAILED, why)
            elif steps == job.spec.training.steps:
                finish(self.store, job.id)

    def run(self, turns: int = 500) -> Sweep:
        """Drive and train until the sweep has ended."""
        for _ in range(turns):
            self.drive()
            if not self.sweeps.unfinished():
                return self.sweeps.get("rates", "default")
            self.train()
        raise AssertionError(self.trials())

    def trials(self) -> list[SweepTrial]:
        sweep = self.sweeps.get("rates", "default")
        return sweep_study.all_shown(sweep.spec, self.studies.trials(sweep.id), self.store.of_sweep(sweep.id))

    def choices(self) -> list[dict[str, Any]]:
        """All that is decided about the trials."""
        return [trial.model_dump(exclude={"job_id"}) for trial in self.trials()]


@pytest.fixture
def lab(database_url: str) -> Lab:
    return Lab(database_url)


@pytest.fixture(autouse=True)
def _without_fsync() -> Iterator[None]:
    """Processes die in these tests, machines do not."""

    def hurry(connection: Any, _record: Any) -> None:
        CONNECTIONS.append(connection)
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", hurry)
    yield
    event.remove(Engine, "connect", hurry)
    CONNECTIONS.clear()


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ({"space": {}}, "space", "at least 1"),
        ({"space": {"optimizer.learning rate": {"choices": [1]}}}, "space.optimizer.learning rate", "path of a field"),
        ({"space": {"group": {"choices": ["a"]}}}, "space.group", "the sweep sets this field"),
        ({"space": {"training.steps": {}}}, "space.training.steps", "exactly one of uniform"),
        ({"space": {"a.b": {"uniform": [0, 1], "choices": [1]}}}, "space.a.b", "exactly one of uniform"),
        ({"space": {"a.b": {"uniform": [1, 1]}}}, "space.a.b", "1 is not below 1"),
        ({"space": {"a.b": {"log_uniform": [0, 1]}}}, "space.a.b", "numbers above 0"),
        ({"space": {"a.b": {"int_uniform": [1, 2.5]}}}, "space.a.b.int_uniform[1]", "whole number"),
        (
            {"search": "grid", "space": {"training.seed": {"int_uniform": [0, 10**20]}}},
            "space.training.seed.int_uniform[1]",
            "9007199254740992",
        ),
        ({"space": {"a.b": {"choices": [1, 2, 1]}}}, "space.a.b", "twice"),
        ({"search": "grid"}, "space.optimizer.learning_rate", "a grid needs values that can be listed"),
        ({"search": "grid", "space": {"training.steps": {"int_uniform": [1, 2000]}}}, "space", "2000 combinations"),
        ({"search": "annealing"}, "search", "grid"),
        ({"budget": {}}, "budget", "search=random has no end of its own"),
        ({"budget": {"trials": 0}}, "budget.trials", "1"),
        ({"parallel": 65}, "parallel", "64"),
        ({"metric": "accuracy"}, "metric", "loss"),
        ({"metric": "validation.web"}, "metric", "no validation set 'web'; it has: none"),
        ({"stop_early": {"kind": "median", "first_step": 9}}, "stop_early.first_step", "not below training.steps=9"),
        ({"stop_early": HALVING, "metric": "validation"}, "stop_early.first_step", "rung at step 1, but the job is"),
        ({"stop_early": HALVING | {"every_steps": 2}}, "stop_early.every_steps", "only median"),
        ({"job": GOOD | {"training": {"steps": 0, "sequence_length": 64}}}, "job.training.steps", "1"),
        ({"seed": -1}, "seed", "0"),
        ({"pruner": "none"}, "pruner", "there is no such field"),
    ],
)
def test_what_makes_no_sweep_is_refused_by_its_field(changes: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(ValidationError) as refused:
        SweepRequest.model_validate(request(**changes))
    errors = {error.field: error.message for error in job_errors(refused.value.errors(), SweepRequest)}
    assert where in errors and what in errors[where], errors


def test_rungs_are_counted_without_a_list_of_them() -> None:
    job = JOB | {"training": JOB["training"] | {"steps": 1_000_000}}
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError, match="gives 999999 rungs"):
            SweepRequest.model_validate(request(job=job, stop_early={"kind": "median", "first_step": 1}))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000  # a list's pointers alone take 8 MB
    finally:
        tracemalloc.stop()


def test_more_tokens_per_second_are_better_unless_the_file_says_otherwise() -> None:
    for changes, minimize in (
        ({}, True), ({"metric": "tokens_per_second"}, False),
        ({"metric": "tokens_per_second", "minimize": True}, True), ({"minimize": False}, False),
    ):  # fmt: skip
        sweep = SweepRequest.model_validate(request(**changes))
        assert sweep.minimize is minimize
        assert SweepRequest.model_validate(sweep.model_dump(mode="json")) == sweep


def test_any_field_of_the_job_is_varied_by_its_path() -> None:
    mixture = [{"kind": "text", "paths": ["a.txt"], "weight": 1}, {"kind": "text", "paths": ["b.txt"], "weight": 1}]
    sweep = SweepRequest.model_validate(request(job=JOB | {"data": {"mixture": mixture}, "tags": ["mine", "trial-9"]}))
    parameters = {
        "data.mixture[1].weight": 3.0,
        "model.preset": "60m",
        "elasticity.data_parallel_size": {"min": 1, "max": 2},
        "optimizer.betas[1]": 0.99,
    }
    spec = sweep.trial(7, parameters)
    assert [source.weight for source in spec.data.mixture] == [1.0, 3.0]
    assert (spec.model.hidden_size, spec.elasticity.data_parallel_size.max) == (512, 2)
    assert (spec.name, spec.group, spec.tags) == ("rates-7", "rates", ("mine", "trial-7"))
    assert spec.optimizer.betas == (sweep.job.optimizer.betas[0], 0.99)
    for parameters, what in (
        ({"model.rank": 4000}, r"with model.rank=4000: model.rank: 4000 is above hidden_size"),
        ({"optimizer.rate": 1}, r"there is no such field"),
        ({"name.first": "a"}, r"what is above first is not a section"),
        ({"data.mixture[2].weight": 1}, r"the job has no entry 2 there"),
        ({"data.mixtures[0].weight": 1}, r"data.mixtures\[0\].weight: the job has no entry 0 there"),
    ):
        with pytest.raises(IllegalTrial, match=what):
            sweep.trial(0, parameters)


def test_steps_and_tokens_stand_for_each_other() -> None:
    training = {key: value for key, value in JOB["training"].items() if key != "steps"}
    for written, path, value in (({"steps": 9}, "training.tokens", 2048), ({"tokens": 9999}, "training.steps", 2)):
        space, job = {path: {"choices": [value]}}, JOB | {"training": training | written}
        sweep = SweepRequest.model_validate(request(job=job, space=space))
        assert sweep.trial(0, {path: value}).training.steps == 2
        both = {"training.steps": {"choices": [2]}, "training.tokens": {"choices": [9999]}}
        sweep = SweepRequest.model_validate(request(job=job, space=both))
        with pytest.raises(IllegalTrial, match="leave one of the two out"):
            sweep.trial(0, {"training.steps": 2, "training.tokens": 9999})


def test_a_section_and_a_field_in_it_are_varied_together_and_the_file_stays_as_it_is() -> None:
    sections = [{"warmup_steps": 3}, {"warmup_steps": 3, "weight_decay": 0.1}]
    space = {"optimizer": {"choices": sections}, "optimizer.learning_rate": {"choices": [0.001, 0.01]}}
    sweep = SweepRequest.model_validate(request(space=space, search="grid", budget={}))
    before = sweep.model_dump(mode="json")
    specs = [sweep.trial(0, parameters) for parameters in sweep.combinations()]
    chosen = [(spec.optimizer.weight_decay, spec.optimizer.learning_rate) for spec in specs]
    assert chosen[2:] == [(0.1, 0.001), (0.1, 0.01)] and chosen[0][0] == chosen[1][0] != 0.1
    assert sweep.model_dump(mode="json") == before


def test_a_trial_without_the_validation_set_of_the_metric_is_refused() -> None:
    job = JOB | {"data": {"validation": [{"name": "web", "kind": "text", "paths": ["a.txt"]}]}}
    space = {"data.validation[0].name": {"choices": ["web", "news"]}}
    sweep = SweepRequest.model_validate(request(job=job, space=space, metric="validation.web"))
    assert sweep.trial(0, {"data.validation[0].name": "web"})
    with pytest.raises(IllegalTrial, match="metric: the job has no validation set 'web'; it has: news"):
        sweep.trial(0, {"data.validation[0].name": "news"})


@pytest.mark.full
def test_a_grid_is_every_combination_once(lab: Lab) -> None:
    lab.create(search="grid", space=GRID, budget={})
    sweep = lab.run()
    assert (sweep.state, sweep.trials) == (SweepState.FINISHED, {TrialState.COMPLETE: 6})
    tried = {tuple(trial.parameters.values()) for trial in lab.trials()}
    assert tried == {(rate, rank) for rate in (0.01, 0.001) for rank in (8, 16, 32)}
    assert sweep.best.parameters == {"optimizer.learning_rate": 0.01, "model.rank": 32}
    assert sweep.message == f"trials: 6 complete; the best is trial {sweep.best.number} with {sweep.best.value:.6g}"


@pytest.mark.parametrize("search", [pytest.param("grid", marks=pytest.mark.full), "random"])
def test_the_seed_decides_which_trials_there_are(search: str, lab: Lab) -> None:
    def parameters(parallel: int, seed: int) -> list[dict[str, Any]]:
        name = f"s-{parallel}-{seed}"
        lab.create(name=name, search=search, space=GRID if search == "grid" else RATES, parallel=parallel, seed=seed)
        while lab.sweeps.unfinished():
            lab.drive()
            lab.train()
        sweep = lab.sweeps.get(name, "default")
        return [trial.params for trial in lab.studies.trials(sweep.id)]

    assert parameters(1, 1) == parameters(6, 1) != parameters(1, 2)


@pytest.mark.full
def test_a_trial_is_judged_by_its_value_at_the_rung_and_not_by_its_best(lab: Lab) -> None:
    # The second is better at each step but the rung; the third is better there, and worse before.
    curves = {"rates-0": [4, 4, 4], "rates-1": [3, 3, 5], "rates-2": [9, 9, 3]}
    lab.loss = lambda job, step: float(curves[job.name][step - 1]) if step <= 3 else 2.0
    rule = {"kind": "successive_halving", "first_step": 3, "reduction_factor": 2}
    lab.create(
        parallel=1, budget={"trials": 3}, stop_early=rule, job=JOB | {"training": JOB["training"] | {"steps": 6}}
    )
    lab.run()
    assert [trial.state for trial in lab.trials()] == ["COMPLETE", "PRUNED", "COMPLETE"]
    pruned = lab.trials()[1]
    assert (pruned.rungs, pruned.value, pruned.reason) == (
        {3: 5.0}, 5.0, "its loss of 5 at step 3 is worse than others' there",
    )  # fmt: skip


@pytest.mark.full
def test_rungs_that_jobs_begin_after_are_passed_over(lab: Lab) -> None:
    lab.begins = 2  # of rungs at steps 1 and 3
    lab.create(stop_early=HALVING, parallel=2, budget={"trials": 3})
    assert lab.run().state is SweepState.FINISHED
    assert {tuple(trial.rungs) for trial in lab.trials()} <= {(3,), (3, 9)}
    assert TrialState.FAILED not in {trial.state for trial in lab.trials()}


def test_a_trial_that_is_not_validated_at_a_rung_is_judged_at_the_next(lab: Lab) -> None:
    lab.create(metric="validation", stop_early=HALVING | {"first_step": 3}, parallel=1, budget={"trials": 1})
    lab.drive()
    (job,) = lab.store.active()
    start(lab.store, job.id)
    reports = a_step(3, loss=1.0), a_step(9, loss=1.0), an_evaluation(9, 0.5, sets=("web",))
    lab.store.append_reports(job.id, 1, numbered(*reports))
    finish(lab.store, job.id)
    assert (lab.run().state, lab.trials()[0].value) == (SweepState.FINISHED, 0.5)


@pytest.mark.full
def test_others_are_judged_while_a_trial_waits_for_its_tenant_to_have_fewer_jobs(lab: Lab) -> None:
    submit = lab.driver.submit

    def refuse_the_second(sweep: Sweep, number: int, *rest: Any) -> JobRecord:
        if number == 1 and any(not job.finished for job in lab.store.page()[0]):
            raise TooManyJobs("default", 1)
        return submit(sweep, number, *rest)

    lab.driver = SweepDriver(lab.sweeps, lab.studies, refuse_the_second)
    lab.create(stop_early=HALVING, parallel=2, budget={"trials": 2})
    assert lab.run().state is SweepState.FINISHED
    assert list(lab.trials()[0].rungs) == [1, 3, 9]


@pytest.mark.full
def test_a_last_step_that_was_a_rung_is_judged_again(lab: Lab) -> None:
    lab.create(stop_early=HALVING, parallel=1, budget={"trials": 1})
    for _ in range(20):
        lab.drive()
        lab.train()
    (trial,) = lab.studies.trials(lab.sweeps.get("rates", "default").id)
    assert sweep_study.next_milestone(trial, [1, 3])[2] == 3


@pytest.mark.full
def test_a_sweep_that_cannot_be_read_holds_up_no_other(lab: Lab) -> None:
    lab.create(name="broken", budget={"trials": 1})
    with lab.store.engine.begin() as connection:
        connection.execute(text("UPDATE sweeps SET spec = '{}'"))
    lab.create(budget={"trials": 1})
    assert lab.run().state is SweepState.FINISHED
    assert [sweep.name for sweep in lab.sweeps.list("default", 10)] == ["rates"]
    for read, said in (
        (lab.sweeps.get, "cannot be read; boost sweep stop"),
        (lab.sweeps.request_stop, "has ended now"),
    ):
        with pytest.raises(SweepConflict, match=f"of another release, and {said}"):
            read("broken", "default")
    with lab.store.engine.connect() as connection:
        states = connection.execute(text("SELECT state FROM sweeps WHERE name = 'broken'")).scalars()
        assert list(states) == [SweepState.STOPPED]


@pytest.mark.full
def test_the_median_is_compared_with_the_value_at_the_step(lab: Lab) -> None:
    lab.loss = lambda job, step: 1.0 if step < 4 and job.name == "rates-5" else 9.0 if job.name == "rates-5" else 4.0
    rule = {"kind": "median", "first_step": 4, "every_steps": 2}
    lab.create(parallel=1, stop_early=rule)
    lab.run()
    assert [trial.state for trial in lab.trials()] == ["COMPLETE"] * 5 + ["PRUNED"]
    assert lab.trials()[5].rungs == {4: 9.0}


@pytest.mark.full
def test_a_pruned_trial_saves_and_ends_at_once(lab: Lab) -> None:
    lab.create(stop_early=HALVING, budget={"trials": 8}, parallel=4)
    sweep = lab.run()
    pruned = [trial for trial in lab.trials() if trial.state is TrialState.PRUNED]
    assert len(pruned) >= 4 and sweep.state is SweepState.FINISHED
    for trial in pruned:
        job = lab.store.get(trial.job_id)
        why = f"pruned as trial {trial.number} of sweep rates: {trial.reason}"
        assert (job.state, job.message) == ("CANCELLED", why) and "is worse than others' there" in why
        assert lab.paused_at[job.id] <= max(trial.rungs) + 3, "a pause saves, and comes within a pass"


@pytest.mark.full
def test_a_complete_trial_ends_by_itself_even_if_it_loses_its_gang_before_its_last_checkpoint(lab: Lab) -> None:
    lab.create(parallel=1, budget={"trials": 1})
    lab.drive()
    lab.train()
    job = lab.store.get(lab.trials()[0].job_id)
    first = lab.store.last_sequences([job.id])[job.id] + 1
    reports = [a_step(step, loss=2.0) for step in range(1, 10)]
    lab.store.append_reports(job.id, job.attempt, numbered(*reports, first=first))
    lab.drive()
    assert lab.trials()[0].state is TrialState.COMPLETE
    lab.store.change(job.id, Reason.GANG_LOST, "its node is gone")
    lab.drive()
    job = lab.store.get(job.id)
    assert (job.state, job.pause_requested) == (JobState.QUEUED, False)
    start(lab.store, job.id)
    finish(lab.store, job.id)
    assert lab.run().state is SweepState.FINISHED
    assert lab.store.get(job.id).state is JobState.SUCCEEDED


@pytest.mark.full
def test_failures_count_as_the_worst_and_stop_nothing(lab: Lab) -> None:
    lab.fails = {0: (0, "out of memory"), 3: (5, "the loss is not finite")}
    lab.loss = lambda job, step: math.nan if job.name == "rates-1" and step == 3 else loss_of(job, step)
    lab.create(search="tpe", stop_early=HALVING, budget={"trials": 5}, parallel=1)
    sweep = lab.run()
    trials = lab.trials()
    assert sweep.state is SweepState.FINISHED
    assert (trials[0].state, trials[0].reason) == ("FAILED", "its job failed: out of memory")
    assert (trials[1].state, trials[1].reason) == ("FAILED", "its loss at step 3 is nan")
    assert trials[1].rungs[3] is None and trials[1].value is None
    assert sweep.best.number not in (0, 1, 3)
    assert sweep.trials[TrialState.FAILED] == sum(trial.state is TrialState.FAILED for trial in trials)


@pytest.mark.full
@pytest.mark.parametrize("together", [False, True])
def test_a_job_that_its_user_cancels_counts_as_failed(lab: Lab, together: bool) -> None:
    lab.create(budget={"trials": 2}, parallel=1)
    lab.drive()
    job_id = lab.trials()[0].job_id
    assert [*lab.store.cancel_many([job_id])] if together else lab.store.request_cancel(job_id)
    lab.run()
    assert [trial.state for trial in lab.trials()] == ["FAILED", "COMPLETE"]
    assert lab.trials()[0].reason == "its job cancelled: cancelled while it was queued"


def test_too_many_failures_end_a_sweep(lab: Lab) -> None:
    lab.fails = dict.fromkeys(range(6), (2, "it diverges"))
    lab.create(max_failures=1, parallel=2)
    sweep = lab.run()
    assert (sweep.state, sweep.trials[TrialState.FAILED]) == (SweepState.FAILED, 2)
    assert sweep.message.startswith("more than 1 trials have failed; trials: ")
    assert all(job.finished for job in lab.store.of_sweep(sweep.id).values())


@pytest.mark.full
def test_parameters_that_make_no_job_fail_their_trial(lab: Lab) -> None:
    space = {"training.micro_batch_size": {"choices": [1, 3]}, "training.global_batch_size": {"choices": [4, 6]}}
    job = JOB | {"training": JOB["training"] | {"micro_batch_size": 1, "global_batch_size": 4}}
    lab.create(search="grid", space=space, job=job, budget={})
    sweep = lab.run()
    (failed,) = [trial for trial in lab.trials() if trial.state is TrialState.FAILED]
    assert failed.parameters == {"training.micro_batch_size": 3, "training.global_batch_size": 4}
    assert "training.micro_batch_size=3, training.global_batch_size=4: " in failed.reason and failed.job_id is None
    assert sweep.state is SweepState.FINISHED and len(lab.store.of_sweep(sweep.id)) == 3


@pytest.mark.full
def test_importance_takes_four_completed_trials(lab: Lab) -> None:
    sweep = lab.create(parallel=1, budget={"trials": 4})
    while lab.sweeps.unfinished():
        assert lab.studies.importance(sweep.id, sweep.spec) is None
        lab.drive()
        lab.train()
    shares = lab.studies.importance(sweep.id, sweep.spec)
    assert shares is not None and sum(shares.values()) == pytest.approx(1)


@pytest.mark.full
def test_importance_is_computed_when_more_trials_have_ended(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = list[int]()
    monkeypatch.setattr(sweep_study, "importance", lambda _, trials: counted.append(len(trials)))
    sweep = lab.create(parallel=1, budget={"trials": 2})
    while lab.sweeps.unfinished():
        lab.drive()
        lab.train()
        for _ in range(2):
            lab.studies.importance(sweep.id, sweep.spec)
    assert len(counted) == 3, "with none, with one, and with both"


@pytest.mark.full
def test_budgets_of_tokens_and_gpu_hours_end_a_sweep(lab: Lab) -> None:
    tokens = 9 * JOB["training"]["sequence_length"] * SweepRequest.model_validate(request()).job.training.samples(1)
    lab.fails = {2: (1, "out of memory")}  # the other eight steps count for nothing
    lab.create(budget={"tokens": 3 * tokens, "trials": 50}, parallel=1)
    assert lab.run().trials == {TrialState.COMPLETE: 3, TrialState.FAILED: 1}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(service.scheduler.sweeps, "gpu_hours_of", lambda *_: 1.0)
        lab.create(name="hours", budget={"gpu_hours": 2}, parallel=1)
        while lab.sweeps.unfinished():
            lab.drive()
            lab.train()
    assert lab.sweeps.get("hours", "default").trials == {TrialState.COMPLETE: 2}


@pytest.mark.full
def test_a_stopped_sweep_stops_its_trials(lab: Lab) -> None:
    lab.create(parallel=3)
    for _ in range(3):
        lab.drive()
        lab.train()
    lab.sweeps.request_stop("rates", "default")
    sweep = lab.run()
    assert (sweep.state, sweep.trials) == (SweepState.STOPPED, {TrialState.STOPPED: 3})
    assert {job.state for job in lab.store.of_sweep(sweep.id).values()} == {JobState.CANCELLED}
    assert {trial.reason for trial in lab.trials()} == {"the sweep was stopped by its user"}
    assert len(lab.paused_at) == 3, "each has saved"
    with pytest.raises(SweepConflict, match="there is a sweep 'rates' already"):
        lab.create()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_sweep_whose_trials_are_lost_ends(lab: Lab, stopped: bool) -> None:
    lab.create(parallel=2)
    lab.drive()
    lab.train()
    Path(str(lab.store.engine.url.database).removesuffix(".db") + "-sweeps.db").unlink()
    with pytest.raises(Exception, match="is missing or was replaced"):
        lab.drive()
    lab.renew()
    if stopped:
        lab.sweeps.request_stop("rates", "default")
    sweep = lab.run()
    state = SweepState.STOPPED if stopped else SweepState.FAILED
    assert (sweep.state, "trials that have jobs are not in its database" in sweep.message) == (state, not stopped)
    jobs = lab.store.of_sweep(sweep.id).values()
    assert {job.state for job in jobs} == {JobState.CANCELLED if stopped else JobState.RUNNING}


# Whoever dies, and however fast jobs are.


class Killed(BaseException):
    """The process ends here."""


def bury() -> None:
    """Close a dead process's connections, as its end does."""
    for connection in CONNECTIONS:
        connection.close()
    CONNECTIONS.clear()


@contextmanager
def killed(dies: Callable[[], bool]) -> Iterator[None]:
    """Let the process end before any transaction, or before its commit, of any database, when ``dies`` says so."""

    def happen(*_: object) -> None:
        if dies():
            raise Killed

    for moment in ("begin", "commit"):
        event.listen(Engine, moment, happen)
    try:
        yield
    finally:
        for moment in ("begin", "commit"):
            event.remove(Engine, moment, happen)


def run_with_deaths(lab: Lab, dies: Callable[[], bool]) -> int:
    """As ``Lab.run``, but whenever the driver has died, a new one goes on; returns how often it did."""
    deaths = 0
    for _ in range(2000):
        try:
            with killed(dies):
                lab.drive()
        except Killed:
            deaths += 1
            bury()
            lab.renew()
            continue
        if not lab.sweeps.unfinished():
            return deaths
        lab.train()
    raise AssertionError(lab.trials())


SWEEPS: list[dict[str, Any]] = [
    {"search": "random", "stop_early": HALVING},
    {"search": "tpe", "stop_early": HALVING | {"kind": "hyperband"}, "metric": "loss"},
    {"search": "tpe", "metric": "validation"},
]


@pytest.mark.full
@BOTH
@pytest.mark.parametrize("changes", SWEEPS)
def test_a_sweep_survives_deaths_anywhere_with_the_same_choices(
    changes: dict[str, Any], database_url: str, tmp_path: Any, request: pytest.FixtureRequest
) -> None:
    quiet = Lab(calm_database(tmp_path, request))
    quiet.fails = {2: (2, "out of memory")}
    quiet.create(budget={"trials": 8}, parallel=3, **changes)
    quiet.run()
    expected = quiet.choices()

    lab = Lab(database_url)
    lab.fails = quiet.fails
    lab.create(budget={"trials": 8}, parallel=3, **changes)
    lab.speed = lambda job: 1 + hash(job.id) % 4  # others at each run
    chance = random.Random(str(changes))
    deaths = run_with_deaths(lab, lambda: chance.random() < 0.02)
    assert deaths > 5
    assert lab.choices() == expected
    jobs = [job for job in lab.store.page(limit=100)[0] if job.spec.group == "rates"]
    assert sorted(job.name for job in jobs) == sorted(f"rates-{number}" for number in range(8)), "none twice"
    assert all(job.finished for job in jobs)


def calm_database(folder: Any, request: pytest.FixtureRequest) -> str:
    file = folder / "calm.db"
    shutil.copyfile(request.getfixturevalue("migrated_file"), file)
    return f"sqlite:///{file}"


@pytest.mark.full
@pytest.mark.parametrize(
    "first", [3, *(pytest.param(each, marks=pytest.mark.nightly) for each in (0, 1, 2, 4, 5, 6, 7))]
)
def test_a_sweep_survives_a_death_before_each_of_its_commits(
    first: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It dies before every eighth commit: from eight beginnings, before each."""
    choices, deaths = list[Any](), 0
    for dies_at in (None, first):
        (folder := tmp_path / str(dies_at)).mkdir()
        lab, commits = Lab(calm_database(folder, request)), itertools.count()
        lab.fails = {1: (2, "out of memory")}
        lab.create(search="tpe", stop_early=HALVING, budget={"trials": 4}, parallel=2)

        def die(*_: object, dies_at: int | None = dies_at, commits: Iterator[int] = commits) -> None:
            if next(commits) % 8 == dies_at:
                raise Killed

        while lab.sweeps.unfinished():
            assert lab.studies.storage  # made before, as it takes commits, too
            event.listen(Engine, "commit", die)
            try:
                lab.drive()
            except Killed:
                deaths += 1
                bury()
                lab.renew()
                continue
            finally:
                event.remove(Engine, "commit", die)
            lab.train()
        choices.append(lab.choices())
        assert len(lab.store.page(limit=100)[0]) == 4
    assert choices[0] == choices[1]
    assert deaths >= 4


# Over HTTP.


@pytest.mark.full
@BOTH
def test_a_sweep_from_its_file_to_its_best_trial(
    api: RunningApi, client: Client, store: JobStore, database_url: str, tmp_path: Path
) -> None:
    boost, lab = boost_at(api.url), Lab(database_url, speed=lambda _: 4)
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(request(job="job.yaml", stop_early=HALVING, budget={"trials": 5}), sort_keys=False))
    done = boost("sweep", "create", str(file))
    assert done.exit_code == 0 and " is RUNNING: boost sweep status rates" in done.stdout, done.stderr
    assert boost("sweep", "create", str(file)).exit_code == 0, "the same again is the same sweep"
    assert boost("sweep", "best", "rates").stderr.startswith("error: no trial of sweep rates has completed yet")
    context, lease = api.app.state.context, Leases(store.engine, "test").take("scheduler", 60)
    loop = SweepLoop(store, context.studies, lambda: lease, trial_submitter(context), 0.05)
    loop.start()
    try:
        deadline = time.monotonic() + 60
        while client.sweep("rates").state is SweepState.RUNNING:
            assert time.monotonic() < deadline
            lab.train()
            time.sleep(0.1)
    finally:
        loop.stop()
    sweep, trials = client.sweep("rates"), client.sweep_trials("rates").trials
    assert (sweep.state, len(trials), client.sweeps().sweeps[0].name) == (SweepState.FINISHED, 5, "rates")
    assert [trial.number for trial in trials if trial.state is TrialState.COMPLETE]
    jobs = client.list(group="rates", tags=["trial-3"]).jobs
    assert [job.id for job in jobs] == [trials[3].job_id] and jobs[0].submitted_by == "anonymous"
    assert jobs[0].spec.optimizer.learning_rate == trials[3].parameters["optimizer.learning_rate"]

    lines = boost("sweep", "trials", "rates", "--csv").stdout.splitlines()
    assert lines[0] == "trial,state,value,job,optimizer.learning_rate,model.rank,step 1,step 3,step 9,reason"
    assert [line.split(",")[3] for line in lines[1:]] == [trial.job_id for trial in trials]
    assert httpx.get(f"{api.url}/v1/sweeps/rates/trials?format=csv").text.splitlines() == lines
    assert f"best        trial {sweep.best.number}, " in boost("sweep", "status", "rates").stdout
    assert "rates  FINISHED  5" in boost("sweep", "list").stdout
    assert json.loads(boost("sweep", "status", "rates", "--json").stdout)["importance"] == sweep.importance
    assert "nothing to stop" in boost("sweep", "stop", "rates").stderr
    best = store.get(sweep.best.job_id)
    store.append_reports(best.id, best.attempt, numbered(a_checkpoint(9), first=100))
    refused = boost("sweep", "best", "rates", "--continue", "12").stderr
    assert "checkpoint.continue_from" in refused, "there are no files of this job"
    assert boost("sweep", "best", "rates", "--quiet").stdout == f"{best.id}\n"
    assert "--set goes with --continue STEPS" in boost("sweep", "best", "rates", "--set", "name=x").stderr
    write_checkpoints(store.get(best.id), 9)
    options = ("--continue", "12", "--set", "priority=3", "--set", "training.seed=7", "-q")
    onward = client.get(boost("sweep", "best", "rates", *options).stdout.strip()).spec
    assert (onward.name, onward.group, onward.tags) == (f"rates-{sweep.best.number}-continued", None, ("continued",))
    assert (onward.priority, onward.training.seed, onward.training.steps) == (3, 7, 12)


@pytest.mark.full
def test_choices_are_stored_with_each_trial_and_so_are_limited(client: Client) -> None:
    with pytest.raises(ApiError, match=r"the choices of all fields take 60\d+ bytes, but 32768 is the limit"):
        client.create_sweep(request(space={"notes": {"choices": [f"{number}" + 1000 * "x" for number in range(60)]}}))
    assert client.create_sweep(request(space={"training.seed": {"choices": list(range(100))}})).name == "rates"


@pytest.mark.full
def test_the_page_shows_sweeps_and_their_trials(visitor: Visit, store: JobStore, database_url: str) -> None:
    page = visitor.open("/")
    page.get_by_role("link", name="Sweeps").click()
    expect(page.get_by_text("No sweeps yet. Begin one with: boost sweep create SWEEP.YAML")).to_be_visible()
    lab = Lab(database_url)
    lab.create(stop_early=HALVING, budget={"trials": 5}, parallel=1)
    best = lab.run().best
    row = page.get_by_role("row", name="rates")
    expect(row).to_contain_text("FINISHED")
    expect(row).to_contain_text(f"trial {best.number}")
    row.get_by_role("link", name="rates").click()
    expect(page.get_by_role("heading", name="rates")).to_be_visible()
    expect(page.locator("tbody tr")).to_have_count(5)
    expect(page.locator("tr.present")).to_contain_text("complete")
    expect(page.get_by_role("columnheader", name="optimizer.learning_rate")).to_be_visible()
    page.locator("tr.present").get_by_role("link").click()
    expect(page).to_have_url(f"{visitor.url}/jobs/{best.job_id}")
    visitor.open("/sweeps/rates").get_by_role("link", name="Compare its jobs").click()
    expect(page.locator(".compared tbody tr")).to_have_count(5)


@pytest.mark.full
def test_combinations_that_make_no_job_are_refused_at_the_door_by_their_values(client: Client) -> None:
    space = {"training.micro_batch_size": {"choices": [1, 3]}, "training.global_batch_size": {"choices": [4, 6]}}
    training = JOB["training"] | {"micro_batch_size": 1, "global_batch_size": 4}
    with pytest.raises(ApiError) as refused:
        client.create_sweep(request(search="grid", space=space, job=JOB | {"training": training}))
    (error,) = refused.value.errors
    assert error.field == "space"
    assert error.message.startswith("with training.micro_batch_size=3, training.global_batch_size=4: training.")
    rates = {"optimizer.rate": {"uniform": [0, 1]}, "model.rank": {"choices": [8, 4000]}}
    with pytest.raises(ApiError) as refused:
        client.create_sweep(request(space=rates))
    assert [error.message.partition(":")[0] for error in refused.value.errors] == [
        "with optimizer.rate=0.0", "with optimizer.rate=1.0", "with model.rank=4000",
    ]  # fmt: skip
    with pytest.raises(ApiError, match="the job takes no GPUs"):
        client.create_sweep(request(budget={"gpu_hours": 1}))
    with pytest.raises(ApiError, match="there is no queue 'night'"):
        client.create_sweep(request(space={"queue": {"choices": ["night"]}}))
    assert client.sweeps().sweeps == []


@pytest.mark.full
def test_the_check_of_a_sweep_looks_at_stores_for_so_long_only(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[str]()

    async def slow(spec: Any, *_: object, pins: bool) -> None:
        assert not pins, "a sweep that is refused would pin for ever"
        looked.append(spec.name)
        time.sleep(2)

    monkeypatch.setattr("service.api.routes.sweeps.admitted", slow)
    monkeypatch.setattr("service.api.routes.sweeps._CHECK_SECONDS", 2)
    space = {"model.rank": {"choices": [8, 16, 32]}}
    assert client.create_sweep(request(search="grid", space=space)).state is SweepState.RUNNING
    assert len(looked) == 1
    with pytest.raises(ApiError, match=r"with model\.rank=4000"):
        client.create_sweep(request(name="more", search="grid", space={"model.rank": {"choices": [8, 16, 4000]}}))


@pytest.mark.full
def test_the_trials_of_a_sweep_are_checked_one_at_a_time_and_for_so_long_only(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = [0], [0]

    def slow(self: SweepRequest, *_: object) -> Any:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.1)
        running[0] -= 1
        return self.job

    monkeypatch.setattr(SweepRequest, "trial", slow)
    monkeypatch.setattr("service.api.routes.sweeps._CHECK_SECONDS", -1)
    monkeypatch.setattr("service.api.routes.sweeps._MORE_SECONDS", 3)
    sweeps = [
        request(name=f"seeds-{number}", search="grid", space={"training.seed": {"int_uniform": [1, 900]}})
        for number in range(3)
    ]
    with ThreadPoolExecutor(3) as threads:
        assert {sweep.state for sweep in threads.map(client.create_sweep, sweeps)} == {SweepState.RUNNING}
    assert most == [1]


@pytest.mark.full
def test_tenants_see_their_own_sweeps_only(guarded: RunningApi, client_with: With, store: JobStore) -> None:
    body = request(job=GOOD_FOR_ALL | {"training": JOB["training"]})
    ours, others = client_with(Scope.SUBMIT, tenant="lab", name="alice"), client_with(Scope.SUBMIT, tenant="other")
    assert ours.post("/v1/sweeps", json=body).status_code == 201
    assert others.get("/v1/sweeps").json() == {"sweeps": []}
    for method, path in (("GET", ""), ("GET", "/trials"), ("POST", "/stop")):
        assert others.request(method, f"/v1/sweeps/rates{path}").status_code == 404
    assert others.post("/v1/sweeps", json=body).status_code == 201, "names are the tenant's own"
    assert client_with(Scope.READ, tenant="lab").post("/v1/sweeps/rates/stop").status_code == 403
    assert ours.post("/v1/sweeps/rates/stop").json()["state"] == "STOPPING"
    audit = client_with(Scope.ADMIN).get("/v1/audit").json()["entries"]
    assert [(each["action"], each["resource"]) for each in audit if each["key_name"] == "alice"] == [
        ("sweep.create", "/v1/sweeps"), ("sweep.stop", "/v1/sweeps/rates/stop"),
    ]  # fmt: skip
    driver = SweepDriver(SweepStore(store), Studies(store.engine), trial_submitter(guarded.app.state.context))
    with ThreadPoolExecutor(1) as thread:  # as in the service: this one has the browser's event loop
        thread.submit(driver.drive, SweepStore(store).get("rates", "other")).result()
    assert {(job.tenant, job.submitted_by) for job in store.page()[0]} == {("other", "tester")}


@pytest.mark.full
def test_a_service_that_schedules_no_longer_changes_no_sweep(lab: Lab) -> None:
    first, second = (Leases(lab.store.engine, name) for name in ("first", "second"))
    lease = first.take("scheduler", 0.01)
    time.sleep(0.05)
    assert second.take("scheduler", 60)
    lab.create()
    lab.sweeps = SweepStore(lab.store, lease)
    lab.driver = SweepDriver(lab.sweeps, lab.studies, plain_submit(lab.store))
    with pytest.raises(LeaseLost):
        lab.drive()
    assert lab.trials() == [] == lab.store.page()[0]


@pytest.mark.full
def test_stores_that_hang_hold_a_few_threads_and_not_the_sweeps_of_others(
    api: RunningApi, store: JobStore, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    responds, submitted = threading.Event(), list[str]()

    async def hangs(spec: Any, context: Any, tenant: str, _then: Any) -> None:
        submitted.append(tenant)
        if tenant == "other":
            raise InvalidJob([])
        await context.stores.run(tenant, "a store", responds.wait)

    monkeypatch.setattr("service.api.routes.sweeps.admitted", hangs)
    context = api.app.state.context
    context = copy(context)
    context.settings = context.settings.model_copy(update={"store_seconds": 0.02})
    for tenant in ("default", "other"):
        context.sweeps.create(SweepRequest.model_validate(request()), Owner(tenant, "tester"))
    before = {thread for thread in threading.enumerate() if thread.name == "store"}
    submit, sweep = trial_submitter(context), context.sweeps.get("rates", "default")

    def submit_often() -> None:
        for _ in range(THREADS_PER_TENANT + 4):
            with pytest.raises(StoreUnavailable):
                submit(sweep, 0, {}, lambda _: None)

    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(submit_often).result()
        hung = {thread for thread in threading.enumerate() if thread.name == "store"} - before
        assert len(hung) == THREADS_PER_TENANT
        lease = Leases(store.engine, "test").take("scheduler", 60)
        submitted.clear()
        monkeypatch.setattr("service.scheduler.sweeps._PUT_OFF", 10_000)
        loop = SweepLoop(store, context.studies, lambda: lease, submit, 0.01)
        loop.start()
        try:
            deadline = time.monotonic() + 30
            while context.sweeps.get("rates", "other").finished_at is None:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            loop.stop()
        assert (submitted.count("default"), submitted.count("other")) == (1, 6)
    finally:
        responds.set()


def test_a_store_that_fails_for_a_moment_refuses_no_trial(
    api: RunningApi, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise problems.pop()

    monkeypatch.setattr("service.api.admission.check_data", fails)
    sweeps, submit = api.app.state.context.sweeps, trial_submitter(api.app.state.context)
    sweep = sweeps.create(SweepRequest.model_validate(request()), Owner("default", "tester"))
    killed, crashed, stale = (SearchFailed("it ended"), SearchFailed("it ended"), UnfitData("data", "cannot look up"))
    killed.__cause__, crashed.__cause__ = CalledProcessError(-9, "search"), CalledProcessError(1, "search")
    stale.__cause__ = OSError(errno.ESTALE, "stale file handle")
    lasting: list[Exception] = [UnfitData("data", "there is no file"), crashed, TooLong("20 s")]
    passing = [StoreUnusable("slow down"), SecretUnusable("missing"), killed, stale]
    problems = [*lasting, *passing]
    with ThreadPoolExecutor(1) as thread:  # a browser's loop may run in this one
        for expected in (*[InvalidJob] * len(passing), *[IllegalTrial] * len(lasting)):
            with pytest.raises(expected):
                thread.submit(submit, sweep, 0, {}, lambda _: None).result()


def test_slow_submissions_of_one_tenant_take_turns_with_the_verdicts_of_others(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.scheduler.sweeps._SUBMIT_SECONDS", 0.01)
    lease = Leases(lab.store.engine, "test").take("scheduler", 60)
    submit, submitted = plain_submit(lab.store), list[str]()

    def slow(sweep: Sweep, *others: Any) -> JobRecord:
        submitted.append(sweep.tenant)
        time.sleep(0.02)
        return submit(sweep, *others)

    for tenant in ("one", "other"):
        lab.sweeps.create(SweepRequest.model_validate(request()), Owner(tenant, "tester"))
    loop = SweepLoop(lab.store, lab.studies, lambda: lease, slow, 0.01)
    loop.start()
    try:
        deadline = time.monotonic() + 30
        while len(lab.store.page()[0]) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        loop.stop()
    assert submitted == ["one", "other"] * 2


@pytest.mark.full
def test_a_submission_that_fails_at_once_is_soon_tried_again_however_long_others_took(lab: Lab) -> None:
    lease = Leases(lab.store.engine, "test").take("scheduler", 60)
    submit, tried = plain_submit(lab.store), list[float]()

    def busy(sweep: Sweep, number: int, *others: Any) -> JobRecord:
        if number == 0:
            time.sleep(1)
            return submit(sweep, number, *others)
        tried.append(time.monotonic())
        raise RuntimeError("another search of this tenant is running")

    lab.create(parallel=2)
    loop = SweepLoop(lab.store, lab.studies, lambda: lease, busy, 0.01)
    loop.start()
    try:
        deadline = time.monotonic() + 30
        while len(tried) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        loop.stop()
    assert tried[1] - tried[0] < 8, "ten times as long as all of the pass"


def test_a_submission_that_hangs_does_not_keep_the_service_from_stopping(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.scheduler.sweeps._STOP_SECONDS", 0.2)
    lease = Leases(lab.store.engine, "test").take("scheduler", 60)
    hangs, responds = threading.Event(), threading.Event()

    def submit(*_: Any) -> JobRecord:
        hangs.set()
        responds.wait()
        raise StoreUnavailable("it does not respond")

    lab.create()
    loop = SweepLoop(lab.store, lab.studies, lambda: lease, submit, 0.01)
    loop.start()
    try:
        assert hangs.wait(30)
        before = time.monotonic()
        loop.stop()
        assert time.monotonic() - before < 5
        assert not responds.is_set()
    finally:
        responds.set()
        loop.stop()


@pytest.mark.full
def test_a_trial_never_has_two_jobs(lab: Lab) -> None:
    sweep = lab.create(parallel=1)
    lab.drive()
    with pytest.raises(IntegrityError):
        lab.driver.submit(sweep, 0, {}, lambda _: None)
    assert len(lab.store.page()[0]) == 1


@pytest.mark.full
def test_a_tenant_has_few_sweeps_at_a_time(lab: Lab) -> None:
    for number in range(MOST_RUNNING):
        lab.create(name=f"sweep-{number}")
    with pytest.raises(SweepConflict, match="which is the maximum; wait, or stop some"):
        lab.create(name="one-more")
