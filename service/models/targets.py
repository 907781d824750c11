"""Where Prometheus finds the ranks, in the format of its HTTP service discovery."""

from pydantic import BaseModel, Field


class TargetLabels(BaseModel):
    """Labels that distinguish the series of a rank."""

    job_id: str = Field(description="The job.")
    job_name: str = Field(description="The job's name.")
    tenant: str = Field(description="The job's tenant.")
    rank: str = Field(description="The rank in its gang.")
    tensor_parallel_rank: str = Field(description="Its place in its tensor parallel group.")
    pipeline_parallel_rank: str = Field(description="Its place in its pipeline.")
    data_parallel_rank: str = Field(description="Its replica.")
    context_parallel_rank: str = Field(description="Its place among the ranks that share its sequences.")
    node: str = Field(description="Ray's node ID.")


class TargetGroup(BaseModel):
    """One rank."""

    targets: list[str] = Field(description="host:port of its metrics.")
    labels: TargetLabels
