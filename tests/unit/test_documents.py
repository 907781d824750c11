"""Documents that cannot be used are named: which file, where in it, and why. Archives are read as what is in them."""

import codecs
import gzip
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from boost_core.config import DataConfig, SourceConfig
from boost_core.config.data_files import SourceFile, check_data, list_files
from boost_core.data import documents as reading
from boost_core.data.corpus import load_corpus
from boost_core.data.documents import Document, documents

TEXTS = [f"text {number}, ümläut and all" for number in range(4000)]
LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)


def zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


def parquet(texts: list[str | None] | pa.Array = TEXTS, **options: int) -> bytes:
    written = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), written, **options)
    return written.getvalue()


def arrow(texts: list[str] = TEXTS) -> bytes:
    written, table = io.BytesIO(), pa.table({"text": texts})
    with pa.ipc.new_stream(written, table.schema) as stream:
        stream.write_table(table, max_chunksize=100)
    return written.getvalue()


def found(path: Path, content: bytes, kind: str) -> tuple[list[str], list[str]]:
    """The good documents of a file, and what is said of the bad ones."""
    path.write_bytes(content)
    all_of_it = list(documents(SourceFile(str(path), len(content)), SourceConfig(kind=kind, paths=(str(path),))))
    bad = [str(document).removeprefix(str(path)) for document in all_of_it if document.problem]
    return [document.content.decode() for document in all_of_it if not document.problem], bad


BAD_LINES = [
    (b'{"words": "x"}', "has no field 'text', but 'words'; set text_field (--text-field) to a field of text: 'words'"),
    (b"no json", "no JSON from character 1 on (Expecting value): an object with a field 'text' is needed"),
    (b"[1, 2]", "no JSON object with a field 'text'"),
    (b'{"text": 3}', "has a field 'text' that is int, not text; convert it"),
    (b'{"text": "half \\ud83d of it"}', r"'text' holds \ud83d, a lone surrogate"),
    (b'{"text": "caf\xe9"}', "is not UTF-8: byte 0xe9 at offset 13"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"text": "' + b"x" * 5000 + b'"}', "is longer than 4,000 bytes"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES, ids=[problem for _, problem in BAD_LINES])
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path: Path, line: bytes, problem: str) -> None:
    content = b'{"text": "before"}\n\n' + line + b'\n{"text": "after"}'
    with patch.object(reading, "_LONGEST", 4000 if "longer" in problem else 1 << 30):
        good, bad = found(tmp_path / "a.jsonl", content, "jsonl")
    assert good == ["before", "after"]
    assert len(bad) == 1
    assert bad[0].startswith(f", line 3: {problem}")


@pytest.mark.parametrize("kind", ["text", "jsonl"])
@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
    ],
)
def test_utf16_is_called_what_it_is(tmp_path: Path, kind: str, mark: bytes, encoding: str) -> None:
    good, bad = found(tmp_path / "a", mark + '{"text": "x"}\n'.encode(encoding), kind)
    name = encoding[:6].upper()
    assert (good, bad) == ([], [f": is {name}, by its byte order mark; convert it to UTF-8, as with: iconv -f {name} "
                                "-t UTF-8"])  # fmt: skip


def test_a_utf8_byte_order_mark_is_none_of_the_text(tmp_path: Path) -> None:
    assert found(tmp_path / "a", codecs.BOM_UTF8 + b'{"text": "x"}\n', "jsonl") == (["x"], [])
    assert found(tmp_path / "a", codecs.BOM_UTF8 + b"x", "text") == (["x"], [])


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    assert found(tmp_path / "a.txt", "déjà".encode("latin-1"), "text") == (
        [], [": is not UTF-8: byte 0xe9 at offset 1; convert it"],
    )  # fmt: skip


@pytest.mark.full
def test_rows_of_parquet_are_named(tmp_path: Path) -> None:
    texts: list[str | None] = [*TEXTS[:7], None, *TEXTS[8:]]
    good, bad = found(tmp_path / "null", parquet(texts, row_group_size=3), "parquet")
    assert good == [text for text in texts if text is not None]
    assert bad == [", row group 2, row 1: 'text' is null; remove the row, or give it text"]
    invalid = pa.array([b"fine", b"caf\xe9"], pa.binary()).view(pa.string())
    assert found(tmp_path / "invalid", parquet(invalid), "parquet") == (
        ["fine"], [", row group 0, row 1: is not UTF-8: byte 0xe9 at offset 3; convert it"],
    )  # fmt: skip
    assert found(tmp_path / "numbers", parquet(pa.array([1, 2])), "parquet")[1] == [
        ": has a column 'text' that is int64, not text; convert it: only text is trained on"
    ]


