"""Changes of a job while it trains, as its users ask for them: what is taken, what is refused, and what is recorded."""

from typing import Any

import pytest
from sqlalchemy import select

from boost_core.config import JobSpec
from boost_core.config.job import MOST_STEERED
from boost_core.messages import Steer
from service.client import ApiError, Client
from service.jobs.model import JobRecord, Owner
from service.jobs.patch import JobPatch, OptimizerPatch
from service.jobs.store import JobStore
from service.jobs.tables import JobRow
from service.models.access import Scope
from tests.service.command_line import boost_at
from tests.service.conftest import RunningApi, With
from tests.service.records import a_spec, a_step, finish, numbered, start

WSD = {"schedule": "wsd", "decay_steps": 3, "warmup_steps": 2}


def training(store: JobStore, steps_done: int = 3, **changes: Any) -> JobRecord:
    job = start(store, store.create(a_spec(**changes), "/checkpoints").id)
    return store.append_reports(job.id, 1, numbered(a_step(steps_done)))


def makes(store: JobStore, job_id: str, steer: Steer, step: int) -> JobRecord:
    """The gang makes a change after a step."""
    report = steer.made(store.get(job_id).spec, step)[1]
    return store.append_reports(job_id, 1, numbered(report, first=store.last_sequences([job_id])[job_id] + 1))


@pytest.mark.full
@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
def test_a_running_job_is_steered_once_its_gang_says_so(api: RunningApi, store: JobStore) -> None:
    job = training(store)
    with Client(api.url) as client:
        asked = client.patch(job.id, JobPatch(optimizer=OptimizerPatch(learning_rate=1e-4)), if_match=job.etag)
        assert (asked.spec, asked.steers[0].number, asked.steers[0].by) == (job.spec, 1, "anonymous")
        assert asked.etag != job.etag
        client.patch(job.id, {"name": "renamed", "optimizer": {"learning_rate": 1e-4}})
        both = client.patch(job.id, {"training": {"steps": 20}, "checkpoint": {"every_steps": 7}})
        assert [steer.number for steer in both.steers] == [1, 2]
        assert (both.name, both.spec.optimizer, both.spec.training) == (
            "renamed",
            job.spec.optimizer,
            job.spec.training,
        )
        assert not list(client.events(job.id, follow=False, kinds=["steered"]))
        for steer, step in zip(both.steers, (4, 6), strict=True):
            made = makes(store, job.id, steer, step)
        assert (made.steers, made.etag) == ([], both.etag)
        assert [stage.until_step for stage in made.spec.steered] == [4, 6]
        assert (made.spec.optimizer.learning_rate, made.spec.training.steps) == (1e-4, 20)
        assert made.spec.checkpoint.every_steps == 7
        first, second = client.events(job.id, follow=False, kinds=["steered"])
        assert first.data["changes"] == {"optimizer.learning_rate": {"from": 3e-3, "to": 1e-4}}
        assert (second.data["step"], second.data["by"]) == (6, "anonymous")
        assert client.clone(job.id).spec.steered == ()


