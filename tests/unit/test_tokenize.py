"""Documents from every kind of source, through every tokenizer, into shards."""

import gzip
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import tokenizers
from s3fs import S3FileSystem

from boost_core.config import DataConfig, JobSpec, SourceConfig
from boost_core.config.data_files import (
    Shard,
    TokenIndex,
    UnfitData,
    check_data,
    index_of,
    kind_by_names,
    list_files,
    read_index,
    tokenizer_vocabulary,
)
from boost_core.data import __main__ as command
from boost_core.data import tokenizers as our_tokenizers
from boost_core.data.corpus import load_corpus
from boost_core.data.documents import documents
from boost_core.data.tokenizers import TokenizerDiffers, job_tokenizer, open_tokenizer, train_bpe
from tests.unit.test_job_spec import changed

TEXTS = [f"document {number}: the quick brown fox, ümläut and all\n" * (number % 5 + 1) for number in range(60)]
SIX = 1 / 6


def write(folder: Path, kind: str) -> SourceConfig:
    """The texts in six files of a kind."""
    folder.mkdir(parents=True)
    for number in range(6):
        texts = TEXTS[number * 10 : number * 10 + 10]
        table = pa.table({"id": list(range(10)), "content": texts})
        if kind == "jsonl":
            lines = "\n".join(json.dumps({"content": text}) for text in texts)
            (folder / f"{number}.jsonl").write_text(lines + "\n\n")
        elif kind == "parquet":
            pq.write_table(table, folder / f"{number}.parquet", row_group_size=3)
        elif kind == "arrow":
            pyarrow.feather.write_feather(table, str(folder / f"{number}.arrow"), chunksize=4)
        elif kind == "dataset":
            with pa.ipc.new_stream(folder / f"data-{number:05}-of-00006.arrow", table.schema) as writer:
                writer.write_table(table, max_chunksize=4)
            shards = [{"filename": f"data-{each:05}-of-00006.arrow"} for each in range(6)]
            (folder / "state.json").write_text(json.dumps({"_data_files": shards}))
        else:
            for offset, text in enumerate(texts):
                (folder / f"{number}{offset}.txt").write_text(text)
    return SourceConfig(kind=kind, paths=(str(folder),), text_field="content")


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "arrow", "dataset"])
def test_every_kind_of_source_has_the_same_documents(tmp_path: Path, kind: str) -> None:
    source = write(tmp_path / kind, kind)
    found = [document for file in list_files(source) for document in documents(file, source)]
    assert [document.content.decode() for document in found] == TEXTS
    assert not any(document.problem for document in found)


def run(source: Path, folder: Path, *options: str) -> int:
    return command.main(
        [
            "tokenize",
            str(source),
            str(folder),
            "--kind",
            "jsonl",
            "--text-field",
            "content",
            "--validation",
            "0.2",
            *options,
        ]
    )


def tokens_of(folder: Path) -> list[list[int]]:
    """Training and validation tokens."""
    (stream,) = load_corpus(DataConfig(source=SourceConfig(kind="tokenized", paths=(str(folder),))), 8).streams
    return [part.read(0, len(part)).tolist() for part in (stream.training, stream.validation)]


