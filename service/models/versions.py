"""What a service consists of."""

from typing import Literal

from pydantic import BaseModel, Field


class Versions(BaseModel):
    """Versions of the service and its dependencies; null for what is not installed where the API runs."""

    service: str = Field(description="Version of BOOST Service.")
    api: str = Field(description="Version of the API, as in its paths.")
    python: str = Field(description="Version of Python.")
    ray: str | None = Field(description="Version of Ray.")
    torch: str | None = Field(description="Version of PyTorch.")
    ray_dashboard_url: str | None = Field(None, description="URL of the Ray cluster's dashboard, if configured.")
    database: Literal["sqlite", "postgresql"] = Field(description="Kind of database that the jobs are kept in.")
