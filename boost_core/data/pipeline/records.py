"""The records that the pipeline writes next to its tokens: for each finished file and shard, and for the corpus."""

import hashlib

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.dataset import CorpusConfig
from boost_core.config.sources.tokenized import Input, Part

LINEAGE = "lineage.json"
BUILDING = "building"  # folder of intermediate files, needed until the shards are complete


class Counts(Config):
    """Counts of what became of documents."""

    read: int = Field(0, description="Documents read.")
    bad: int = Field(0, description="Documents that could not be used; listed in quarantine-*.jsonl.")
    filtered: dict[str, int] = Field({}, description="Documents dropped by filters, by measure.")
    exact_duplicates: int = Field(0, description="Documents with the same words as an earlier one.")
    near_duplicates: int = Field(0, description="Documents nearly equal to an earlier one.")
    kept: int = Field(0, description="Documents in the shards.")
    bytes: int = Field(0, description="UTF-8 bytes of the good documents read.")
    tokens: int = Field(0, description="Tokens in the shards.")

    def plus(self, other: "Counts") -> "Counts":
        """The sum of both."""
        added = {name: getattr(self, name) + getattr(other, name) for name in Counts.model_fields if name != "filtered"}
        measures = sorted({*self.filtered, *other.filtered})
        filtered = {each: self.filtered.get(each, 0) + other.filtered.get(each, 0) for each in measures}
        return Counts(**added, filtered=filtered)


class FileRecord(Config):
    """A file whose tokens are all in runs: ``building/<digest>-<number>-<run>.bin``, each with a table ``.arrow``.

    Attributes:
        corpus: Digest of how its tokens were made.
        number: Its index among the files.
        input: What was read.
        runs: Names of the runs, without suffix.
        counts: Counts for its documents; duplicates are found later.
    """

    corpus: str
    number: int
    input: Input
    runs: tuple[str, ...]
    counts: Counts


class ShardRecord(Config):
    """A shard of one part."""

    part: Part
    name: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: str


class ShardPair(Config):
    """The shards filled from one range of the shuffle's keys.

    Attributes:
        inputs: Digest of everything they were made from.
        shards: The shards.
    """

    inputs: str
    shards: tuple[ShardRecord, ...]


class TokenizerRecord(Config):
    """The tokenizer that made the tokens."""

    name: str = Field(description="Name as given.")
    sha256: str = Field(description="SHA-256 of its tokenizer.json; empty for bytes.")
    vocabulary: int
    end_of_document: int


class Lineage(Config):
    """What a corpus was made from and how, as written to ``lineage.json`` next to its shards."""

    format: int = 1
    corpus: CorpusConfig = Field(description="The corpus as requested.")
    tokenizer: TokenizerRecord
    files: tuple[Input, ...] = Field(description="The files, with a digest of their documents.")
    counts: Counts
    shards: tuple[ShardRecord, ...]
    versions: dict[str, str] = Field(description="Versions of software that may affect the result.")

    @property
    def fingerprint(self) -> str:
        """A digest that is equal for the same tokenizer and tokens, wherever the documents are."""
        said = [self.tokenizer.sha256, *(shard.sha256 for shard in self.shards)]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()