def decoded(parts: list[list[int]], folder: Path) -> list[str]:
    """The documents of both parts."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    return [
        tokenizer.decode(document.tolist())
        for part in parts
        for document in np.split(np.array(part), np.flatnonzero(np.array(part) == end) + 1)
        if len(document)
    ]


def test_tokens_remember_the_bytes_of_their_text(tmp_path: Path) -> None:
    write(tmp_path / "in", "jsonl")
    assert run(tmp_path / "in", tmp_path / "out", "--train-bpe", "280") == 0
    index = read_index(str(tmp_path / "out"))
    source = SourceConfig(kind="tokenized", paths=(str(tmp_path / "out"),))
    (stream,) = load_corpus(DataConfig(source=source), 8).streams
    texts = [text.encode() for text in decoded(tokens_of(tmp_path / "out"), tmp_path / "out")]
    assert sum(shard.text_bytes for shard in index.shards) == sum(map(len, texts))
    held = next(shard for shard in index.shards if shard.part == "validation")
    assert stream.validation.bytes_per_token == held.text_bytes / held.tokens
    older = index.model_copy(
        update={"shards": tuple(shard.model_copy(update={"text_bytes": None}) for shard in index.shards)}
    )
    (tmp_path / "out" / "index.json").write_text(older.model_dump_json(exclude_none=True))
    (stream,) = load_corpus(DataConfig(source=source), 8).streams
    assert stream.validation.bytes_per_token is None


def test_empty_documents_are_left_out_of_what_is_tokenized_at_the_start_too(tmp_path: Path) -> None:
    texts = ["one", "", "two", ""] * 100
    for name, kept in (("all", texts), ("some", [text for text in texts if text])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in kept))
    sources = (SourceConfig(kind="jsonl", paths=(str(tmp_path / f"{name}.jsonl"),)) for name in ("all", "some"))
    first, second = (load_corpus(DataConfig(source=source), 8).streams[0].training for source in sources)
    assert first.read(0, len(first)).tolist() == second.read(0, len(second)).tolist()


def test_bytes_in_many_shards_are_the_documents(tmp_path: Path) -> None:
    write(tmp_path / "in", "jsonl")
    with patch.object(our_tokenizers, "_BATCH_BYTES", 300):
        assert run(tmp_path / "in", tmp_path / "out", "--shard-tokens", "1500") == 0
    index = read_index(str(tmp_path / "out"))
    assert (index.dtype, index.vocabulary, index.end_of_document, index.documents) == ("uint8", 256, 0, 60)
    assert len(index.shards) > 4
    found = [bytes(part).split(b"\0") for part in tokens_of(tmp_path / "out")]
    assert sorted(text for part in found for text in part if text) == sorted(text.encode() for text in TEXTS)
    assert 3 < len(found[1]) < 25


def test_a_learnt_tokenizer_gives_the_documents_back(tmp_path: Path) -> None:
    write(tmp_path / "in", "jsonl")
    assert run(tmp_path / "in", tmp_path / "out", "--train-bpe", "300") == 0
    assert 256 < read_index(str(tmp_path / "out")).vocabulary <= 300
    assert read_index(str(tmp_path / "out")).dtype == "uint16"
    parts = tokens_of(tmp_path / "out")
    assert sorted(decoded(parts, tmp_path / "out")) == sorted(TEXTS)
    assert sum(map(len, parts)) < sum(len(text.encode()) for text in TEXTS) / 2


def test_a_learnt_tokenizer_of_another_size_is_not_passed_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in", "jsonl")
    for size, status, message in (("280", 0, ""), ("300", 0, "of 280 tokens, is kept"), ("270", 2, "has 280 tokens")):
        assert run(tmp_path / "in", tmp_path / "out", "--train-bpe", size) == status
        assert message in " ".join(capsys.readouterr().err.split())


def test_tokens_of_different_tokenizers_of_one_size_are_told_apart(tmp_path: Path) -> None:
    """Also of older folders, unless their tokenizers are gone."""
    write(tmp_path / "in", "jsonl")
    lines = "".join(json.dumps({"content": text.swapcase()}) + "\n" for text in TEXTS)
    (tmp_path / "swapped.jsonl").write_text(lines)
    given = ("--tokenizer", f"{tmp_path}/a/tokenizer.json", "--shuffle", "0", "--workers", "1")
    for name, source, options in (("a", "in", ("--train-bpe", "280")), ("alike", "swapped.jsonl", given)):
        assert run(tmp_path / source, tmp_path / name, *options) == 0
    assert run(tmp_path / "swapped.jsonl", tmp_path / "b", "--train-bpe", "280") == 0

    def mixed(*names: str) -> DataConfig:
        return DataConfig.model_validate(
            {"mixture": [{"kind": "tokenized", "paths": [str(tmp_path / name)], "weight": 1} for name in names]}
        )

    for _ in range(2):
        check_data(mixed("a", "alike"), 280, 8)
        for refuse in (lambda data: check_data(data, 280, 8), lambda data: load_corpus(data, 8)):
            with pytest.raises(ValueError, match=r"/alike and .*/b were made by different tokenizers \(SHA-256 "):
                refuse(mixed("a", "alike", "b"))
        model = JobSpec.model_validate(changed(model={"vocab_size": 280})).model
        with pytest.raises(TokenizerDiffers, match=r"/b/tokenizer\.json is not what made the job's tokens"):
            job_tokenizer(mixed("a"), model, str(tmp_path / "b" / "tokenizer.json"))
        assert job_tokenizer(mixed("a"), model, str(tmp_path / "alike" / "tokenizer.json")).end_name == "<|endoftext|>"
        for index in tmp_path.glob("*/index.json"):  # as they were written before
            older = TokenIndex.model_validate_json(index.read_bytes()).model_copy(update={"tokenizer": None})
            index.write_text(older.model_dump_json(exclude_none=True))
    (tmp_path / "b" / "tokenizer.json").unlink()
    check_data(mixed("a", "b"), 280, 8)


@pytest.mark.parametrize("after", [1, 4, 9])
def test_an_interrupted_run_goes_on_to_the_same_tokens(tmp_path: Path, after: int) -> None:
    write(tmp_path / "in", "jsonl")
    options = ("--shard-tokens", "1000")
    reports = iter(range(after))

    def interrupt(*_: object) -> None:
        if next(reports, None) is None:
            raise KeyboardInterrupt

    with patch.object(our_tokenizers, "_BATCH_BYTES", 300):
        assert run(tmp_path / "in", tmp_path / "whole", *options) == 0
        with patch.object(command, "_show", interrupt):
            assert run(tmp_path / "in", tmp_path / "cut", *options) == 130
        begun = index_of(str(tmp_path / "cut"))
        assert begun is None or not begun.complete
        assert run(tmp_path / "in", tmp_path / "cut", *options) == 0
    assert tokens_of(tmp_path / "cut") == tokens_of(tmp_path / "whole")
    assert read_index(str(tmp_path / "cut")) == read_index(str(tmp_path / "whole"))


@pytest.mark.nightly
def test_a_store_that_is_away_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = {"ENDPOINT_URL": "http://127.0.0.1:9", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "MAX_ATTEMPTS": "1"}
    for name, value in away.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    S3FileSystem.clear_instance_cache()
    assert command.main(["tokenize", "s3://corpus/texts", str(tmp_path / "out")]) == 2
    S3FileSystem.clear_instance_cache()
    said = capsys.readouterr().err
    assert said.startswith(
        "\nthe object store cannot be used: list_objects_v2 of s3://corpus/texts/: Could not connect"
    )
    assert "check the URL" in said


@pytest.mark.parametrize(("share", "part"), [("0.05", "for validation"), ("0.9", "to train on")])
def test_a_part_without_tokens_is_told_of(
    tmp_path: Path, share: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("one")
    arguments = ["tokenize", str(tmp_path / "a.txt"), str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert command.main([*arguments, "--validation", share]) == 0
    says = "a document, such as a text file, goes to one part as a whole: make several of it"
    assert f"no tokens are kept {part}; {says}" in " ".join(capsys.readouterr().err.split())


def test_another_input_is_not_mixed_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in", "jsonl")
    assert run(tmp_path / "in", tmp_path / "out") == 0
    assert run(tmp_path / "in", tmp_path / "out", "--shard-tokens", "77") == 2
    assert "or another folder" in capsys.readouterr().err


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """96 MiB of text take hardly more than 12 MiB do."""
    peaks = []
    for name, mebibytes in (("small", 12), ("large", 96)):
        folder = tmp_path / name
        folder.mkdir()
        line = json.dumps({"text": "x" * 1000}) + "\n"
        with (folder / "a.jsonl").open("w") as stream:
            stream.writelines(line for _ in range(mebibytes << 10))
        script = (
            "import sys, resource; from boost_core.data.__main__ import main; status = main(sys.argv[1:]); "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(status)"
        )
        arguments = [
            "tokenize",
            str(folder),
            str(tmp_path / f"{name}-out"),
            "--kind",
            "jsonl",
            "--shard-tokens",
            "20000000",
        ]
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] - peaks[0] < 24  # a few batches of 8 MiB, as text, as tokens and on their way out


def test_a_vocabulary_too_large_for_the_model_is_refused_at_the_door(tmp_path: Path) -> None:
    write(tmp_path / "in", "jsonl")
    assert run(tmp_path / "in", tmp_path / "out", "--train-bpe", "300") == 0
    size = tokenizer_vocabulary(str(tmp_path / "out" / "tokenizer.json"))
    tokenized = DataConfig(source=SourceConfig(kind="tokenized", paths=(str(tmp_path / "out"),)))
    check_data(tokenized, size, 8)
    with pytest.raises(ValueError, match=f"has {size} tokens and model.vocab_size is {size - 1}"):
        check_data(tokenized, size - 1, 8)
    raw = DataConfig(source=write(tmp_path / "again", "jsonl"), tokenizer=str(tmp_path / "out" / "tokenizer.json"))
    with pytest.raises(ValueError, match=f"raise it to {size}"):
        check_data(raw, size - 1, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--validation", "nan"), "validation_fraction: "),
        (("--validation", "1"), "validation_fraction: should be less than 1"),
        (("--validation", "-0.1"), "validation_fraction: should be greater than or equal to 0"),
        (("--shard-tokens", "0"), "shard_tokens: should be greater than or equal to 1"),
        (("--end-of-document", "<end>"), "end_of_document: "),
        (("--train-bpe", "256"), "give 257 to 1,000,000"),
        (("--train-bpe", "-5"), "give 257 to 1,000,000"),
        (("--train-bpe", "0"), "give 257 to 1,000,000"),
        (("--train-bpe", str(10**20)), "give 257 to 1,000,000"),
    ],
)
def test_what_no_corpus_can_be_is_refused_before_anything_is_written(
    tmp_path: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in", "jsonl")
    assert run(tmp_path / "in", tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("into", "status"), [("in", 2), ("in/tokens", 2), ("in and out", 0), ("in/../out", 0), ("out/../in/tokens", 2)]
)
def test_tokens_are_not_written_where_documents_are_read(
    tmp_path: Path, into: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in", "jsonl")
    before = sorted(tmp_path.rglob("*"))
    assert run(tmp_path / "in", tmp_path / into) == status
    assert ("all files are read; write the tokens to another folder" in capsys.readouterr().err) == bool(status)
    assert (sorted(tmp_path.rglob("*")) == before) == bool(status)


def test_tokens_may_be_written_beside_a_datasets_arrow_files(tmp_path: Path) -> None:
    write(tmp_path / "in", "dataset")
    for _ in range(2):  # the second run reads the same files, and finds that nothing is left to do
        assert run(tmp_path / "in", tmp_path / "in" / "tokens", "--kind", "dataset") == 0


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"vocab": 3}}', "no json"])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        tokenizer_vocabulary(str(path))
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
        open_tokenizer(str(path), None)


def test_a_tokenizer_without_the_token_that_ends_a_document(tmp_path: Path) -> None:
    write(tmp_path / "in", "jsonl")
    assert run(tmp_path / "in", tmp_path / "out", "--train-bpe", "300") == 0
    name = str(tmp_path / "out" / "tokenizer.json")
    assert open_tokenizer(name, None).end_of_document == open_tokenizer(name, "<|endoftext|>").end_of_document
    with pytest.raises(ValueError, match="does not have '<end>'"):
        open_tokenizer(name, "<end>")


def test_a_folder_goes_on_only_with_the_token_that_ended_its_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in", "jsonl")
    made = tokenizers.Tokenizer.from_str(train_bpe([b"the quick brown fox " * 9], 300))
    made.add_special_tokens(["<|im_end|>"])
    made.save(str(tmp_path / "two.json"))
    options = ("--tokenizer", str(tmp_path / "two.json"), "--end-of-document")
    assert run(tmp_path / "in", tmp_path / "out", *options, "<|endoftext|>") == 0
    capsys.readouterr()
    assert run(tmp_path / "in", tmp_path / "out", *options, "<|im_end|>") == 2
    assert "not <|im_end|>" in " ".join(capsys.readouterr().err.split())
    assert run(tmp_path / "in", tmp_path / "out", *options, "<|endoftext|>") == 0


def test_truncation_padding_and_dropout_stored_in_a_tokenizer_have_no_effect(tmp_path: Path) -> None:
    """As in ``transformers``, where only a call asks for them."""
    made = tokenizers.Tokenizer.from_str(train_bpe([b"the quick brown fox " * 9], 300))
    texts = [b"the quick brown fox " * 50, b"short"]
    tokens = [made.encode(text.decode()).ids for text in texts]
    made.enable_truncation(16, stride=4)
    made.enable_padding(pad_to_multiple_of=64, pad_id=1, pad_token="!")
    made.model.dropout = 0.5
    made.save(str(tmp_path / "tokenizer.json"))
    name = str(tmp_path / "tokenizer.json")
    assert [each.tolist() for each in open_tokenizer(name, None).encode(texts)] == tokens
    spec = JobSpec.model_validate(changed(data={"tokenizer": name}, model={"vocab_size": 300}))
    exported = tokenizers.Tokenizer.from_str(job_tokenizer(spec.data, spec.model).content)
    assert [each.ids for each in exported.encode_batch([text.decode() for text in texts])] == tokens


@pytest.mark.parametrize(
    ("special", "end"), [(["<eos>"], "<eos>"), (["<eos>", "</s>"], None), ([], None), (["<|im_end|>"], "<|im_end|>")]
)
def test_only_special_tokens_are_guessed_to_end_documents(tmp_path: Path, special: list[str], end: str | None) -> None:
    """Gemma's vocabulary has an ordinary </s> for HTML beside the special <eos>."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "</s>": 1}, []))
    made.add_special_tokens(special)
    made.add_tokens([each for each in ("</s>", "<|endoftext|>") if each not in special])
    name = str(tmp_path / "tokenizer.json")
    made.save(name)
    if end is None:
        with pytest.raises(ValueError, match="name the token that ends a document in end_of_document"):
            open_tokenizer(name, None)
    else:
        assert open_tokenizer(name, None).end_name == end
    assert open_tokenizer(name, "</s>").end_of_document == 1


