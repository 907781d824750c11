import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from boost_core.messages import Drill, RankTimesReport
from boost_core.terminal import duration
from service.jobs.patch import JobPatch
from service.jobs.states import JobState, Reason
from service.jobs.store import JobStore
from tests.service import command_line
from tests.service.command_line import Boost, boost_at, job_file, process, run_boost
from tests.service.conftest import RunningApi
from tests.service.records import (
    GOOD,
    a_fault,
    a_log_line,
    a_restart,
    a_shape,
    a_spare,
    a_spec,
    a_start,
    a_step,
    an_interruption,
    finish,
    numbered,
    run_to_the_end,
    start,
)


@pytest.fixture
def boost(api: RunningApi) -> Boost:
    return boost_at(api.url)


@pytest.mark.full
def test_submit_prints_the_id_and_what_to_do_next(boost, store: JobStore, tmp_path: Path) -> None:
    result = boost("submit", job_file(tmp_path, GOOD))
    assert result.exit_code == 0, result.output
    (job,) = store.page()[0]
    assert result.stdout.splitlines() == [f"submitted {job.id}", f"watch it with: boost watch {job.id}"]


def test_submit_as_json_gives_the_record(boost, store: JobStore, tmp_path: Path) -> None:
    result = boost("submit", job_file(tmp_path, GOOD), "--json")
    assert json.loads(result.stdout) == store.page()[0][0].model_dump(mode="json")


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (GOOD | {"training": {"steps": 0}}, "error: training.steps: should be greater than or equal to 1, not 0"),
        (GOOD | {"modle": {}}, "error: modle: there is no such field; did you mean model?"),
        (
            GOOD | {"data": {"source": {"kind": "text", "paths": ["/no/such"]}}},
            "error: data.source.paths: there is no file",
        ),
        ("- a list", "must hold a mapping"),
        ("{", "is not YAML"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("name: a\nname: b", "duplicate field 'name'; remove one"),
        (
            GOOD | {"training": {"steps": "1:30"}},
            "error: training.steps: must be a whole number, not '1:30'",
        ),
    ],
)
def test_submit_says_what_is_wrong_with_a_job_file(boost, tmp_path: Path, job: object, message: str) -> None:
    result = boost("submit", job_file(tmp_path, job))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_every_problem_of_a_job_file_is_a_line(boost, tmp_path: Path) -> None:
    result = boost("submit", job_file(tmp_path, {"name": "x"}))
    assert result.stderr.splitlines() == ["error: model: is missing; add it", "error: training: is missing; add it"]


def test_a_job_file_that_is_not_there(boost) -> None:
    result = boost("submit", "/nowhere/job.yaml")
    assert result.exit_code == 2
    assert "/nowhere/job.yaml" in result.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ("ls",),
        ("show", "job-0"),
        ("logs", "job-0"),
        ("events", "job-0"),
        ("watch", "job-0"),
        ("retry", "job-0"),
        ("clone", "job-0"),
        ("ckpt", "ls", "job-0"),
        ("queues", "ls"),
        ("nodes",),
        ("keys", "ls"),
        ("tenants", "ls"),
        ("audit",),
        ("whoami",),
        ("cancel", "job-0"),
        ("pause", "job-0"),
        ("resume", "job-0"),
        ("patch", "job-0", "--priority", "1"),
        ("drill", "kill_rank", "job-0"),
        ("profile", "job-0"),
    ],
)
def test_an_unreachable_service(unused_url: str, arguments: tuple[str, ...]) -> None:
    result = run_boost(*arguments, "--url", unused_url)
    assert result.exit_code == 3, result.output
    assert "is `boost serve` running" in result.stderr
    assert unused_url in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("ls", "--url", "nowhere", "--help"), 0, "Usage: boost ls"),
        (("submit", "/nowhere/job.yaml", "--url", "nowhere"), 2, "/nowhere/job.yaml does not exist"),
        (("events", "job-0", "-f", "--url", "nowhere"), 2, "'nowhere' is not the URL of a service"),
        (("pause", "by-name", "--url", "nowhere"), 2, "'nowhere' is not the URL of a service"),
    ],
)
def test_a_bad_address_is_said_when_it_is_used(arguments: tuple[str, ...], code: int, says: str) -> None:
    result = run_boost(*arguments, BOOST_RETRY_SECONDS="1")
    assert (result.exit_code, says in result.output) == (code, True), result.output


