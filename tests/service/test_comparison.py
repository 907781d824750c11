"""Jobs side by side: their results, and in what their specs differ, on both databases."""

import csv
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from boost_core.config import JobSpec, Layout
from service.accounts.keys import KeyStore
from service.client import Client
from service.jobs.comparison import differing_fields, gpu_hours_of
from service.jobs.model import Owner
from service.jobs.queries import results_of
from service.jobs.states import Reason
from service.jobs.store import JobStore
from service.models.access import Scope
from service.models.jobs import csv_of
from tests.service.command_line import boost_at, job_file
from tests.service.conftest import RunningApi
from tests.service.records import GOOD, a_shape, a_spec, a_step, an_evaluation, start


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return request.param


def test_only_what_differs_is_listed_by_its_path_and_what_only_follows_is_told_apart() -> None:
    before = a_spec(model={"preset": "60m"}, tags=["a", "b"], data={"validation": []})
    after = a_spec(
        model={"preset": "130m", "rank": 96},
        tags=["a"],
        data={"validation": [{"name": "books", "kind": "text", "paths": ["b.txt"]}]},
        resources={"node_labels": {"pool": "x"}},
    )
    fields = {each.field: each for each in differing_fields([before, after])}
    submitted = {field: each.values for field, each in fields.items() if each.submitted}
    assert submitted["model.preset"] == ["60m", "130m"]
    assert submitted["model.rank"] == [before.model.rank, 96]
    assert submitted["tags"] == [["a", "b"], ["a"]]
    assert submitted["data.validation[0].name"] == [None, "books"]
    assert submitted["resources.node_labels.pool"] == [None, "x"]
    follows = {field: each.values for field, each in fields.items() if not each.submitted}
    assert follows["model.hidden_size"] == [before.model.hidden_size, after.model.hidden_size]
    assert not [field for field in fields if field.startswith(("training", "optimizer", "name"))]
    assert differing_fields([before, before]) == []


def test_the_shards_of_a_dataset_are_not_its_users() -> None:
    def job(**written: object) -> JobSpec:
        return a_spec(data={"mixture": [{"dataset": "my-txt", "weight": 1.0, **written}]})

    first, second = (job(kind="tokenized", paths=[f"/datasets/{each}"]) for each in "ab")
    fields = differing_fields([job(), first]) + differing_fields([first, second])
    assert [(each.field, each.submitted) for each in fields] == 2 * [("data.mixture[0].paths", False)]


def test_layouts_that_the_service_has_chosen_are_not_its_users() -> None:
    job = a_spec(elasticity={"layouts": "auto", "gpus": {"min": 1, "max": 2}}, parallelism={})
    (field,) = differing_fields([job.with_layouts((Layout(1, 1, 1),)), job.with_layouts((Layout(2, 1, 1),))])
    assert (field.field, field.values, field.submitted) == ("elasticity.resolved", [[[1, 1, 1]], [[2, 1, 1]]], False)


def test_what_was_steered_is_shown_with_what_held_at_first(api: RunningApi, store: JobStore, tmp_path: Path) -> None:
    def steered(spec: JobSpec, until_step: int) -> JobSpec:
        faster = spec.steering.model_copy(
            update={"optimizer": spec.steering.optimizer.model_copy(update={"learning_rate": 0.02})}
        )
        return spec.steered_after(until_step, faster, "ci", None)

    slow, fast = a_spec(), a_spec(optimizer={"learning_rate": 0.02})
    (field,) = differing_fields([steered(slow, 3), fast])
    assert (field.values, field.values_at_first, field.submitted) == ([0.02, 0.02], [0.003, 0.02], True)
    assert differing_fields([steered(slow, 0), fast]) == []  # before its first step
    ids = [store.create(spec, "/checkpoints").id for spec in (steered(slow, 3), fast)]
    for command in ("diff", "compare"):
        shown = boost_at(api.url)(command, *ids, COLUMNS="200").stdout
        assert "optimizer.learning_rate" in shown and shown.count("0.02") == 2 and shown.count("(from 0.003)") == 1


def test_two_jobs_and_job_files_are_compared(api: RunningApi, store: JobStore, tmp_path: Path) -> None:
    job = store.create(a_spec(), "/checkpoints")
    clone = store.create(a_spec(name="longer", training={"steps": 500, "sequence_length": 64}), "/checkpoints")
    with Client(api.url) as client:
        result = client.diff(job.id, clone.id)
    assert result.jobs == [job.id, clone.id]
    assert {each.field: each.values for each in result.fields} == {
        "name": ["tiny", "longer"],
        "training.steps": [10, 500],
    }
    boost = boost_at(api.url)
    assert json.loads(boost("diff", job.id, clone.id, "--json").stdout) == result.model_dump(mode="json")
    file = job_file(tmp_path, GOOD | {"model": {"preset": "60m"}})
    shown = boost("diff", file, job.id).stdout
    names, rows = shown.splitlines()[:2], [line.split() for line in shown.splitlines()]
    assert names == [f"A  {file}", f"B  {job.id}"]
    assert ["FIELD", "A", "B"] in rows and ["model.preset", "60m", "tiny"] in rows  # a line each, also at 80 columns
    assert "model.preset" in shown.split("FOLLOWS FROM THESE")[0]
    assert "model.hidden_size" in shown.split("FOLLOWS FROM THESE")[1]
    assert boost("diff", job.id, job.id).stdout == "no field differs\n"
    missing = boost("diff", job.id, str(tmp_path / "absent.yaml"))
    assert (missing.exit_code, "absent.yaml" in missing.stderr) == (2, True)