def test_before_its_first_gang_a_job_is_changed_at_once(api: RunningApi, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    with Client(api.url) as client:
        changed = client.patch(job.id, {"optimizer": WSD, "training": {"evaluate_every_steps": 5}})
        assert (changed.steers, changed.spec.steered) == ([], ())
        assert (changed.spec.optimizer.decay_steps, changed.spec.training.evaluate_every_steps) == (3, 5)
        (event,) = client.events(job.id, follow=False, kinds=["steered"])
        assert (event.data["number"], event.data["step"]) == (0, 0)
        assert event.data["changes"]["optimizer.schedule"] == {"from": "cosine", "to": "wsd"}
        back = client.patch(job.id, {"optimizer": {"schedule": "cosine", "decay_steps": None}})
        assert (back.spec.optimizer.schedule, back.spec.optimizer.decay_steps) == ("cosine", None)


def test_a_clone_takes_what_was_asked_of_the_job_and_steps_instead_of_tokens(api: RunningApi, store: JobStore) -> None:
    job = training(store, training={"tokens": "10K", "sequence_length": 64})
    store.patch(job.id, JobPatch.model_validate({"optimizer": {"learning_rate": 1e-4}}))
    with Client(api.url) as client:
        clone = client.clone(job.id, {"training": {"steps": 20}})
        assert (clone.spec.training.steps, clone.spec.training.tokens) == (20, None)
        assert (clone.spec.optimizer.learning_rate, clone.spec.steered) == (1e-4, ())
        again = client.clone(clone.id, {"training": {"tokens": "10K"}})
        assert (again.spec.training.steps, again.spec.training.tokens) == (10, 10_000)


def test_a_job_that_was_to_train_on_tokens_is_given_steps(store: JobStore) -> None:
    job = training(store, training={"tokens": "10K", "sequence_length": 64})
    assert job.spec.training.steps == 10
    longer = store.patch(job.id, JobPatch.model_validate({"training": {"steps": 11}}))
    made = makes(store, job.id, longer.steers[0], 4)
    assert (made.spec.training.steps, made.spec.training.tokens) == (11, None)
    assert JobSpec.model_validate(made.spec.model_dump(mode="json")).at_step(4).training.steps == 10


def test_a_job_that_takes_a_change_late_or_in_part_can_be_read_again(store: JobStore) -> None:
    sample = {"every_steps": 1, "prompts": ["a"]}
    late = training(store, 990, training={"steps": 2000, "sequence_length": 64})
    late = store.patch(late.id, JobPatch.model_validate({"training": {"steps": 1000, "sample": sample}}))
    made = makes(store, late.id, late.steers[0], 1005)
    assert (made.spec.training.steps, made.spec.training.sample.every_steps) == (1006, 2)
    part = training(store, 990, training={"steps": 1000, "sequence_length": 64, "sample": sample})
    more = {"training": {"steps": 5000, "sample": {"every_steps": 10, "prompts": ["of too many tokens"]}}}
    steer = store.patch(part.id, JobPatch.model_validate(more)).steers[0]
    kept = steer.steering.training.model_copy(update={"sample": part.spec.training.sample})  # as its ranks do then
    steer = steer.model_copy(update={"steering": steer.steering.model_copy(update={"training": kept})})
    assert makes(store, part.id, steer, 995).spec.training.sample.every_steps == 5
    assert len(store.active()) == 2


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"training": {"steps": 3}}, "training.steps", "step 3 is done already; use 4 or more, or cancel the job"),
        ({"training": {"steps": 0}}, "training.steps", "greater than or equal to 1"),
        (
            {"training": {"sequence_length": 8}},
            "training.sequence_length",
            "these can: steps, evaluate_every_steps, sample",
        ),
        ({"optimizer": {"learning_rate": 10}}, "optimizer.learning_rate", "less than 10"),
        ({"optimizer": {"warmup_steps": 11}}, "optimizer.warmup_steps", "does not fit into training.steps=10"),
        ({"optimizer": {"decay_steps": 2}}, "optimizer.decay_steps", "set schedule=wsd"),
        ({"training": {"steps": 4}, "optimizer": WSD}, "optimizer.decay_steps", "shorten one of them"),
        (
            {"training": {"sample": {"every_steps": 1, "prompts": ["x" * 40], "max_new_tokens": 32}}},
            "training.sample.prompts",
            "shorten it",
        ),
        ({"training": {"sample": {"every_steps": 1}}}, "training.sample.prompts", "is missing"),
        ({"optimizer": {"weight_decay": 0.1}}, "optimizer.weight_decay", "cannot be changed in a job that has been"),
    ],
)
def test_what_the_job_cannot_be_is_refused(
    api: RunningApi, store: JobStore, changes: dict[str, Any], field: str, message: str
) -> None:
    job = training(store)
    with Client(api.url) as client, pytest.raises(ApiError) as refused:
        client.patch(job.id, changes)
    assert refused.value.status == 422
    (error,) = [error for error in refused.value.errors if error.field == field]
    assert message in error.message
    assert store.get(job.id) == job