def test_following_retries_for_longer_only_with_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command_line._NOBODY, "BOOST_RETRY_SECONDS", None)  # as users have it
    result = run_boost("events", "job-0", "-f", "--url", "nowhere")
    assert (result.exit_code, "'nowhere' is not the URL of a service" in result.output) == (2, True)


def test_bad_addresses_and_settings() -> None:
    result = run_boost("ls", "--url", "localhost:8900")
    assert (result.exit_code, "http://127.0.0.1:8900" in result.stderr) == (2, True)
    result = run_boost("ls", BOOST_PUBLIC_URL="boost.example.org")
    assert (result.exit_code, "BOOST_PUBLIC_URL: " in result.stderr, "http:// or https://" in result.stderr) == (
        2,
        True,
        True,
    )
    result = run_boost("ls", BOOST_PORT="http")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: BOOST_PORT: must be a whole number")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["show", "events", "logs", "watch", "cancel", "pause", "resume", "retry", "clone"])
def test_an_unknown_job(boost, command: str) -> None:
    result = boost(command, "job-0")
    assert result.exit_code == 1
    assert result.stderr == "error: there is no job 'job-0'; list the jobs to see their ids\n"


def test_ls_shows_jobs_newest_first(boost, store: JobStore) -> None:
    jobs = [store.create(a_spec(name=name), "/checkpoints") for name in ("first", "second")]
    run_to_the_end(store, jobs[0].id)
    store.change(jobs[1].id, Reason.HEAD_OF_QUEUE, "needs [red]2 CPUs[/red]")
    header, second, first = boost("ls").stdout.splitlines()
    assert header.split() == ["ID", "NAME", "QUEUE", "STATE", "STEP", "LOSS", "AGE", "MESSAGE"]
    assert second.split()[:6] == [jobs[1].id, "second", "default", "SCHEDULING", "0/10", "-"]
    assert second.endswith("needs [red]2 CPUs[/red]")
    assert first.split()[:6] == [jobs[0].id, "first", "default", "SUCCEEDED", "10/10", "4.0000"]
    listed = json.loads(boost("ls", "--json").stdout)
    assert [job["id"] for job in listed["jobs"]] == [jobs[1].id, jobs[0].id]


