"""A checkpoint run in transformers' classes, straight from its files: what it says, and what is refused."""

import shutil
from pathlib import Path

import pytest
import torch

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config.training import CorpusConfig, SourceConfig
from boost_core.data.tokenize import tokenize
from boost_core.data.tokenizers import open_tokenizer, train_bpe
from boost_core.inference import generate as loading
from boost_core.inference.__main__ import main
from boost_core.inference.generate import Sampling, generate, load_model, round_weights
from tests.distributed.recording import train_and_record
from tests.exports import DENSE, OWN, TOKENS, checkpoint_of, log_probabilities, model_with, weights_of
from tests.jobs import TEXT, tiny_job, write_corpus
from tests.ranks import Ranks

CASES = {**OWN, **DENSE}
SOME = ("lax, dense", "cola, yarn")


@pytest.fixture
def checkpoints(tmp_path: Path) -> str:
    model = model_with(OWN["cola, grouped queries"])
    return checkpoint_of(model, weights_of(model), str(tmp_path / "checkpoints")).url


@pytest.fixture(scope="module")
def learnt(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a job that has learnt one sentence, in tokens of its own, by a pipeline."""
    folder = tmp_path_factory.mktemp("learnt")
    (folder / "tokenizer.json").write_text(train_bpe([TEXT.encode()], 290))
    name = str(folder / "tokenizer.json")
    source = SourceConfig(kind="text", paths=(str(write_corpus(folder / "corpus", files=8)),))
    how = CorpusConfig(source=source, tokenizer=name, validation_fraction=0.3, shard_tokens=10_000)
    tokenize(how, str(folder / "tokens"), lambda *_: None)
    training = {"steps": 60, "global_batch_size": 8, "micro_batch_size": 4, "evaluate_every_steps": 60}
    spec = tiny_job(
        folder,
        folder / "checkpoints",
        model={"vocab_size": open_tokenizer(name, None).vocabulary},
        data={"source": {"kind": "tokenized", "paths": [str(folder / "tokens")]}},
        parallelism={"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
        training=training,
        checkpoint={"every_steps": 60},
    )
    ranks.run(2, train_and_record, spec)
    return folder


@pytest.mark.parametrize("name", ["cola, grouped queries", "dense, tied"])
def test_weights_are_rounded_and_rotary_frequencies_are_not(name: str, tmp_path: Path) -> None:
    model = model_with(CASES[name])
    made = load_model(checkpoint_of(model, weights_of(model), str(tmp_path)), 0, None).model
    before = dict(made.named_buffers())
    round_weights(made, torch.bfloat16)
    assert {weight.dtype for weight in made.parameters()} == {torch.bfloat16}
    assert any("inv_freq" in buffer for buffer in before)
    assert all(torch.equal(buffer, before[key]) for key, buffer in made.named_buffers())
    assert {buffer.dtype for buffer in before.values()} == {torch.float32}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.nightly) for name in CASES]
)
def test_the_model_computes_what_the_trainer_does(name: str, tmp_path: Path) -> None:
    model = model_with(CASES[name])
    found = load_model(checkpoint_of(model, weights_of(model), str(tmp_path)), 0, None)
    with torch.no_grad():
        computed = torch.log_softmax(found.model(TOKENS[None]).logits[0].double(), -1)
    # As exports are compared: fp32 against float64, over three layers whose weights are doubled.
    torch.testing.assert_close(computed, log_probabilities(model), rtol=1e-3, atol=1e-3)


@pytest.mark.full
def test_a_learnt_sentence_is_continued_as_it_comes(learnt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "--prompt=0 The quick brown", "--temperature=0", "--max-new-tokens=12"]
    assert main([*asked, str(learnt / "checkpoints")]) == 0
    assert capsys.readouterr().out.startswith(" fox jumps over")
    parts: list[str] = []
    found = load_model(CheckpointFolder(str(learnt / "checkpoints")), 60, None)
    assert generate(found, "0 The quick brown", Sampling(12, temperature=0), parts.append) == 12
    assert "".join(parts).startswith(" fox jumps over")
    assert len(parts) > 2  # streamed, and not in one piece


def test_draws_are_repeated_by_their_seed(checkpoints: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for seed in (1, 1, 2):
        assert main(["generate", "--prompt=", f"--seed={seed}", "--top-p=0.9", checkpoints]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
    assert "\x1b" not in "".join(said)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt=" + 48 * "x"], "has 48 tokens, and the model was trained on sequences of 48; give at most 47"),
        (["--prompt=abc", "--max-new-tokens=46"], "ask for at most 45 with --max-new-tokens, not 46"),
        (["--prompt=a", "--temperature=-1"], "--temperature -1 is not from 0 to 100"),
        (["--prompt=a", "--temperature=nan"], "--temperature nan is not from 0 to 100"),
        (["--prompt=a", "--top-p=0"], "--top-p 0 is not above 0"),
        (["--prompt=a", "--max-new-tokens=0"], "ask for 1 or more"),
        (["--prompt=a", "--step=7"], "holds no checkpoint of step 7; there are: "),
        (["--prompt=a", "--tokenizer=/nowhere.json"], "the job's tokenizer cannot be read"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    checkpoints: str, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *options, checkpoints]) == 2
    assert says in capsys.readouterr().err


def test_a_tokenizer_that_has_gone_is_asked_for_and_another_is_refused(
    learnt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints, prompt = str(learnt / "checkpoints"), ["generate", "--prompt=The", "--max-new-tokens=2"]
    (tmp_path / "other.json").write_text(train_bpe([TEXT.encode()], 280))
    assert main([*prompt, f"--tokenizer={tmp_path}/other.json", checkpoints]) == 2
    assert "give the one it was trained with" in capsys.readouterr().err
    (learnt / "tokens").rename(learnt / "moved")
    try:
        assert main([*prompt, checkpoints]) == 2
        assert "give its tokenizer.json with --tokenizer" in capsys.readouterr().err
        assert main([*prompt, f"--tokenizer={learnt}/moved/tokenizer.json", checkpoints]) == 0
    finally:
        (learnt / "moved").rename(learnt / "tokens")


def test_a_checkpoint_that_is_being_removed_is_named(
    checkpoints: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed_meanwhile(folder: CheckpointFolder, *arguments: object) -> None:
        shutil.rmtree(f"{checkpoints}/step-00000000")
        read(folder, *arguments)

    read = loading.load_alone
    monkeypatch.setattr(loading, "load_alone", removed_meanwhile)
    assert main(["generate", "--prompt=a", checkpoints]) == 2
    assert "the checkpoint of step 0 was removed while it was being read; choose another" in capsys.readouterr().err