def test_a_job_without_steps_to_do_is_left_alone(api: RunningApi, store: JobStore) -> None:
    saving, ended = training(store, 10), training(store)
    finish(store, ended.id)
    often = training(store)
    spec = often.spec
    for step in range(MOST_STEERED):
        spec = spec.steered_after(step, spec.steering, "", None)
    with store.engine.begin() as connection:
        row = JobRow.__table__
        connection.execute(
            row.update().where(row.c.id == often.id).values(spec=spec.model_dump(mode="json"), version=99)
        )
    with Client(api.url) as client:
        for job, message in (
            (saving, "has done all of its 10 steps; clone it"),
            (ended, "has already SUCCEEDED and cannot be changed"),
            (often, "has been steered 200 times"),
        ):
            with pytest.raises(ApiError, match=message) as refused:
                client.patch(job.id, {"optimizer": {"learning_rate": 1e-4}})
            assert refused.value.status == 409


def test_only_those_who_may_change_a_job_steer_it_and_the_audit_log_says_who(
    client_with: With, store: JobStore
) -> None:
    job = start(store, store.create(a_spec(), "/checkpoints", Owner("lab", "ann")).id)
    changes = {"optimizer": {"learning_rate": 1e-4}}
    bob = client_with(Scope.SUBMIT, tenant="lab", name="bob")
    for other, status in (
        (client_with(Scope.READ, tenant="lab", name="eve"), 403),
        (client_with(Scope.SUBMIT, tenant="other", name="mallory"), 404),
        (bob, 200),
    ):
        assert other.patch(f"/v1/jobs/{job.id}", json=changes).status_code == status
    assert [steer.by for steer in store.get(job.id).steers] == ["bob"]
    entries = client_with(Scope.ADMIN).get("/v1/audit").json()["entries"]
    found = [(entry["key_name"], entry["status"]) for entry in entries if entry["resource"] == f"/v1/jobs/{job.id}"]
    assert found == [("eve", 403), ("mallory", 404), ("bob", 200)]


def test_a_job_that_nobody_steers_is_stored_as_the_release_before_reads_it(store: JobStore) -> None:
    store.create(a_spec(), "/checkpoints")
    with store.engine.connect() as connection:
        spec = connection.execute(select(JobRow.spec)).scalar_one()
    assert "steered" not in spec
    assert not {"tokens", "evaluate_at_start"} & spec["training"].keys()


def test_the_command_line_steers(api: RunningApi, store: JobStore) -> None:
    boost, job = boost_at(api.url), training(store)
    said = boost("steer", job.id, "--set", "optimizer.learning_rate=1e-4", "--set", "training.steps=20")
    assert said.exit_code == 0, said.output
    assert "training.steps from 10 to 20, optimizer.learning_rate from 0.003 to 0.0001" in said.stdout
    assert "waits for its gang" in said.stdout
    (steer,) = store.get(job.id).steers
    assert "optimizer.learning_rate from 0.003 to 0.0001" in boost("show", job.id).stdout
    makes(store, job.id, steer, 5)
    told = boost("events", job.id).stdout
    assert "steered by anonymous: from step 6 on training.steps from 10 to 20" in told
    assert "nothing to change" in boost("steer", job.id).stderr
    refused = boost("steer", job.id, "--set", "priority=3")
    assert (refused.exit_code != 0, "training, optimizer and checkpoint" in refused.stderr) == (True, True)
    refused = boost("steer", job.id, "--set", "training.steps=2")
    assert "step 3 is done already" in refused.stderr
