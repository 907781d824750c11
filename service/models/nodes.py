"""The cluster's nodes and their jobs, as the API shows them."""

from datetime import datetime

from pydantic import BaseModel, Field


class NodeJob(BaseModel):
    """A job of the requesting tenant with ranks on a node."""

    id: str = Field(description="The job's ID.")
    name: str = Field(description="The job's name.")
    ranks: int = Field(description="Number of its ranks on the node.")


class NodeDataset(BaseModel):
    """A dataset that is being built, partly on a node."""

    name: str | None = Field(description="The dataset's name; null if it is another tenant's.")
    cpus: float = Field(
        description="CPUs that it holds there: those neither free nor of a job's ranks, at most its own."
    )


class Node(BaseModel):
    """One node of the cluster."""

    node_id: str = Field(description="Ray's node ID.")
    labels: dict[str, str] = Field(description="Its labels, which jobs' node_labels are matched against.")
    total: dict[str, float] = Field(description="Total of each resource.")
    free: dict[str, float] = Field(description="Free amount of each resource.")
    draining: bool = Field(description="Whether it is draining; nothing new is placed on it.")
    unusable: str | None = Field(
        None, description="Why no rank can run on it, such as another version of the trainer; null: ranks can."
    )
    jobs: list[NodeJob] = Field(description="Jobs of the requesting tenant on it; operators see all jobs.")
    other_ranks: int = Field(description="Ranks of other tenants' jobs on it.")
    dataset: NodeDataset | None = Field(None, description="Dataset that is being built on it, if any.")


class NodeList(BaseModel):
    """The nodes, as the scheduler last saw them."""

    seen_at: datetime | None = Field(description="When the nodes were last observed; null if never.")
    nodes: list[Node] = Field(description="Ordered by ID.")