def test_other_tenants_jobs_are_not_compared_with(guarded: RunningApi, store: JobStore) -> None:
    ours, theirs = (
        store.create(a_spec(name=name, group="g"), "/checkpoints", Owner(name, "x")) for name in ("ours", "theirs")
    )
    headers = {"Authorization": f"Bearer {KeyStore(store.engine).create('k', 'ours', [Scope.READ], None).key}"}
    compare = httpx.get(f"{guarded.url}/v1/jobs/compare", params={"job": [ours.id, theirs.id]}, headers=headers)
    assert (compare.status_code, compare.json()["code"]) == (404, "job-not-found")
    of_group = httpx.get(f"{guarded.url}/v1/jobs/compare", params={"group": "g", "tenant": "theirs"}, headers=headers)
    assert [job["name"] for job in of_group.json()["jobs"]] == ["ours"]
    for first, second in ((ours, theirs), (theirs, ours)):
        answer = httpx.get(f"{guarded.url}/v1/jobs/{first.id}/diff/{second.id}", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (404, "job-not-found")


def test_jobs_that_have_not_succeeded_say_why(api: RunningApi, store: JobStore) -> None:
    ids = [store.create(a_spec(), "/checkpoints").id for _ in range(2)]
    store.request_cancel(ids[0], "pruned as trial 3 of sweep rates")
    with Client(api.url) as client:
        assert [job.message for job in client.compare(ids).jobs] == ["pruned as trial 3 of sweep rates", None]
    assert "pruned as trial 3 of sweep rates" in boost_at(api.url)("compare", *ids, COLUMNS="200").stdout


T0 = datetime(2026, 1, 1, tzinfo=UTC)


def a_run(store: JobStore, name: str, rate: float, *losses: float) -> str:
    """A job on two GPUs for an hour, then on four for half an hour, which from then on only keeps its state."""
    optimizer = {"learning_rate": rate}
    job = store.create(a_spec(name=name, group="rates", optimizer=optimizer, resources={"gpus_per_worker": 1}), "/c")
    store.change(job.id, Reason.HEAD_OF_QUEUE, "is next")
    store.change(job.id, Reason.GANG_STARTING, "2 workers start", attempt=1)
    store.append_reports(job.id, 1, [(1, T0, a_shape())])
    store.change(job.id, Reason.GANG_STARTING, "loading the data and the model")
    store.change(job.id, Reason.GANG_STARTED, "2 workers train")
    reports = [
        (60, a_shape().model_copy(update={"data_parallel_size": 2})),
        *((61 + step, an_evaluation(step, loss)) for step, loss in enumerate(losses)),
        (80, a_step(10, loss=losses[-1] if losses else float("nan"))),
        (90, a_shape().model_copy(update={"keeps": True})),
    ]
    numbered = [(number + 2, T0 + timedelta(minutes=at), report) for number, (at, report) in enumerate(reports)]
    store.append_reports(job.id, 1, numbered)
    store.change(job.id, Reason.TRAINING_FINISHED, "done")
    return job.id


def test_jobs_are_compared_by_any_result(api: RunningApi, store: JobStore) -> None:
    low, high = a_run(store, "low", 0.001, 3.0, 2.5, 2.75), a_run(store, "high", 0.01, float("nan"), 4.0)
    waiting = store.create(a_spec(name="waiting", group="rates", resources={"gpus_per_worker": 1}), "/c").id
    with Client(api.url) as client:
        both = client.compare([low, high], sort="final_loss", descending=True)
        assert [job.id for job in both.jobs] == [high, low]
        assert [(job.final_loss, job.best_validation_loss) for job in both.jobs] == [(4.0, 4.0), (2.75, 2.5)]
        assert [job.gpu_hours for job in both.jobs] == pytest.approx([4.0, 4.0])
        assert [(each.field, each.values) for each in both.fields] == [("optimizer.learning_rate", [0.01, 0.001])]
        for descending, first in ((False, [low, high]), (True, [high, low])):
            sorted_ = client.compare(group="rates", sort="best_validation_loss", descending=descending)
            assert [job.id for job in sorted_.jobs] == [*first, waiting]  # without the result: last
        assert client.compare([waiting]).jobs[0].seconds is None
        assert client.compare(group="others").jobs == []


def test_a_gang_that_waits_for_lost_workers_uses_no_gpu_hours(store: JobStore) -> None:
    job = store.create(a_spec(resources={"gpus_per_worker": 1}), "/c")
    start(store, job.id)
    now, hour = datetime.now(UTC), timedelta(hours=1)
    store.append_reports(job.id, 1, [(1, now - hour, a_shape())])
    store.change(job.id, Reason.GANG_RECOVERING, "node a was lost")
    store.change(job.id, Reason.WAITING_FOR_RESOURCES, "waits for 2 × {GPU: 1}")
    store.append_reports(job.id, 1, [(2, now + 5 * hour, a_shape())])
    with Session(store.engine) as session:
        _, ranks = results_of(session, [job.id])
    assert gpu_hours_of(store.get(job.id), ranks[job.id], now + 6 * hour) == pytest.approx(2 + 2, rel=0.01)


def test_results_are_of_the_whole_run_and_of_the_job_alone(api: RunningApi, store: JobStore) -> None:
    job = store.create(a_spec(), "/c")
    start(store, job.id)
    each = job.spec.training.global_batch_size * job.spec.training.sequence_length
    # It goes on from step 40 of another job. The last batch was slow, and an easy one.
    losses = [9.0] * 10 + [4.0] * 19 + [2.0]
    reports = [a_shape()] + [
        a_step(step, tokens=step * each, loss=loss, step_seconds=1.0, steps=99, tokens_per_second=float(70 - step))
        for step, loss in enumerate(losses, 41)
    ]
    begin = job.submitted_at
    numbered = [(number, begin + timedelta(seconds=number), report) for number, report in enumerate(reports, 1)]
    store.append_reports(job.id, 1, numbered)
    with Client(api.url) as client:
        (result,) = client.compare([job.id]).jobs
    assert result.tokens == 30 * each
    assert result.tokens_per_second == pytest.approx(each, rel=0.05)
    assert result.final_loss == pytest.approx((19 * 4.0 + 2.0) / 20)
    (cells,) = boost_at(api.url)("compare", job.id, COLUMNS="160").stdout.splitlines()[1:2]
    assert cells.split()[2:6] == ["3.9000", "-", f"{result.tokens_per_second:,.0f}", f"{30 * each:,}"]


def test_the_command_line_compares(api: RunningApi, store: JobStore) -> None:
    ids = a_run(store, "low", 0.001, 2.5), a_run(store, "high", 0.01, 4.0)
    boost = boost_at(api.url)
    shown = boost("compare", *ids, "--sort", "best_validation_loss", "--descending", COLUMNS="160").stdout.splitlines()
    assert shown[0].split() == [
        "JOB", "STATE", "LOSS", "VALIDATION", "TOKENS/S", "TOKENS", "TIME", "GPU-HOURS", "optimizer.learning_rate"
    ]  # fmt: skip
    assert (shown[1].split()[:4], shown[1].split()[-2:]) == (
        ["high", "SUCCEEDED", "4.0000", "4.0000"], ["4.00", "0.01"]
    )  # fmt: skip
    table = [*csv.DictReader(boost("compare", "--group", "rates", "--csv").stdout.splitlines())]
    assert [(row["id"], row["best_validation_loss"], row["optimizer.learning_rate"]) for row in table] == [
        (ids[1], "4.0", "0.01"), (ids[0], "2.5", "0.001")
    ]  # fmt: skip
    assert json.loads(boost("compare", *ids, "--json").stdout)["jobs"][0]["id"] == ids[0]
    found = json.loads(boost("compare", "--search", "HIGH", "--json").stdout)["jobs"]
    assert [job["id"] for job in found] == [ids[1]]
    none = boost("compare", "--tag", "none")
    assert (none.exit_code, none.stdout, "no job fits these options" in none.stderr) == (1, "", True)
    assert "give the jobs' IDs" in boost("compare").stderr
    assert boost("compare", *ids, "--sort", "luck").exit_code == 2


def test_a_spreadsheet_calculates_no_text_of_a_job() -> None:
    (row,) = csv.reader([csv_of([('=HYPERLINK("x")', "@a", -1, ["=a"], "text", None)])])
    assert row == ['\'=HYPERLINK("x")', "'@a", "-1", '["=a"]', "text", ""]


@pytest.fixture
def statements(store: JobStore) -> Iterator[list[tuple[str, object]]]:
    seen: list[tuple[str, object]] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: object, *_: object) -> None:
        seen.append((statement, parameters))

    event.listen(store.engine, "before_cursor_execute", note)
    yield seen
    event.remove(store.engine, "before_cursor_execute", note)


def test_results_are_read_without_the_events_of_steps(
    api: RunningApi, store: JobStore, statements: list[tuple[str, object]], database: str
) -> None:
    job = a_run(store, "low", 0.001, 2.5)
    with Client(api.url) as client:
        client.compare([job])
    reads = [each for each in statements if "kind IN" in each[0] and each[0].startswith("SELECT")]
    explain = "EXPLAIN QUERY PLAN " if database == "sqlite" else "EXPLAIN "
    with store.engine.connect() as connection:
        if database == "postgresql":
            connection.exec_driver_sql("SET enable_seqscan = off")
        plans = [str(connection.exec_driver_sql(explain + statement, values).all()) for statement, values in reads]
    assert ["ix_events_results" in plan for plan in plans] == [True, True], plans
