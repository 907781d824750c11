"""Operations that help before a job is submitted."""

from collections.abc import Mapping
from typing import Any

from boost_core.config import JobSpec
from boost_core.plan.report import PlanSearch, PresetList
from service.client.calls import Call, get, operation, path_of, plain
from service.models.examples import JobExampleList
from service.models.plans import PlanAnswer
from service.models.versions import Versions


class PlanningCalls:
    """What a job would need, and what to build one from."""

    @operation
    def plan(self, spec: JobSpec | Mapping[str, Any], search: PlanSearch | None = None) -> Call[PlanAnswer]:
        """Return a job's memory, throughput and time in each layout; with a search, also the best ways to train it."""
        asked = {} if search is None else {"search": plain(search)}
        return Call("POST", path_of("plans"), PlanAnswer, body=plain(spec) | asked, repeatable=True)

    @operation
    def presets(self) -> Call[PresetList]:
        """Return the published models."""
        return get(path_of("presets"), PresetList)

    @operation
    def examples(self) -> Call[JobExampleList]:
        """Return example job files."""
        return get(path_of("examples"), JobExampleList)

    @operation
    def versions(self) -> Call[Versions]:
        """Return the versions of the service and of what it runs on."""
        return get(path_of("versions"), Versions)
