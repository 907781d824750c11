"""The cluster's nodes and who is on them, as the API shows them."""

from datetime import datetime

from pydantic import BaseModel, Field


class NodeJob(BaseModel):
    """A job of the asking tenant with ranks on a node."""

    id: str = Field(description="The job's id.")
    name: str = Field(description="The job's name.")
    ranks: int = Field(description="How many of its ranks are on the node.")


class Node(BaseModel):
    """One node of the cluster."""

    node_id: str = Field(description="Ray's id of it.")
    labels: dict[str, str] = Field(description="Its labels, which a job's node_labels are compared with.")
    total: dict[str, float] = Field(description="What it has of each resource.")
    free: dict[str, float] = Field(description="What of it nobody holds.")
    draining: bool = Field(description="Whether it is about to go; nothing new is placed on it.")
    jobs: list[NodeJob] = Field(description="The own tenant's jobs on it; an operator sees all.")
    other_ranks: int = Field(description="Ranks of other tenants' jobs on it.")


class NodeList(BaseModel):
    """The nodes, as the scheduler saw them last."""

    seen_at: datetime | None = Field(description="When that was; null when no scheduler has looked yet.")
    nodes: list[Node] = Field(description="By id.")
