"""Datasets, as the API takes and shows them."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, Field

from boost_core.config.base import ResourceName
from boost_core.config.job import StorageUrl
from boost_core.config.training import CorpusConfig, DatasetName


class DatasetState(StrEnum):
    """The state of a dataset. A failed or cancelled one becomes BUILDING again when it is requested again."""

    BUILDING = "BUILDING"
    READY = "READY"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class DatasetRequest(CorpusConfig):
    """A request to build a dataset."""

    name: DatasetName = Field(description="Its name, as used in job files.")
    url: StorageUrl | None = Field(
        None, description="Folder in which its shards get a folder of their own; default: one of the service's."
    )
    credentials: ResourceName | None = Field(
        None, description="Name of the secret with credentials for s3://; default: the nodes' own credentials."
    )

    @property
    def corpus(self) -> CorpusConfig:
        """What to build, without where and by whom."""
        return CorpusConfig.model_validate(self.model_dump(include=set(CorpusConfig.model_fields)))


class DatasetProgress(BaseModel):
    """Progress of building a dataset."""

    stage: str = Field(description="Present stage: files, duplicates, shards or done.")
    done: int = Field(description="Files or pairs of shards done.")
    of: int = Field(description="Total number of them.")
    documents: int = Field(description="Documents read so far.")
    bytes: int = Field(description="UTF-8 bytes read by the present run.")
    seconds: float = Field(description="Seconds since the present run started.")
    cpus: float = Field(0.0, description="CPUs of the cluster that it may hold at present.")


class Dataset(BaseModel):
    """A dataset."""

    name: str = Field(description="Its name, as used in job files.")
    id: str = Field(description="Its unique ID, never reused.")
    tenant: str = Field(description="Tenant that owns it.")
    submitted_by: str = Field(description="Name of the key that requested it.")
    state: DatasetState = Field(description="BUILDING, READY, FAILED or CANCELLED.")
    message: str = Field(description="The state in words; why it failed.")
    url: str = Field(description="Folder of its shards.")
    spec: DatasetRequest = Field(description="The request.")
    progress: DatasetProgress | None = Field(description="Its progress.")
    counts: dict[str, Any] | None = Field(description="If READY: what became of the documents; the vocabulary.")
    fingerprint: str | None = Field(description="If READY: a hash of its tokenizer and all its shards.")
    created_at: datetime = Field(description="When it was first requested.")
    finished_at: datetime | None = Field(description="When it entered its present final state.")


class DatasetDetail(Dataset):
    """A dataset with its full lineage."""

    lineage: dict[str, Any] | None = Field(
        description="If READY: its lineage.json, with files, tokenizer, counts, hashes of shards, and versions."
    )


class DatasetList(BaseModel):
    """A tenant's datasets."""

    datasets: list[Dataset] = Field(description="Ordered by name.")
