"""A job's checkpoints, as the API shows them."""

from datetime import datetime

from pydantic import BaseModel, Field


class Checkpoint(BaseModel):
    """One committed checkpoint of a job."""

    step: int = Field(description="Step at which it was written.")
    url: str = Field(description="Its folder.")
    bytes: int = Field(description="Size of all its files.")
    saved_at: datetime = Field(description="When it was committed.")
    pinned: bool = Field(description="Whether it is kept until it is unpinned, regardless of retention.")
    tensor_parallel_size: int = Field(
        description="Tensor parallel size of the gang that wrote it; any layout can load it."
    )
    pipeline_parallel_size: int = Field(description="Pipeline parallel size of the gang that wrote it.")
    data_parallel_size: int = Field(description="Data parallel size of the gang that wrote it.")
    context_parallel_size: int = Field(1, description="Context parallel size of the gang that wrote it.")
    samples: int = Field(description="Samples consumed so far.")


class CheckpointFile(BaseModel):
    """One file of a checkpoint."""

    bytes: int = Field(description="Its size.")
    crc32: int = Field(description="CRC-32 of its content as written.")


class CheckpointDetail(Checkpoint):
    """A checkpoint with its files and the versions that wrote it."""

    files: dict[str, CheckpointFile] = Field(description="The files by name.")
    versions: dict[str, str] = Field(description="Versions of the packages that wrote it.")


class DamagedCheckpoint(BaseModel):
    """A committed checkpoint that no job can resume from."""

    step: int = Field(description="Step at which it was written.")
    url: str = Field(description="Its folder.")
    pinned: bool = Field(description="Whether it is kept until it is unpinned, regardless of retention.")
    damage: str = Field(description="Which file is damaged, and how.")


class CheckpointList(BaseModel):
    """A job's committed checkpoints."""

    checkpoints: list[Checkpoint] = Field(
        description="Newest first. All files exist with the right size; their content is not verified."
    )
    damaged: list[DamagedCheckpoint] = Field(
        [], description="Checkpoints whose manifest or files are missing, truncated or changed, newest first."
    )