def test_tokens_that_are_not_there_or_not_complete(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no tokens"):
        read_index(str(tmp_path))
    write(tmp_path / "in", "jsonl")
    assert run(tmp_path / "in", tmp_path / "out") == 0
    index = tmp_path / "out" / "index.json"
    index.write_text(index.read_text().replace('"complete": true', '"complete": false'))
    with pytest.raises(ValueError, match="is not complete"):
        read_index(str(tmp_path / "out"))
    index.write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        read_index(str(tmp_path / "out"))


def mixtures() -> Iterator[tuple[dict[str, Any], str]]:
    text = {"kind": "text", "paths": ["a"]}
    yield {"source": text, "mixture": [text | {"weight": 1}]}, "a source and a mixture"
    yield {"mixture": [text | {"weight": 1}, text | {"weight": 10_000}]}, "less than 1/4096"
    yield {"mixture": [text | {"weight": 1}, {"kind": "tokenized", "paths": ["b"], "weight": 1}]}, "tokenize the others"
    yield {"source": {"kind": "tokenized", "paths": ["b"]}, "tokenizer": "bytes"}, "leave tokenizer out"
    yield {"source": text, "end_of_document": "</s>"}, "leave end_of_document out"
    yield {"source": {"kind": "parquet"}}, "needs at least one path"


@pytest.mark.parametrize(("data", "message"), list(mixtures()))
def test_what_does_not_go_together_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate(data)


def test_an_index_may_name_the_validation_part_as_it_was_called_first() -> None:
    assert Shard.model_validate({"part": "held_out", "name": "held_out-00000.bin", "tokens": 1}).part == "validation"


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "arrow"])
def test_without_a_kind_the_names_of_the_files_tell_it(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in", kind)
    arguments = ["tokenize", str(tmp_path / "in"), str(tmp_path / "out")]
    arguments += ["--text-field", "content"] if kind != "text" else []
    assert command.main(arguments) == 0
    assert f"{len(TEXTS)} documents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.json.gz", "jsonl"),
        ("a.jsonl.zst", "jsonl"),
        ("a.ndjson", "jsonl"),
        ("a.json", "text"),
        ("a.txt.gz", "text"),
        ("A.JSON.GZ", "jsonl"),
        ("B.PARQUET", "parquet"),
    ],
)
def test_the_kind_of_a_file_by_its_name(name: str, kind: str) -> None:
    assert kind_by_names([f"s3://bucket/{name}"]) == kind