def test_a_column_of_a_few_texts_over_and_over_is_text(tmp_path: Path) -> None:
    few = pa.array(["a", "b", "a"]).dictionary_encode()
    assert found(tmp_path / "few", parquet(few), "parquet") == (["a", "b", "a"], [])


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_column_of_a_doubled_name_is_not_guessed(tmp_path: Path, kind: str) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    written = io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, written)
    else:
        with pa.ipc.new_stream(written, table.schema) as stream:
            stream.write_table(table)
    assert found(tmp_path / "a", written.getvalue(), kind) == (
        [],
        [": has 2 columns 'text'; rename all but one, or set text_field (--text-field) to another"],
    )


POSITIONS = {  # in a column of texts of 5, 6 and 7 characters, and what damage makes of them
    "32 bits": (pa.string(), struct.pack("<4i", 0, 5, 11, 18), struct.pack("<4i", 0, 1 << 30, 11, 18)),
    "64 bits": (pa.large_string(), struct.pack("<4q", 0, 5, 11, 18), struct.pack("<4q", 0, -(1 << 40), 11, 18)),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), struct.pack("<3i", 0, 1, 2), struct.pack("<3i", 0, 1, 99)),
}


@pytest.mark.parametrize("kind", POSITIONS)
def test_damaged_positions_of_texts_are_damage_and_nothing_is_read_beyond_them(tmp_path: Path, kind: str) -> None:
    column_type, whole, damaged = POSITIONS[kind]
    written, table = io.BytesIO(), pa.table({"text": pa.array(["fiver", "sixsix", "sevenss"]).cast(column_type)})
    with pa.ipc.new_file(written, table.schema) as stream:
        stream.write_table(table)
    assert written.getvalue().count(whole) == 1
    good, bad = found(tmp_path / "a", written.getvalue().replace(whole, damaged), "arrow")
    assert (good, len(bad)) == ([], 1)
    assert bad[0].startswith(", from row 0 on: is damaged or cut off: ")


def test_what_a_damaged_schema_and_size_lead_to_is_damage(tmp_path: Path) -> None:
    whole = arrow()
    unnamed = whole.replace(b"text\0", b"\xff\xfe\xfd\xfc\0")
    assert found(tmp_path / "a", unnamed, "arrow") == (
        [], [": is damaged or cut off: it has names that are not UTF-8"],
    )  # fmt: skip
    first = whole.index(b"\xff\xff\xff\xff", 8)  # begins the first batch; its body's size follows
    message = pa.ipc.read_message(whole[first:])
    size = struct.pack("<q", message.body.size)
    place = whole.index(size, first)
    vast = whole[:place] + struct.pack("<q", 1 << 62) + whole[place + 8 :]
    good, bad = found(tmp_path / "a", vast, "arrow")
    assert (good, bad) == ([], [", from row 0 on: is damaged or cut off: it claims to hold more than fits into memory"])


def test_damage_in_one_row_group_of_parquet_leaves_the_others(tmp_path: Path) -> None:
    whole = parquet(row_group_size=250)
    place = pq.ParquetFile(io.BytesIO(whole)).metadata.row_group(1).column(0).dictionary_page_offset
    torn = whole[: place + 60] + b"\xff" * 400 + whole[place + 460 :]
    good, bad = found(tmp_path / "torn", torn, "parquet")
    assert good == TEXTS[:250] + TEXTS[500:]
    assert len(bad) == 1
    assert bad[0].startswith(", row group 1, from row 0 on: is damaged or cut off: ")


CUT = {
    "parquet": (parquet(), "parquet", ": is damaged or cut off: Parquet magic bytes not found", 0),
    "arrow": (arrow(), "dataset", ", from row 3900 on: is damaged or cut off: ", 3900),
    "jsonl.gz": (gzip.compress(LINES), "jsonl", ", after line ", 1000),
    "jsonl.zst": (zstd(LINES), "jsonl", ", after line ", 1000),
    "txt.gz": (gzip.compress(LINES), "text", ": is damaged or cut off: Compressed file ended", 0),
    "txt.zst": (zstd(LINES), "text", ": is damaged or cut off: Truncated compressed stream", 0),
}


@pytest.mark.parametrize("name", CUT)
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, name: str) -> None:
    content, kind, problem, at_least = CUT[name]
    good, bad = found(tmp_path / f"a.{name}", content[:-20], kind)
    assert len(good) >= at_least and good == TEXTS[: len(good)] and good != TEXTS
    assert len(bad) == 1
    assert bad[0].startswith(problem)
    good, bad = found(tmp_path / f"a.{name}", b"", kind)
    assert (good, len(bad)) == ([], 1)


