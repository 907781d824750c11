import copy
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import httpx
import pytest
from httpx_sse import ServerSentEvent, connect_sse

from boost_core.messages import Drill
from service.api.requests import MOST_BODY_BYTES
from service.client import ApiError, Client, ServiceUnreachable
from service.jobs.outlook import Outlook
from service.jobs.patch import JobPatch
from service.jobs.store import JobStore
from service.jobs.writes import MOST_COMMANDS
from tests.service.conftest import RunningApi
from tests.service.records import (
    GOOD,
    a_log_line,
    a_spec,
    a_step,
    finish,
    numbered,
    run_to_the_end,
    start,
)


@pytest.fixture
def http(api: RunningApi) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, timeout=10) as opened:
        yield opened


@pytest.fixture(scope="module")
def refusing(looked_at: RunningApi) -> Iterator[httpx.Client]:
    """A client for the requests that are refused and so leave nothing behind."""
    with httpx.Client(base_url=looked_at.url, timeout=10) as opened:
        yield opened


def problem_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    assert problem["type"].startswith("urn:boost:problem:")
    assert problem["title"]
    assert problem["detail"]
    assert problem["instance"] == response.request.url.path
    return problem


def changed(path: str, value: object) -> dict:
    job = copy.deepcopy(GOOD)
    section = job
    *sections, field = path.split(".")
    for name in sections:
        section = section.setdefault(name, {})
    section[field] = value
    return job


IN_FP8_ON_AMPERE = GOOD | {
    "model": {"preset": "60m"}, "parallelism": {}, "training": {"steps": 1, "precision": "fp8"},
    "resources": {"gpus_per_worker": 1, "accelerator_type": "A100"},
}  # fmt: skip


def without(field: str) -> dict:
    return {name: value for name, value in GOOD.items() if name != field}


def test_submit_show_list_cancel(http: httpx.Client, store: JobStore) -> None:
    created = http.post("/v1/jobs", json=GOOD)
    assert created.status_code == 201, created.text
    record = created.json()
    assert created.headers["location"] == f"/v1/jobs/{record['id']}"
    assert http.get(created.headers["location"]).json() == record
    assert record["state"] == "QUEUED"
    assert record["spec"]["model"]["hidden_size"] == 128
    assert record["checkpoint_url"].endswith(f"/home/checkpoints/default/{record['id']}")
    assert http.get("/v1/jobs").json() == {"jobs": [record], "next_cursor": None}
    cancelled = http.delete(f"/v1/jobs/{record['id']}")
    assert cancelled.status_code == 202
    assert cancelled.json()["state"] == "CANCELLED"
    assert http.delete(f"/v1/jobs/{record['id']}").json() == cancelled.json()