def test_before_its_first_step_a_job_is_at_the_step_that_it_continues_from(boost, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    start(store, job.id)
    store.append_reports(job.id, 1, numbered(a_shape(), a_start(6)))
    assert boost("ls").stdout.splitlines()[1].split()[4] == "6/10"
    store.append_reports(job.id, 1, [*numbered(a_shape(), a_start(6), a_step(7))])
    assert boost("ls").stdout.splitlines()[1].split()[4] == "7/10"
    assert store.get(job.id).goodput.recomputed == 0


@pytest.mark.full
def test_show(boost, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    assert f"none yet; goes to /checkpoints/default/{job.id}" in boost("show", job.id).stdout
    further = store.create(a_spec(checkpoint={"continue_from": f"file:///c/{job.id}"}), "/checkpoints")
    assert f"origin      continues from the newest checkpoint in file:///c/{job.id}" in boost("show", further.id).stdout
    run_to_the_end(store, job.id)
    shown = boost("show", job.id).stdout
    for fact in (
        "SUCCEEDED (TRAINING_FINISHED)",
        "10/10",
        "loss 2.5000 (perplexity 12.18) at step 10",
        "file:///checkpoints/step-10",
    ):
        assert fact in shown
    assert json.loads(boost("show", job.id, "--json").stdout) == store.get(job.id).model_dump(mode="json")


def test_show_tells_shape_restarts_and_time(boost, store: JobStore) -> None:
    queued = store.create(a_spec(), "/checkpoints")
    assert "layout      tp 2 × pp 1 × dp 1; not formed yet\nrestarts    0\n" in boost("show", queued.id).stdout
    job = store.create(a_spec(), "/checkpoints")
    start(store, job.id)
    now = datetime.now(UTC)
    step = a_step(3, step_seconds=10.0)
    reports = [a_shape(2), step, an_interruption(), a_restart(waiting_seconds=2.0), step, a_spare()]
    store.append_reports(
        job.id, 1, [(number, now + timedelta(seconds=20 * number), report) for number, report in enumerate(reports, 1)]
    )
    store.request_pause(job.id)
    shown = boost("show", job.id).stdout
    for fact in (
        "state       RUNNING (GANG_STARTED), to be paused",
        "layout      tp 2 × pp 1 × dp 2, 4 worker(s) on 2 node(s): node-a, node-b",
        "spare copy  of step 3, on node node-z",
        "restarts    1 (1 WORKER_LOST)",
        "  WORKER_LOST at step 3: resumed from memory at step 2; cost 1 step(s) and 4.0 s, 2.0 s of it waiting",
    ):
        assert fact in shown, shown
    (goodput,) = [line for line in shown.splitlines() if line.startswith("goodput")]
    assert goodput.startswith("goodput     58% restart, 30% recomputed, 10% productive, 2% waiting, of 1:4")
    store.request_cancel(job.id)
    assert "to be cancelled" in boost("show", job.id).stdout


def test_events_print_what_befell_a_gang(boost, store: JobStore) -> None:
    job = store.create(a_spec(training={"steps": 10, "micro_batch_size": 4}), "/checkpoints")
    start(store, job.id)
    store.append_reports(job.id, 1, numbered(a_shape(2), an_interruption(), a_restart(), a_fault()))
    store.patch(job.id, JobPatch.model_validate({"priority": 2, "data_parallel_size": {"max": 4}}))
    store.patch(job.id, JobPatch.model_validate({"data_parallel_size": {"min": 2}}))
    store.ask(job.id, Drill(kind="kill_rank", rank=1))
    store.ask(job.id, Drill(kind="drop_node", at_step=7))
    lines = [line.split("  ", 1)[1] for line in boost("events", job.id).stdout.splitlines()]
    assert lines[4:] == [
        "the gang is tp 2 × pp 1 × dp 2, 4 worker(s) on 2 node(s)",
        "step 3  interrupted by WORKER_LOST: rank 1 was killed by signal 9",
        "step 2  continues after WORKER_LOST at step 3: resumed from memory at step 2; cost 1 step(s) and 4.0 s, "
        "1.0 s of it waiting for resources",
        "step 3  slow rank: rank 1 computes 75% of the step",
        "changed: priority from 0 to 2, data_parallel_size from none to 1–4",
        "changed: data_parallel_size from 1–4 to 2–4",
        "drill requested: kill_rank, rank 1, at once",
        "drill requested: drop_node, rank 0, after step 7",
    ]


@pytest.mark.full
def test_events_print_a_line_for_every_event(boost, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    run_to_the_end(store, job.id)
    result = boost("events", job.id)
    assert result.exit_code == 0
    lines = [line.split("  ", 1)[1] for line in result.stdout.splitlines()]
    assert len(lines) == len(store.events(job.id))
    assert "RUNNING: 2 workers train" in lines
    assert "training starts from scratch at step 0: 123,456 parameters on 2 worker(s)" in lines
    assert "step 1/10  loss 4.9000  2,048 tokens/s  communication 25%  ETA 0:04" in lines
    assert "step 10  validation loss 2.5000 (perplexity 12.18), unigram entropy of that text 3.0000" in lines
    assert "step 10  checkpoint file:///checkpoints/step-10 (1.0 MiB, 0.25 s)" in lines
    for following in ((), ("--follow",)):
        chosen = boost("events", job.id, "--kind", "evaluation", "--kind", "checkpoint", *following)
        assert [line.split("  ", 1)[1] for line in chosen.stdout.splitlines()] == lines[-3:-1]
    assert "steered" in boost("events", job.id, "--kind", "luck").stderr


def test_what_others_wrote_does_not_steer_the_terminal(boost, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    start(store, job.id)
    store.append_reports(job.id, 1, numbered(a_log_line("red \x1b[31m title \x9d0;x\x07 \u202ekcab\r\ttab")))
    said = "red \\u001b[31m title \\u009d0;x\\u0007 \\u202ekcab\\u000d"
    for arguments in (("logs", job.id), ("events", job.id)):
        printed = boost(*arguments).stdout
        assert said in printed
        assert not {"\x1b", "\x9d", "\x07", "\u202e", "\r"} & set(printed)


def test_json_with_control_characters_stays_json(boost, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    job = store.create(a_spec(), "/checkpoints")
    store.change(job.id, Reason.HEAD_OF_QUEUE, "the next\x9b one\x7f")
    printed = boost("show", job.id, "--json").stdout
    assert not {"\x9b", "\x7f"} & set(printed)
    assert json.loads(printed)["message"] == "the next\x9b one\x7f"


@pytest.mark.full
def test_cancel(boost, store: JobStore) -> None:
    queued, running, done = (store.create(a_spec(), "/checkpoints") for _ in range(3))
    start(store, running.id)
    run_to_the_end(store, done.id)
    assert boost("cancel", queued.id).stdout == f"{queued.id} is CANCELLED\n"
    assert "will be cancelled within seconds" in boost("cancel", running.id).stdout
    refused = boost("cancel", done.id)
    assert (refused.exit_code, "already SUCCEEDED" in refused.stderr) == (1, True)


@pytest.mark.full
def test_pause_and_resume(boost, store: JobStore) -> None:
    queued, running = (store.create(a_spec(), "/checkpoints") for _ in range(2))
    start(store, running.id)
    assert boost("pause", queued.id).stdout == f"{queued.id} is PAUSED\n"
    assert boost("resume", queued.id).stdout == f"{queued.id} is QUEUED: waits for its turn\n"
    assert boost("pause", running.id).stdout == f"{running.id} will be paused after its current step\n"
    assert boost("resume", running.id).stdout == f"{running.id} is RUNNING: 2 workers train\n"
    refused = boost("resume", running.id)
    assert (refused.exit_code, "only a paused job can be resumed" in refused.stderr) == (1, True)


@pytest.mark.full
def test_patch(boost, store: JobStore) -> None:
    eight = {"steps": 10, "sequence_length": 64, "global_batch_size": 16, "micro_batch_size": 2}
    job = store.create(a_spec(training=eight), "/checkpoints")
    assert boost("patch", job.id, "--priority", "-2").stdout == f"{job.id} is tiny, priority -2, with 1 replica(s)\n"
    changed = boost("patch", job.id, "--name", "other", "--min-replicas", "1", "--max-replicas", "8")
    assert changed.stdout == f"{job.id} is other, priority -2, with 1 to 8 replica(s)\n"
    uneven = boost("patch", job.id, "--max-replicas", "3").stdout.splitlines()
    assert uneven[0].endswith("with 1 to 3 replica(s)")
    assert "allows 3 replicas, but the job never has more than 2: more could not" in uneven[1]
    assert len(boost("patch", job.id, "--max-replicas", "8").stdout.splitlines()) == 1
    refused = boost("patch", job.id, "--min-replicas", "9")
    assert (refused.exit_code, "min (9) must not exceed max (8)" in refused.stderr) == (2, True)
    nothing = boost("patch", job.id)
    assert (nothing.exit_code, "give --name, --priority" in nothing.stderr) == (2, True)


@pytest.mark.full
def test_a_job_that_leaves_its_layouts(boost, tmp_path: Path) -> None:
    elasticity = {"layouts": "auto", "gpus": {"min": 1, "max": 4}}
    file = tmp_path / "job.json"
    file.write_text(json.dumps(GOOD | {"parallelism": {}, "elasticity": elasticity}))
    for tried in (boost("submit", str(file), "--dry-run"), boost("plan", str(file))):
        assert tried.exit_code == 0, tried.output
        assert "legal layouts:\n- tp 1 × pp 1 × dp 1: most of its step is arithmetic" in tried.stdout
    job_id = boost("submit", str(file)).stdout.split()[1]
    shown = boost("show", job_id).stdout
    assert "chosen for 1 to 4 workers:\n" in shown
    assert "tp 1 × pp 1 × dp 1, " in shown
    assert "layouts chosen from 3 legal ones: " in boost("events", job_id).stdout
    assert boost("patch", job_id, "--max-gpus", "2").stdout.endswith("priority 0, with 1 to 2 worker(s)\n")


def test_drill(boost, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    assert boost("drill", "kill_rank", job.id).exit_code == 1
    start(store, job.id)
    asked = boost("drill", "delay_rank", job.id, "--rank", "1", "--at-step", "4", "--steps", "2", "--seconds", "0.5")
    assert asked.stdout.startswith(f"delay_rank will be injected into {job.id}"), asked.output
    assert store.take_commands(job.id) == [Drill(kind="delay_rank", rank=1, at_step=4, steps=2, seconds=0.5)]
    refused = boost("drill", "flood", job.id)
    assert (refused.exit_code, "kind: should be 'kill_rank', 'hang_rank'" in refused.stderr) == (2, True)


@pytest.mark.full
def test_following_ends_with_the_job(api: RunningApi, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    following = process("events", job.id, "--follow", BOOST_URL=api.url)
    start(store, job.id)
    times = RankTimesReport(step=1, busy_seconds=[0.25, 0.5])
    store.append_reports(job.id, 1, numbered(times, a_spare(), *(a_step(step) for step in range(1, 11))))
    finish(store, job.id)
    output, _ = following.communicate(timeout=60)
    assert following.returncode == 0, output
    assert "RUNNING: 2 workers train" in output
    assert "step 10/10" in output
    assert "SUCCEEDED: all steps done" in output.splitlines()[-1]
    assert len([line for line in output.splitlines() if "loss" in line]) == 2, "steps are shown now and then only"
    assert "busy seconds" not in output
    assert "spare copy" not in output
    assert "step 1  busy seconds by rank: 0.25, 0.5" in boost_at(api.url)("events", job.id).stdout


def test_following_a_job_that_does_not_succeed(boost, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    store.request_cancel(job.id)
    result = boost("events", job.id, "-f")
    assert result.exit_code == 1
    assert "CANCELLED" in result.stdout
    assert boost("events", job.id, "-f", "--json").exit_code == 1


def test_ctrl_c_stops_following_and_leaves_the_job(api: RunningApi, store: JobStore, tmp_path: Path) -> None:
    following = process("submit", job_file(tmp_path, GOOD), "--follow", BOOST_URL=api.url)
    assert following.stdout is not None
    assert [following.stdout.readline().split()[0], "QUEUED:" in following.stdout.readline()] == ["submitted", True]
    following.send_signal(signal.SIGINT)
    output, _ = following.communicate(timeout=60)
    (job,) = store.page()[0]
    assert following.returncode == 130, output
    assert f"the job continues. Follow it again: boost events {job.id} -f" in output
    assert job.state == "QUEUED"


def test_the_live_view_shows_a_bar(boost, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    job = store.create(a_spec(), "/checkpoints")
    run_to_the_end(store, job.id)
    shown = boost("events", job.id, "-f").stdout
    assert "step 10/10" in shown
    assert "communication 25%" in shown


def test_the_demo_needs_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_boost("demo")
    assert result.exit_code == 2
    assert "examples/cola-tiny.yaml is not under" in result.stderr


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 61, 3723, 86_399, 16_713_554)] == [
        "0:00", "1:00", "1:01", "1:02:03", "23:59:59", "193 d 10 h",
    ]  # fmt: skip


@pytest.mark.nightly
def test_a_demo_whose_service_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    failing = process("demo", BOOST_HOME=str(tmp_path), BOOST_DATABASE_URL="nonsense://")
    output, _ = failing.communicate(timeout=60)
    assert failing.returncode == 1, output
    assert "the service ended with exit status 1" in output
    assert "nonsense" in output.split("demo.log:")[1]


@pytest.mark.full
@pytest.mark.parametrize(("send", "by"), [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)])
def test_an_interrupted_program_of_the_trainer_may_end_what_it_does(
    tmp_path: Path, send: Callable[[int, int], None], by: signal.Signals
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:  # which takes connections and never answers
        hub.settimeout(60)
        address = f"http://127.0.0.1:{hub.getsockname()[1]}"
        source = "hf://datasets/org/corpus/rows"
        running = process(
            "data", "tokenize", source, str(tmp_path / "out"), HF_ENDPOINT=address, HF_HUB_OFFLINE="0"
        )  # fmt: skip
        connection, _ = hub.accept()
        send(running.pid, by)
        said, _ = running.communicate(timeout=60)
        connection.close()
    assert said == "\ninterrupted; run the same command again to pick up where it left off\n"
    assert running.returncode == 130


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["plan", "no.yaml"], "no.yaml does not exist; check the path"),
        (["plan", "tests"], "tests is a folder; give the path of a file"),
        (["plan", "examples/cola-tiny.yaml", "--cluster", "no.yaml"], "no.yaml does not exist; check the path"),
        (["plan", "examples/cola-tiny.yaml", "--profile", "no.json"], "no.json does not exist; check the path"),
        (["diff", "no.yaml", "examples/cola-tiny.yaml"], "no.yaml does not exist; check the path"),
        (["import-config", "no.yaml"], "no.yaml does not exist; check the path"),
        (["datasets", "create", "no.yaml"], "no.yaml does not exist; check the path"),
    ],
)
def test_a_path_that_cannot_be_read_is_named_with_what_to_do(command: list[str], said: str) -> None:
    result = run_boost(*command)
    assert (result.exit_code, result.stderr) == (2, f"error: {said}\n")


@pytest.mark.parametrize(
    ("command", "needed"),
    [(["plan", "examples/cola-tiny.yaml", "--cluster"], "levels"), (["plan", "examples/cola-tiny.yaml", "--profile"],
     "device, commit"), (["datasets", "create"], "source, name"), (["sweep", "create"], "name, job")],
)  # fmt: skip
def test_a_file_with_a_list_is_refused_without_words_of_http(command: list[str], needed: str, tmp_path: Path) -> None:
    (file := tmp_path / "list.json").write_text("[1]")
    result = run_boost(*command, file, COLUMNS="400")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {file}: must hold a mapping with at least {needed}")


@pytest.mark.full
def test_output_that_cannot_be_written_is_told_in_a_line(tmp_path: Path) -> None:
    plan = [sys.executable, "-m", "service.cli.main", "plan", job_file(tmp_path, GOOD), "--json"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(plan, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "error: [Errno 28] No space left on device\n")


@pytest.mark.full
@pytest.mark.parametrize("options", [(), ("--json",)])  # a table, and plain text
def test_a_reader_that_goes_ends_the_program_as_others(tmp_path: Path, options: tuple[str, ...]) -> None:
    plan = [sys.executable, "-m", "service.cli.main", "plan", job_file(tmp_path, GOOD), *options]
    with subprocess.Popen(plan, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as boost:
        assert boost.stdout and boost.stderr
        boost.stdout.close()
        assert (boost.wait(), boost.stderr.read()) == (141, "")


@pytest.mark.parametrize(("given", "each"), [("768", "32 days"), ("32d", "32 days"), ("12h", "12 h")])
def test_the_time_between_failures_is_hours_or_a_span(boost, tmp_path: Path, given: str, each: str) -> None:
    planned = boost("plan", job_file(tmp_path, GOOD), "--mtbf", given)
    assert f"if each has one in {each};" in planned.stdout


def test_a_time_between_failures_that_is_none_is_refused(boost, tmp_path: Path) -> None:
    for given in ("12x", "0", "-3h", "1e13"):
        refused = boost("plan", job_file(tmp_path, GOOD), "--mtbf", given)
        assert refused.exit_code == 2
        assert "give hours, or a span such as 12h or 30d" in refused.output.replace("\n", " ")


@pytest.mark.full
def test_jobs_are_named_by_id_or_by_a_name_that_is_theirs_alone(
    boost, store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, other = store.create(a_spec(name="alone"), "/c"), store.create(a_spec(name="alone-2"), "/c")
    twins = [store.create(a_spec(name="twin"), "/c") for _ in range(2)]
    assert boost("show", "alone", "--json").stdout == boost("show", alone.id, "--json").stdout
    assert json.loads(boost("compare", "alone-2", "alone", "--json").stdout)["jobs"][0]["id"] == other.id
    assert boost("diff", "alone", job_file(tmp_path, GOOD)).exit_code == 0
    for command in (("ckpt", "show"), ("generate", "--prompt=x"), ("export",), ("eval", f"--tasks={tmp_path}")):
        asked = boost(*command, "alone", *(["out"] if command == ("export",) else []))
        assert f"{alone.id} has no committed checkpoint yet" in asked.stderr, command
    result = boost("cancel", "twin")
    assert result.exit_code == 2
    assert "'twin' is the name of several jobs; give an ID" in result.stderr
    assert all(twin.id in result.stderr for twin in twins)
    assert "there is no job 'alon'" in boost("cancel", "alon").stderr
    monkeypatch.setattr("service.cli.connection._PAGE", 1)
    assert boost("show", "alone", "--json").stdout == boost("show", alone.id, "--json").stdout
    store.create(a_spec(name="twin-2"), "/c")
    assert "'twin' is the name of several jobs" in boost("cancel", "twin").stderr
    assert boost("cancel", "alone", other.id).exit_code == 0
    assert [store.get(job.id).state for job in (alone, other)] == [JobState.CANCELLED] * 2
