import errno
import os
import re
import struct
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from boost_core.config import DataConfig, SourceConfig
from boost_core.config.base import StoreUnusable
from boost_core.config.data_files import (
    Shard,
    SourceFile,
    SourceSplit,
    TokenIndex,
    UnfitData,
    check_data,
    list_files,
    refuse_damaged,
    schema_of,
    split_source,
)
from boost_core.config.storage import Disk
from boost_core.config.user_files import problems_of_schemas
from boost_core.data.corpus import load_corpus
from tests.jobs import write_corpus


def text(*paths: str | Path, validation: float = 0.05) -> DataConfig:
    source = SourceConfig(kind="text", paths=tuple(map(str, paths)))
    return DataConfig(source=source, validation_fraction=validation)


def split(data: DataConfig, sequence_length: int) -> SourceSplit:
    return split_source(data.sources[0][0], data.validation_fraction, sequence_length)


def parts(data: DataConfig) -> list[list[int]]:
    """Training and validation tokens of a lone source."""
    (stream,) = load_corpus(data, 8).streams
    return [tokens.read(0, len(tokens)).tolist() for tokens in (stream.training, stream.validation)]


def test_the_standard_library_is_real_text_split_by_file() -> None:
    found = split(DataConfig(), 256)
    training, validation = ({file.url for file in files} for files in (found.training, found.validation))
    assert not training & validation
    assert len(training) > 300
    assert 0.04 < len(validation) / len(training | validation) < 0.07
    assert not any("/test/" in url or "site-packages" in url for url in training | validation)


@pytest.mark.parametrize("form", ["{}", "{}/*.txt", "file://{}", "file://{}/*.txt"])
def test_folders_globs_and_urls_name_the_same_files(tmp_path: Path, form: str) -> None:
    write_corpus(tmp_path, files=4)
    found = list_files(SourceConfig(kind="text", paths=(form.format(tmp_path),)))
    assert [Path(file.url).name for file in found] == ["0.txt", "1.txt", "2.txt", "3.txt"]


def test_a_file_named_twice_counts_once(tmp_path: Path) -> None:
    write_corpus(tmp_path, files=2)
    assert len(list_files(SourceConfig(kind="text", paths=(str(tmp_path), f"{tmp_path}/0.txt")))) == 2


