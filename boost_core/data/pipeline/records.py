"""What the pipeline notes beside its tokens: of each file and shard that is done, and of the whole in the end."""

import hashlib

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.dataset import CorpusConfig
from boost_core.config.sources.tokenized import Input, Part

LINEAGE = "lineage.json"
BUILDING = "building"  # folder of what is needed until the shards are whole


class Counts(Config):
    """What became of documents."""

    read: int = Field(0, description="Documents that were read.")
    bad: int = Field(0, description="That could not be used, and are listed in quarantine-*.jsonl.")
    filtered: dict[str, int] = Field({}, description="That a filter has left out, by its measure.")
    exact_duplicates: int = Field(0, description="That have the words of an earlier one.")
    near_duplicates: int = Field(0, description="That are almost the same as an earlier one.")
    kept: int = Field(0, description="That are in the shards.")
    bytes: int = Field(0, description="UTF-8 bytes of the good documents that were read.")
    tokens: int = Field(0, description="Tokens in the shards.")

    def plus(self, other: "Counts") -> "Counts":
        """Both together."""
        added = {name: getattr(self, name) + getattr(other, name) for name in Counts.model_fields if name != "filtered"}
        measures = sorted({*self.filtered, *other.filtered})
        filtered = {each: self.filtered.get(each, 0) + other.filtered.get(each, 0) for each in measures}
        return Counts(**added, filtered=filtered)


class FileRecord(Config):
    """A file whose tokens are all in runs: ``building/<number>-<run>.bin``, with a table ``.arrow`` for each.

    Attributes:
        corpus: Digest of how it was made.
        number: Its place among the files.
        input: What was read.
        runs: Names of the runs, without suffix.
        counts: What became of its documents so far; duplicates are found later.
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
    """The shards that one range of the shuffle's keys has filled.

    Attributes:
        inputs: Digest of all that they were made from.
        shards: The shards.
    """

    inputs: str
    shards: tuple[ShardRecord, ...]


class TokenizerRecord(Config):
    """The tokenizer that made the tokens."""

    name: str = Field(description="As it was given.")
    sha256: str = Field(description="Of its tokenizer.json; empty for bytes.")
    vocabulary: int
    end_of_document: int


class Lineage(Config):
    """What a corpus was made from, and how: ``lineage.json`` beside its shards."""

    format: int = 1
    corpus: CorpusConfig = Field(description="What was asked for.")
    tokenizer: TokenizerRecord
    files: tuple[Input, ...] = Field(description="The files, with a digest of their documents.")
    counts: Counts
    shards: tuple[ShardRecord, ...]
    versions: dict[str, str] = Field(description="Of what could make a difference.")

    @property
    def fingerprint(self) -> str:
        """The same for the same tokens from the same documents, wherever these are."""
        said = [self.tokenizer.sha256, *(shard.sha256 for shard in self.shards)]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()
