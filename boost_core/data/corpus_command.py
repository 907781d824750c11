"""The options of ``boost data tokenize`` for corpora of many files: filters, duplicates, shuffling, engines."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import get_args

from pydantic import ValidationError

from boost_core.config.base import counted
from boost_core.config.data import SourceConfig
from boost_core.config.dataset import CorpusConfig, Measure, NearDedup, QualityFilter
from boost_core.data.pipeline.build import Build, BuildProgress
from boost_core.data.pipeline.engine import Engine, LocalEngine
from boost_core.terminal import print_lines, print_over


def add_corpus_options(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = command.add_argument_group(
        "corpora", "Any of these shuffles the documents, uses several processes and writes DST/lineage.json."
    )
    group.add_argument(
        "--filter", action="append", default=[], metavar="MEASURE:MIN:MAX", type=_filter,
        help=f"keep documents within these bounds, one of which may be empty; on {', '.join(get_args(Measure))}",
    )  # fmt: skip
    group.add_argument("--exact-dedup", action="store_true", help="keep the first of documents with the same words")
    group.add_argument(
        "--near-dedup", action="store_true", help="keep the first of documents that are nearly equal (MinHash)"
    )
    group.add_argument("--shuffle", type=int, metavar="SEED", help="shuffle the documents with this seed (default: 0)")
    group.add_argument("--workers", type=int, metavar="N", help="local processes (default: one per core)")
    group.add_argument("--ray", action="store_true", help="run on a Ray cluster with Ray Data")
    group.add_argument("--address", help="with --ray: the cluster's address (default: RAY_ADDRESS, or a new local Ray)")


def is_corpus(given: argparse.Namespace) -> bool:
    """Whether any of the options is given."""
    several = given.workers is not None or given.ray or given.shuffle is not None
    if given.address is not None and not given.ray:
        raise ValueError("--address is for a Ray cluster; give --ray, too")
    if given.workers is not None and given.ray:
        raise ValueError("--workers is for this machine, and --ray uses the cluster's CPUs; leave one out")
    return bool(given.filter or given.exact_dedup or given.near_dedup or several)


def source_of(given: argparse.Namespace) -> SourceConfig:
    """The source of the documents."""
    return SourceConfig(kind=given.kind, paths=tuple(given.sources), text_field=given.text_field)


def corpus_of(given: argparse.Namespace, tokenizer: str) -> CorpusConfig:
    """How the documents become tokens.

    Raises:
        ValueError: An option has an invalid value.
    """
    return CorpusConfig(
        source=source_of(given), tokenizer=tokenizer, end_of_document=given.end_of_document,
        filters=tuple(given.filter), exact_dedup=given.exact_dedup,
        near_dedup=NearDedup() if given.near_dedup else None, seed=given.shuffle or 0,
        validation_fraction=given.validation, shard_tokens=given.shard_tokens, on_error=given.on_error,
    )  # fmt: skip


def build(corpus: CorpusConfig, given: argparse.Namespace) -> int:
    """Build the corpus and print what it contains; return 0.

    Raises:
        ValueError, OSError: See ``Build``.
    """
    with _engine(given) as engine:
        lineage = Build(corpus, given.folder, engine, _show).run()
    counts = lineage.counts
    filtered = "".join(f", {count:,} filtered out by {measure}" for measure, count in counts.filtered.items())
    print_lines(
        f"\n{counts.kept:,} of {counted(counts.read, 'document')}, {counted(counts.tokens, 'token')} of a vocabulary "
        f"of {lineage.tokenizer.vocabulary:,}, in {given.folder}\nleft out: {counts.bad:,} bad{filtered}, "
        f"{counts.exact_duplicates:,} exact and {counts.near_duplicates:,} near duplicates\n"
        f"lineage.json says what it was made from; its fingerprint is {lineage.fingerprint}",
        to=sys.stderr,
    )
    return 0


@contextmanager
def _engine(given: argparse.Namespace) -> Iterator[Engine]:
    if not given.ray:
        with closing(LocalEngine(given.workers or os.cpu_count() or 1)) as local:
            yield local
        return
    try:
        from boost_core.data.pipeline.ray_engine import ray_engine  # needs an extra, and slow to import
    except ImportError as error:
        raise ValueError(f"--ray needs Ray ({error}); install boost-service[service], or leave --ray out") from error
    with ray_engine(given.address) as engine:
        yield engine


def _filter(text: str) -> QualityFilter:
    measure, *bounds = text.split(":")
    try:
        least, most = (float(each) if each else None for each in bounds)
        return QualityFilter.model_validate({"measure": measure, "min": least, "max": most})
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise argparse.ArgumentTypeError(f"{text!r}: {problem}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not MEASURE:MIN:MAX with a measure of {', '.join(get_args(Measure))}, such as words:50:100000"
        ) from error


def _show(progress: BuildProgress) -> None:
    rate = progress.bytes / 2**20 / max(progress.seconds, 1e-9)
    read = counted(progress.counts.read, "document")
    line = f"{progress.stage}: {progress.done} of {progress.of}; {read}, {rate:,.1f} MiB per second"
    print_over(line)