def test_files_of_several_kinds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in", "jsonl")
    write(tmp_path / "more", "text")
    assert command.main(["tokenize", *(str(tmp_path / name) for name in ("in", "more", "out"))]) == 2
    assert "is jsonl, '" in (told := capsys.readouterr().err)
    assert "tokenize each kind by itself, or say --kind" in told


def test_a_job_does_not_read_json_lines_as_text(tmp_path: Path) -> None:
    source = write(tmp_path / "in", "jsonl").model_copy(update={"kind": "text"})
    with pytest.raises(UnfitData, match="would be read as text; write kind: jsonl"):
        check_data(DataConfig(source=source), 256, 8)


def test_a_table_of_text_is_not_read_as_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.csv").write_text("id,content\n" + "1,some text\n" * 50)
    assert command.main(["tokenize", str(tmp_path / "c.csv"), str(tmp_path / "out")]) == 2
    assert "convert it to Parquet or JSON lines" in capsys.readouterr().err
    with pytest.raises(UnfitData, match="whose columns are not read"):
        check_data(DataConfig(source=SourceConfig(kind="text", paths=(str(tmp_path / "c.csv"),))), 256, 8)
    assert command.main(["tokenize", "--kind", "text", str(tmp_path / "c.csv"), str(tmp_path / "out")]) == 0


