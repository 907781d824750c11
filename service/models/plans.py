"""What a plan is asked for, and what it answers besides the plan itself."""

from pydantic import Field

from boost_core.config import JobSpec
from boost_core.plan.auto_layouts import ChosenLayouts
from boost_core.plan.fitted import Fitted
from boost_core.plan.report import Plan
from boost_core.plan.search_report import PlanSearch, SearchReport
from service.models.profiles import StoredProfile


class PlanRequest(JobSpec):
    """A job, and what to search for it."""

    search: PlanSearch | None = Field(None, description="Search the best ways to train it; default: do not.")

    @property
    def job(self) -> JobSpec:
        """The job alone."""
        return JobSpec.model_construct(**{name: getattr(self, name) for name in JobSpec.model_fields})


class PlanAnswer(Plan):
    """A job's plan, and the best ways to train it if they were asked for."""

    chosen: ChosenLayouts | None = Field(
        None, description="The layouts of a job with layouts=auto, and why; null for others."
    )
    search: SearchReport | None = Field(None, description="What was found; null if nothing was searched.")
    profile: StoredProfile | None = Field(
        None, description="The stored profile that seconds are predicted by; null if there is none, or one was given."
    )
    fitted: Fitted | None = Field(
        None, description="What jobs took beside such predictions, by which they are corrected; null without any."
    )
