"""Examples of job files."""

from pydantic import BaseModel, Field


class JobExample(BaseModel):
    """A job file to begin with."""

    name: str = Field(description="The name of its file, without the suffix.")
    description: str = Field(description="What it is for.")
    text: str = Field(description="The file, YAML with comments.")


class JobExampleList(BaseModel):
    """All examples, those that need no GPU first."""

    examples: list[JobExample]
