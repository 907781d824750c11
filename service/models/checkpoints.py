"""A job's checkpoints, as the API shows them."""

from datetime import datetime

from pydantic import BaseModel, Field


class Checkpoint(BaseModel):
    """One committed checkpoint of a job."""

    step: int = Field(description="Steps done when it was written.")
    url: str = Field(description="Its folder.")
    bytes: int = Field(description="Size of all its files.")
    saved_at: datetime = Field(description="When it was committed.")
    pinned: bool = Field(description="Whether it is kept until it is unpinned, whatever else is thinned out.")
    tensor_parallel_size: int = Field(description="Of the gang that wrote it; any other layout can load it, too.")
    pipeline_parallel_size: int = Field(description="Of the gang that wrote it.")
    data_parallel_size: int = Field(description="Of the gang that wrote it.")
    samples: int = Field(description="Samples of the data that the job had consumed.")


class CheckpointFile(BaseModel):
    """One file of a checkpoint."""

    bytes: int = Field(description="Its size.")
    crc32: int = Field(description="CRC-32 of what was written.")


class CheckpointDetail(Checkpoint):
    """A checkpoint with its files and what wrote it."""

    files: dict[str, CheckpointFile] = Field(description="The files by name.")
    versions: dict[str, str] = Field(description="Versions of the packages that wrote it.")


class DamagedCheckpoint(BaseModel):
    """A checkpoint that was committed and that no job can go on from."""

    step: int = Field(description="Steps done when it was written.")
    url: str = Field(description="Its folder.")
    pinned: bool = Field(description="Whether it is kept until it is unpinned, whatever else is thinned out.")
    damage: str = Field(description="What is wrong with it: which file, and how.")


class CheckpointList(BaseModel):
    """A job's committed checkpoints."""

    checkpoints: list[Checkpoint] = Field(
        description="The newest first. Their files are all there, each of its size; what they hold is not read."
    )
    damaged: list[DamagedCheckpoint] = Field(
        [], description="Those with a manifest or files that are missing, cut off or changed, the newest first."
    )
