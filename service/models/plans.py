"""What a plan is requested for, and its answer."""

from pydantic import BaseModel, Field

from boost_core.config import JobSpec
from boost_core.plan.correction import Fitted
from boost_core.plan.report import Plan, PlanSearch, SearchReport
from boost_core.plan.resolve import ChosenLayouts
from service.models.cluster import StoredProfile


class PlanRequest(JobSpec):
    """A job, and a search to run for it."""

    search: PlanSearch | None = Field(None, description="Search for the best ways to train it; default: no search.")

    @property
    def job(self) -> JobSpec:
        """The job without the search."""
        return JobSpec.model_construct(**{name: getattr(self, name) for name in JobSpec.model_fields})


class PlanAnswer(Plan):
    """A job's plan, and the best ways to train it if requested."""

    chosen: ChosenLayouts | None = Field(
        None, description="The layouts of a job with layouts=auto, and why; null for others."
    )
    search: SearchReport | None = Field(None, description="Result of the search; null if none was requested.")
    profile: StoredProfile | None = Field(
        None, description="Stored profile used for the predicted times; null if there is none, or one was given."
    )
    fitted: Fitted | None = Field(
        None, description="Measured times of jobs relative to the predictions, used to correct these; null without any."
    )


# Examples of job files.


class JobExample(BaseModel):
    """An example job file."""

    name: str = Field(description="Name of its file, without the suffix.")
    description: str = Field(description="What it shows.")
    text: str = Field(description="The file: YAML with comments.")


class JobExampleList(BaseModel):
    """All examples; those that need no GPU come first."""

    examples: list[JobExample]
