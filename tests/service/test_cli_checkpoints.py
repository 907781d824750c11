import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from boost_core.checkpoint.folder import CheckpointFolder
from service.cli.main import app
from service.jobs.store import JobStore
from tests.distributed.recording import train_and_record
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks
from tests.service.command_line import boost_at, run_boost
from tests.service.conftest import RunningApi
from tests.service.records import a_spec, a_step, run_to_the_end, start


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a job that has saved at steps 3, 6 and 8."""
    folder = tmp_path_factory.mktemp("trained")
    ranks.run(2, train_and_record, tiny_job(write_corpus(folder / "corpus"), folder / "checkpoints"))
    return folder / "checkpoints"


@pytest.fixture
def checkpoints(trained: Path, tmp_path: Path) -> str:
    """A copy of them, to be changed."""
    return f"file://{shutil.copytree(trained, tmp_path / 'checkpoints')}"


def ckpt(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["ckpt", *map(str, arguments)])


@pytest.mark.full
def test_list_and_show(checkpoints: str) -> None:
    lines = ckpt("ls", checkpoints).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["STEP", "8", "6", "3"]
    assert all("tp 2 × pp 1 × dp 1" in line and checkpoints in line for line in lines[1:])
    assert json.loads(ckpt("show", checkpoints).stdout)["step"] == 8
    assert json.loads(ckpt("show", checkpoints, "--step", 3).stdout)["samples"] == 3 * 4


@pytest.mark.full
def test_verify_names_what_is_damaged(checkpoints: str, tmp_path: Path) -> None:
    intact = ckpt("verify", checkpoints)
    assert (intact.exit_code, intact.stdout.splitlines()) == (0, [f"step {step}: intact" for step in (3, 6, 8)])
    shard = tmp_path / "checkpoints" / "step-00000006" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    damaged = ckpt("verify", checkpoints)
    assert damaged.exit_code == 1
    assert [line for line in damaged.stdout.splitlines() if "intact" not in line] == [
        f"step 6: {shard} has {shard.stat().st_size} bytes of {shard.stat().st_size + 1}"
    ]
    assert ckpt("verify", checkpoints, "--step", 8).exit_code == 0


@pytest.mark.full
def test_damaged_checkpoints_are_named_and_the_others_are_served(checkpoints: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shard, manifest = folder / "step-00000006" / "__1_0.distcp", folder / "step-00000008" / "manifest.json"
    manifest.write_bytes(b"")
    lines = ckpt("ls", checkpoints).stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["STEP", "6", "3"]
    assert lines[3:] == [f"the checkpoint of step 8 is damaged: {manifest} is empty"]
    listed = json.loads(ckpt("ls", checkpoints, "--json").stdout)
    assert [(one["step"], one["damage"]) for one in listed["damaged"]] == [(8, f"{manifest} is empty")]

    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    verified = ckpt("verify", checkpoints)
    assert (verified.exit_code, verified.stdout.splitlines()) == (1, [
        "step 3: intact",
        f"step 6: {shard} is not what was written (CRC-32 differs)",
        f"step 8: {manifest} is empty",
    ])  # fmt: skip
    shown = ckpt("show", checkpoints)
    assert (shown.exit_code, shown.stderr) == (
        2, f"error: the checkpoint of step 8 is damaged: {manifest} is empty; choose another with --step\n",
    )  # fmt: skip
    assert json.loads(ckpt("show", checkpoints, "--step", 6).stdout)["job"]["name"] == "tiny-test"
    assert ckpt("prune", checkpoints, "--keep-last", 1).stdout == "removed 0; left: 3, 6, 8\n"  # 3 alone is intact
    assert run_boost("export", checkpoints, tmp_path / "model", "--step", 3).exit_code == 0


def test_prune(checkpoints: str) -> None:
    assert ckpt("prune", checkpoints, "--keep-last", 1, "--keep-every", 3).stdout == "removed 0; left: 3, 6, 8\n"
    assert ckpt("prune", checkpoints, "--keep-last", 2).stdout == "removed 1; left: 6, 8\n"
    assert CheckpointFolder(checkpoints).steps() == [6, 8]


EXPORTED = [
    "README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_boost.py", "tokenizer.json",
    "tokenizer_config.json",
]  # fmt: skip


@pytest.mark.nightly
def test_export_of_a_folder(checkpoints: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    assert run_boost("export", f"{checkpoints}/step-00000006", model, "--dtype", "bf16").exit_code == 0
    shown = capfd.readouterr()
    assert (shown.out, "Warning" in shown.err) == (f"exported step 6 to {model}\n", False)
    assert sorted(path.name for path in model.iterdir()) == EXPORTED
    assert json.loads((model / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert "| checkpoint | step 6, " in (model / "README.md").read_text()
    assert " loss |" not in (model / "README.md").read_text()


@pytest.mark.nightly
def test_export_of_a_job_has_its_losses_on_the_card(
    api: RunningApi, store: JobStore, trained: Path, tmp_path: Path
) -> None:
    job = store.create(a_spec(), str(tmp_path / "runs"))
    empty = boost_at(api.url)("export", job.id, tmp_path / "model")
    assert (empty.exit_code, empty.stderr) == (2, f"error: {job.id} has no committed checkpoint yet\n")
    run_to_the_end(store, job.id)
    shutil.copytree(trained, job.checkpoint_url.removeprefix("file://"))
    result = boost_at(api.url)("export", job.id, tmp_path / "model")
    assert result.exit_code == 0, result.output
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| checkpoint | step 8, " in card
    assert f"| training loss | {a_step(8).loss:.4f} nats a token |" in card


@pytest.mark.nightly
def test_generation_from_the_newest_checkpoint_of_a_job_that_trains(
    api: RunningApi, store: JobStore, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = start(store, store.create(a_spec(), str(tmp_path / "runs")).id)
    command = ("generate", job.id, "--prompt", "0 The", "--temperature", 0, "--max-new-tokens", 3)
    empty = boost_at(api.url)(*command)
    assert (empty.exit_code, empty.stderr) == (2, f"error: {job.id} has no committed checkpoint yet\n")
    shutil.copytree(trained, job.checkpoint_url.removeprefix("file://"))
    capfd.readouterr()
    assert boost_at(api.url)(*command).exit_code == 0
    newest = capfd.readouterr().out
    assert run_boost("generate", f"{trained}/step-00000008", *command[2:]).exit_code == 0
    assert capfd.readouterr().out == newest != ""
    assert boost_at(api.url)("generate", job.id, "--prompt", 40 * "x").exit_code == 2
    assert "give at most 31" in capfd.readouterr().err


@pytest.mark.nightly
def test_export_passes_on_what_is_refused(checkpoints: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_boost("export", checkpoints, tmp_path / "model", "--merge").exit_code == 2
    assert "there is no product to multiply out; export it without --merge" in capfd.readouterr().err


@pytest.mark.parametrize("command", [["ls"], ["show"], ["verify"], ["prune", "--keep-last", "1"]])
def test_an_empty_folder_is_said_in_a_line(tmp_path: Path, command: list[str]) -> None:
    result = ckpt(*command, tmp_path)
    assert (result.exit_code, result.stderr) == (
        2, f"error: {tmp_path} holds no committed checkpoint; check the URL\n",
    )  # fmt: skip


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("export", "out"), ("eval", "--tasks", "tests")])
def test_a_place_without_checkpoints_is_refused_before_the_trainer_is_loaded(
    tmp_path: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.cli.commands.checkpoints.run_trainer", lambda *_: 99)
    name, *options = command
    result = run_boost(name, tmp_path, *options)
    assert (result.exit_code, result.stderr) == (
        2, f"error: {tmp_path} holds no committed checkpoint; check the URL\n",
    )  # fmt: skip
    absent = run_boost("eval", tmp_path, "--tasks", tmp_path / "no.yaml")
    assert (absent.exit_code, "no task file or folder is at" in absent.stderr) == (2, True)


def test_a_step_that_is_not_there(checkpoints: str) -> None:
    result = ckpt("show", checkpoints, "--step", 7)
    assert result.exit_code == 2
    assert result.stderr == f"error: {checkpoints} holds no checkpoint of step 7; there are: 3, 6, 8\n"
