"""Checkpoints out as models: in shards, without the model in memory, with tokenizer and card, to where they go."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec
from boost_core.config.training import CorpusConfig, SourceConfig
from boost_core.convert.__main__ import main
from boost_core.convert.export import Destination
from boost_core.convert.model_folder import InMemory, published_slots, to_published, write_start
from boost_core.data.tokenize import tokenize
from boost_core.data.tokenizers import open_tokenizer
from boost_core.temporary import TemporaryFolder
from tests.distributed.recording import train_and_record
from tests.exports import OWN, checkpoint_of, model_with, weights_of
from tests.hub import local_hub
from tests.jobs import TEXT, tiny_job, write_corpus
from tests.ranks import Ranks
from tests.s3 import BUCKET, s3_server

MODEL = model_with(OWN["cola, grouped queries"])


@pytest.fixture
def checkpoints(tmp_path: Path) -> str:
    """A folder with a checkpoint of step 0."""
    return checkpoint_of(MODEL, weights_of(MODEL), str(tmp_path / "checkpoints")).url


def export(checkpoints: object, to: object, *options: object) -> int:
    return main(["export", str(checkpoints), str(to), *map(str, options)])


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.full
def test_shards_are_what_transformers_writes(checkpoints: str, tmp_path: Path) -> None:
    assert export(checkpoints, tmp_path / "whole") == 0
    assert export(checkpoints, tmp_path / "shards", "--max-shard-size", "20KB", "--dtype", "bf16") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", trust_remote_code=True, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    ours, theirs = (tensors_of(tmp_path / each) for each in ("shards", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    index, their_index = (
        json.loads((tmp_path / each / "model.safetensors.index.json").read_text()) for each in ("shards", "theirs")
    )
    assert index["metadata"]["total_size"] == their_index["metadata"]["total_size"]
    for file in (tmp_path / "shards").glob("*.safetensors"):
        with safe_open(file, framework="pt") as stream:
            assert {index["weight_map"][name] for name in stream.keys()} == {file.name}  # noqa: SIM118
            assert stream.metadata() == {"format": "pt"}
        sizes = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(sizes) <= 20_000 or len(sizes) == 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "shards", trust_remote_code=True)
    assert loaded.dtype is torch.bfloat16
    assert all(torch.equal(weight, theirs[name]) for name, weight in loaded.state_dict().items())


MEASURED = """
import sys
from pathlib import Path
from boost_core.convert.__main__ import main
def status(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0]) * 1024
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
assert main(sys.argv[1:]) == 0
print(status("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model of 210 MB."""
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 9, "num_attention_heads": 8}
    job = JobSpec.model_validate(
        {"name": "large", "model": shape | {"family": "svd", "rank": 256, "vocab_size": 4096}, "training": {"steps": 1}}
    )
    folder = tmp_path_factory.mktemp("large")
    tensors = {name: torch.randn(slot.published_shape) for name, slot in published_slots(job.model).items()}
    assert sum(tensor.nbytes for tensor in tensors.values()) > 200e6
    write_start(CheckpointFolder(str(folder)), job, InMemory(tensors))
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        # The embedding, the largest weight, is 17 MB: twice that as it is read, and as much as is written; the rest is
        # what torch and tokenizers take when they are first used.
        (),
        pytest.param(("--dtype", "bf16", "--max-shard-size", "50MB"), marks=pytest.mark.nightly),
        # Of a model of 490 MB, whose products are in fp64 before they are rounded.
        pytest.param(("--merge",), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_an_export_takes_a_fraction_of_the_models_memory(large: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    assert peak_of("export", large, tmp_path / "model", *options) < 100e6


@pytest.mark.nightly
def test_a_start_takes_a_fraction_of_the_models_memory(large: Path, tmp_path: Path) -> None:
    assert export(large, tmp_path / "model") == 0
    manifest = CheckpointFolder(str(large)).manifest(0)
    (tmp_path / "job.json").write_text(json.dumps(manifest.job))
    # Half of the export's: one weight and a copy of its box.
    assert peak_of("start", tmp_path / "model", tmp_path / "job.json", tmp_path / "start") < 100e6


def peak_of(*arguments: object) -> int:
    """By how much a command makes the memory of a process grow at most, in bytes.

    Freed blocks go back to the system at once: how many of them glibc keeps otherwise, in the holes of its heap,
    differs from run to run by more than what is measured.
    """
    command = [sys.executable, "-c", MEASURED, *map(str, arguments)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return int(printed.splitlines()[-1])  # after what the command prints itself


def data_of(tmp_path: Path, kind: str) -> dict:
    """A job's data with a tokenizer of each kind, whose document ends are 0, 1, 0, and out of reach."""
    write_corpus(tmp_path / "corpus")
    texts = {"kind": "text", "paths": [str(tmp_path / "corpus")]}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<|end|>": 1, "fox": 2}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing("<|end|> $A", special_tokens=[("<|end|>", 1)])
    words.save(str(tmp_path / "words.json"))
    if kind == "tokenized":
        how = CorpusConfig(source=SourceConfig(**texts), validation_fraction=0.1, shard_tokens=10_000)
        tokenize(how, str(tmp_path / "tokens"), lambda *_: None)
        return {"source": {"kind": "tokenized", "paths": [str(tmp_path / "tokens")]}}
    named = {
        "bytes": {},
        "file": {"tokenizer": str(tmp_path / "words.json"), "end_of_document": "<|end|>"},
        "gone": {"tokenizer": str(tmp_path / "gone.json")},
    }
    return {"source": texts} | named[kind]


def checkpoint_with(tmp_path: Path, **changes: object) -> str:
    content = tiny_job(tmp_path, tmp_path).model_dump(mode="json") | changes
    job = JobSpec.model_validate(content | {"model": MODEL.model_dump()})
    folder = CheckpointFolder(str(tmp_path / "with"))
    write_start(folder, job, InMemory(to_published(MODEL, weights_of(MODEL))))
    return folder.url


@pytest.mark.full
@pytest.mark.parametrize(("kind", "end"), [("bytes", 0), ("file", 1), ("tokenized", 0)])
def test_the_tokenizer_comes_along_and_makes_the_trainers_tokens(tmp_path: Path, kind: str, end: int) -> None:
    data = data_of(tmp_path, kind)
    assert export(checkpoint_with(tmp_path, data=data), tmp_path / "model") == 0
    config, generation = (
        json.loads((tmp_path / "model" / f"{name}config.json").read_text()) for name in ("", "generation_")
    )
    assert (config["eos_token_id"], generation) == (end, {"eos_token_id": end, "pad_token_id": end})
    ours = open_tokenizer(data.get("tokenizer"), data.get("end_of_document"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model", trust_remote_code=True)
    texts = [TEXT, "every byte: " + bytes(range(256)).decode("latin-1"), "Ā\0 žluťoučký 🦊\n\n"]
    for text, tokens in zip(texts, ours.encode([text.encode() for text in texts]), strict=True):
        assert theirs(text)["input_ids"] == tokens.tolist()
        assert kind == "file" or theirs.decode(tokens) == text
    assert theirs.eos_token == ("<|end|>" if kind == "file" else "\0")
    padded, alone = theirs(["a fox a", "fox"], padding=True), theirs("fox")["input_ids"]
    padding = len(padded["input_ids"][0]) - len(alone)
    assert padded["input_ids"][1] == padding * [end] + alone
    assert padded["attention_mask"][1] == padding * [0] + len(alone) * [1]


def test_a_tokenizer_that_is_gone_is_a_warning_and_another_models_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = checkpoint_with(tmp_path, data=data_of(tmp_path, "gone"))
    assert export(checkpoints, tmp_path / "without") == 0
    assert "the export gets no tokenizer and no eos_token_id" in caplog.text
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    words = {"</s>": 0} | {str(number): number for number in range(1, 300)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="1")).save(str(tmp_path / "other.json"))
    assert export(checkpoints, tmp_path / "other", "--tokenizer", tmp_path / "other.json") == 2
    assert "other.json has 300 tokens and the model was trained with 256" in capsys.readouterr().err
    assert export(checkpoints, tmp_path / "nowhere", "--tokenizer", tmp_path / "nowhere.json") == 2
    assert "nowhere.json" in capsys.readouterr().err
    assert not (tmp_path / "other").exists() and not (tmp_path / "nowhere").exists()


@pytest.mark.full
def test_the_card_says_what_was_trained_on_what(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, train_and_record, tiny_job(write_corpus(tmp_path / "corpus"), tmp_path / "runs"))
    known = tmp_path / "known.json"
    known.write_text(json.dumps({"losses": {"training": 2.5, "validation": 2.625}}))
    assert export(f"{tmp_path}/runs/step-00000006", tmp_path / "model", "--known", known) == 0
    _, about, card = (tmp_path / "model" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(about)["pipeline_tag"] == "text-generation"
    for fact in (
        "# tiny-test", "| checkpoint | step 6, ", "768 tokens, in sequences of 32", "2.5000 nats", "validation loss",
        "tp 2 × pp 1 × dp 1", f"{tmp_path}/corpus", "learning_rate: 0.01", "trust_remote_code=True",
    ):  # fmt: skip
        assert fact in card, fact


REFUSED = [
    (["--step", "7"], "holds no checkpoint of step 7"),
    (["--max-shard-size", "0GB"], "'0GB' is not a size; give one such as 500MB or 5GB"),
    (["--merge"], "family=cola has a SiLU between the two factors of a projection"),
    (["--tokenizer", "README.md"], "README.md"),
]


@pytest.mark.full
@pytest.mark.parametrize(("options", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_bad_input_is_refused_with_a_reason(
    checkpoints: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    try:
        status = export(checkpoints, tmp_path / "model", *options)
    except SystemExit as refusal:  # argparse
        status = refusal.code
    assert (status, says in capsys.readouterr().err) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_nothing_is_written_over(checkpoints: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.tex").write_text("x")
    assert export(checkpoints, tmp_path / "model") == 2
    assert "is not empty (it has thesis.tex); give a new folder" in capsys.readouterr().err
    assert export(checkpoints, tmp_path / "model" / "thesis.tex") == 2
    assert "is a file" in capsys.readouterr().err


def test_what_a_killed_export_has_left_in_a_folder_is_no_obstacle_and_another_export_is(
    checkpoints: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    (model / ".export-killed").mkdir(parents=True)
    assert export(checkpoints, model) == 0
    assert (model / "config.json").exists() and not list(model.glob(".*"))
    shutil.rmtree(model)
    model.mkdir()
    with TemporaryFolder(".export-", model):
        assert export(checkpoints, model) == 2
        assert "is not empty (it has .export-" in capsys.readouterr().err
    new, there = Destination(str(tmp_path / "new")), Destination(str(tmp_path / "new"))
    with new.staging(1) as first, there.staging(1) as second:
        for staged, name in ((first, "a"), (second, "b")):
            (staged / name).write_text("x")
        new.publish(first)
        with pytest.raises(OSError, match="new cannot be made: Directory not empty; give a new folder"):
            there.publish(second)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a"]


def test_a_disk_that_is_full_is_refused_before_anything_is_read(
    checkpoints: str, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(checkpoints, small_disk / "model") == 2
    assert f"{small_disk} has 0.000 GB free; the export takes 0.001 GB; make room" in capsys.readouterr().err
    assert not list(small_disk.iterdir())


def test_a_checkpoint_that_is_being_removed_is_named(
    checkpoints: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from boost_core.convert import export as exporting

    def removed_meanwhile(folder: CheckpointFolder, *arguments: object) -> None:
        shutil.rmtree(f"{checkpoints}/step-00000000")
        read(folder, *arguments)

    read = exporting.load_alone
    monkeypatch.setattr(exporting, "load_alone", removed_meanwhile)
    assert export(checkpoints, tmp_path / "model") == 2
    assert "the checkpoint of step 0 was removed while it was being read; choose another" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.nightly
def test_an_export_to_s3_is_the_same_as_to_a_folder(checkpoints: str, tmp_path: Path) -> None:
    with s3_server(tmp_path) as server:
        url = f"s3://{BUCKET}/models/mine"
        run = pushed(checkpoints, url, "--max-shard-size", "50KB", **server.environment)
        again = pushed(checkpoints, url, **server.environment)
        code = "import fsspec, sys; fsspec.filesystem('s3').get(sys.argv[1], sys.argv[2], recursive=True)"
        get = [sys.executable, "-c", code, url, str(tmp_path / "got")]
        subprocess.run(get, env=os.environ | server.environment, check=True)
    assert run.returncode == 0, run.stderr
    assert (again.returncode, f"{url} is not empty" in again.stderr) == (2, True)
    assert export(checkpoints, tmp_path / "local", "--max-shard-size", "50KB") == 0
    files = sorted(path.name for path in (tmp_path / "local").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "got").iterdir())
    assert all((tmp_path / "got" / name).read_bytes() == (tmp_path / "local" / name).read_bytes() for name in files)


def pushed(checkpoints: str, to: object, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because the libraries read their environment once."""
    command = [sys.executable, "-m", "boost_core.convert", "export", checkpoints, str(to), *options]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


FROM_THE_HUB = """
import sys, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
prompt = tokenizer("abc", return_tensors="pt")
print(model.generate(**prompt, max_new_tokens=4, do_sample=False, eos_token_id=None).shape)
"""


@pytest.mark.nightly
def test_an_export_is_pushed_to_a_hub_and_loads_from_there(checkpoints: str, tmp_path: Path) -> None:
    with local_hub() as hub:
        notes = {"notes.md": b"whoever else's"}
        hub.files["team/mine"] = {"model.safetensors": b"an earlier export's", "tokenizer.json": b"{}"} | notes
        environment = hub.environment | {"HF_HOME": str(tmp_path / "cache")}
        run = pushed(checkpoints, tmp_path / "model", "--push", "team/mine", "--max-shard-size", "50KB", **environment)
        assert run.returncode == 0, run.stderr
        assert hub.private == {"team/mine"}
        local = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
        there = {name: content for name, content in hub.files["team/mine"].items() if name != ".gitattributes"}
        assert there == local | notes
        load = [sys.executable, "-c", FROM_THE_HUB, "team/mine"]
        loaded = subprocess.run(load, env=os.environ | environment, capture_output=True, text=True)
        assert loaded.stdout == "torch.Size([1, 7])\n", loaded.stderr

        denied = pushed(checkpoints, tmp_path / "denied", "--push", "team/mine", **environment | {"HF_TOKEN": "hf_x"})
        misnamed = pushed(checkpoints, tmp_path / "misnamed", "--push", "a/b/c", **environment)
    away = pushed(checkpoints, tmp_path / "away", "--push", "team/mine", **environment)
    for refused, says in (
        (denied, f"the hub at {hub.url} refuses team/mine: "),
        (misnamed, "--push a/b/c: "),
        (away, f"the hub at {hub.url} does not answer: "),
    ):
        assert (refused.returncode, says in refused.stderr, len(refused.stderr.splitlines())) == (2, True, 1), refused
    assert not [name for name in ("denied", "misnamed", "away") if (tmp_path / name).exists()]
