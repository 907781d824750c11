"""Documents to tokens: ``python -m boost_core.data --help``."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import get_args

import fsspec

from boost_core.config.base import INTERRUPTED, counted, hear_interrupts, in_lines
from boost_core.config.data import BYTES, SourceConfig
from boost_core.config.dataset import CorpusConfig, OnError
from boost_core.config.parsing.stores import no_room, stores_in_words
from boost_core.config.sources.files import list_files
from boost_core.data.corpus_command import add_corpus_options, build, corpus_of, is_corpus, source_of
from boost_core.data.documents import documents
from boost_core.data.inputs import refuse_own_output
from boost_core.data.token_folder import TokenFolder
from boost_core.data.tokenize import Progress, TokenizePlan, tokenize
from boost_core.data.tokenizers import FileTokenizer, open_tokenizer, train_bpe
from boost_core.terminal import print_lines, print_over

_TRAINED = "tokenizer.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Tokenize; return 0 on success, 2 if something cannot be read or written, 130 if interrupted."""
    given = _parser().parse_args(arguments)
    hear_interrupts()
    try:
        with stores_in_words():
            several = is_corpus(given)
            refuse_own_output(source_of(given), given.folder)
            corpus_of(given, BYTES if given.train_bpe is not None else given.tokenizer)  # before training a tokenizer
            corpus = corpus_of(given, _tokenizer_of(given))
            if several:
                return build(corpus, given)
            plan = _plan(corpus, given.folder)
            index = tokenize(plan, _show)
    except KeyboardInterrupt:
        print_lines("\ninterrupted; run the same command again to pick up where it left off", to=sys.stderr)
        return INTERRUPTED
    except (OSError, ValueError) as error:
        full = no_room(error, given.folder, "run the same command again")
        print_lines(f"\n{full or in_lines(error)}", to=sys.stderr)
        return 2
    print_lines(
        f"\n{counted(index.documents, 'document')}, {counted(index.tokens('training'), 'token')} to train on and "
        f"{index.tokens('validation'):,} for validation, of a vocabulary of {index.vocabulary:,}, in {plan.folder}",
        to=sys.stderr,
    )
    if index.skipped:
        listed = f"{plan.folder.rstrip('/')}/quarantine-*.jsonl"
        print_lines(f"{counted(index.skipped, 'bad document')} skipped; {listed} says which and why", to=sys.stderr)
    return 0


def _plan(corpus: CorpusConfig, folder: str) -> TokenizePlan:
    content, tokenizer = "", open_tokenizer(corpus.tokenizer, corpus.end_of_document)
    if isinstance(tokenizer, FileTokenizer):
        with fsspec.open(corpus.tokenizer, "r", encoding="utf-8") as stream:
            content = stream.read()
    return TokenizePlan(
        corpus.source, folder, tokenizer, content, corpus.validation_fraction, corpus.shard_tokens, corpus.on_error
    )


def _tokenizer_of(given: argparse.Namespace) -> str:
    """The name of the tokenizer, which is trained first if requested."""
    if given.train_bpe is None:
        return str(given.tokenizer)
    _train_once(source_of(given), given.folder, given.train_bpe, given.on_error)
    return f"{given.folder.rstrip('/')}/{_TRAINED}"


def _train_once(source: SourceConfig, folder: str, vocabulary: int, on_error: OnError) -> None:
    """Train a tokenizer and store it in the folder for the tokens; one that an interrupted run left there is kept."""
    filesystem, path = fsspec.url_to_fs(f"{folder.rstrip('/')}/{_TRAINED}")
    if filesystem.exists(path):
        return
    print(f"learning {vocabulary:,} tokens", file=sys.stderr)
    content = train_bpe(_texts(source, on_error), vocabulary)
    TokenFolder(folder).write(_TRAINED, content.encode())


def _texts(source: SourceConfig, on_error: OnError) -> Iterator[bytes]:
    """The good documents; a bad one is an error unless bad ones are skipped."""
    for file in list_files(source):
        for document in documents(file, source):
            if not document.problem:
                yield document.content
            elif on_error == "fail":
                raise ValueError(f"{document}\nfix it, or leave bad documents out with --on-error skip")


def _show(progress: Progress) -> None:
    rate = progress.tokens / max(progress.seconds, 1e-9)
    line = (
        f"{progress.files} of {counted(progress.of_files, 'file')}, {counted(progress.documents, 'document')}, "
        f"{counted(progress.tokens, 'token')}, {rate:,.0f} per second"
    ) + (f", {progress.skipped:,} skipped" if progress.skipped else "")
    print_over(line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="boost data")
    command = parser.add_subparsers(required=True).add_parser("tokenize", help="tokenize documents into shards")
    command.add_argument(
        "sources", nargs="+", metavar="SRC", help="files, folders, globs or URLs; text and jsonl also as .gz or .zst"
    )
    command.add_argument("folder", metavar="DST", help="folder or URL for the tokens; an interrupted run resumes there")
    command.add_argument("--kind", choices=("text", "jsonl", "parquet", "arrow", "dataset"), default="text")
    command.add_argument("--text-field", default="text", help="field of each line or row that holds the text")
    command.add_argument("--tokenizer", default=BYTES, help="bytes, or the path or URL of a tokenizer.json")
    command.add_argument("--train-bpe", type=int, metavar="N", help="train a byte-level BPE of N tokens on SRC first")
    command.add_argument(
        "--end-of-document", help="the token that ends a document (default: the only special token of a usual name)"
    )
    command.add_argument(
        "--validation", "--held-out", type=float, default=0.05, help="share of the documents kept for validation"
    )
    command.add_argument(
        "--on-error", choices=get_args(OnError), default="fail",
        help="what to do with a document that cannot be used: stop, or skip it and list it in DST/quarantine-*.jsonl",
    )  # fmt: skip
    command.add_argument("--shard-tokens", type=int, default=1 << 28, help="training tokens per shard")
    add_corpus_options(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
