"""Text made while a job trains: the same in every layout, what its checkpoint says, and without a trace in training."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec
from boost_core.inference.generate import Sampling, generate, load_model
from boost_core.messages import line_of
from tests.distributed.recording import losses, train_and_record
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

PROMPTS = ["The quick", "0 ", "liquor jugs.\n"]
SAMPLE = {"every_steps": 5, "prompts": PROMPTS, "max_new_tokens": 12}
STEPS = 12
LAYOUTS = {
    "tp2 pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp2 dp2": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    "vanilla tp2": {"tensor_parallel_size": 2, "strategy": "vanilla"},
    "two halves": {"tensor_parallel_size": 2, "split_micro_batch": True},
}
MODELS: dict[str, dict[str, Any]] = {"two halves": {}, "vanilla tp2": {}, "tp2 dp2": {"tie_embeddings": True}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def job(corpus: Path, folder: Path, sample: dict[str, Any] | None = SAMPLE, **changes: Any) -> JobSpec:
    training = {"steps": STEPS, "evaluate_every_steps": STEPS, "sample": sample}
    return tiny_job(corpus, folder, **{"training": training, "checkpoint": {"every_steps": STEPS}} | changes)


def samples(reports: list[Any]) -> dict[int, list[str]]:
    return {report.step: [sample.text for sample in report.samples] for report in reports if report.kind == "sample"}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "tp2 pp2" else pytest.mark.nightly) for name in LAYOUTS],
)
def test_samples_are_what_the_checkpoint_says_and_leave_training_alone(
    ranks: Ranks, corpus: Path, tmp_path: Path, layout: str
) -> None:
    parallelism, model = LAYOUTS[layout], MODELS.get(layout, {})
    spec = job(corpus, tmp_path / "with", parallelism=parallelism, model=model)
    without = job(corpus, tmp_path / "without", None, parallelism=parallelism, model=model)
    world = spec.parallelism.world_size
    reports, expected = (ranks.run(world, train_and_record, each)[0] for each in (spec, without))
    assert losses(reports) == losses(expected)  # bit for bit
    assert samples(expected) == {}
    made = samples(reports)
    assert list(made) == [5, 10, STEPS]
    loaded = load_model(CheckpointFolder(str(tmp_path / "with")), STEPS, None)
    for prompt, text in zip(PROMPTS, made[STEPS], strict=True):
        parts: list[str] = []
        generate(loaded, prompt, Sampling(12, temperature=0), parts.append)
        assert "".join(parts).removesuffix("\n") == text.removesuffix("\n")


@pytest.mark.full
def test_samples_are_told_in_a_line(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = job(corpus, tmp_path, parallelism={"tensor_parallel_size": 1})
    (reports,) = ranks.run(1, train_and_record, spec)
    first = next(report for report in reports if report.kind == "sample")
    assert line_of(first).startswith('step 5  samples "The quick')
    assert len(line_of(first).splitlines()) == 1
    assert first.seconds > 0


def before_any_text(spec: JobSpec) -> None:
    with patch("boost_core.train.loop.load_corpus", side_effect=AssertionError("the text is tokenized")):
        train_and_record(spec)


def test_a_prompt_without_room_ends_the_job_at_once(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    from boost_core.data.tokenizers import train_bpe

    (tmp_path / "tokenizer.json").write_text(train_bpe([b"the quick brown fox"], 260))
    data = {"source": {"kind": "text", "paths": [str(corpus)]}, "tokenizer": str(tmp_path / "tokenizer.json")}
    sample = SAMPLE | {"prompts": ["one", "x y " * 30]}
    spec = job(
        corpus, tmp_path / "c", sample, data=data, model={"vocab_size": 270}, parallelism={"tensor_parallel_size": 1}
    )
    with pytest.raises(ValueError, match=r"prompt 1 has \d+ tokens, .* has room for only 20"):
        ranks.run(1, before_any_text, spec)
