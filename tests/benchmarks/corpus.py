"""Corpora beside what their tokenizer alone can do on the same text with as many processes.

``python -m tests.benchmarks.corpus`` writes docs/figures/corpus.md; it takes some minutes on two cores. All is measured
in turns, so that a machine that is busy with other things is so for all.
"""

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ray
import tokenizers

from boost_core.config.training import CorpusConfig, NearDedup, QualityFilter, SourceConfig
from boost_core.data.pipeline.build import Build, Engine, Lineage
from boost_core.data.pipeline.engine import LocalEngine, use_one_core
from boost_core.data.pipeline.ray_engine import RayEngine
from boost_core.data.tokenizers import train_bpe
from tests.benchmarks.figures import FIGURES, write_table

FILES = 16
BATCH_BYTES = 8 << 20
FILTERS = (
    QualityFilter(measure="words", min=5),
    QualityFilter(measure="word_length", max=100),
    QualityFilter(measure="symbols", max=2),
    QualityFilter(measure="letters", min=0.1),
    QualityFilter(measure="repeated_lines", max=0.9),
)


def write_text(folder: Path, mebibytes: int) -> None:
    """Python source text of this machine as JSON lines, in files of about the same size."""
    folder.mkdir()
    streams = [(folder / f"{number:02}.jsonl").open("w") for number in range(FILES)]
    size = 0
    for number, text in enumerate(_texts()):
        streams[number % FILES].write(json.dumps({"text": text}) + "\n")
        size += len(text)
        if size >= mebibytes << 20:
            break
    for stream in streams:
        stream.close()


def _texts() -> Iterator[str]:
    paths = sysconfig.get_paths()
    for root in (paths["stdlib"], paths["purelib"]):
        for path in sorted(Path(root).rglob("*.py")):
            try:
                yield path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue


def tokenizer_alone(files: Sequence[Path], tokenizer: Path, barrier: multiprocessing.Barrier) -> None:  # type: ignore[valid-type]
    """Encode the texts of some files, which are in memory by the time that the clock starts."""
    use_one_core()
    opened = tokenizers.Tokenizer.from_file(str(tokenizer))
    batches: list[list[str]] = [[]]
    size = 0
    for line in (line for file in files for line in file.read_text().splitlines()):
        batches[-1].append(json.loads(line)["text"])
        size += len(batches[-1][-1])
        if size >= BATCH_BYTES:
            batches.append([])
            size = 0
    barrier.wait()  # type: ignore[attr-defined]
    for batch in batches:
        opened.encode_batch_fast(batch, add_special_tokens=False)
    barrier.wait()  # type: ignore[attr-defined]


def bound(folder: Path, tokenizer: Path, workers: int) -> float:
    """Seconds in which as many processes as the pipeline has encode everything and do nothing else."""
    context, files = multiprocessing.get_context("spawn"), sorted(folder.iterdir())
    barrier = context.Barrier(workers + 1)
    processes = [
        context.Process(target=tokenizer_alone, args=(files[number::workers], tokenizer, barrier))
        for number in range(workers)
    ]
    for process in processes:
        process.start()
    barrier.wait()
    begun = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - begun
    for process in processes:
        process.join()
    return seconds


def build(source: Path, tokenizer: Path, engine: Engine, curated: bool) -> tuple[float, Lineage]:
    """Seconds from files to shards, by processes that run by then."""
    corpus = CorpusConfig(
        source=SourceConfig(kind="jsonl", paths=(str(source),)), tokenizer=str(tokenizer), shard_tokens=1 << 22,
        filters=FILTERS if curated else (), exact_dedup=curated, near_dedup=NearDedup() if curated else None,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        lineage = Build(corpus, folder, engine, lambda _progress: None).run()
        return time.perf_counter() - begun, lineage


def main() -> None:
    """Measure in turns and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    found: dict[str, Lineage] = {}
    with tempfile.TemporaryDirectory() as scratch:
        source, tokenizer = Path(scratch) / "in", Path(scratch) / "tokenizer.json"
        write_text(source, given.mebibytes)
        learnt = (json.loads(line)["text"].encode() for line in (source / "00.jsonl").read_text().splitlines())
        tokenizer.write_text(train_bpe(learnt, 32_000))
        ray.init(
            "local", num_cpus=given.workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
        )
        local = LocalEngine(given.workers)
        ways: dict[str, Callable[[], tuple[float, Lineage]]] = {
            "processes": lambda: build(source, tokenizer, local, False),
            "processes, five filters, both deduplications": lambda: build(source, tokenizer, local, True),
            "Ray Data, five filters, both deduplications": lambda: build(source, tokenizer, RayEngine(None), True),
        }
        # The first corpus starts the processes and Ray's workers, which takes the same seconds whatever it holds.
        warm = Path(scratch) / "warm"
        write_text(warm, 1)
        for engine in (local, RayEngine(None)):
            build(warm, tokenizer, engine, True)
        for _ in range(given.rounds):
            seconds.setdefault("the tokenizer alone", []).append(bound(source, tokenizer, given.workers))
            for name, way in ways.items():
                taken, found[name] = way()
                seconds.setdefault(name, []).append(taken)
        local.close()
        ray.shutdown()
    write_table(FIGURES / "corpus.md", HEADER, rows_of(seconds, found))


HEADER = ("", "seconds", "documents/s", "tokens/s", "MiB of text/s", "relative to the tokenizer alone")


def rows_of(seconds: dict[str, list[float]], found: dict[str, Lineage]) -> list[list[str]]:
    """A row for each way: medians, and the median of the rounds' ratios."""
    whole = found["processes"].counts
    rows = []
    for name, taken in seconds.items():
        median = statistics.median(taken)
        ratio = statistics.median(own / each for own, each in zip(seconds["the tokenizer alone"], taken, strict=True))
        rows.append([
            name, f"{median:.1f}", f"{whole.read / median:,.0f}", f"{whole.tokens / median:,.0f}",
            f"{whole.bytes / 2**20 / median:.1f}", f"{ratio:.2f}",
        ])  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
