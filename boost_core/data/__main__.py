"""Documents to tokens: ``python -m boost_core.data --help``.

Corpora of many files take further options: filters, duplicates, shuffling, engines.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import get_args

import fsspec
from pydantic import ValidationError

from boost_core.config.base import INTERRUPTED, counted, hear_interrupts, in_lines, stores_in_words
from boost_core.config.data_files import TokenIndex, kind_by_names, list_files, tokenizer_vocabulary
from boost_core.config.storage import no_room
from boost_core.config.training import BYTES, CorpusConfig, Measure, NearDedup, OnError, QualityFilter, SourceConfig
from boost_core.config.user_files import count_tokens
from boost_core.data.documents import documents, refuse_own_output
from boost_core.data.pipeline.build import Build, BuildProgress, Engine
from boost_core.data.pipeline.engine import LocalEngine
from boost_core.data.tokenize import TokenFolder, tokenize
from boost_core.data.tokenizers import train_bpe
from boost_core.terminal import ProgressLine, print_lines

_TRAINED = "tokenizer.json"
_PROGRESS = ProgressLine()


def main(arguments: Sequence[str] | None = None) -> int:
    """Tokenize; return 0 on success, 2 if something cannot be read or written, 130 if interrupted."""
    options = _parser().parse_args(arguments)
    hear_interrupts()
    try:
        with stores_in_words():
            if options.address is not None and not options.ray:
                raise ValueError("--address is for a Ray cluster; give --ray, too")
            if options.workers is not None and options.ray:
                raise ValueError("--workers is for this machine, and --ray uses the cluster's CPUs; leave one out")
            is_corpus = options.filter or options.exact_dedup or options.near_dedup or options.ray
            is_corpus = is_corpus or options.workers is not None or options.shuffle is not None
            if options.tokenizer and options.train_bpe is not None:
                raise ValueError("--train-bpe makes a tokenizer of its own; leave --tokenizer out, or --train-bpe")
            kind = options.kind or "text"
            source = SourceConfig(kind=kind, paths=tuple(options.sources), text_field=options.text_field or "text")
            refuse_own_output(source, options.folder)
            if options.kind is None:  # a cluster's nodes may read what this machine cannot list
                files = options.sources if options.ray else [file.url for file in list_files(source)]
                source = source.model_copy(update={"kind": kind_by_names(files)})
            if options.text_field and source.kind == "text":
                raise ValueError("--text-field is for files with fields or columns, and these are text; leave it out")
            trained = None if options.train_bpe is None else f"{options.folder.rstrip('/')}/{_TRAINED}"
            corpus = CorpusConfig(  # what is wrong with it is said before a tokenizer is trained
                source=source, tokenizer=trained or options.tokenizer or BYTES, end_of_document=options.end_of_document,
                filters=tuple(options.filter), exact_dedup=options.exact_dedup,
                near_dedup=NearDedup() if options.near_dedup else None, seed=options.shuffle or 0,
                validation_fraction=options.validation, shard_tokens=options.shard_tokens, on_error=options.on_error,
            )  # fmt: skip
            if trained:
                _train_once(source, trained, options)
            if is_corpus:
                return _build(corpus, options)
            index = tokenize(corpus, options.folder, _show)
    except KeyboardInterrupt:
        print_lines("\ninterrupted; run the same command again to pick up where it left off", to=sys.stderr)
        return INTERRUPTED
    except (OSError, ValueError) as error:
        full = no_room(error, options.folder, "run the same command again")
        print_lines(f"\n{full or in_lines(error)}", to=sys.stderr)
        return 2
    print_lines(
        f"\n{counted(index.documents, 'document')}, {counted(index.tokens('training'), 'token')} to train on and "
        f"{index.tokens('validation'):,} for validation, of a vocabulary of {index.vocabulary:,}, in {options.folder}",
        to=sys.stderr,
    )
    if not (index.tokens("training") and index.tokens("validation")):
        part, remedy = ("to train on", "lower") if index.tokens("validation") else ("for validation", "raise")
        remedy += " --validation"
        if index.documents == 1:
            remedy = "a document, such as a text file, goes to one part as a whole: make several of it"
        print_lines(f"no tokens are kept {part}; {remedy}", to=sys.stderr)
    if index.skipped:
        listed = f"{options.folder.rstrip('/')}/quarantine-*.jsonl"
        print_lines(f"{counted(index.skipped, 'bad document')} skipped; {listed} says which and why", to=sys.stderr)
    return 0


def _train_once(source: SourceConfig, name: str, options: argparse.Namespace) -> None:
    """Train a tokenizer and store it in the folder for the tokens; one that an interrupted run left there is kept.

    Raises:
        ValueError: The one that is there has more tokens than are wanted.
    """
    filesystem, path = fsspec.url_to_fs(name)
    if filesystem.exists(path):
        size = tokenizer_vocabulary(name)
        if size > options.train_bpe:
            problem = f"{name} has {size:,} tokens, more than the {options.train_bpe:,} of --train-bpe"
            raise ValueError(f"{problem}; give another folder")
        if size < options.train_bpe:  # as when the text had no more pairs to learn from
            kept = f"{name}, of {size:,} tokens, is kept; to learn up to {options.train_bpe:,}, give another folder"
            print_lines(kept, to=sys.stderr)
        return

    def texts() -> Iterator[bytes]:
        good, bad = False, ""
        for file in list_files(source):
            for document in documents(file, source):
                if not document.problem:
                    good = good or bool(document.content)
                    yield document.content
                elif options.on_error == "fail":
                    raise ValueError(document.refusal())
                else:
                    bad = bad or f" that are good: {document}"
        if not good:
            raise ValueError(f"there are no documents in {', '.join(source.paths)}{bad}")

    print(f"learning {options.train_bpe:,} tokens", file=sys.stderr)
    content = train_bpe(texts(), options.train_bpe).encode()  # before the folder is made
    if (size := count_tokens(content)) < options.train_bpe:
        print(f"it has {size:,}: the text has no more pairs to learn from", file=sys.stderr)
    TokenFolder(options.folder).write(_TRAINED, content)


def _build(corpus: CorpusConfig, options: argparse.Namespace) -> int:
    """Build the corpus and print what it contains; return 0."""
    with ExitStack() as stack:
        engine: Engine
        if options.ray:
            try:
                from boost_core.data.pipeline.ray_engine import ray_engine  # needs an extra, and slow to import
            except ImportError as error:
                problem = f"--ray needs Ray ({error}); install boost-service[service], or leave --ray out"
                raise ValueError(problem) from error
            engine = stack.enter_context(ray_engine(options.address))
        else:
            engine = stack.enter_context(closing(LocalEngine(options.workers or os.cpu_count() or 1)))
        lineage = Build(corpus, options.folder, engine, _show_build).run()
    counts = lineage.counts
    filtered = "".join(f", {count:,} filtered out by {measure}" for measure, count in counts.filtered.items())
    print_lines(
        f"\n{counts.kept:,} of {counted(counts.read, 'document')}, {counted(counts.tokens, 'token')} of a vocabulary "
        f"of {lineage.tokenizer.vocabulary:,}, in {options.folder}\nleft out: {counts.bad:,} bad{filtered}, "
        f"{counts.exact_duplicates:,} exact and {counts.near_duplicates:,} near duplicates\n"
        f"lineage.json says what it was made from; its fingerprint is {lineage.fingerprint}",
        to=sys.stderr,
    )
    return 0


def _show(index: TokenIndex, files: int, tokens: int, seconds: float) -> None:
    rate, skipped = tokens / max(seconds, 1e-9), f", {index.skipped:,} skipped" if index.skipped else ""
    done = f"{index.cursor.file} of {counted(files, 'file')}, {counted(index.documents, 'document')}"
    _PROGRESS.show(f"{done}, {counted(tokens, 'token')}, {rate:,.0f} per second{skipped}")


def _show_build(progress: BuildProgress) -> None:
    rate = progress.bytes / 2**20 / max(progress.seconds, 1e-9)
    read = counted(progress.counts.read, "document")
    _PROGRESS.show(f"{progress.stage}: {progress.done} of {progress.of}; {read}, {rate:,.1f} MiB per second")


def _filter(text: str) -> QualityFilter:
    measure, *bounds = text.split(":")
    try:
        least, most = (float(each) if each else None for each in bounds)
        return QualityFilter.model_validate({"measure": measure, "min": least, "max": most})
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise argparse.ArgumentTypeError(f"{text!r}: {problem}") from error
    except ValueError as error:
        form = f"MEASURE:MIN:MAX with a measure of {', '.join(get_args(Measure))}, such as words:50:100000"
        raise argparse.ArgumentTypeError(f"{text!r} is not {form}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="boost data")
    command = parser.add_subparsers(required=True).add_parser("tokenize", help="tokenize documents into shards")
    add = command.add_argument
    add("sources", nargs="+", metavar="SRC", help="files, folders, globs or URLs; text and jsonl also as .gz or .zst")
    add("folder", metavar="DST", help="folder or URL for the tokens; an interrupted run resumes there")
    add(
        "--kind", choices=("text", "jsonl", "parquet", "arrow", "dataset"),
        help="what the files are (default: what their names end in: .jsonl, .ndjson and .json.gz are jsonl, .parquet "
        "and .arrow themselves, all else is text)",
    )  # fmt: skip
    add("--text-field", help="field of each line or row that holds the text (default: text)")
    add("--tokenizer", help="bytes (the default), or the path or URL of a tokenizer.json")
    add("--train-bpe", type=int, metavar="N", help="train a byte-level BPE of N tokens on SRC first")
    add("--end-of-document", help="the token that ends a document (default: the only special token of a usual name)")
    add("--validation", "--held-out", type=float, default=0.05, help="share of the documents kept for validation")
    add(
        "--on-error", choices=get_args(OnError), default="fail",
        help="what to do with a document that cannot be used: stop, or skip it and list it in DST/quarantine-*.jsonl",
    )  # fmt: skip
    add("--shard-tokens", type=int, default=1 << 28, help="training tokens per shard")
    what = "Any of these shuffles the documents, uses several processes and writes DST/lineage.json."
    add = command.add_argument_group("corpora", what).add_argument
    add(
        "--filter", action="append", default=[], metavar="MEASURE:MIN:MAX", type=_filter,
        help=f"keep documents within these bounds, one of which may be empty; on {', '.join(get_args(Measure))}",
    )  # fmt: skip
    add("--exact-dedup", action="store_true", help="keep the first of documents with the same words")
    add("--near-dedup", action="store_true", help="keep the first of documents that are nearly equal (MinHash)")
    add("--shuffle", type=int, metavar="SEED", help="shuffle the documents with this seed (default: 0)")
    add("--workers", type=int, metavar="N", help="local processes (default: one per core)")
    add("--ray", action="store_true", help="run on a Ray cluster with Ray Data")
    add("--address", help="with --ray: the cluster's address (default: RAY_ADDRESS, or a new local Ray)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
