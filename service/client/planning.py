"""Operations that help before a job is submitted."""

from collections.abc import Mapping
from typing import Any

from boost_core.config import JobSpec
from boost_core.plan.report import Plan, PresetList
from service.client.calls import Call, get, operation, path_of, plain
from service.models.versions import Versions


class PlanningCalls:
    """What would come of a job, and what there is to make one of."""

    @operation
    def plan(self, spec: JobSpec | Mapping[str, Any]) -> Call[Plan]:
        """A job's memory, throughput and time in each of its layouts."""
        return Call("POST", path_of("plans"), Plan, body=plain(spec), repeatable=True)

    @operation
    def presets(self) -> Call[PresetList]:
        """The published models."""
        return get(path_of("presets"), PresetList)

    @operation
    def versions(self) -> Call[Versions]:
        """Versions of the service and of what it runs on."""
        return get(path_of("versions"), Versions)
