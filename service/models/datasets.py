"""Datasets, as the API takes and shows them."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, Field, field_validator

from boost_core.config.base import Location, ResourceName
from boost_core.config.data import DatasetName
from boost_core.config.dataset import CorpusConfig
from boost_core.config.parsing.urls import refuse_unserved


class DatasetState(StrEnum):
    """Where a dataset is in its life. What failed or was cancelled is BUILDING again when it is asked for again."""

    BUILDING = "BUILDING"
    READY = "READY"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class DatasetRequest(CorpusConfig):
    """A dataset to be made."""

    name: DatasetName = Field(description="Its name, as used in job files.")
    url: Location | None = Field(
        None, description="Folder for its shards, in one of the dataset's own; default: one of the service's."
    )
    credentials: ResourceName | None = Field(
        None, description="Name of the secret with credentials for s3://; default: the nodes' own credentials."
    )

    @field_validator("url")
    @classmethod
    def _folder_is_served(cls, value: str | None) -> str | None:
        return value if value is None else refuse_unserved(value)

    @property
    def corpus(self) -> CorpusConfig:
        """What is made, without where and by whom."""
        return CorpusConfig.model_validate(self.model_dump(include=set(CorpusConfig.model_fields)))


class DatasetProgress(BaseModel):
    """How far the making of a dataset is."""

    stage: str = Field(description="files, duplicates, shards or done.")
    done: int = Field(description="Files or pairs of shards that are done.")
    of: int = Field(description="All of them.")
    documents: int = Field(description="Documents read so far.")
    bytes: int = Field(description="UTF-8 bytes that the present run has read.")
    seconds: float = Field(description="Since the present run has begun.")


class Dataset(BaseModel):
    """A dataset."""

    name: str = Field(description="Its name, as used in job files.")
    id: str = Field(description="Its id, which no other dataset ever has.")
    tenant: str = Field(description="Whose it is.")
    submitted_by: str = Field(description="Name of the key that has asked for it.")
    state: DatasetState = Field(description="BUILDING, READY, FAILED or CANCELLED.")
    message: str = Field(description="The same for people; why it has failed.")
    url: str = Field(description="Folder of its shards.")
    spec: DatasetRequest = Field(description="What was asked for.")
    progress: DatasetProgress | None = Field(description="How far it is.")
    counts: dict[str, Any] | None = Field(description="Of a READY one: what became of the documents.")
    fingerprint: str | None = Field(description="Of a READY one: a hash of its tokenizer and all its shards.")
    created_at: datetime = Field(description="When it was first asked for.")
    finished_at: datetime | None = Field(description="When it came to its present end.")


class DatasetDetail(Dataset):
    """A dataset with all that it was made from."""

    lineage: dict[str, Any] | None = Field(
        description="Of a READY one: its lineage.json, with files, tokenizer, counts, hashes of shards, and versions."
    )


class DatasetList(BaseModel):
    """A tenant's datasets."""

    datasets: list[Dataset] = Field(description="Ordered by name.")
