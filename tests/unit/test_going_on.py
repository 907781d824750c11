"""``boost data tokenize`` beside bad and mended input: what is skipped is listed, what is finished is kept."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from boost_core.config import DataConfig, SourceConfig
from boost_core.config.base import INTERRUPTED
from boost_core.config.data_files import TokenIndex, index_of, read_index
from boost_core.data import __main__ as command
from boost_core.data import tokenizers
from boost_core.data.corpus import load_corpus

TEXTS = [
    f"file {file}, document {document}: {'the quick brown fox ' * 5}" for file in range(6) for document in range(20)
]


def write(folder: Path) -> Path:
    """Six files of JSON lines."""
    folder.mkdir()
    for number in range(6):
        write_file(folder / f"{number}.jsonl", TEXTS[number * 20 : number * 20 + 20])
    return folder


def write_file(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run(source: Path, folder: Path, *options: str) -> int:
    arguments = [
        "tokenize",
        str(source),
        str(folder),
        "--kind",
        "jsonl",
        "--validation",
        "0.2",
        "--shard-tokens",
        "2000",
    ]
    with patch.object(tokenizers, "_BATCH_BYTES", 700):
        return command.main([*arguments, *options])


def tokens_of(folder: Path) -> list[bytes]:
    """Training and validation tokens, which are bytes."""
    (stream,) = load_corpus(DataConfig(source=SourceConfig(kind="tokenized", paths=(str(folder),))), 8).streams
    return [bytes(part.read(0, len(part)).tolist()) for part in (stream.training, stream.validation)]


def spoil(path: Path, line: int) -> str:
    """Spoil a line, and return what was there."""
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    lines[line - 1] = "spoilt\n"
    path.write_text("".join(lines))
    return whole


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in")


@pytest.mark.parametrize("line", [1, 15])
def test_a_mended_file_is_gone_on_with_after_the_last_whole_shard(
    tmp_path: Path, source: Path, line: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(source, tmp_path / "whole") == 0
    whole = spoil(source / "3.jsonl", line)
    assert run(source, tmp_path / "out") == 2
    assert f"{source}/3.jsonl, line {line}: no JSON from character" in capsys.readouterr().err
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*-0000[01].bin")}
    assert len(finished) == 4
    (source / "3.jsonl").write_text(whole)
    write_file(source / "4.jsonl", TEXTS[80:90])  # whatever no shard holds may change
    write_file(source / "6.jsonl", TEXTS[90:100])
    assert run(source, tmp_path / "out") == 0
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert run(source, tmp_path / "at once") == 0
    assert tokens_of(tmp_path / "out") == tokens_of(tmp_path / "at once") != tokens_of(tmp_path / "whole")


def test_each_pair_of_shards_says_what_it_holds(tmp_path: Path, source: Path) -> None:
    assert run(source, tmp_path / "out") == 0
    pairs = [json.loads(path.read_text()) for path in sorted((tmp_path / "out").glob("inputs-*.json"))]
    assert len(pairs) == len(read_index(str(tmp_path / "out")).shards) / 2 > 4
    documents = [
        (held["file"], place) for pair in pairs for held in pair for place in range(held["first"], held["end"])
    ]
    assert documents == [(f"{source}/{file}.jsonl", place) for file in range(6) for place in range(20)]


@pytest.fixture
def cut_off(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """A run that ended in the fourth file, some of which is in a finished shard; and the file as it should be."""
    whole = spoil(source / "3.jsonl", 18)
    assert run(source, tmp_path / "out") == 2
    capsys.readouterr()
    index = index_of(str(tmp_path / "out"))
    assert index is not None and index.cursor.file == 3 and 5 < index.cursor.document < 18
    return whole


@pytest.mark.parametrize("name", ["1.jsonl", "3.jsonl"])
def test_a_changed_file_that_a_shard_holds_is_refused_by_name(
    tmp_path: Path, source: Path, cut_off: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "3.jsonl").write_text(cut_off)
    as_it_was = (source / name).read_text()
    (source / name).write_text(as_it_was.replace("document 2", "document X"))
    assert run(source, tmp_path / "out") == 2
    assert f"{source}/{name} has changed, and finished shards hold tokens" in capsys.readouterr().err
    (source / name).write_text("".join(as_it_was.splitlines(keepends=True)[:3]))
    assert run(source, tmp_path / "out") == 2
    assert f"{source}/{name} has changed" in capsys.readouterr().err
    (source / name).write_text(as_it_was)  # another time of modification, the same documents
    assert run(source, tmp_path / "out") == 0


def test_a_longer_file_of_which_a_shard_holds_all_has_changed(
    tmp_path: Path, source: Path, cut_off: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_file(source / "1.jsonl", [*TEXTS[20:40], "one more"])
    assert run(source, tmp_path / "out") == 2
    assert f"{source}/1.jsonl has changed" in capsys.readouterr().err


def test_files_that_come_and_go_among_those_that_shards_hold_are_refused(
    tmp_path: Path, source: Path, cut_off: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "3.jsonl").write_text(cut_off)
    write_file(source / "1a.jsonl", ["new"])
    assert run(source, tmp_path / "out") == 2
    assert f"hold tokens of {source}/2.jsonl, and {source}/1a.jsonl was added before it" in capsys.readouterr().err
    (source / "1a.jsonl").unlink()
    (source / "0.jsonl").rename(tmp_path / "aside")
    assert run(source, tmp_path / "out") == 2
    assert f"hold tokens of {source}/0.jsonl, and it is gone" in capsys.readouterr().err
    (tmp_path / "aside").rename(source / "0.jsonl")
    assert run(source, tmp_path / "out") == 0
    write_file(source / "9.jsonl", ["new"])
    assert run(source, tmp_path / "out") == 2
    assert f"is complete and holds nothing of {source}/9.jsonl" in capsys.readouterr().err


def test_unchanged_files_are_not_read_again(tmp_path: Path, source: Path, cut_off: str) -> None:
    (source / "3.jsonl").write_text(cut_off)
    for name in ("0.jsonl", "1.jsonl", "2.jsonl"):
        stamp, size = (source / name).stat(), (source / name).stat().st_size
        (source / name).write_text("x" * size)  # that nobody reads
        os.utime(source / name, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert run(source, tmp_path / "out") == 0


def quarantined(folder: Path) -> list[dict[str, str]]:
    lists = sorted(folder.glob("quarantine-*.jsonl"))
    return [json.loads(line) for path in lists for line in path.read_text().splitlines()]


def test_bad_documents_are_skipped_counted_and_listed(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(source / "0.jsonl", 3)
    (source / "2.jsonl").write_bytes(b"\xff\xfex\0")
    with (source / "5.jsonl").open("a") as file:
        file.write('{"text": "nul \\u0000 byte"}\n{"text": "' + "long " * 1000 + "\n")
    assert run(source, tmp_path / "out", "--on-error", "skip") == 0
    assert f"4 bad documents skipped; {tmp_path}/out/quarantine-*.jsonl says which" in capsys.readouterr().err
    index = read_index(str(tmp_path / "out"))
    assert (index.documents, index.skipped) == (20 * 5 - 1, 4)
    found = quarantined(tmp_path / "out")
    assert [(Path(each["file"]).name, each["place"], each["reason"].split(",")[0]) for each in found] == [
        ("0.jsonl", "line 3", "no JSON from character 1 on (Expecting value): an object with a field 'text' is needed"),
        ("2.jsonl", "", "is UTF-16"),
        ("5.jsonl", "line 21", "holds byte 0"),
        (
            "5.jsonl",
            "line 22",
            "no JSON from character 5011 on (Invalid control character at): an object with a field 'text' is needed",
        ),
    ]
    assert [each["begins"][:12] for each in found] == ["spoilt\n", "\\xff\\xfex\0", "nul \0 byte", '{"text": "lo']
    assert max(len(each["begins"]) for each in found) == 1000
    good = {text.encode() for text in TEXTS if not text.startswith(("file 2", "file 0, document 2:"))}
    documents = [text for part in tokens_of(tmp_path / "out") for text in part.split(b"\0") if text]
    assert (len(documents), set(documents)) == (len(good), good)


def test_a_run_that_stopped_goes_on_skipping(tmp_path: Path, source: Path, cut_off: str) -> None:
    assert run(source, tmp_path / "out", "--on-error", "skip") == 0
    assert [each["place"] for each in quarantined(tmp_path / "out")] == ["line 18"]
    assert run(source, tmp_path / "at once", "--on-error", "skip") == 0
    assert tokens_of(tmp_path / "out") == tokens_of(tmp_path / "at once")
    assert read_index(str(tmp_path / "out")) == read_index(str(tmp_path / "at once"))


@pytest.mark.parametrize("options", [(), ("--exact-dedup", "--workers", "1")])
def test_what_a_run_skipped_is_not_kept_by_one_that_does_not(
    tmp_path: Path, source: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(source / "0.jsonl", 3)
    assert run(source, tmp_path / "out", *options, "--on-error", "skip") == 0
    assert run(source, tmp_path / "out", *options) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"left out 1 bad document, as {tmp_path}/out/quarantine-*.jsonl lists" in said
    assert run(source, tmp_path / "out", *options, "--on-error", "skip") == 0


def test_a_list_of_a_round_that_did_not_end_goes(tmp_path: Path, source: Path) -> None:
    first, last = spoil(source / "3.jsonl", 17), (source / "3.jsonl").read_text()

    lists = []

    def interrupt(index: TokenIndex, *_: object) -> None:
        if index.skipped:
            lists.extend((tmp_path / "out").glob("quarantine-*.jsonl"))
            raise KeyboardInterrupt

    with patch.object(command, "_show", interrupt):
        assert run(source, tmp_path / "out", "--on-error", "skip") == INTERRUPTED
    assert not quarantined(tmp_path / "out")
    lists[0].write_text('{"place": "line 18"}\n')  # as a killed process leaves it
    assert quarantined(tmp_path / "out")
    (source / "3.jsonl").write_text(first)
    assert last != first
    assert run(source, tmp_path / "out", "--on-error", "skip") == 0
    assert not quarantined(tmp_path / "out")


@pytest.mark.parametrize("options", [(), ("--on-error", "skip"), ("--train-bpe", "300")])
def test_a_document_that_holds_the_token_that_ends_documents_is_bad(
    tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    end = "<|endoftext|>" if "--train-bpe" in options else "\0"
    (tmp_path / "in").mkdir()
    write_file(tmp_path / "in" / "a.jsonl", ["one document " * 20] * 20 + [f"one{end}two", "one document " * 20])
    assert run(tmp_path / "in", tmp_path / "out", *options) == (0 if "skip" in options else 2)
    if "skip" in options:
        assert sum(part.count(b"\0") for part in tokens_of(tmp_path / "out")) == 21
    else:
        name = "byte 0" if end == "\0" else end
        assert f"a.jsonl, line 21: holds {name}, which ends documents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("\n\n", (), "there are no documents in"),
        (
            "bad\n\nbad\n",
            ("--on-error", "skip"),
            "a.jsonl, line 1: no JSON from character",
        ),
        (
            '{"body": "x"}',
            (),
            "has no field 'text', but 'body'; set text_field (--text-field) to a field of text: 'body'",
        ),
        (
            '{"body": "x"}\n',
            ("--on-error", "skip"),
            "set text_field (--text-field) to",
        ),
        (
            '{"body": "x"}',
            ("--on-error", "skip", "--workers", "1"),
            "set text_field (--text-field) to",
        ),
        ('{"body": "x"}', ("--on-error", "skip", "--train-bpe", "300"), "that are good: "),
        ("", ("--train-bpe", "300"), "there are no documents in"),
    ],
)
def test_no_documents_at_all_is_an_error(
    tmp_path: Path, content: str, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(content)
    for _ in range(2):
        assert run(tmp_path / "in", tmp_path / "out", *options) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert message in said
        assert "--on-error skip" not in said
    with pytest.raises(ValueError, match="holds no tokens"):
        read_index(str(tmp_path / "out"))
