"""The trainer on real ranks: what it reports, and that the layout changes nothing but the order of sums."""

import math
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec
from boost_core.config.training import CorpusConfig, SourceConfig
from boost_core.data.tokenize import tokenize
from boost_core.messages import perplexity_of
from tests.distributed.recording import losses, train_and_record
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.full
def test_reports_of_a_whole_run(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = tiny_job(corpus, tmp_path)
    first, second = ranks.run(2, train_and_record, spec)
    assert second == []  # rank 0 alone reports
    kinds = [report.kind for report in first]
    assert kinds[0] == "started"
    assert [report.step for report in first if report.kind == "progress"] == list(range(1, 9))
    assert [report.step for report in first if report.kind == "evaluation"] == [4, 8]
    assert [report.step for report in first if report.kind == "checkpoint"] == [3, 6, 8]
    assert CheckpointFolder(str(tmp_path)).steps() == [3, 6, 8]
    last = [report for report in first if report.kind == "progress"][-1]
    assert last.tokens == 8 * 4 * 32
    assert 0 < last.exposed_communication_seconds < last.step_seconds
    assert last.communication_seconds > 0
    assert last.communication_bytes > 0
    assert last.eta_seconds == 0
    saved = [report for report in first if report.kind == "checkpoint"][-1]
    assert saved.bytes == sum(path.stat().st_size for path in Path(saved.url).iterdir() if path.name != "manifest.json")


def where_the_first_rank_alone_reads_indices(spec: JobSpec) -> int | str:
    """The number of reports, or why it was refused."""
    name = "boost_core.config.data_files.index_of"
    refused = patch(name, side_effect=AssertionError("it reads the index")) if dist.get_rank() else nullcontext()
    with refused:
        try:
            return len(train_and_record(spec))
        except ValueError as error:
            return str(error)


@pytest.mark.full
def test_one_rank_reads_what_the_others_are_told_of_the_data(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    source = SourceConfig(kind="text", paths=(str(corpus),))
    tokenize(CorpusConfig(source=source, validation_fraction=0.2, shard_tokens=1_000), str(tokens), lambda *_: None)
    data = {"source": {"kind": "tokenized", "paths": [str(tokens)]}}
    spec = tiny_job(corpus, tmp_path / "checkpoints", data=data)
    reports, none = ranks.run(2, where_the_first_rank_alone_reads_indices, spec)
    assert reports > 8
    assert none == 0
    (tokens / "training-00000.bin").unlink()
    answers = ranks.run(2, where_the_first_rank_alone_reads_indices, tiny_job(corpus, tmp_path / "again", data=data))
    assert all("is missing on this node; name a folder that every node can read" in answer for answer in answers)
    (tokens / "index.json").unlink()
    answers = ranks.run(2, where_the_first_rank_alone_reads_indices, tiny_job(corpus, tmp_path / "more", data=data))
    assert all("holds no tokens (index.json is missing)" in answer for answer in answers)


@pytest.mark.full
def test_named_sets_are_evaluated_alike_in_every_layout(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    text = "Sphinx of black quartz, judge my vow.\n" * 30
    (tmp_path / "books.txt").write_text(text)
    write_corpus(tmp_path / "notes", files=2, lines=2)
    sets = [
        {"name": "books", "kind": "text", "paths": [str(tmp_path / "books.txt")]},
        {"name": "notes", "kind": "text", "paths": [str(tmp_path / "notes")]},
    ]
    data = {"source": {"kind": "text", "paths": [str(corpus)]}, "validation": sets}
    training = {"evaluate_sequences": 3, "evaluate_every_steps": 8}  # which two replicas cannot share evenly
    found = []
    for name, layout in (("alone", {"tensor_parallel_size": 1}), ("gang", LAYOUTS["tp2 pp2"]), ("two", LAYOUTS["dp2"])):
        spec = tiny_job(corpus, tmp_path / name, data=data, training=training, parallelism=layout)
        reports, *_ = ranks.run(spec.parallelism.world_size, train_and_record, spec)
        (report,) = [report for report in reports if report.kind == "evaluation"]
        found.append(report)
    alone, *gangs = found
    books, notes = alone.sets
    assert (books.name, notes.name, books.tokens) == ("books", "notes", 3 * 32)
    assert alone.loss < books.loss  # the text that is trained on is better known than another
    assert notes.loss < books.loss
    # A token a byte, and none more in one document: nats a token are bits a byte times ln 2.
    assert books.bits_per_byte == pytest.approx(books.loss / math.log(2), rel=1 / len(text))
    assert perplexity_of(books.loss) == pytest.approx(math.exp(books.loss))
    for gang in gangs:  # the tolerance of the curves' test below
        assert [each.loss for each in gang.sets] == pytest.approx([books.loss, notes.loss], rel=1e-4)
        assert gang.loss == pytest.approx(alone.loss, rel=1e-4)


LAYOUTS = {
    "tp4": {"tensor_parallel_size": 4},
    "dp2": {"tensor_parallel_size": 1, "data_parallel_size": 2},
    "tp2 dp2": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    "tp2 pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
JOBS = {
    "cola": {},
    "dense": {"model": {"family": "dense", "rank": None}},
    "lax": {"model": {"family": "lax", "lax": {"gate": "dense"}}},
    # Its third and sixth steps are exact.
    "svd loro": {"model": {"family": "svd"}, "optimizer": {"kind": "loro", "loro": {"exact_every_steps": 3}}},
}


# Each layout, and each job at the layout that asks most of it; test_layouts.py has more of them, to the last digit.
CURVES = [
    *((layout, "cola") for layout in ("tp4", "dp2", "tp2 pp2")),
    *(("tp2 dp2", job) for job in ("dense", "lax", "svd loro")),
]
SOME = [("tp2 pp2", "cola"), ("tp2 dp2", "lax")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "job"),
    [
        pytest.param(LAYOUTS[layout], JOBS[job], marks=() if (layout, job) in SOME else pytest.mark.nightly)
        for layout, job in CURVES
    ],
    ids=map(" ".join, CURVES),
)
def test_every_layout_follows_the_same_curve(
    ranks: Ranks, corpus: Path, tmp_path: Path, layout: dict, job: dict
) -> None:
    alone = tiny_job(corpus, tmp_path / "alone", parallelism={"tensor_parallel_size": 1}, **job)
    gang = tiny_job(corpus, tmp_path / "gang", parallelism=layout, **job)
    (expected,) = ranks.run(1, train_and_record, alone)
    (got, *_) = ranks.run(gang.parallelism.world_size, train_and_record, gang)
    # fp32 sums in another order: each of 8 steps may add a few units in the last place (6e-8) of a loss
    # near 5.5, amplified by Adam's division; 1e-4 is a hundredth of what one wrong sample would change.
    assert losses(got) == pytest.approx(losses(expected), rel=1e-4)
    evaluations = [[r.loss for r in reports if r.kind == "evaluation"] for reports in (got, expected)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-4)
    tokens = {report.tokens for report in got if report.kind == "evaluation"}
    assert tokens == {6 * 32}


@pytest.mark.full
def test_bf16_trains_close_to_fp32(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    curves = []
    for precision in ("fp32", "bf16"):
        spec = tiny_job(corpus, tmp_path / precision, training={"precision": precision})
        (reports, _) = ranks.run(2, train_and_record, spec)
        curves.append(list(losses(reports).values()))
    assert curves[1] != curves[0]
    # bf16 keeps 8 bits: 2^-8 relative on activations, which reach a loss near 5 as a few hundredths.
    assert curves[1] == pytest.approx(curves[0], abs=0.05)


def test_the_wrong_number_of_ranks_is_refused_with_a_remedy(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = tiny_job(corpus, tmp_path, parallelism={"tensor_parallel_size": 4})
    with pytest.raises(ValueError, match="= 4 processes, but 2 are running; start 4"):
        ranks.run(2, train_and_record, spec)


def why_training_ends(first: JobSpec, others: JobSpec) -> str:
    try:
        train_and_record(others if dist.get_rank() else first)
    except Exception as error:
        return str(error)
    return ""


def test_ranks_that_have_other_files_are_refused(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    specs = [tiny_job(each, tmp_path / "checkpoints") for each in (corpus, write_corpus(tmp_path / "more", files=9))]
    for reason in ranks.run(2, why_training_ends, *specs):
        assert reason.startswith("data: rank 1 has [(")


def test_a_loss_that_is_not_finite_stops_the_job(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    # A decay that multiplies every weight by about -1e3 a step overflows fp32 within a dozen steps.
    huge = {"learning_rate": 1.0, "weight_decay": 1e3, "warmup_steps": 0}
    spec = tiny_job(corpus, tmp_path, training={"steps": 40}, optimizer=huge)
    with pytest.raises(FloatingPointError, match=r"lower optimizer\.learning_rate"):
        ranks.run(2, train_and_record, spec)
