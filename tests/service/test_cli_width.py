"""What ``boost`` prints is no wider than a terminal of 80 columns, and nothing is cut off; pipes get whole rows."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

import boost_core.__main__
import boost_core.bench.__main__
import boost_core.convert.__main__
import boost_core.data.__main__
import boost_core.inference.__main__
from boost_core import terminal
from boost_core.bench.results import Row, table
from boost_core.terminal import UNLIMITED, cells, print_lines, table_lines, wrapped
from service.cli.commands import jobs
from service.cli.main import app
from service.jobs.states import JobState, Reason
from tests.service.canned import (
    A_CHECKPOINT,
    A_KEY,
    A_PLAN,
    A_QUEUE,
    A_TENANT,
    AUDIT,
    NODES,
    a_job,
    a_running_job,
    metrics,
)
from tests.service.command_line import boost_at, job_file, run_boost
from tests.service.records import GOOD, PROFILE, SCORES, a_checkpoint, a_restart, a_step
from tests.service.scripted import Answer, events, serving

WIDTH = 80
LONG = "a-name-of-sixty-three-characters-which-is-as-long-as-names-can-be"[:63]
SENTENCE = "the worker of rank 17 on node-b was killed by signal 9 while it waited for the all-reduce of step 1,234"
PATH = "s3://a-bucket/" + "a-folder/" * 12 + "step-00000100"
TIME = "2026-01-01T00:00:00Z"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_LOOK_SECONDS", 0.01)


def too_wide(shown: str) -> list[str]:
    """The lines that are wider than the terminal, but for single words."""
    return [line for line in shown.splitlines() if cells(line) > WIDTH and len(line.split()) > 1]


def commands(command: click.Command, *path: str) -> Iterator[tuple[str, ...]]:
    yield path
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, *path, name)


def test_every_help_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    helps = {}
    for path in commands(typer.main.get_command(app)):
        if path not in (("bench",), ("data",)):  # the trainer's, below
            helps[" ".join(("boost", *path))] = run_boost(*path, "--help", COLUMNS=str(WIDTH)).stdout
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    trainer: dict[Callable[..., int], tuple[str, ...]] = {
        boost_core.bench.__main__.main: ("", "profile", "job", "comm"),
        boost_core.data.__main__.main: ("", "tokenize"),
        boost_core.convert.__main__.main: ("", "export", "start"),
        boost_core.inference.__main__.main: ("", "generate", "eval"),
    }
    for main, names in trainer.items():
        for name in names:
            with pytest.raises(SystemExit):
                main([*name.split(), "--help"])
            helps[f"{main.__module__} {name}"] = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["boost_core", "--help"])
    with pytest.raises(SystemExit):
        boost_core.__main__.main()
    helps["boost_core"] = capsys.readouterr().out
    assert len(helps) > 60 and all("sage:" in shown for shown in helps.values())
    assert {name: wide for name, shown in helps.items() if (wide := too_wide(shown))} == {}


WAITING = a_job(
    id="job-0123456789abcdef", name=LONG, queue=LONG, waiting_for=f"32 GPUs of the queue {LONG}, which has 8 free"
)
RUNNING = a_running_job(
    5,
    name=LONG,
    checkpoint=a_checkpoint(100).model_dump(mode="json") | {"url": PATH},
    restart_counts={"WORKER_LOST": 1},
    restarts=[a_restart(message=SENTENCE).model_dump(mode="json") | {"time": TIME}],
)
FAILED = a_job(JobState.FAILED, reason=Reason.TRAINING_FAILED, message=SENTENCE, progress=a_step(10), name=LONG)


def event(number: int, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"id": number, "job_id": "job-1", "kind": kind, "time": TIME, "data": data}


EVENTS = (
    event(1, "progress", a_step(3, steps=1_000_000, tokens_per_second=123_456_789.0).model_dump(mode="json")),
    event(2, "restart", a_restart(message=SENTENCE).model_dump(mode="json")),
    event(3, "state", {"state": "FAILED", "reason": "TRAINING_FAILED", "message": f"{SENTENCE}: {PATH}"}),
)
LISTED_KEY = {name: value for name, value in A_KEY.items() if name != "key"} | {
    "name": LONG, "tenant": LONG, "scopes": ["read", "submit", "admin"], "expires_at": TIME, "last_used_at": TIME,
    "revoked_at": TIME,
}  # fmt: skip
QUEUE = A_QUEUE | {"name": LONG, "description": SENTENCE, "jobs": dict.fromkeys(JobState, 1234)}
NODE = NODES["nodes"][0] | {
    "node_id": "0123456789abcdef" * 3,
    "labels": {f"label-{number}": LONG for number in range(4)},
    "jobs": [{"id": f"job-{number}", "name": LONG, "ranks": 4} for number in range(3)],
}
STORED = {"kind": "H100", "profile": PROFILE.model_dump(mode="json"), "stored_at": TIME, "stored_by": LONG}
DATASET = {
    "name": LONG, "id": "dataset-1", "tenant": LONG, "submitted_by": "ci", "state": "FAILED", "message": SENTENCE,
    "url": PATH, "progress": None, "counts": {"kept": 10**9, "tokens": 10**12}, "fingerprint": "0123456789abcdef" * 4,
    "created_at": TIME, "finished_at": TIME,
    "spec": {"name": LONG, "source": {"kind": "text", "paths": [PATH]}}, "lineage": None,
}  # fmt: skip
PROBLEM = {
    "type": "urn:boost:problem:bad-job", "title": "bad job", "status": 422, "detail": SENTENCE, "instance": "/",
    "code": "bad-job", "errors": [{"field": "training.steps", "message": SENTENCE}],
}  # fmt: skip
CHECKPOINT = A_CHECKPOINT | {"url": PATH}
DAMAGED = {"step": 1, "url": PATH, "pinned": True, "damage": SENTENCE}
SCRIPT = {
    "GET /v1/jobs": Answer(200, {"jobs": [WAITING, RUNNING, FAILED], "next_cursor": "a-cursor" * 4}),
    "GET /v1/jobs/job-1": [Answer(200, RUNNING), Answer(200, RUNNING), Answer(200, FAILED)],
    "GET /v1/jobs/job-1/events": events(*EVENTS),
    "GET /v1/jobs/job-1/metrics": Answer(200, metrics(*map(float, range(24)))),
    "GET /v1/jobs/job-1/evaluations": Answer(
        200, {"evaluations": [SCORES.model_dump(mode="json") | {"time": TIME, "recorded_by": "ci", "checkpoint": PATH}]}
    ),
    "GET /v1/jobs/job-1/trackers": Answer(200, {"trackers": []}),
    "GET /v1/jobs/job-1/checkpoints": Answer(200, {"checkpoints": [CHECKPOINT], "damaged": [DAMAGED]}),
    "GET /v1/nodes": Answer(200, {"seen_at": TIME, "nodes": [NODE]}),
    "GET /v1/queues": Answer(200, {"queues": [QUEUE]}),
    f"GET /v1/queues/{LONG}": Answer(200, QUEUE),
    "GET /v1/tenants": Answer(200, {"tenants": [A_TENANT | {"name": LONG}]}),
    "GET /v1/keys": Answer(200, {"keys": [LISTED_KEY]}),
    "GET /v1/audit": Answer(200, AUDIT),
    "GET /v1/profiles": Answer(200, {"profiles": [STORED]}),
    "GET /v1/profiles/H100": Answer(200, STORED),
    "GET /v1/datasets": Answer(200, {"datasets": [DATASET]}),
    f"GET /v1/datasets/{LONG}": Answer(200, DATASET),
    "GET /v1/whoami": Answer(200, {"name": LONG, "tenant": LONG, "scopes": ["read", "submit"], "expires_at": TIME}),
    "POST /v1/jobs": Answer(422, PROBLEM),
    "POST /v1/plan": Answer(200, A_PLAN | {"profile": STORED}),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "facts"),
    [
        ("ls", f"ID NAME QUEUE STATE STEP LOSS AGE MESSAGE {LONG} {WAITING['waiting_for']} {SENTENCE} FAILED"),
        ("show job-1", f"{LONG} {PATH} WORKER_LOST resumed from memory"),
        ("events job-1", f"3/1000000 loss 4.7000 123,456,789 tokens/s {SENTENCE} {PATH}"),
        ("events job-1 -f", f"{SENTENCE} {PATH}"),
        ("watch job-1", f"job-1 {LONG} RUNNING 5/10 {SENTENCE}"),
        ("ckpt ls job-1", f"STEP SAVED SIZE LAYOUT PINNED URL {PATH} {SENTENCE}"),
        ("nodes", f"NODE STATE FREE GPUS CPUS JOBS LABELS label-0={LONG} 6/8 {LONG} (job-2)"),
        ("queues ls", f"NAME GPUS CPUS JOBS DESCRIPTION {LONG} {SENTENCE} 1234 PAUSED"),
        (f"queues show {LONG}", f"{LONG} {SENTENCE}"),
        ("tenants ls", f"NAME GPUS CPUS JOBS {LONG} 4/16"),
        ("keys ls", f"ID NAME TENANT SCOPES CREATED EXPIRES LAST USED REVOKED {LONG} abcdefgh admin"),
        ("audit", "ID TIME TENANT KEY FROM STATUS ACTION RESOURCE jobs.cancel 10.0.0.9 /v1/jobs"),
        ("profiles ls", f"KIND PRECISION MEASURED COMMIT STORED BY DEVICE {LONG} NVIDIA H100 80GB HBM3"),
        ("profiles show H100", f"{LONG} NVIDIA"),
        ("datasets ls", f"NAME STATE DOCUMENTS TOKENS MESSAGE {SENTENCE} 1,000,000,000,000"),
        (f"datasets show {LONG}", f"{SENTENCE} {PATH}"),
        ("whoami", LONG),
        ("plan JOB", "LAYOUT RANKS MEMORY STEP TOKENS/S ALL STEPS fastest recompute"),
        ("plan JOB --gpus 8 --explain", "CHOICE RANKS MEMORY STEP TOKENS/S ALL STEPS"),
        ("submit JOB", f"error: training.steps: {SENTENCE}"),
        ("show job-9", "error"),
        ("plan BAD", "error: training.steps"),
        ("plan no-such-file", "error: no-such-file does not exist; check the path"),
        ("ckpt verify no-such-folder", "error"),
    ],
)  # fmt: skip
def test_outputs_fit(command: str, facts: str, tmp_path: Path) -> None:
    files = {"JOB": GOOD, "BAD": GOOD | {"training": {"steps": "many", "sequence_length": 64, LONG: 1}}}
    words = [job_file(tmp_path, files[word]) if word in files else word for word in command.split()]
    with serving(SCRIPT) as server:
        shown = boost_at(server.url)(*words, COLUMNS=str(WIDTH)).output
    assert too_wide(shown) == []
    assert [fact for fact in facts.split() if fact not in shown] == [], shown


@pytest.mark.parametrize("command", [("events", "job-1", "-f"), ("watch", "job-1")])
def test_live_views_fit_and_cut_nothing_off(command: tuple[str, ...]) -> None:
    with serving(SCRIPT) as server:
        shown = boost_at(server.url)(*command, COLUMNS=str(WIDTH), FORCE_COLOR="1").output
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n")
    assert too_wide(lines) == []
    assert "…" not in lines and SENTENCE.split()[-1] in lines


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    progress = terminal.ProgressLine()
    for number in range(5):
        progress.show(f"{number} files")
        now += 4
    assert capsys.readouterr().err == "0 files\n3 files\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for number in range(2):
        progress.show(f"{number} files")
    assert re.fullmatch(r"\r0 files +\r1 files +", capsys.readouterr().err)


def test_the_trainers_lines_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    print_lines(f"{SENTENCE}\n  {SENTENCE}\n\x1b]0;title\a")
    rows = [Row("7b tp4 b4 s4096 cola", f"quantity {each}", "s", 0.1, 0.2, 0.3) for each in range(9)]
    shown = capsys.readouterr().out + table(rows, WIDTH)
    assert too_wide(shown) == []
    assert "\\u001b]0;title\\u0007" in shown
    assert shown.count("quantity") == 9 and shown.count("200.000 ms (100.000 – 300.000)") == 9


texts = st.text(st.sampled_from("ab 宽é\n"), max_size=60)
tables = st.integers(1, 5).flatmap(
    lambda columns: st.lists(st.lists(texts, min_size=columns, max_size=columns), min_size=1, max_size=4)
)


@pytest.mark.full
@given(texts, st.integers(4, 30), st.integers(0, 8))
def test_wrapping_loses_no_word_and_fits(text: str, width: int, hang: int) -> None:
    lines = wrapped(text, width, hang)
    assert " ".join(lines).split() == text.split()
    assert all(cells(line) <= width or len(line.split()) == 1 for line in lines)


def test_a_line_of_too_many_blanks_is_empty() -> None:
    assert wrapped("a\n" + 100 * " " + "\n b", 80) == ["a", "", " b"]


@pytest.mark.full
@given(tables)
def test_tables_lose_no_word_and_fit(cell_rows: list[list[str]]) -> None:
    headings, lines = table_lines(cell_rows[0], cell_rows[1:], 30)
    for wanted, laid in ((cell_rows[:1], headings), (cell_rows[1:], lines)):
        assert sorted(" ".join(laid).split()) == sorted(word for row in wanted for cell in row for word in cell.split())
        assert all(cells(line) <= 30 or len(line.split()) == 1 for line in laid)


def test_a_table_that_fits_has_a_line_a_row() -> None:
    assert table_lines(("A", "B"), [("1", "two words")], 20) == (["A  B"], ["1  two words"])


@pytest.mark.parametrize("options", [(), ("--gpus", "16xH100")])
def test_a_plans_table_fits_in_a_pipe_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", None)
    sizes = {"steps": 10, "sequence_length": 2048, "global_batch_size": 32, "precision": "bf16"}
    job = {"name": "a", "model": {"preset": "1b"}, "training": sizes, "resources": {"gpus_per_worker": 1}}
    lines = boost_at("http://127.0.0.1:1")("plan", job_file(tmp_path, job), *options).stdout.splitlines()
    begin = next(number for number, line in enumerate(lines) if "RANKS" in line)
    table = lines[begin : lines.index("", begin)]
    assert len(table) > 1 and all(cells(line) <= WIDTH for line in table)
    assert any("tp 1" in line for line in table)


def test_a_pipe_gets_a_line_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", None)  # as where the tests' own output is no terminal
    with serving(SCRIPT) as server:
        boost = boost_at(server.url)
        listed, shown = boost("ls", "-n", 3).stdout.splitlines(), boost("events", "job-1").stdout
    assert [line.split()[0] for line in listed] == ["ID", WAITING["id"], RUNNING["id"], FAILED["id"], "(showing"]
    assert all(LONG in line for line in listed[1:4]) and listed[3].endswith(SENTENCE)
    assert f"{SENTENCE}: {PATH}" in shown
    assert table_lines(("A", "B"), [("1\n2", "two words")], UNLIMITED) == (["A    B"], ["1 2  two words"])
