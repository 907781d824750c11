"""Tokenization of documents, a few MiB at a time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from boost_core.data.tokenizers import Tokenizer, Tokens, dtype_for

if TYPE_CHECKING:
    from boost_core.data.documents import Document

_BATCH_BYTES = 8 << 20  # text tokenized at once
_DOCUMENT_BYTES = 100  # overhead per document, so that empty ones fill a batch, too


def batches(documents: Iterable["Document"]) -> Iterator[list["Document"]]:
    """Group documents into lists of a few MiB, to be tokenized at once."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.content) + _DOCUMENT_BYTES
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(batch: Sequence["Document"], tokenizer: Tokenizer) -> Iterator[tuple["Document", Tokens]]:
    """Yield each document with its tokens and the end-of-document token; bad ones have no tokens.

    A document that contains the end-of-document token is bad, too, as it would become two documents.
    """
    end = np.array([tokenizer.end_of_document], dtype_for(tokenizer.vocabulary))
    encoded = iter(tokenizer.encode([document.content for document in batch if not document.problem]))
    for document in batch:
        if document.problem:
            yield document, end[:0]
            continue
        tokens = next(encoded)
        if (tokens == end).any():
            yield replace(document, problem=f"holds {tokenizer.end_name}, which ends documents; remove it"), end[:0]
        else:
            yield document, np.concatenate([tokens, end])