def test_what_the_file_system_says_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(documents(SourceFile(str(tmp_path / "a"), 1), SourceConfig(kind="text", paths=("a",))))


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstd)])
def test_archives_in_folders_and_globs_are_read_as_what_is_in_them(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    half = LINES.index(b"\n", len(LINES) // 2) + 1
    # Two archives one after the other are one, as of ``cat``.
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(compress(LINES[:half]) + compress(LINES[half:]))
    (tmp_path / "b.jsonl").write_bytes(LINES)
    for path, times in ((str(tmp_path), 2), (f"{tmp_path}/*.{suffix}", 1), (f"file://{tmp_path}/a*", 1)):
        source = SourceConfig(kind="jsonl", paths=(path,))
        read = [document for file in list_files(source) for document in documents(file, source)]
        assert [document.content.decode() for document in read] == TEXTS * times


@pytest.mark.full
@pytest.mark.parametrize(
    ("after", "problem"),
    [
        (b"\0" * 512, None),  # as tapes and tar pad
        (b"\0" * 512 + gzip.compress(LINES), None),
        (b"something else", "is damaged or cut off: Not a gzipped file"),
        (gzip.compress(LINES)[:40] + b"\xff" * 400, "is damaged or cut off: "),
    ],
)
def test_what_follows_an_archive_in_its_file_loses_nothing_of_it(
    tmp_path: Path, after: bytes, problem: str | None
) -> None:
    good, bad = found(tmp_path / "a.jsonl.gz", gzip.compress(LINES) + after, "jsonl")
    assert good[: len(TEXTS)] == TEXTS
    assert len(bad) == (problem is not None)
    assert problem is None or problem in bad[0]


def test_a_job_reads_archives_and_counts_what_is_in_them(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.txt.gz").write_bytes(gzip.compress(b"0123456789" * 1000))
    data = DataConfig(source=SourceConfig(kind="text", paths=(str(tmp_path),)), validation_fraction=0.5)
    check_data(data, 256, 5000)  # of archives of 60 bytes
    (stream,) = load_corpus(data, 5000).streams
    assert (len(stream.training), len(stream.validation)) == (10_000, 10_000)
    with pytest.raises(ValueError, match="the training text is 10000 tokens, too little"):
        load_corpus(data, 10_000)


BAD_TEXTS = {
    b"zero \0 byte": "holds byte 0, which ends documents",
    b"caf\xe9" * 5: "is not UTF-8",
    codecs.BOM_UTF16_LE + "text".encode("utf-16-le"): "is UTF-16",
}


@pytest.mark.parametrize("content", BAD_TEXTS, ids=list(BAD_TEXTS.values()))
def test_a_job_is_told_which_document_is_bad_and_what_to_do(tmp_path: Path, content: bytes) -> None:
    for name in ("0.txt", "1.txt"):
        (tmp_path / name).write_bytes(content)
    data = DataConfig(source=SourceConfig(kind="text", paths=(str(tmp_path),)))
    with pytest.raises(ValueError, match=rf"{tmp_path}/\d.txt: {BAD_TEXTS[content]}.* --on-error skip"):
        load_corpus(data, 2)


def test_a_job_whose_files_hold_no_documents_is_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("\n" * 50)
    data = DataConfig(source=SourceConfig(kind="jsonl", paths=(str(tmp_path),)))
    with pytest.raises(ValueError, match="the training text is 0 tokens, too little"):
        load_corpus(data, 8)


def test_nobody_is_told_to_skip_where_that_might_leave_out_all(tmp_path: Path) -> None:
    columns = tmp_path / "b.parquet"
    columns.write_bytes(parquet(TEXTS))
    absent = SourceConfig(kind="parquet", paths=(str(columns),), text_field="body")
    with pytest.raises(ValueError, match=r"set text_field \(--text-field\) to a column of text: 'text'$"):
        load_corpus(DataConfig(source=absent), 8)
    lines = tmp_path / "a.jsonl"
    for first, advised in (('{"body": "other"}', False), ('{"text": "good"}', True), ("no JSON", True)):
        lines.write_text(f'{first}\n{{"body": "other"}}\n')
        source = SourceConfig(kind="jsonl", paths=(str(lines),))
        bad = next(each for each in documents(SourceFile(str(lines), 40), source) if each.problem)
        assert ("--on-error skip" in bad.refusal()) == advised


def test_a_bad_document_says_where_it_is() -> None:
    assert str(Document("a.jsonl", "line 3", b"", "is bad")) == "a.jsonl, line 3: is bad"
    assert str(Document("a.txt", "", b"", "is bad")) == "a.txt: is bad"
