"""Tokenizers: plain bytes, or Hugging Face's tokenizers."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from boost_core.config import ModelConfig
from boost_core.config.data_files import index_of, read_index
from boost_core.config.storage import read_small
from boost_core.config.training import BYTE_TOKENS, BYTES, DataConfig
from boost_core.config.user_files import MOST_TOKENIZER_BYTES

if TYPE_CHECKING:
    from boost_core.data.documents import Document  # with pyarrow, which ranks that read shards of tokens do without

Tokens = npt.NDArray[np.unsignedinteger[Any]]

# Names of the end-of-document token in published tokenizers.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_END = _ENDS[0]
_MOST_TOKENS = 1_000_000  # of a model's vocabulary


class ByteTokenizer:
    """One token per byte; byte 0, which text does not contain, ends a document.

    Attributes:
        vocabulary: Number of tokens in the vocabulary.
        end_of_document: The token that ends a document.
        end_name: The name of that token in errors.
        dtype: The smallest type that can hold all tokens.
        content: Content of the ``tokenizer.json``; empty for bytes.
        sha256: Its SHA-256; empty for bytes.
    """

    vocabulary, end_of_document, end_name, dtype, content, sha256 = 256, 0, "byte 0", np.dtype(np.uint8), b"", ""

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """The bytes of each document."""
        return [np.frombuffer(each, np.uint8) for each in documents]


class FileTokenizer:
    """One of Hugging Face's tokenizers. Attributes are as of ``ByteTokenizer``.

    Args:
        content: Content of its ``tokenizer.json``.
        tokenizer: The tokenizer.
        name: The tokenizer's name in errors.
        end_of_document: The token that ends a document; ``None`` for the only special token of a usual name.

    Raises:
        ValueError: The tokenizer does not have that token, or has special tokens of several usual names.
    """

    def __init__(self, content: bytes, tokenizer: tokenizers.Tokenizer, name: str, end_of_document: str | None) -> None:
        self.content, self.sha256, self._tokenizer = content, hashlib.sha256(content).hexdigest(), tokenizer
        self.vocabulary = max(tokenizer.get_vocab().values()) + 1
        if end_of_document is None:
            # Ordinary tokens of such names are text, as </s> of HTML is in Gemma's vocabulary.
            special = {str(token) for token in tokenizer.get_added_tokens_decoder().values() if token.special}
            candidates = [end for end in _ENDS if end in special]
        else:
            candidates = [end_of_document] if tokenizer.token_to_id(end_of_document) is not None else []
        if len(candidates) != 1:
            missing = repr(end_of_document) if end_of_document else f"any of {', '.join(_ENDS)} as a special token"
            problem = f"has both {' and '.join(candidates)}" if candidates else f"does not have {missing}"
            raise ValueError(f"{name} {problem}; name the token that ends a document in end_of_document")
        self.end_name = candidates[0]
        self.end_of_document: int = tokenizer.get_vocab()[self.end_name]
        self.dtype = np.min_scalar_type(self.vocabulary - 1)

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """The tokens of each document, computed on all cores."""
        texts = [each.decode() for each in documents]
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # without offsets
        return [np.array(each.ids, self.dtype) for each in encoded]


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(name: str | None, end_of_document: str | None) -> Tokenizer:
    """The tokenizer of a job.

    Args:
        name: ``bytes``, or the path or URL of a ``tokenizer.json``; ``None`` for bytes.
        end_of_document: The token that ends a document; ``None`` for the only special token of a usual name.

    Raises:
        ValueError: The file is not a tokenizer, or lacks that token, or has special tokens of several usual names.
        OSError: The file cannot be read.
    """
    if name in (None, BYTES):
        return ByteTokenizer()
    return FileTokenizer(*load_tokenizer(name), name, end_of_document)


def load_tokenizer(name: str) -> tuple[bytes, tokenizers.Tokenizer]:
    """Load a ``tokenizer.json`` without what a trainer of it may have set: truncation, padding, and dropout of merges.

    Args:
        name: Path or URL of the file.

    Returns:
        The file's content, and the tokenizer.

    Raises:
        ValueError: It is not a tokenizer, or has no tokens.
        OSError: The file cannot be read.
    """
    filesystem, path = fsspec.url_to_fs(name)
    content = read_small(filesystem, path, MOST_TOKENIZER_BYTES)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{name} is not a tokenizer.json of Hugging Face's tokenizers: {error}") from error
    if not tokenizer.get_vocab_size():
        raise ValueError(f"{name} has no tokens; give the tokenizer.json of a trained tokenizer")
    # They are stored if the tokenizer was saved after a call that set them, and would apply to every document. With
    # dropout, each run would also have other tokens.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    return content, tokenizer


def train_bpe(documents: Iterable[bytes], vocabulary: int) -> str:
    """Train a byte-level BPE on documents; return the content of a ``tokenizer.json``.

    Args:
        documents: UTF-8 documents to train on; pairs of neighbours are counted, the text itself is not kept.
        vocabulary: Maximum number of tokens.

    Raises:
        ValueError: The vocabulary size is out of range.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if not len(alphabet) < vocabulary <= _MOST_TOKENS:
        raise ValueError(
            f"a byte-level BPE of {vocabulary} tokens: it has one for each of {len(alphabet)} bytes and one that ends "
            f"documents; give {len(alphabet) + 1} to {_MOST_TOKENS:,}"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((each.decode() for each in documents), trainer)
    return tokenizer.to_str()


# Tokenization of documents, a few MiB at a time.

_BATCH_BYTES = 8 << 20  # text tokenized at once
_DOCUMENT_BYTES = 100  # overhead per document, so that empty ones fill a batch, too


def batches(documents: Iterable["Document"]) -> Iterator[list["Document"]]:
    """Group documents into lists of a few MiB, to be tokenized at once."""
    batch, size = list["Document"](), 0
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
    end = np.array([tokenizer.end_of_document], tokenizer.dtype)
    encoded = iter(tokenizer.encode([document.content for document in batch if not document.problem]))
    for document in batch:
        if document.problem:
            yield document, end[:0]
        elif ((tokens := next(encoded)) == end).any():
            yield replace(document, problem=f"holds {tokenizer.end_name}, which ends documents; remove it"), end[:0]
        else:
            yield document, np.concatenate([tokens, end])


# The tokenizer of a job, in the form that Hugging Face's ``AutoTokenizer`` reads.

_FILE = "tokenizer.json"


class TokenizerDiffers(ValueError):
    """A tokenizer is not the one the model was trained with."""


@dataclass(frozen=True)
class ExportedTokenizer:
    """A tokenizer to be exported.

    Attributes:
        content: Content of its ``tokenizer.json``.
        end_of_document: The token that ends a document.
        end_name: The text of that token.
    """

    content: str
    end_of_document: int
    end_name: str

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of transformers' tokenizer: the end of document also pads, on the left, as generation needs."""
        end = self.end_name
        return {"eos_token": end, "pad_token": end, "padding_side": "left", "clean_up_tokenization_spaces": False}

    def files(self, sequence_length: int) -> dict[str, str]:
        """The contents of its files by name."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": sequence_length} | self.settings
        return {_FILE: self.content, "tokenizer_config.json": json.dumps(config, indent=2)}


def job_tokenizer(data: DataConfig, model: ModelConfig, name: str | None = None) -> ExportedTokenizer:
    """The tokenizer that a model was trained with.

    Args:
        data: The data it was trained on.
        model: The model.
        name: Path or URL of the tokenizer, if it is not where the job says.

    Raises:
        TokenizerDiffers: The tokenizer is a different one.
        ValueError: The file is not a tokenizer.
        OSError: It cannot be read.
    """
    if not data.tokenized:
        name = name or data.tokenizer
        digest = "" if data.tokenizer in (None, BYTES) else None
        return _of_bytes() if name in (None, BYTES) else _of_file(name, model, data.end_of_document, digest=digest)
    # The tokenizer that made a folder's tokens is stored in the folder unless it is bytes.
    folder = data.sources[0][0].paths[0]
    if name is not None and index_of(folder) is None:  # the folder is gone, so compare with the model only
        return _of_file(name, model, data.end_of_document)
    index = read_index(folder)
    name = name or f"{folder.rstrip('/')}/{_FILE}"
    filesystem, path = fsspec.url_to_fs(name)
    if index.vocabulary == BYTE_TOKENS and not filesystem.exists(path):
        return _of_bytes()
    return _of_file(name, model, end=index.end_of_document, vocabulary=index.vocabulary, digest=index.tokenizer)


def _of_file(
    name: str, model: ModelConfig, end_of_document: str | None = None, end: int | None = None, vocabulary: int = 0,
    digest: str | None = None,
) -> ExportedTokenizer:  # fmt: skip
    content, tokenizer = load_tokenizer(name)
    size = max(tokenizer.get_vocab().values()) + 1
    if size > model.vocab_size or vocabulary not in (0, size):
        problem = f"{name} has {size} tokens and the model was trained with {vocabulary or model.vocab_size}"
        raise TokenizerDiffers(f"{problem}; give the one it was trained with")
    if digest not in (None, hashlib.sha256(content).hexdigest()):
        raise TokenizerDiffers(f"{name} is not what made the job's tokens; give that, or leave --tokenizer out")
    if end is None:
        end = FileTokenizer(content, tokenizer, name, end_of_document).end_of_document
    end_name = tokenizer.id_to_token(end)
    if end_name is None:
        raise TokenizerDiffers(f"{name} has no token {end}, which ends documents; give the one it was trained with")
    stored = json.loads(content) | {"truncation": None, "padding": None}  # as in training
    if "dropout" in stored["model"]:
        stored["model"]["dropout"] = None
    if tokenizer.num_special_tokens_to_add(False):
        stored["post_processor"] = None
    return ExportedTokenizer(json.dumps(stored), end, end_name)


def _of_bytes() -> ExportedTokenizer:
    """One token per byte: the characters that stand for bytes in byte-level tokenizers, with the byte as token id.

    Only the byte that ends documents stands for itself, as a special token: it is the character that it is in UTF-8.
    """
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # First the bytes that stand for themselves, then, in order, those that are mapped to a character above 255.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [byte for byte in range(BYTE_TOKENS) if chr(byte) in alphabet]
    others = [byte for byte in range(BYTE_TOKENS) if byte not in own]
    end = ByteTokenizer.end_of_document
    characters = dict(zip(own + others, alphabet, strict=True)) | {end: chr(end)}
    tokenizer = tokenizers.Tokenizer(models.BPE({character: byte for byte, character in characters.items()}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    tokenizer.add_special_tokens([chr(end)])
    return ExportedTokenizer(tokenizer.to_str(), end, chr(end))
