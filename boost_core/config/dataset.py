"""What a corpus is made from and how: its documents, which of them are kept, and how they are tokenized."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from boost_core.config.base import Config, Location
from boost_core.config.data import BYTES, SourceConfig, check_end_of_document
from boost_core.config.parsing.urls import refuse_unserved

Measure = Literal["characters", "words", "word_length", "symbols", "letters", "repeated_lines"]
Bound = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
OnError = Literal["fail", "skip"]


class QualityFilter(Config):
    """Bounds on one measure; documents outside them are dropped."""

    measure: Measure = Field(
        description="characters or words: their number; word_length: mean characters per word; symbols: hashes and "
        "ellipses per word; letters: share of words that contain a letter; repeated_lines: share of the text's "
        "characters in lines that repeat earlier ones.",
    )
    min: Bound | None = Field(None, description="Smallest value kept; null: no bound.")
    max: Bound | None = Field(None, validate_default=True, description="Largest value kept; null: no bound.")

    @field_validator("max")
    @classmethod
    def _bounds_leave_something(cls, value: float | None, info: Any) -> float | None:
        least = info.data.get("min")
        if "min" in info.data and value is None and least is None:
            raise ValueError("the filter has no bound; give min, max or both")
        if value is not None and least is not None and least > value:
            raise ValueError(f"min ({least:g}) must not exceed max ({value:g})")
        return value


class NearDedup(Config):
    """MinHash: of documents whose signatures share a band, directly or through others, only the first is kept.

    Two documents whose shingles have Jaccard similarity s share a band with probability 1 − (1 − sʳ)ᵇ, which rises
    steeply around s = (1/b)^(1/r), by default 0.72.
    """

    shingle_words: int = Field(5, ge=1, le=50, description="Consecutive words per shingle.")
    bands: int = Field(14, ge=1, le=64, description="b: bands per signature; more also match less similar documents.")
    rows: int = Field(8, ge=1, le=64, description="r: hashes per band; more match only more similar documents.")


class CorpusConfig(Config):
    """How documents become shards of tokens."""

    source: SourceConfig = Field(description="The documents.")
    tokenizer: Location = Field(BYTES, description="bytes, or the path or URL of a tokenizer.json.")
    end_of_document: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="The token that ends a document; default: the only special token of a usual name.",
    )
    filters: Annotated[tuple[QualityFilter, ...], Field(max_length=16)] = Field(
        (), description="Bounds that documents must satisfy."
    )
    exact_dedup: bool = Field(
        False, description="Keep only the first of documents that are equal apart from case and white space."
    )
    near_dedup: NearDedup | None = Field(None, description="Keep only the first of documents that are nearly equal.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the shuffle of documents.")
    validation_fraction: float = Field(0.05, ge=0, lt=1, description="Share of the documents kept for validation.")
    shard_tokens: int = Field(
        1 << 28, ge=1, le=1 << 32, description="Approximate training tokens per shard; each is ordered in memory."
    )
    on_error: OnError = Field("fail", description="skip: leave out bad documents and list them in quarantine-*.jsonl.")

    @field_validator("source")
    @classmethod
    def _source_is_text(cls, value: SourceConfig) -> SourceConfig:
        if value.kind == "tokenized":
            raise ValueError("kind=tokenized is tokens already; name the documents they were made from")
        return value

    @field_validator("tokenizer")
    @classmethod
    def _tokenizer_is_served(cls, value: str) -> str:
        return value if value == BYTES else refuse_unserved(value)

    @field_validator("end_of_document")
    @classmethod
    def _bytes_have_their_own_end(cls, value: str | None, info: Any) -> str | None:
        return check_end_of_document(value, info.data.get("tokenizer"))

    @field_validator("filters")
    @classmethod
    def _measures_are_not_repeated(cls, value: tuple[QualityFilter, ...]) -> tuple[QualityFilter, ...]:
        measures = [each.measure for each in value]
        if twice := next((each for each in measures if measures.count(each) > 1), None):
            raise ValueError(f"{twice} is given twice; give one filter with min and max")
        return value
