"""What a service is made of."""

from typing import Literal

from pydantic import BaseModel, Field


class Versions(BaseModel):
    """Versions of the service and of what it stands on; null for what is not installed where the API runs."""

    service: str = Field(description="Of BOOST Service.")
    api: str = Field(description="Of the API, as in its paths.")
    python: str = Field(description="Of Python.")
    ray: str | None = Field(description="Of Ray.")
    torch: str | None = Field(description="Of PyTorch.")
    ray_dashboard_url: str | None = Field(None, description="URL of the Ray cluster's dashboard, if configured.")
    database: Literal["sqlite", "postgresql"] = Field(description="Where the job database is kept.")