def test_options_that_would_have_no_effect_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in", "text")
    for options, problem in (
        (["--text-field", "body"], "--text-field is for files with fields"),
        (["--train-bpe", "300", "--tokenizer", "bytes"], "leave --tokenizer out"),
    ):
        assert command.main(["tokenize", *options, str(tmp_path / "in"), str(tmp_path / "out")]) == 2
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
def test_a_new_job_does_not_validate_on_more_text_than_it_trains_on(tmp_path: Path, suffix: str) -> None:
    data = DataConfig(source=SourceConfig(kind="text", paths=(str(tmp_path),)), validation_fraction=0.01)
    refusals = []
    for sizes in ((1, 3), (3, 1)):  # one of the files is for validation, by its name
        for name, size in zip("ab", sizes, strict=True):
            text = random.Random(size).randbytes(100 * size).hex().encode()
            (tmp_path / f"{name}.{suffix}").write_bytes(gzip.compress(text) if suffix == "txt.gz" else text)
        check_data(data, 256, 8, new=False)  # a job that was accepted earlier
        check_data(data.model_copy(update={"validation_fraction": 0.5}), 256, 8)
        try:
            check_data(data, 256, 8)
        except UnfitData as refusal:
            refusals.append(str(refusal))
    (refusal_of_one,) = refusals
    assert "of the text would be for validation, not validation_fraction=0.01" in refusal_of_one