def test_a_finished_job_cannot_be_cancelled(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    run_to_the_end(store, job.id)
    assert "already SUCCEEDED" in problem_of(http.delete(f"/v1/jobs/{job.id}"), 409)["detail"]


def test_pause_and_resume(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    paths = [f"/v1/jobs/{job.id}/{what}" for what in ("pause", "resume")]
    assert "only a paused job" in problem_of(http.post(paths[1]), 409)["detail"]
    for path, state in zip(paths, ("PAUSED", "QUEUED"), strict=True):
        answer = http.post(path)
        assert (answer.status_code, answer.json()["state"]) == (202, state)
    start(store, job.id)
    assert http.post(paths[0]).json()["pause_requested"] is True
    assert http.post(paths[1]).json()["pause_requested"] is False
    finish(store, job.id)
    for path in paths:
        assert problem_of(http.post(path), 409)["type"] == "urn:boost:problem:job-already-finished"


def test_a_patch_changes_what_it_names(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    answer = http.patch(f"/v1/jobs/{job.id}", json={"priority": 3, "data_parallel_size": {"max": 4}})
    assert answer.status_code == 200, answer.text
    assert answer.json() == store.get(job.id).model_dump(mode="json")
    assert answer.json()["spec"]["priority"] == 3
    assert answer.json()["spec"]["elasticity"]["data_parallel_size"] == {"min": 1, "max": 4}
    finish(store, start(store, job.id).id)
    assert "cannot be changed" in problem_of(http.patch(f"/v1/jobs/{job.id}", json={}), 409)["detail"]


BAD_PATCHES = [
    ({"priority": 2000}, "priority", "less than or equal to 1000, not 2000"),
    ({"priority": "high"}, "priority", "not 'high'"),
    ({"prioritty": 2}, "prioritty", "did you mean priority?"),
    ({"credentials": "mine"}, "credentials", "these can: name, priority, data_parallel_size, gpus, group, tags"),
    ({"training": {"precision": "fp32"}}, "training.precision", "these can: steps, evaluate_every_steps, sample"),
    ({"data_parallel_size": {"most": 2}}, "data_parallel_size.most", "known here: min, max"),
    ({"data_parallel_size": {"max": 0}}, "elasticity.data_parallel_size.max", "not 0"),
    ({"gpus": {"max": 9}}, "elasticity.gpus", "change data_parallel_size instead"),
    ({"data_parallel_size": {"min": 9}}, "elasticity.data_parallel_size", "min (9) must not exceed max (1)"),
    ([], "body", "must be a JSON object (Content-Type: application/json)"),
]


@pytest.mark.parametrize(("changes", "field", "message"), BAD_PATCHES, ids=[message for _, _, message in BAD_PATCHES])
def test_a_bad_patch_is_refused_with_its_field_and_the_remedy(
    http: httpx.Client, store: JobStore, changes: object, field: str, message: str
) -> None:
    job = store.create(a_spec(), "/checkpoints")
    problem = problem_of(http.patch(f"/v1/jobs/{job.id}", json=changes), 422)
    assert any(error["field"] == field and message in error["message"] for error in problem["errors"]), problem
    assert store.get(job.id) == job


def test_drills(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    path, drill = f"/v1/jobs/{job.id}/drills", {"kind": "kill_rank", "rank": 1}
    assert "needs a job that is RUNNING" in problem_of(http.post(path, json=drill), 409)["detail"]
    start(store, job.id)
    answer = http.post(path, json=drill)
    assert answer.status_code == 202
    assert [asked["rank"] for asked in answer.json()["commands"]] == [1]
    problem = problem_of(http.post(path, json=drill | {"rank": 2}), 422)
    assert [(error["field"], error["value"]) for error in problem["errors"]] == [("rank", 2)]
    assert problem_of(http.post(path, json=drill | {"rnk": 2}), 422)["errors"][0]["message"].endswith(
        "did you mean rank?"
    )
    assert "kind" in problem_of(http.post(path, json={"kind": "flood"}), 422)["detail"]
    assert "with at least kind" in problem_of(http.post(path), 422)["detail"]
    problem_of(http.post("/v1/jobs/job-0/drills", json=drill), 404)
    problem_of(http.patch("/v1/jobs/job-0", json={"priority": 1}), 404)


def test_profiles(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    path = f"/v1/jobs/{job.id}/profiles"
    assert "a profile needs a job that is RUNNING" in problem_of(http.post(path, json={}), 409)["detail"]
    start(store, job.id)
    answer = http.post(path, json={})
    assert (answer.status_code, answer.json()["commands"]) == (202, [{"kind": "profile", "steps": 3, "ranks": [0]}])
    problem = problem_of(http.post(path, json={"ranks": [0, 2]}), 422)
    assert [(error["field"], error["value"]) for error in problem["errors"]] == [("ranks", 2)]
    assert "2 is not a rank of a gang of tp 2" in problem["detail"]
    wrong: dict[str, dict[str, object]] = {
        "steps": {"steps": 21}, "ranks": {"ranks": []}, "ranks[1]": {"ranks": [0, -1]},
        "ranks[2]": {"ranks": [0, 1, "1"]}, "stps": {"stps": 3},
    }  # fmt: skip
    for field, body in wrong.items():
        assert [error["field"] for error in problem_of(http.post(path, json=body), 422)["errors"]] == [field]
    key = {"Idempotency-Key": "once"}
    answers = [http.post(path, json={"steps": 2}, headers=key) for _ in range(2)]
    assert [len(answer.json()["commands"]) for answer in answers] == [2, 2]
    for _ in range(MOST_COMMANDS - 2):
        assert http.post(path, json={}).status_code == 202
    problem = problem_of(http.post(path, json={}), 409)
    assert f"{MOST_COMMANDS} drills and profiles wait for its gang; try again in some seconds" in problem["detail"]
    store.take_commands(job.id)
    assert http.post(path, json={}).status_code == 202
    problem_of(http.post("/v1/jobs/job-0/profiles", json={}), 404)


def test_jobs_are_listed_by_state_and_page(http: httpx.Client, store: JobStore) -> None:
    ids = [store.create(a_spec(), "/checkpoints").id for _ in range(3)]
    start(store, ids[1])
    page = http.get("/v1/jobs", params={"limit": 2}).json()
    assert [job["id"] for job in page["jobs"]] == [ids[2], ids[1]]
    rest = http.get("/v1/jobs", params={"limit": 2, "cursor": page["next_cursor"]}).json()
    assert [job["id"] for job in rest["jobs"]] == [ids[0]]
    assert rest["next_cursor"] is None
    chosen = http.get("/v1/jobs", params={"state": ["RUNNING", "FAILED"]}).json()
    assert [job["id"] for job in chosen["jobs"]] == [ids[1]]


BAD = [
    (without("name"), "name", "is missing"),
    (without("model"), "model", "is missing"),
    (without("training"), "training", "is missing"),
    (changed("name", ""), "name", "at least 1 character"),
    (changed("name", 7), "name", "must be a string, not 7"),
    (changed("name", "-x"), "name", "pattern"),
    (changed("modle", {}), "modle", "did you mean model?"),
    (changed("owner", "me"), "owner", "known here: name, model"),
    (changed("model", "tiny"), "model", "must be an object"),
    (changed("model", {}), "model.hidden_size", "is missing"),
    (changed("model.preset", "huge"), "model.preset", "choose one of tiny"),
    (changed("model.hiden_size", 64), "model.hiden_size", "did you mean hidden_size?"),
    (changed("model.rank", 129), "model.rank", "hidden_size/4=32"),
    (changed("model.rank", 0), "model.rank", "greater than or equal to 1, not 0"),
    (changed("model.rank", "many"), "model.rank", "not 'many'"),
    (changed("model.rank", None), "model.rank", "hidden_size/4=32"),
    (changed("model.num_attention_heads", 5), "model.num_attention_heads", "does not split into 5 heads"),
    (changed("model.num_key_value_heads", 3), "model.num_key_value_heads", "choose a divisor of 4"),
    (changed("model.vocab_size", 100), "model.vocab_size", "use at least 256"),
    (
        changed("parallelism.tensor_parallel_size", 3),
        "parallelism.tensor_parallel_size",
        "use 1, 2, 4",
    ),
    (changed("parallelism.tensor_parallel_size", 1.5), "parallelism.tensor_parallel_size", "not 1.5"),
    (changed("parallelism.tp", 2), "parallelism.tp", "known here: tensor_parallel_size"),
    (changed("parallelism.pipeline_parallel_size", 32), "parallelism.pipeline_parallel_size", "use fewer stages"),
    (changed("training.global_batch_size", 24), "training.global_batch_size", "such as 32"),
    (changed("training.steps", 0), "training.steps", "not 0"),
    (changed("training.steps", 10**30), "training.steps", "less than or equal to 100000000"),
    (changed("training.precision", "fp16"), "training.precision", "'fp32', 'bf16' or 'fp8', not 'fp16'"),
    (IN_FP8_ON_AMPERE, "training.precision", "A100 GPUs have no 8-bit products"),
    (changed("optimizer.warmup_steps", 11), "optimizer.warmup_steps", "training.steps=10"),
    (changed("optimizer.learning_rate", -1), "optimizer.learning_rate", "greater than 0, not -1"),
    (changed("optimizer.betas", [0.9, 2]), "optimizer.betas[1]", "less than 1, not 2"),
    (changed("data.source.paths", ["/nowhere/at/all"]), "data.source.paths", "there is no file at '/nowhere/at/all'"),
    (changed("data.source.paths", ["\u0000"]), "data.source.paths", "check the path"),
    (changed("data.source.paths", []), "data.source.paths", "at least one path"),
    (changed("data.source.paths", ["ftp://x/y"]), "data.source.paths", "file://, s3:// or hf://"),
    (changed("data.source.kind", "standard_library"), "data.source.paths", "use kind=text"),
    (changed("training.sequence_length", 1_048_576), "data.source.paths", "too little for one sequence"),
    (changed("checkpoint.url", "gopher://x"), "checkpoint.url", "file:// or s3://"),
    (changed("checkpoint.every_steps", "often"), "checkpoint.every_steps", "not 'often'"),
    (changed("resources.gpus_per_worker", 2), "resources.gpus_per_worker", "0 or 1, not 2"),
    (changed("fault_tolerance", {"max_restarts": -1}), "fault_tolerance.max_restarts", "not -1"),
    (changed("elasticity", {"data_parallel_size": {"min": 2}}), "elasticity.data_parallel_size.max", "is missing"),
    (changed("elasticity", {"data_parallel": {}}), "elasticity.data_parallel", "did you mean data_parallel_size?"),
    (
        changed("elasticity.data_parallel_size", {"max": 2, "mn": 1}),
        "elasticity.data_parallel_size.mn",
        "did you mean min?",
    ),
    (changed("data.source.path", "x"), "data.source.path", "did you mean paths?"),
    (changed("data.mixture", [{"kind": "text", "weigth": 1}]), "data.mixture[0].weigth", "did you mean weight?"),
    ([], "body", "must be a JSON object with at least name, model, training"),
    ("job", "body", "must be a JSON object"),
    (None, "body", "must be a JSON object"),
]


@pytest.mark.parametrize(("job", "field", "message"), BAD, ids=[f"{field}: {message}" for _, field, message in BAD])
def test_a_bad_job_is_refused_with_its_field_and_the_remedy(
    refusing: httpx.Client, job: object, field: str, message: str
) -> None:
    problem = problem_of(refusing.post("/v1/jobs", content=json.dumps(job), headers=JSON), 422)
    messages = [error["message"] for error in problem["errors"] if error["field"] == field]
    assert any(message in text for text in messages), problem
    assert field in problem["detail"]


JSON = {"Content-Type": "application/json"}

BAD_BODIES = [
    (b"", "body", "must be a JSON object"),
    (b"{", "body", "is not JSON"),
    (b"\xff\xfe", "body", "send it in UTF-8"),
    (b'{"name": NaN}', "body", "NaN is not a valid JSON number"),
    (b'{"model": {"rope_theta": Infinity}}', "body", "Infinity is not a valid JSON number"),
    (b'{"model": {"rope_theta": 1e999}}', "body", "too large"),
    (b'{"training": {"steps": 1' + b"0" * 5000 + b"}}", "body", "is too long"),
    (b"[" * 30_000, "body", "nested too deeply"),
    (b"[" * 100_000, "body", "has more than 40000 values"),
    (b'{"a": "' + b"[" * 100_000, "body", "is not JSON"),
    (json.dumps({f"f{number}": 1 for number in range(12_001)}).encode(), "body", "values or 12000 fields"),
    (b'{"\\ud800": 1}', "body", "surrogates"),
    (json.dumps(changed("checkpoint.url", "\ud800")).encode(), "body", "surrogates"),
]


@pytest.mark.parametrize(("body", "field", "message"), BAD_BODIES, ids=range(len(BAD_BODIES)))
def test_a_bad_body_is_refused(refusing: httpx.Client, body: bytes, field: str, message: str) -> None:
    problem = problem_of(refusing.post("/v1/jobs", content=body, headers=JSON), 422)
    assert any(error["field"] == field and message in error["message"] for error in problem["errors"]), problem


def test_a_body_that_does_not_say_that_it_is_json_is_refused(refusing: httpx.Client) -> None:
    body = json.dumps(GOOD).encode()
    problem = problem_of(refusing.post("/v1/jobs", content=body, headers={"Content-Type": "text/plain"}), 422)
    assert "Content-Type: application/json" in problem["detail"]


def test_a_body_that_is_too_large_is_refused(refusing: httpx.Client) -> None:
    body = json.dumps(changed("name", "x" * MOST_BODY_BYTES)).encode()
    assert "send less" in problem_of(refusing.post("/v1/jobs", content=body, headers=JSON), 413)["detail"]
    chunks = (b" " * 65_536 for _ in range(32))
    problem_of(refusing.post("/v1/jobs", content=chunks, headers=JSON), 413)


@pytest.mark.parametrize(
    ("query", "field"),
    [("limit=0", "limit"), ("limit=501", "limit"), ("state=LOST", "state[0]"), ("sate=QUEUED", "sate")],
)
def test_a_bad_query_is_refused(refusing: httpx.Client, query: str, field: str) -> None:
    problem = problem_of(refusing.get(f"/v1/jobs?{query}"), 422)
    assert [error["field"] for error in problem["errors"]] == [field]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/jobs/job-0", 404),
        ("DELETE", "/v1/jobs/job-0", 404),
        ("POST", "/v1/jobs/job-0/pause", 404),
        ("POST", "/v1/jobs/job-0/resume", 404),
        ("GET", "/v1/jobs/job-0/events", 404),
        ("GET", "/v1/nothing", 404),
        ("PUT", "/v1/jobs", 405),
        ("POST", "/healthz", 405),
    ],
)
def test_other_errors_are_problems_too(refusing: httpx.Client, method: str, path: str, status: int) -> None:
    response = refusing.request(method, path)
    problem_of(response, status)
    assert (status == 405) == ("allow" in response.headers)


def test_a_failure_inside_is_a_problem_that_gives_nothing_away(http: httpx.Client, api: RunningApi) -> None:
    @api.app.get("/broken")
    def broken() -> None:
        raise RuntimeError("the password is 1234")

    response = http.get("/broken")
    problem_of(response, 500)
    assert "1234" not in response.text


def test_health_and_readiness(http: httpx.Client, api: RunningApi) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready"}
    api.outlook = Outlook(problem="Ray has no node")
    assert problem_of(http.get("/readyz"), 503)["detail"] == "Ray has no node"
    assert http.get("/healthz").status_code == 200


def test_a_record_says_what_of_it_is_old_and_why_nothing_starts(
    http: httpx.Client, api: RunningApi, store: JobStore
) -> None:
    waits, trains, paused = (store.create(a_spec(), "/checkpoints").id for _ in range(3))
    start(store, trains)
    store.request_pause(paused)
    fine = http.get(f"/v1/jobs/{trains}").json()
    assert fine["last_seen"] is None
    now = datetime.now(UTC)
    api.outlook = Outlook("Ray cannot be reached: no head", now - timedelta(seconds=10))
    assert http.get(f"/v1/jobs/{trains}").json() == fine, "a moment ago is as good as now"
    api.outlook = Outlook("Ray cannot be reached: no head", now - timedelta(minutes=4))
    for found in (
        {job["id"]: job for job in http.get("/v1/jobs").json()["jobs"]},
        {job_id: http.get(f"/v1/jobs/{job_id}").json() for job_id in (waits, trains, paused)},
    ):
        assert datetime.fromisoformat(found[trains]["last_seen"]) == now - timedelta(minutes=4)
        assert found[trains]["waiting_for"] == "Ray cannot be reached: no head"
        assert found[trains]["message"] == fine["message"]
        assert found[waits]["waiting_for"] == "nothing is scheduled at present: Ray cannot be reached: no head"
        assert (found[waits]["last_seen"], found[paused]["waiting_for"], found[paused]["last_seen"]) == (None,) * 3
    assert "nothing is scheduled" in http.post("/v1/jobs", json=GOOD).json()["waiting_for"]
    assert "nothing is scheduled" in http.post(f"/v1/jobs/{paused}/resume").json()["waiting_for"]
    api.outlook = Outlook(unseen={trains: now - timedelta(seconds=50)})
    job = http.get(f"/v1/jobs/{trains}").json()
    assert datetime.fromisoformat(job["last_seen"]) == now - timedelta(seconds=50)
    assert job["waiting_for"] == "its gang does not answer the scheduler"
    assert http.get(f"/v1/jobs/{waits}").json()["waiting_for"] is None
    assert store.get(trains).waiting_for is None, "nothing of this is recorded"


def test_openapi_documents_problems(refusing: httpx.Client) -> None:
    openapi = refusing.get("/openapi.json").json()
    answers = openapi["paths"]["/v1/jobs"]["post"]["responses"]
    guarded = {"401", "403", "414", "429", "503", "507"}
    assert set(answers) == guarded | {"201", "413", "422"}
    job = openapi["paths"]["/v1/jobs/{job_id}"]
    assert set(job["delete"]["responses"]) == guarded | {"202", "404", "409", "422"}
    assert set(job["patch"]["responses"]) == guarded | {"200", "404", "409", "412", "413", "422"}
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    assert answers["422"]["content"] == problem
    assert openapi["paths"]["/v1/jobs/{job_id}/events"]["get"]["responses"]["404"]["content"] == problem
    assert "HTTPValidationError" not in openapi["components"]["schemas"]


# Events


def stream(http: httpx.Client, job_id: str, query: str = "", **headers: str) -> list[ServerSentEvent]:
    with connect_sse(http, "GET", f"/v1/jobs/{job_id}/events{query}", headers=headers) as source:
        return list(source.iter_sse())


def test_events_of_a_finished_job(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    run_to_the_end(store, job.id)
    sent = stream(http, job.id)
    stored = store.events(job.id)
    assert [int(event.id) for event in sent] == [event.id for event in stored]
    assert [event.event for event in sent] == [event.kind for event in stored]
    assert [event.json() for event in sent] == [event.model_dump(mode="json") for event in stored]
    assert sent[-1].json()["data"]["state"] == "SUCCEEDED"


@pytest.mark.parametrize("how", ["header", "query"])
def test_events_resume_after_the_last_one_seen(http: httpx.Client, store: JobStore, how: str) -> None:
    job = store.create(a_spec(), "/checkpoints")
    run_to_the_end(store, job.id)
    ids = [event.id for event in store.events(job.id)]
    if how == "header":
        sent = stream(http, job.id, "?after=1", **{"Last-Event-ID": str(ids[4])})
    else:
        sent = stream(http, job.id, f"?after={ids[4]}")
    assert [int(event.id) for event in sent] == ids[5:]
    assert stream(http, job.id, f"?after={ids[-1]}") == []
    assert stream(http, job.id, "?after=999999") == []


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "9" * 30])
def test_a_malformed_event_id_is_refused(http: httpx.Client, store: JobStore, last: str) -> None:
    job = store.create(a_spec(), "/checkpoints")
    path = f"/v1/jobs/{job.id}/events"
    problem = problem_of(http.get(path, headers={"Last-Event-ID": last}), 422)
    assert problem["errors"][0]["field"].lower() == "last-event-id"
    assert problem_of(http.get(f"{path}?after={last}"), 422)["errors"][0]["field"] == "after"


def test_without_follow_the_stream_ends_at_once(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    start(store, job.id)
    assert len(stream(http, job.id, "?follow=false")) == 4


def test_following_shows_what_happens_and_ends_with_the_job(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    with connect_sse(http, "GET", f"/v1/jobs/{job.id}/events") as source:
        sent = source.iter_sse()
        assert next(sent).json()["data"]["state"] == "QUEUED"
        start(store, job.id)
        assert [event.json()["data"]["state"] for event in islice(sent, 3)][-1] == "RUNNING"
        store.append_reports(job.id, 1, numbered(*(a_step(step) for step in range(1, 4)), a_log_line("hello [/]")))
        finish(store, job.id)
        assert [event.event for event in sent] == ["progress", "progress", "progress", "log", "state"]


def test_thousands_of_events_come_in_order(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    start(store, job.id)
    store.append_reports(job.id, 1, numbered(*(a_log_line(str(number)) for number in range(2500))))
    finish(store, job.id)
    lines = [event.json()["data"]["message"] for event in stream(http, job.id) if event.event == "log"]
    assert lines == [str(number) for number in range(2500)]


def test_a_client_that_goes_away_ends_its_stream(http: httpx.Client, api: RunningApi, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    with connect_sse(http, "GET", f"/v1/jobs/{job.id}/events") as source:
        sent = source.iter_sse()  # dropping it would end the stream already
        next(sent)
        assert len(api.server.server_state.tasks) == 1
    deadline = time.monotonic() + 5
    while api.server.server_state.tasks:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_server_stops_with_open_streams(http: httpx.Client, api: RunningApi, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    with connect_sse(http, "GET", f"/v1/jobs/{job.id}/events") as source:
        sent = source.iter_sse()
        next(sent)
        assert api.stop() < 3
        assert list(sent) == []


# The client


def test_the_client_submits_and_looks(client: Client, store: JobStore) -> None:
    first, second = client.submit(GOOD), client.submit(a_spec(name="other"))
    assert client.get(first.id) == first
    assert first.model_dump() == store.get(first.id).model_dump()
    assert client.list(limit=1).jobs == [second]
    assert client.list(states=["RUNNING"]).jobs == []
    assert client.pause(first.id).state == "PAUSED"
    assert client.resume(first.id).state == "QUEUED"
    assert client.patch(first.id, JobPatch(priority=2)).spec.priority == 2
    assert client.patch(first.id, {"name": "renamed"}).name == "renamed"
    with pytest.raises(ApiError, match="a drill needs a job that is RUNNING"):
        client.drill(first.id, Drill(kind="kill_rank"))
    assert client.cancel(first.id).finished
    with pytest.raises(ApiError, match="rank: 129 is above") as caught:
        client.submit(changed("model.rank", 129))
    assert (caught.value.status, [error.field for error in caught.value.errors]) == (422, ["model.rank"])
    with pytest.raises(ApiError, match="no job 'job-0'"):
        client.get("job-0")


def test_the_client_follows_across_a_restart_of_the_service(client: Client, api: RunningApi, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    start(store, job.id)
    events = client.events(job.id)
    seen = list(islice(events, 4))

    def restart() -> None:
        api.stop()
        store.append_reports(job.id, 1, numbered(a_step(1)))
        finish(store, job.id)
        api.start()

    restarting = threading.Thread(target=restart)
    restarting.start()
    seen += events
    restarting.join()
    assert seen == store.events(job.id)


def test_the_client_overhears_keep_alives(client: Client, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastapi.routing._PING_INTERVAL", 0.05)
    job = store.create(a_spec(), "/checkpoints")
    events = client.events(job.id)
    seen = [next(events)]
    threading.Timer(0.4, store.request_cancel, [job.id]).start()
    seen += events
    assert seen == store.events(job.id)


def test_the_client_says_what_to_do_when_nothing_answers(unused_url: str) -> None:
    with (
        Client(unused_url, retry_seconds=0) as client,
        pytest.raises(ServiceUnreachable, match="is `boost serve` running"),
    ):
        client.list()
    for address in ("localhost:8900", "http://[::1"):
        with pytest.raises(ValueError, match="not the URL of a service"):
            Client(address)


def test_the_api_imports_neither_torch_nor_ray() -> None:
    code = "import sys, service.api.app, service.cli.main; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
