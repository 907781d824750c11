"""Commands about jobs against a service that answers what it is told to."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from boost_core.config import JobSpec
from boost_core.plan.report import Plan
from service.cli.console import BadInput
from service.cli.options import merge_patch, moment
from service.jobs.states import JobState
from tests.service.canned import A_CHECKPOINT, A_PLAN, a_job
from tests.service.command_line import boost_at, job_file
from tests.service.records import GOOD
from tests.service.scripted import Answer, Asked, events, problem, serving

CREATED = Answer(201, a_job())


# New jobs


def test_submit_in_other_words_than_the_files(tmp_path: Path) -> None:
    with serving({"POST /v1/jobs": CREATED}) as server:
        boost = boost_at(server.url)
        file = job_file(tmp_path, GOOD)
        options = ("--name", "other", "--queue", "night", "--priority", "0", "--idempotency-key", "night-42")
        assert boost("submit", file, *options).exit_code == 0
        quiet = boost("submit", job_file(tmp_path, GOOD | {"priority": 7}), "-q")
        assert (quiet.exit_code, quiet.stdout) == (0, "job-1\n")
        refused = boost("submit", file, "--queue", "No Queue")
    changed, plain = server.asked
    assert (changed.body["name"], changed.body["queue"], changed.body["priority"]) == ("other", "night", 0)
    assert (plain.body["name"], plain.body["queue"], plain.body["priority"]) == ("tiny", "default", 7)
    assert changed.headers["Idempotency-Key"] == "night-42"
    assert plain.headers["Idempotency-Key"]
    assert (refused.exit_code, "error: queue: " in refused.stderr) == (2, True)


def test_a_dry_run_submits_nothing(tmp_path: Path) -> None:
    answer = Answer(200, {"spec": a_job()["spec"], "plan": A_PLAN})
    with serving({"POST /v1/jobs/dry-run": answer}) as server:
        boost = boost_at(server.url)
        shown = boost("submit", job_file(tmp_path, GOOD), "--dry-run")
        as_json = boost("submit", job_file(tmp_path, GOOD), "--dry-run", "--json")
    assert (shown.exit_code, [asked.path for asked in server.asked]) == (0, ["/v1/jobs/dry-run"] * 2)
    assert "tiny could be submitted to the queue default" in shown.stdout
    _, parameters, _, _, _, header, small, large, _, best, step, exchange, memory, note = shown.stdout.splitlines()
    assert parameters.split() == ["parameters", "1.23", "million"]
    assert header.split() == ["LAYOUT", "RANKS", "MEMORY", "STEP", "TOKENS/S", "ALL", "STEPS"]
    for fact in ("tp 2 × pp 1 × dp 1", "100.0 GiB", "does not fit"):
        assert fact in small, fact
    for fact in ("tp 2 × pp 1 × dp 2", "36.0 GiB", "2 million", "0.25 s", "1 h"):
        assert fact in large, fact
    assert best.split(maxsplit=1) == ["fastest", "tp 2 × pp 1 × dp 2, recompute none"]
    assert step.endswith("0.25 s, four in five from 0.2 to 0.3 s: arithmetic 80%, exchange 16%, reduction 4%")
    assert exchange.startswith("exchange         a tensor parallel rank sends ")
    assert memory.startswith("memory of a rank 36.0 GiB of a GPU's 80.0 GiB: weights 8.0 GiB, gradients 8.0 GiB, ")
    assert note == "note: times are of an H100"
    assert json.loads(as_json.stdout)["plan"]["fastest"] == 1


def test_a_plan_needs_no_service(tmp_path: Path) -> None:
    job = GOOD | {
        "model": {"preset": "tiny", "family": "cola"},
        "parallelism": {"tensor_parallel_size": 2},
        "elasticity": {"data_parallel_size": {"min": 1, "max": 1}, "layouts": [[1, 1], [2, 1]]},
    }
    boost = boost_at("http://127.0.0.1:1")  # nobody listens there
    shown, as_json = boost("plan", job_file(tmp_path, job)), boost("plan", job_file(tmp_path, job), "--json")
    assert shown.exit_code == 0, shown.output
    planned = Plan.model_validate_json(as_json.stdout)
    _, _, _, _, header, alone, together, *rest = shown.stdout.splitlines()
    assert header.split()[:2] == ["LAYOUT", "RANKS"]
    assert alone.startswith("tp 1 × pp 1 × dp 1")
    assert together.startswith("tp 2 × pp 1 × dp 1")
    # Four blocks, in each seven latents of 32 elements and two statistics in four all-reduces, forward and backward.
    training = JobSpec.model_validate(job).training
    tokens = training.micro_batch_size * training.sequence_length
    elements = 4 * 2 * (7 * 32 + 2)
    assert planned.shapes[1].communication.elements_per_token == elements
    sent = f"a tensor parallel rank sends {elements * tokens * 4 / 2**20:.4g} MiB in 32 collectives per micro-batch"
    assert any(line.startswith("exchange") and line.endswith(sent) for line in rest)


def test_a_search_that_finds_nothing_shows_no_table(tmp_path: Path) -> None:
    gpu = {"gpus_per_worker": 1, "accelerator_type": "T4"}
    large = GOOD | {"model": {"preset": "7b"}, "resources": gpu, "parallelism": {}}
    shown = boost_at("http://127.0.0.1:1")("plan", job_file(tmp_path, large), "--gpus", "1")
    assert shown.exit_code == 0, shown.output
    assert "nothing fits" in shown.stdout.splitlines()


def test_clone() -> None:
    with serving({"POST /v1/jobs/job-0/clone": Answer(201, a_job(cloned_from="job-0"))}) as server:
        boost = boost_at(server.url)
        result = boost(
            "clone", "job-0", "--set", "training.steps=500", "--name", "longer", "--from-checkpoint",
            "--idempotency-key", "k",
        )  # fmt: skip
        quiet = boost("clone", "job-0", "--quiet")
        refused = boost("clone", "job-0", "--set", "training.steps")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "submitted job-1")
    assert (quiet.exit_code, quiet.stdout) == (0, "job-1\n")
    asked, _ = server.asked
    assert asked.body == {
        "changes": {"training": {"steps": 500}, "name": "longer"},
        "from_checkpoint": True,
        "from_weights": False,
    }
    assert asked.headers["Idempotency-Key"] == "k"
    assert (refused.exit_code, "such as training.steps=500" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("changes", "patch"),
    [
        ([], {}),
        (["elasticity=null"], {"elasticity": None}),
        (["a.b.c=1", "a.b.d=x=y", "a.e=[1, 2]"], {"a": {"b": {"c": 1, "d": "x=y"}, "e": [1, 2]}}),
        (["optimizer.learning_rate=0.003"], {"optimizer": {"learning_rate": 0.003}}),
        (["name="], {"name": None}),
    ],
)
def test_changes_as_a_merge_patch(changes: list[str], patch: dict[str, Any]) -> None:
    assert merge_patch(changes) == patch


@pytest.mark.parametrize(
    "changes",
    [["=1"], ["a..b=1"], ["a"], ["a=1", "a.b=2"], ["a.b=2", "a={b: 1}"], ["a={"], ["a=.nan"], ["a={b: .inf}"]],
)
def test_changes_that_make_no_patch(changes: list[str]) -> None:
    with pytest.raises(BadInput, match=f"--set {changes[-1].split('=')[0]}"):
        merge_patch(changes)


def test_retry() -> None:
    checkpoint = {"kind": "checkpoint", "step": 400, "url": "s3://x", "bytes": 1, "seconds": 1.0, "commit_seconds": 1.0}
    with serving({"POST /v1/jobs/job-1/retry": Answer(202, a_job(checkpoint=checkpoint))}) as server:
        assert boost_at(server.url)("retry", "job-1").stdout == "job-1 is QUEUED again and continues from step 400\n"
    with serving({"POST /v1/jobs/job-1/retry": problem(409, "wrong-state")}) as server:
        assert boost_at(server.url)("retry", "job-1").exit_code == 1


# Looking


def test_jobs_are_cancelled_together() -> None:
    ids = ["job-a", "job-b", "job-c"]
    answer = {"cancelled": 2, "ended": 1, "not_found": [], "remaining": False}
    unknown, none = answer | {"not_found": ["job-0"]}, answer | {"cancelled": 0, "ended": 0}
    with serving({"POST /v1/jobs/cancel": [Answer(202, each) for each in (answer, unknown, none)]}) as server:
        boost = boost_at(server.url)
        done, partly = boost("cancel", *ids), boost("cancel", *ids, "job-0")
        nothing = boost("cancel", "--group", "nope", "--yes")
        refused = [boost("cancel"), boost("cancel", "job-a", "--group", "g"), boost("cancel", "--group", "g")]
    assert [asked.body for asked in server.asked] == [{"ids": ids}, {"ids": [*ids, "job-0"]}, {"group": "nope"}]
    assert (nothing.exit_code, "no job that has not ended fits" in nothing.stdout) == (0, True)
    assert (done.exit_code, done.stdout.startswith("2 jobs cancelled")) == (0, True)
    assert "1 job had ended before" in done.stdout
    assert (partly.exit_code, "there is no job job-0" in partly.stderr) == (1, True)
    assert [each.exit_code for each in refused] == [2, 2, 2]
    assert "add --yes" in refused[2].stderr


@pytest.mark.parametrize(("answer", "cancelled"), [("y\n", True), ("n\n", False)])
def test_jobs_that_fit_options_are_cancelled_once_confirmed(
    answer: str, cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(remaining: bool) -> Answer:
        return Answer(202, {"cancelled": 1000, "ended": 0, "not_found": [], "remaining": remaining})

    listed = {"jobs": [a_job(id=f"job-{number}") for number in range(3)], "next_cursor": None}
    listed["jobs"][2] |= {"cancel_requested": True}
    monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda _: True)
    answers = {"GET /v1/jobs": Answer(200, listed), "POST /v1/jobs/cancel": [part(True), part(False)] * 2}
    with serving(answers) as server:
        options = ("cancel", "--group", "g", "--tag", "t", "--state", "queued")
        asked = boost_at(server.url)(*options, stdin=answer)
        assert "Cancel 2 jobs?" in asked.stdout
        assert ("2,000 jobs cancelled" in asked.stdout) is cancelled
        assert boost_at(server.url)(*options, "--yes").exit_code == 0
    body = {"group": "g", "tag": ["t"], "state": ["QUEUED"]}
    assert server.asked[0].query == {"group": ["g"], "tag": ["t"], "state": ["QUEUED"], "limit": ["500"]}
    assert [each.body for each in server.asked[1:]] == [body] * (4 if cancelled else 2)


def test_what_is_old_says_so() -> None:
    state = {"state": "RUNNING", "reason": "GANG_STARTED", "message": "2 workers are training", "attempt": 1}
    old = a_job(**state, last_seen="2026-01-02T03:04:05Z", waiting_for="Ray cannot be reached: no head")
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).astimezone()
    answers = {
        "GET /v1/jobs/job-1": Answer(200, old),
        "GET /v1/jobs": Answer(200, {"jobs": [old], "next_cursor": None}),
    }
    with serving(answers) as server:
        boost = boost_at(server.url)
        shown, listed = boost("show", "job-1"), boost("ls")
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert f"message as last seen at {at:%H:%M:%S}: 2 workers are training" in lines
    assert f"not seen since {at:%Y-%m-%d %H:%M:%S}: Ray cannot be reached: no head" in lines
    expected = f"as last seen at {at:%H:%M:%S}: 2 workers are training; Ray cannot be reached"
    assert expected in " ".join(listed.stdout.split())


def asked_for_jobs(*arguments: str) -> Asked:
    with serving({"GET /v1/jobs": Answer(200, {"jobs": [], "next_cursor": None})}) as server:
        assert boost_at(server.url)("ls", *arguments).exit_code == 0
    (asked,) = server.asked
    return asked


def test_ls_filters() -> None:
    assert asked_for_jobs().query == {"limit": ["100"]}
    filters = ("--state", "running", "--state", "QUEUED", "--queue", "night", "--name", "co", "--tenant", "acme")
    assert asked_for_jobs(*filters, "-n", "5", "--cursor", "job-9").query == {
        "state": ["RUNNING", "QUEUED"], "queue": ["night"], "name": ["co"], "tenant": ["acme"], "limit": ["5"],
        "cursor": ["job-9"],
    }  # fmt: skip


@pytest.mark.full
def test_ls_takes_as_many_pages_as_it_needs() -> None:
    def page(first: int, count: int, cursor: str | None) -> Answer:
        jobs = [a_job(id=f"job-{number}") for number in range(first, first + count)]
        return Answer(200, {"jobs": jobs, "next_cursor": cursor})

    with serving({"GET /v1/jobs": [page(0, 500, "job-499"), page(500, 20, "job-519")]}) as server:
        shown = boost_at(server.url)("ls", "-n", "520")
    assert [(asked.query["limit"], asked.query.get("cursor")) for asked in server.asked] == [
        (["500"], None),
        (["20"], ["job-499"]),
    ]
    lines = shown.stdout.splitlines()
    assert len(lines) == 1 + 520 + 1
    assert lines[-1] == "(showing 520; for older ones add --cursor job-519)"
    with serving({"GET /v1/jobs": [page(0, 500, "job-499"), page(500, 3, None)]}) as server:
        listed = json.loads(boost_at(server.url)("ls", "-n", "1000", "--json").stdout)
    assert (len(listed["jobs"]), listed["next_cursor"]) == (503, None)


def test_why_a_job_waits_is_shown() -> None:
    job = a_job(waiting_for="4 GPUs of the queue night", cloned_from="job-0", queue="night")
    script = {
        "GET /v1/jobs": Answer(200, {"jobs": [job], "next_cursor": None}),
        "GET /v1/jobs/job-1": Answer(200, job),
        "GET /v1/jobs/job-1/trackers": Answer(200, {"trackers": []}),
    }
    with serving(script) as server:
        listed = boost_at(server.url)("ls").stdout
        shown = boost_at(server.url)("show", "job-1").stdout
    assert listed.splitlines()[1].endswith("4 GPUs of the queue night")
    for fact in ("waits for   4 GPUs of the queue night", "clone of    job-0", "tenant      acme", "ago) by ci"):
        assert fact in shown
    assert "queue       night, priority 0" in shown


def test_a_job_of_a_service_without_evaluations_and_trackers_is_shown() -> None:
    absent = Answer(404, {"title": "Not Found", "status": 404, "detail": "there is no such path"})
    parts = {f"GET /v1/jobs/job-1/{part}": absent for part in ("evaluations", "trackers")}
    with serving({"GET /v1/jobs/job-1": Answer(200, a_job())} | parts) as server:
        shown = boost_at(server.url)("show", "job-1")
    assert (shown.exit_code, "tenant      acme" in shown.stdout) == (0, True), shown.output


def test_events_of_a_newer_service_are_passed_over() -> None:
    newer = a_log_event(1, 0, "said") | {"kind": "dream", "data": {"of": "sheep"}}
    script = {
        "GET /v1/jobs/job-1": Answer(200, a_job(JobState.SUCCEEDED)),
        "GET /v1/jobs/job-1/events": events(newer, a_log_event(2, 0, "out of memory")),
    }
    with serving(script) as server:
        boost = boost_at(server.url)
        shown, followed = boost("events", "job-1"), boost("events", "job-1", "--follow")
        as_json = boost("events", "job-1", "--json")
    for result in (shown, followed):
        assert result.exit_code == 0, result.output
        assert "out of memory" in result.stdout and "sheep" not in result.stdout
    assert [json.loads(line)["kind"] for line in as_json.stdout.splitlines()] == ["dream", "log"]


# Logs


def a_log_event(number: int, rank: int, message: str) -> dict[str, Any]:
    data = {"kind": "log", "rank": rank, "level": "ERROR", "message": message}
    return {"id": number, "job_id": "job-1", "kind": "log", "time": "2026-01-01T00:00:00Z", "data": data}


def test_logs_of_ranks() -> None:
    script = {
        "GET /v1/jobs/job-1": Answer(200, a_job()),
        "GET /v1/jobs/job-1/logs": events(a_log_event(1, 0, "out of memory"), a_log_event(2, 1, "too")),
    }
    with serving(script) as server:
        boost = boost_at(server.url)
        shown = boost("logs", "job-1", "--rank", "0", "--level", "error", "--level", "WARNING", "--since", "10m")
        as_json = boost("logs", "job-1", "--json")
        refused = boost("logs", "job-1", "--since", "yesterday")
    assert shown.exit_code == 0, shown.output
    lines = [line.split("  ", 1)[1] for line in shown.stdout.splitlines()]
    assert lines == ["rank 0 ERROR: out of memory", "rank 1 ERROR: too"]
    filtered, plain = (asked.query for asked in server.asked if asked.path.endswith("/logs"))
    since = datetime.fromisoformat(filtered.pop("since")[0])
    assert timedelta(minutes=9) < datetime.now(UTC) - since < timedelta(minutes=11)
    assert filtered == {"rank": ["0"], "level": ["ERROR", "WARNING"], "follow": ["false"]}
    assert plain == {"follow": ["false"]}
    assert [json.loads(line)["id"] for line in as_json.stdout.splitlines()] == [1, 2]
    assert (refused.exit_code, "'yesterday' is not a time" in refused.stderr) == (2, True)


def test_logs_and_events_say_what_the_other_is_for() -> None:
    boost = boost_at("http://127.0.0.1:1")
    assert "boost events" in boost("logs", "--help").stdout
    assert "boost logs" in boost("events", "--help").stdout


# Times


@pytest.mark.parametrize("read", [partial(moment, in_future=False), partial(moment, in_future=True)])
def test_times_that_are_none(read: Callable[[str], datetime]) -> None:
    for text in ("", "10", "m", "10 m", "-5m", "1y", "soon", "2026-13-01"):
        with pytest.raises(BadInput, match="is not a time"):
            read(text)


def test_times() -> None:
    now = datetime.now(UTC)
    for text, span in (("90s", 90), ("10m", 600), ("2h", 7200), ("3d", 3 * 86_400), ("1w", 7 * 86_400)):
        assert (now - moment(text, in_future=False)).total_seconds() == pytest.approx(span, abs=30)
        assert (moment(text, in_future=True) - now).total_seconds() == pytest.approx(span, abs=30)
    assert moment("2026-01-02T03:04:05Z", in_future=False) == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert moment("2026-01-02T03:04:05", in_future=False).utcoffset() is not None
    assert moment("2999-01-01", in_future=True).year == 2999
    with pytest.raises(BadInput, match="not in the future"):
        moment("2020-01-01", in_future=True)


# Checkpoints


def test_checkpoints_of_a_job() -> None:
    at_step = "/v1/jobs/job-1/checkpoints/100"
    detail = A_CHECKPOINT | {"files": {"__0_0.distcp": {"bytes": 9, "crc32": 8}}, "versions": {"torch": "2.11"}}
    script = {
        "GET /v1/jobs/job-1/checkpoints": Answer(200, {"checkpoints": [A_CHECKPOINT]}),
        f"GET {at_step}": Answer(200, detail),
        f"PUT {at_step}/pin": Answer(200, A_CHECKPOINT),
        f"DELETE {at_step}/pin": Answer(200, A_CHECKPOINT | {"pinned": False}),
        f"DELETE {at_step}": Answer(204),
    }
    with serving(script) as server:
        boost = boost_at(server.url)
        header, line = boost("ckpt", "ls", "job-1").stdout.splitlines()
        listed = json.loads(boost("ckpt", "ls", "job-1", "--json").stdout)
        newest = json.loads(boost("ckpt", "show", "job-1").stdout)
        assert newest == json.loads(boost("ckpt", "show", "job-1", "--step", "100").stdout)
        assert "is kept until it is unpinned" in boost("ckpt", "pin", "job-1", "100").stdout
        assert "is again subject to the job's retention" in boost("ckpt", "unpin", "job-1", "100").stdout
        assert boost("ckpt", "rm", "job-1", "100").stdout == "deleted the checkpoint of step 100 of job-1\n"
    assert header.split() == ["STEP", "SAVED", "SIZE", "LAYOUT", "PINNED", "URL"]
    for fact in ("100", "3.0 MiB", "tp 2 × pp 1 × dp 4", "pinned", "s3://runs/job-1/step-00000100"):
        assert fact in line
    assert listed["checkpoints"][0]["samples"] == 6400
    assert newest["files"] == {"__0_0.distcp": {"bytes": 9, "crc32": 8}}
    assert [f"{asked.method} {asked.path}" for asked in server.asked[-3:]] == list(script)[2:]


def test_a_job_without_checkpoints_and_refusals() -> None:
    script = {
        "GET /v1/jobs/job-1/checkpoints": Answer(200, {"checkpoints": []}),
        "DELETE /v1/jobs/job-1/checkpoints/5": problem(409, "checkpoint-pinned"),
    }
    with serving(script) as server:
        boost = boost_at(server.url)
        none = boost("ckpt", "show", "job-1")
        pinned = boost("ckpt", "rm", "job-1", "5")
    assert (none.exit_code, none.stderr) == (2, "error: job-1 has no committed checkpoint yet\n")
    assert (pinned.exit_code, "it is checkpoint-pinned" in pinned.stderr) == (1, True)