def test_an_empty_file_is_no_document(tmp_path: Path) -> None:
    folder, counts = tmp_path / "in", []
    write(folder, "text")
    (folder / "empty.txt").touch()
    for options in ([], ["--workers", "1"]):
        out = str(tmp_path / f"out{len(options)}")
        assert command.main(["tokenize", *options, str(folder), out]) == 0
        counts.append(read_index(out).documents)
    assert counts == [60, 60]


def test_settings_that_differ_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in", "jsonl")
    again = ["tokenize", "--text-field", "content", str(tmp_path / "in"), str(tmp_path / "out")]
    assert command.main(again) == 0
    (tmp_path / "t.json").write_text(train_bpe([b"text"], 258))
    for options, problem in (
        (["--validation", "0.5"], "has tokens from validation share 0.05, not 0.5; give"),
        (["--tokenizer", str(tmp_path / "t.json")], "has tokens from tokenizer bytes, not 258 tokens, SHA-256 "),
    ):
        assert command.main([again[0], *options, *again[1:]]) == 2
        assert problem in capsys.readouterr().err
    (tmp_path / "out" / "settings.json").unlink()  # as an earlier version left it
    assert command.main([*again, "--validation", "0.5"]) == 2
    assert "from another tokenizer, kind, text field, split or shard size" in capsys.readouterr().err


def test_a_tokenizer_without_tokens_is_refused(tmp_path: Path) -> None:
    name = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(name))
    with pytest.raises(ValueError, match="has no tokens; give the"):
        open_tokenizer(str(name), None)
