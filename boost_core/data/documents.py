"""The documents of a file, one after the other, never all of them in memory."""

import json
from collections.abc import Iterator
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from boost_core.config.data import SourceConfig
from boost_core.config.sources import SourceFile


def documents(file: SourceFile, source: SourceConfig) -> Iterator[str | bytes]:
    """The text of each document.

    Raises:
        ValueError: A line is not JSON, or the text's field is missing or no text.
        OSError: The file cannot be read.
    """
    with fsspec.open(file.url, "rb") as stream:
        if source.kind == "jsonl":
            yield from _of_lines(stream, file.url, source.text_field)
        elif source.kind == "parquet":
            yield from _of_columns(pq.ParquetFile(stream).iter_batches, file.url, source.text_field)
        elif source.kind == "dataset":
            reader = pa.ipc.open_stream(stream)

            def selected(columns: list[str]) -> Iterator[Any]:
                return (batch.select(columns) for batch in reader)

            yield from _of_columns(selected, file.url, source.text_field)
        else:
            yield stream.read()


def _of_lines(stream: Any, url: str, field: str) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[field]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{url}, line {number}: no JSON object with a field {field!r}; check text_field"
            ) from error
        if not isinstance(text, str):
            raise ValueError(f"{url}, line {number}: {field!r} is no text but {type(text).__name__}")
        yield text


def _of_columns(batches: Any, url: str, field: str) -> Iterator[str]:
    try:
        for batch in batches(columns=[field]):
            for text in batch.column(0):
                if not text.is_valid or not isinstance(text.as_py(), str):
                    raise ValueError(f"{url}: a row's {field!r} is no text; check text_field, and remove empty rows")
                yield text.as_py()
    except (KeyError, IndexError) as error:
        raise ValueError(f"{url} has no column {field!r}; check text_field") from error
    except pa.ArrowInvalid as error:
        raise ValueError(f"{url} cannot be read: {error}") from error
