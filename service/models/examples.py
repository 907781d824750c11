"""Examples of job files."""

from pydantic import BaseModel, Field


class JobExample(BaseModel):
    """An example job file."""

    name: str = Field(description="Name of its file, without the suffix.")
    description: str = Field(description="What it shows.")
    text: str = Field(description="The file: YAML with comments.")


class JobExampleList(BaseModel):
    """All examples; those that need no GPU come first."""

    examples: list[JobExample]
