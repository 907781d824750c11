"""The tokenizer of a job, in the form that Hugging Face's ``AutoTokenizer`` reads."""

import json
from dataclasses import dataclass
from typing import Any

import fsspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from boost_core.config import ModelConfig
from boost_core.config.data import BYTE_TOKENS, BYTES, DataConfig
from boost_core.config.parsing.small_files import read_small
from boost_core.config.sources.tokenized import find_index, read_index
from boost_core.config.sources.vocabulary import MOST_BYTES
from boost_core.data.tokenizers import ByteTokenizer, FileTokenizer, load_tokenizer

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
        return {
            "eos_token": self.end_name,
            "pad_token": self.end_name,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
        }

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
    if data.tokenized:
        return _of_tokens(data.sources[0][0].paths[0], model, name, data.end_of_document)
    name = name or data.tokenizer
    return _of_bytes() if name in (None, BYTES) else _of_file(name, model, data.end_of_document)


def _of_tokens(folder: str, model: ModelConfig, name: str | None, end_of_document: str | None) -> ExportedTokenizer:
    """The tokenizer that made a folder's tokens, which is stored in the folder unless it is bytes."""
    if name is not None and find_index(folder) is None:  # the folder is gone, so compare with the model only
        return _of_file(name, model, end_of_document)
    index = read_index(folder)
    name = name or f"{folder.rstrip('/')}/{_FILE}"
    filesystem, path = fsspec.url_to_fs(name)
    if index.vocabulary == BYTE_TOKENS and not filesystem.exists(path):
        return _of_bytes()
    return _of_file(name, model, end=index.end_of_document, vocabulary=index.vocabulary)


def _of_file(
    name: str, model: ModelConfig, end_of_document: str | None = None, end: int | None = None, vocabulary: int = 0
) -> ExportedTokenizer:
    filesystem, path = fsspec.url_to_fs(name)
    content = read_small(filesystem, path, MOST_BYTES)
    tokenizer = load_tokenizer(content, name)
    found = max(tokenizer.get_vocab().values()) + 1
    if found > model.vocab_size or vocabulary not in (0, found):
        raise TokenizerDiffers(
            f"{name} has {found} tokens and the model was trained with {vocabulary or model.vocab_size}; give the "
            "tokenizer it was trained with"
        )
    if end is None:
        end = FileTokenizer(tokenizer, name, end_of_document).end_of_document
    end_name = tokenizer.id_to_token(end)
    if end_name is None:
        raise TokenizerDiffers(
            f"{name} has no token {end}, which ends documents; give the tokenizer it was trained with"
        )
    unused: dict[str, None] = {"truncation": None, "padding": None}  # as in training
    if tokenizer.num_special_tokens_to_add(False):
        unused["post_processor"] = None
    return ExportedTokenizer(json.dumps(json.loads(content) | unused), end, end_name)


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
