import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from boost_core.config import DataConfig, SourceConfig
from boost_core.config.sources.files import SourceSplit, UnfitData, check_data, list_files, split_source
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


def test_too_little_text_is_said_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x" * 100)
    (tmp_path / "b").write_text("y" * 100)
    with pytest.raises(ValueError, match="the training text is 100 bytes, too little for one sequence of 100 tokens"):
        split(text(tmp_path), 100)
