"""``boost eval`` with the real lm-eval on local tasks, and what becomes of its scores."""

import json
import re
import shutil
from pathlib import Path

import httpx
import pytest
import yaml

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.inference.__main__ import main
from boost_core.inference.generate import load_model
from boost_core.messages import Scores
from service.cli.commands import checkpoints
from service.jobs.store import JobStore
from tests.distributed.recording import train_and_record
from tests.jobs import TEXT, tiny_job, write_corpus
from tests.ranks import Ranks
from tests.service.canned import A_CHECKPOINT, a_job
from tests.service.command_line import boost_at
from tests.service.conftest import RunningApi
from tests.service.records import SCORES, a_spec, run_to_the_end
from tests.service.scripted import Answer, problem, serving

QUESTIONS = [
    {"question": "The quick brown fox", "choices": [" jumps", " sleeps"], "answer": 0},
    {"question": "over the lazy", "choices": [" cat", " dog"], "answer": 1},
    {"question": "pack my box with five", "choices": [" dozen", " lemon"], "answer": 0},
]


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a job that has learnt the sentence of the questions."""
    folder = tmp_path_factory.mktemp("trained")
    training = {"steps": 60, "sequence_length": 64, "evaluate_every_steps": 60}
    spec = tiny_job(
        write_corpus(folder / "corpus"), folder / "checkpoints", training=training, checkpoint={"every_steps": 60}
    )
    ranks.run(2, train_and_record, spec)
    return folder / "checkpoints"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "fox.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    task = {
        "task": "fox", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "fox.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}", "target_delimiter": "",
        "doc_to_choice": "{{choices}}", "doc_to_target": "answer", "metadata": {"version": 2.0},
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (folder / "fox.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.nightly
def test_scores_of_a_job_are_in_its_record_its_events_and_on_the_card(
    api: RunningApi, store: JobStore, trained: Path, tasks: Path, tmp_path: Path,
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)  # which is no repository
    job, boost = store.create(a_spec(), str(tmp_path / "runs")), boost_at(api.url)
    run_to_the_end(store, job.id)
    shutil.copytree(trained, job.checkpoint_url.removeprefix("file://"))
    result = boost("eval", job.id, "--tasks", tasks / "fox.yaml")
    shown = capfd.readouterr()
    assert result.exit_code == 0, shown.err
    assert "(3 documents)" in shown.out and "git" not in shown.err
    (found,) = httpx.get(f"{api.url}/v1/jobs/{job.id}/evaluations").json()["evaluations"]
    (score,) = found["scores"]
    assert (found["step"], score["task"], score["metric"], score["samples"]) == (60, "fox", "acc", 3)
    assert score["value"] == 1.0  # it has seen these sentences and no others
    assert (score["version"], score["higher_is_better"]) == ("2.0", True)
    assert found["evaluated_by"].startswith("lm-eval 0.")
    assert "fox acc 1.0000 ± 0.0000 on 3 documents at step 60" in boost("show", job.id).stdout
    assert "step 60  scores: fox acc 1.0000" in boost("events", job.id).stdout
    assert boost("export", job.id, tmp_path / "model").exit_code == 0
    assert "| fox acc | 1.0000 ± 0.0000 on 3 documents (lm-eval" in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.full
def test_a_folder_of_checkpoints_needs_no_service(trained: Path, tasks: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.json"
    assert main(["eval", f"--tasks={tasks}", "--limit=2", f"--out={out}", str(trained)]) == 0
    (score,) = json.loads(out.read_text())["scores"]
    assert (score["samples"], score["value"]) == (2, 1.0)
    assert score["task_hash"] != "0" * 16


@pytest.mark.full
def test_files_that_cannot_be_used_are_named_before_anything_is_loaded(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"task: caf\xe9\n")
    for options, refusal in (
        ([f"--tasks={tasks}", f"--out={tmp_path}"], "--out must name a file in a folder that exists"),
        ([f"--tasks={tasks}", f"--out={tmp_path}/no/scores.json"], "--out must name a file in a folder that exists"),
        ([f"--tasks={tmp_path}/latin.yaml"], "latin.yaml' is not UTF-8 at byte 9; convert it"),
    ):
        assert main(["eval", *options, "/nowhere"]) == 2
        assert refusal in capsys.readouterr().err


@pytest.mark.full
def test_answers_generated_in_a_batch_are_those_of_each_question(trained: Path, tasks: Path, tmp_path: Path) -> None:
    one, asked = load_model(CheckpointFolder(str(trained)), 60, None), []
    for length in (3, 9, 20):
        prompt = one.tokenizer(TEXT[:length], return_tensors="pt")
        answer = one.model.generate(**prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, length:]
        asked.append({"question": TEXT[:length], "answer": one.tokenizer.decode(answer)})
    (tasks / "fox.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    task = yaml.safe_load((tasks / "fox.yaml").read_text()) | {
        "output_type": "generate_until", "doc_to_target": "{{answer}}", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["<end>"], "max_gen_toks": 8, "do_sample": False},
    }  # fmt: skip
    del task["doc_to_choice"]
    (tasks / "fox.yaml").write_text(yaml.safe_dump(task))
    out = tmp_path / "scores.json"
    assert main(["eval", f"--tasks={tasks}", f"--out={out}", str(trained)]) == 0
    (score,) = json.loads(out.read_text())["scores"]
    assert (score["metric"], score["samples"], score["value"]) == ("exact_match", 3, 1.0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(
            {"dataset_path": "somebody/nothing", "dataset_kwargs": {}},
            "lm-eval cannot evaluate fox: ",
            marks=pytest.mark.nightly,  # without a network the hub is asked several times
        ),
        ({"dataset_kwargs": {"data_files": {"test": "/nowhere.jsonl"}}}, "/nowhere.jsonl"),
    ],
)
def test_a_task_that_cannot_be_run_is_named(
    trained: Path, tasks: Path, change: dict, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = yaml.safe_load((tasks / "fox.yaml").read_text())
    (tasks / "fox.yaml").write_text(yaml.safe_dump(task | change))
    assert main(["eval", f"--tasks={tasks}", str(trained)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.full
def test_paths_without_tasks_are_refused_before_anything_is_loaded(
    trained: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--tasks=/nowhere", str(trained)]) == 2
    assert "no task file or folder is at '/nowhere'; check --tasks" in capsys.readouterr().err
    assert main(["eval", f"--tasks={tasks / 'fox.jsonl'}", str(trained)]) == 2
    assert "has no task of lm-eval: a YAML file with a field task" in capsys.readouterr().err
    (tasks / "another.yaml").write_bytes((tasks / "fox.yaml").read_bytes())
    codes = [main(["eval", f"--tasks={tasks / name}.yaml", str(trained)]) for name in ("fox", "another")]
    assert 2 in codes  # lm-eval knows one of them
    assert "both have the task 'fox'; rename one" in capsys.readouterr().err


def test_an_evaluation_is_recorded_once_whenever_its_job_ended(api: RunningApi, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    run_to_the_end(store, job.id)
    path, body = f"{api.url}/v1/jobs/{job.id}/evaluations", SCORES.model_dump(mode="json")
    for _ in range(2):
        assert httpx.post(path, json=body, headers={"Idempotency-Key": "one"}).status_code == 201
    assert [each["step"] for each in httpx.get(path).json()["evaluations"]] == [SCORES.step]
    refused = httpx.post(path, json=body | {"scores": []})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "scores")
    assert httpx.get(f"{api.url}/v1/jobs/job-0/evaluations").status_code == 404


@pytest.mark.full
def test_evaluations_that_are_too_large_are_refused_and_the_newest_listed(api: RunningApi, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    run_to_the_end(store, job.id)
    path, body = f"{api.url}/v1/jobs/{job.id}/evaluations", SCORES.model_dump(mode="json")
    for large in (501 * body["scores"][:1], 500 * [body["scores"][0] | {"task": "ä" * 200, "metric": "ä" * 200}]):
        refused = httpx.post(path, json=body | {"scores": large})
        assert refused.status_code == 422
        assert "at most 500 scores and 256 KiB" in refused.json()["errors"][0]["message"]
    for step in range(1, 53):
        store.add_scores(job.id, SCORES.model_copy(update={"step": step}))
    assert [each["step"] for each in httpx.get(path).json()["evaluations"]] == list(range(52, 2, -1))


NO_CURVES = {
    "job_id": "job-1", "from_step": 0, "to_step": 10, "bucket_steps": 1, "samples": [], "evaluations": [], "ranks": [],
}  # fmt: skip
SCORED = {
    "GET /v1/jobs/job-1": Answer(200, a_job()),
    "GET /v1/whoami": Answer(200, {"tenant": "acme", "name": "ci", "scopes": ["submit"]}),
}


def test_what_cannot_be_recorded_is_kept_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def scored(_module: str, arguments: list[str]) -> int:
        (out,) = (word.removeprefix("--out=") for word in arguments if word.startswith("--out="))
        Path(out).write_text(SCORES.model_dump_json())
        return 0

    monkeypatch.setattr(checkpoints, "run_trainer", scored)
    refusing = {
        "GET /v1/jobs/job-1/checkpoints/10": Answer(200, A_CHECKPOINT | {"step": 10, "files": {}, "versions": {}}),
        "POST /v1/jobs/job-1/evaluations": problem(403, "not-you"),
    }
    with serving(SCORED | refusing) as server:
        result = boost_at(server.url)("eval", "job-1", "--tasks", "tests", "--step", "10")
    assert (result.exit_code, "it is not-you" in result.stderr) == (4, True), result.output
    (file,) = re.findall(r"the scores are in (\S+);", result.stderr)
    assert Scores.model_validate_json(Path(file).read_bytes()) == SCORES


def test_a_card_gets_the_newest_scores_of_tasks_whatever_their_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known: dict[str, dict[str, str]] = {}

    def exported(_module: str, arguments: list[str]) -> int:
        assert sum(map(len, arguments)) < 2000
        (file,) = (word.removeprefix("--known=") for word in arguments if word.startswith("--known="))
        known.update(json.loads(Path(file).read_text()))
        return 0

    monkeypatch.setattr(checkpoints, "run_trainer", exported)
    newest, older = (
        SCORES.model_copy(
            update={
                "scores": tuple(SCORES.scores[0].model_copy(update={"task": f"t{n}", "value": v}) for n in range(200))
            }
        ).model_dump(mode="json")
        | {"time": "2026-01-01T00:00:00Z"}
        for v in (0.5, 0.25)
    )
    script = {
        "GET /v1/jobs/job-1/checkpoints/10": Answer(200, A_CHECKPOINT | {"step": 10, "files": {}, "versions": {}}),
        "GET /v1/jobs/job-1/metrics": Answer(200, NO_CURVES),
        "GET /v1/jobs/job-1/evaluations": Answer(200, {"evaluations": [newest, older]}),
    }
    with serving(script) as server:
        result = boost_at(server.url)("export", "job-1", tmp_path / "model", "--step", "10")
    assert result.exit_code == 0, result.output
    assert len(known["scores"]) == 100 and known["scores"]["t0 acc"].startswith("0.5000")


def test_who_may_not_record_is_told_before_anything_is_run() -> None:
    reader = {"GET /v1/whoami": Answer(200, {"tenant": "acme", "name": "eye", "scopes": ["read"]})}
    with serving(SCORED | reader) as server:
        result = boost_at(server.url)("eval", "job-1", "--tasks", "tests")
    assert (result.exit_code, "scope submit, which 'eye' lacks" in result.stderr) == (1, True)