def listed(kind: str, *paths: Path | str, **options) -> list[str]:
    return [
        Path(file.url).name for file in list_files(SourceConfig(kind=kind, paths=tuple(map(str, paths))), **options)
    ]


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    """As in the cache of Hugging Face's hub, whose snapshots are links to blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "data"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name in ("one", "two"):
        (blobs / name).write_text(name)
        (snapshot / f"{name}.txt").symlink_to(blobs / name)
    (snapshot / "three.txt").write_text("three")
    (snapshot / "loop").symlink_to(snapshot)
    (snapshot / "up").symlink_to(tmp_path / "snapshots")
    for path in (
        snapshot,
        tmp_path / "snapshots",
        snapshot / "*.txt",
        snapshot / "**/*.txt",
        tmp_path / "*" / "data" / "up" / "*" / "*.txt",
    ):
        assert listed("text", path) == ["one.txt", "three.txt", "two.txt"], path
    (snapshot / "gone.txt").symlink_to(blobs / "gone")
    assert listed("text", snapshot / "t*.txt") == ["three.txt", "two.txt"]
    for path in (snapshot, snapshot / "*.txt"):
        with pytest.raises(ValueError, match=r"gone\.txt' is a symbolic link to .*blobs/gone': No such file"):
            listed("text", path)


def test_hidden_files_are_read_only_if_they_are_named(tmp_path: Path) -> None:
    write_corpus(tmp_path, files=2)
    write_corpus(tmp_path / ".ipynb_checkpoints", files=2)
    (tmp_path / ".hidden.txt").write_text("hidden")
    for path in (tmp_path, tmp_path / "*.txt", tmp_path / "**" / "*.txt"):
        assert listed("text", path) == ["0.txt", "1.txt"], path
    for path in (tmp_path / ".ipynb_checkpoints", tmp_path / ".ipynb*" / "*.txt"):
        assert listed("text", path) == ["0.txt", "1.txt"], path
    assert listed("text", tmp_path / ".hidden.txt") == listed("text", tmp_path / ".h*") == [".hidden.txt"]


@pytest.mark.parametrize("name", ["part[1].txt", "part*.txt", "part?.txt"])
def test_a_name_with_wildcards_is_the_file_of_that_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "part1.txt").write_text("another")
    assert listed("text", tmp_path / name) == ["part1.txt"]
    (tmp_path / name).write_text("this one")
    assert listed("text", tmp_path / name) == [name]


@pytest.mark.parametrize(
    "spelled", ["{}/./0.txt", "{}//0.txt", "file://{}/0.txt", "{}/link", "{}/hard", "{}/../{name}/0.txt"]
)
def test_a_file_is_the_same_under_all_its_names(tmp_path: Path, spelled: str) -> None:
    write_corpus(tmp_path, files=10)
    (tmp_path / "link").symlink_to(tmp_path / "0.txt")
    (tmp_path / "hard").hardlink_to(tmp_path / "0.txt")
    path = spelled.format(tmp_path, name=tmp_path.name)
    assert len(listed("text", tmp_path / "0.txt", path)) == 1
    with pytest.raises(UnfitData, match="is also trained on"):
        check_data(
            DataConfig.model_validate(
                {
                    "source": {"kind": "text", "paths": [f"{tmp_path}/0.txt"]},
                    "validation": [{"name": "held", "kind": "text", "paths": [path]}],
                }
            ),
            256,
            4,
        )


def test_no_source_of_a_mixture_trains_on_what_another_validates_on(tmp_path: Path) -> None:
    write_corpus(tmp_path / "code", files=20)
    write_corpus(tmp_path, files=20)
    sources = [{"kind": "text", "paths": [str(path)], "weight": 1} for path in (tmp_path, tmp_path / "code")]
    mixed = DataConfig.model_validate({"mixture": sources, "validation_fraction": 0.3})
    with pytest.raises(UnfitData, match="is validated on as part of one source and trained on as part of another"):
        check_data(mixed, 256, 4)
    check_data(mixed, 256, 4, new=False)  # a job that was accepted goes on
    check_data(DataConfig.model_validate({"mixture": [sources[0], sources[0] | {"weight": 2}]}), 256, 4)


def test_what_a_lone_file_is_validated_on_is_not_trained_on_otherwise(tmp_path: Path) -> None:
    write_corpus(tmp_path, files=20)
    (tmp_path / "same").symlink_to(tmp_path / "0.txt")
    every, lone, same = (
        {"kind": "text", "paths": [f"{tmp_path}/{name}"], "weight": 1} for name in ("*.txt", "0.txt", "same")
    )
    for other in (every, lone | {"kind": "jsonl"}, lone | {"paths": [f"{tmp_path}/0.txt", f"{tmp_path}/1.txt"]}):
        mixed = DataConfig.model_validate({"mixture": [lone, other], "validation_fraction": 0.3})
        with pytest.raises(UnfitData, match=r"0\.txt is validated on as part of one source and trained on as part"):
            check_data(mixed, 256, 4)
        check_data(mixed, 256, 4, new=False)
    check_data(DataConfig.model_validate({"mixture": [lone, same]}), 256, 4)  # it is cut at the same place


def test_a_saved_dataset_is_what_its_state_lists(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {name: datasets.Dataset.from_dict({"text": [name] * 9}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "both"))
    datasets.DatasetDict({"train": parts["train"]}).save_to_disk(str(tmp_path / "one"))
    (tmp_path / "one" / "train" / "cache-1.arrow").write_bytes(b"a copy")
    (name,) = listed("dataset", tmp_path / "one")
    assert name.startswith("data-")
    assert listed("dataset", tmp_path / "both" / "test" / "") == [name]
    (tmp_path / "both" / "train" / "cache-1.arrow").write_bytes(b"a copy")
    for pattern, times in (("both/*", 2), ("*/train", 2), ("one*", 1), ("both/tr*/*", 1), ("both/*/*.arrow", 2)):
        assert listed("dataset", tmp_path / pattern) == [name] * times, pattern
    (tmp_path / "large").mkdir()
    for content, problem in (("[" * 10**5, "is damaged"), ("[[]," * 2**17, "524288 bytes, and 262144 is the limit")):
        (tmp_path / "large" / "state.json").write_text(content)
        with pytest.raises(ValueError, match=f"large/state.json.* {problem}"):
            listed("dataset", tmp_path / "large")
    with pytest.raises(ValueError, match="it has the splits train, test; name the folder of one"):
        listed("dataset", tmp_path / "both")
    with pytest.raises(ValueError, match="use kind=arrow"):
        listed("dataset", tmp_path)


def test_what_spark_writes_beside_its_files_is_none_of_them(tmp_path: Path) -> None:
    for name in ("_SUCCESS", "_metadata", "part-0.parquet", "_named.parquet"):
        (tmp_path / name).write_bytes(b"")
    for path in (tmp_path, tmp_path / "*"):
        assert listed("parquet", path) == ["_named.parquet", "part-0.parquet"]
    assert listed("parquet", tmp_path / "_SUCCESS") == ["_SUCCESS"]
    assert len(listed("text", tmp_path)) == 4


def test_a_glob_that_matches_a_folder_is_refused_for_what_is_new(tmp_path: Path) -> None:
    write_corpus(tmp_path / "2.txt", files=1)
    (tmp_path / "1.txt").write_text("text")
    for pattern in ("*", "*.txt", "[0-9].txt"):
        with pytest.raises(ValueError, match=r"/2\.txt' is a folder, of which this glob reads nothing"):
            listed("text", tmp_path / pattern)
        assert listed("text", tmp_path / pattern, new=False) == ["1.txt"]
    assert listed("text", tmp_path / "**") == ["1.txt", "0.txt"]


@pytest.mark.parametrize("name", ["a::b.txt", b"caf\xe9.txt"])
def test_a_name_that_stands_for_another_file_or_for_none_is_refused(tmp_path: Path, name: str | bytes) -> None:
    there = os.fsdecode(name)
    (tmp_path / there).write_text("text")
    for path in (tmp_path, tmp_path / "*.txt"):
        with pytest.raises(ValueError, match="in its name; rename it") as refused:
            listed("text", path)
        assert repr(f"{tmp_path}/{there}") in str(refused.value)


@pytest.mark.parametrize(("number", "passes"), [(errno.EIO, True), (errno.ESTALE, True), (errno.EACCES, False)])
def test_what_cannot_be_read_for_a_moment_does_not_end_an_accepted_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, passes: bool
) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    texts = text(write_corpus(tmp_path / "corpus"))
    kinds = {"text": "corpus", "parquet": ".txt", "tokenized": "index.json"}
    several = [
        (DataConfig(source=SourceConfig(kind=kind, paths=(f"{tmp_path}/corpus",))), kinds[kind]) for kind in kinds
    ]
    several.append((texts.model_copy(update={"tokenizer": f"{tmp_path}/tokenizer.json"}), "tokenizer.json"))

    of_the_disk = Disk.status
    for data, end in several:

        def failing(disk: Disk, path: str, end: str = end) -> os.stat_result:
            if path.endswith(end):
                raise OSError(number, os.strerror(number), path)
            return of_the_disk(disk, path)

        monkeypatch.setattr(Disk, "status", failing)
        refused = StoreUnusable if passes else UnfitData
        with pytest.raises(refused, match="cannot "):
            check_data(data, 256, 8)
        with pytest.raises(OSError, match="cannot "):
            check_data(data, 256, 8, new=False)


@pytest.mark.parametrize("spelled", ["{}", "{}/", "file://{}", "{}/../{name}", "{}-link"])
def test_tokens_named_twice_count_once(tmp_path: Path, spelled: str) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir()
    (tmp_path / "tokens-link").symlink_to(folder)
    shards = [Shard(part=part, name=f"{part}.bin", tokens=40) for part in ("training", "validation")]
    index = TokenIndex(dtype="uint8", vocabulary=256, end_of_document=0, shards=shards, source="a", complete=True)
    (folder / "index.json").write_text(index.model_dump_json())
    for shard in shards:
        (folder / shard.name).write_bytes(bytes(40))
    paths = [str(folder), spelled.format(folder, name="tokens")]
    data = DataConfig.model_validate({"source": {"kind": "tokenized", "paths": paths}})
    for indices in (None, check_data(data, 256, 8)):
        (stream,) = load_corpus(data, 8, indices).streams
        assert (len(stream.training), len(stream.validation)) == (40, 40)


def test_the_split_does_not_depend_on_where_the_folder_is(tmp_path: Path) -> None:
    first, second = write_corpus(tmp_path / "a", files=20), write_corpus(tmp_path / "elsewhere" / "b", files=20)
    validation = [[Path(f.url).name for f in split(text(where), 8).validation] for where in (first, second)]
    assert validation[0] == validation[1]
    assert len(validation[0]) == 1


def test_a_lone_file_is_split_by_position(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(bytes(range(1, 101)))
    assert parts(text(tmp_path / "one.txt", validation=0.2)) == [list(range(1, 81)), list(range(81, 101))]


def test_documents_are_separated(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name * 20)
    training, validation = parts(text(tmp_path))
    assert (len(training), len(validation)) == (41, 20)
    assert training.count(0) == 1


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["missing.txt"], "there is no file at"),
        (["*.parquet"], "there is no file at"),
        (["empty"], "there is no file at"),
    ],
)
def test_absent_data_is_named(tmp_path: Path, names: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        split(text(*(tmp_path / name for name in names)), 8)


def test_a_parquet_file_that_is_cut_off_is_refused_at_the_door(tmp_path: Path) -> None:
    for number in range(3):
        table = pa.table({"text": [f"text {number} {row}" for row in range(500)]})
        pq.write_table(table, tmp_path / f"{number}.parquet", compression="none")
    data = DataConfig(source=SourceConfig(kind="parquet", paths=(str(tmp_path),)), validation_fraction=0.3)
    check_data(data, vocab_size=256, sequence_length=64)
    last = tmp_path / "2.parquet"
    for size in (last.stat().st_size - 1, 8, 0):
        os.truncate(last, size)
        with pytest.raises(
            UnfitData, match=r"2\.parquet' is not a complete Parquet file: it is truncated, or a file of another kind"
        ):
            check_data(data, vocab_size=256, sequence_length=2)


TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SCHEMAS: list[tuple[list[tuple[str, Any]], str]] = [
    ([("text", pa.string())], ""),
    ([("id", pa.int64()), ("text", pa.large_string())], ""),
    ([("text", pa.dictionary(pa.int32(), pa.string()))], ""),
    (
        [("content", pa.string()), ("id", pa.int64())],
        "has no column 'text', but 'content', 'id'; set .* text: 'content'",
    ),
    ([("text", pa.int64()), ("body", pa.string())], "has a column 'text' that is int64, not text; set .* text: 'body'"),
    ([("text", pa.binary())], "has a column 'text' that is binary, not text; convert it"),
    ([("text", TURNS)], "has a column 'text' that is list<.*, not text; convert it: only text is trained on"),
    ([("messages", TURNS)], "has no column 'text', but 'messages'; convert it"),
    ([], "has no column 'text', but nothing; convert it"),
    (
        [(f"column_{number}", pa.string()) for number in range(5000)],
        "has no .* 'column_7' and 4992 more; set text_field",
    ),
]


def write_rows(path: Path, kind: str, columns: list[tuple[str, Any]], rows: int = 1000) -> None:
    schema = pa.schema(columns)
    table = pa.table([pa.nulls(rows, each.type) for each in schema], schema=schema)
    if kind == "parquet":
        pq.write_table(table, path)
        return
    with (pa.ipc.new_file if kind == "file" else pa.ipc.new_stream)(str(path), schema) as stream:
        stream.write_table(table)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_schemas_without_text_are_named(tmp_path: Path, kind: str) -> None:
    for number, (columns, _) in enumerate(SCHEMAS):
        write_rows(
            tmp_path / f"{number}", kind, columns, rows=number % 2 * 1000
        )  # files without rows have schemas, too
    disk = fsspec.filesystem("file")
    paths = [tmp_path / f"{number}" for number in range(len(SCHEMAS))]
    parts = [schema_of(disk, str(path), path.stat().st_size) for path in paths]
    assert max(map(len, parts)) > 1 << 16, "the last is not all in what is read first"
    for problem, (columns, wanted) in zip(problems_of_schemas(parts, "text"), SCHEMAS, strict=True):
        assert re.match(wanted, problem) and bool(problem) == bool(wanted), columns


def test_rows_without_text_are_refused_at_the_door(tmp_path: Path) -> None:
    for number in range(10):
        write_rows(tmp_path / f"{number}", "parquet", [("text", pa.string())])
    parquet = SourceConfig(kind="parquet", paths=(str(tmp_path),))
    check_data(DataConfig(source=parquet, validation_fraction=0.3), vocab_size=256, sequence_length=64)
    write_rows(tmp_path / "9", "parquet", [("messages", TURNS)])
    with pytest.raises(UnfitData, match=r"/9' has no column 'text', but 'messages'") as refused:
        check_data(DataConfig(source=parquet, validation_fraction=0.3), vocab_size=256, sequence_length=64)
    assert refused.value.field == "data.source.paths"


def test_what_is_no_arrow_is_refused_at_the_door(tmp_path: Path) -> None:
    endless = struct.pack("<Ii", 2**32 - 1, 2**31 - 1)
    for content in (endless, b"x" * 100 + endless[4:] + b"ARROW1"):
        (tmp_path / "0").write_bytes(content)
        with pytest.raises(ValueError, match=r"/0' is damaged or cut off: "):
            refuse_damaged(SourceConfig(kind="arrow", paths=("0",)), [SourceFile(str(tmp_path / "0"), len(content))])


def test_too_little_text_is_said_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x" * 100)
    (tmp_path / "b").write_text("y" * 100)
    with pytest.raises(ValueError, match="the training text is 100 bytes, too little for one sequence of 100 tokens"):
        split(text(tmp_path), 100)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"messages": [{"role": "user", "content": "hi"}], "id": 7}', "no field 'text', but 'messages', 'id'; conv"),
        ('{"text": null}', "a field 'text' that is NoneType, not text"),
        ("{}", "no field 'text', but nothing; convert it"),
        (
            '\ufeff{"content": "a"}',
            "no field 'text', but 'content'; set text_field .--text-field. to a field of text: 'content'",
        ),
        ("not JSON", None),
        ('["text"]', None),
        ("", None),
        ('{"text": "a document"}', None),
        ('{"text": "a document that is longer than what is looked at, ' + "x" * 2**20 + '"}', None),
    ],
)
def test_lines_without_text_are_refused_by_the_first(tmp_path: Path, line: str, named: str | None) -> None:
    (tmp_path / "a.jsonl").write_text(f"\n{line}\n" + '{"text": "another"}\n' * 50)
    source = SourceConfig(kind="jsonl", paths=(str(tmp_path),))
    if named is None:
        refuse_damaged(source, list_files(source))
        return
    with pytest.raises(UnfitData, match=f"its first line has {named}"):
        check_data(DataConfig(source=source), 256, 32)


def test_each_field_of_text_of_a_mixture_is_looked_at(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.jsonl").write_text('{"text": "some text of this document"}\n' * 9)
    source = {"kind": "jsonl", "paths": [str(tmp_path)], "weight": 1}
    mixture = DataConfig.model_validate({"mixture": [source, source | {"weight": 2}, source | {"text_field": "body"}]})
    with pytest.raises(UnfitData, match="its first line has no field 'body', but 'text'") as refused:
        check_data(mixture, 256, 8)
    assert refused.value.field == "data.mixture[2].paths"


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 4])
def test_columns_are_compressed_so_that_sizes_of_files_say_little(tmp_path: Path, count: int) -> None:
    paths = [str(tmp_path / f"{number}.parquet") for number in range(count)]
    for path in paths:
        pq.write_table(pa.table({"text": ["the same words again and again " * 9] * 200}), path, compression="zstd")
    source = {"kind": "parquet", "paths": paths}
    held = {"name": "held", "kind": "parquet", "paths": [str(tmp_path / "held.parquet")]}
    pq.write_table(pa.table({"text": ["other words again and again " * 9] * 200}), held["paths"][0], compression="zstd")
    data = DataConfig.model_validate({"source": source, "validation": [held], "validation_fraction": 0.25})
    check_data(data, 256, 8192)
    (stream,) = (corpus := load_corpus(data, 8192)).streams
    assert min(len(stream.training), len(stream.validation), len(corpus.validation["held"])) > 8192


def test_paths_and_urls_of_one_source_are_split(tmp_path: Path) -> None:
    write_corpus(tmp_path, files=20)
    some = [f"{tmp_path}/{number}.txt" for number in range(10)]
    others = [f"file://{tmp_path}/{number}.txt" for number in range(10, 20)]
    mixed = split(text(*some, *others), 8)
    assert (len(mixed.training), len(mixed.validation)) == (19, 1)
    assert mixed == split(text(*others, *some), 8)
