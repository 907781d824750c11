"""Searches on behalf of requests: for plans, and for the layouts of jobs that leave them to the service.

Each search keeps a core busy, so it runs in a process of its own, and only a few run at a time.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Generic, TypeVar

from boost_core.config import JobSpec
from boost_core.config.base import Config
from boost_core.config.job import CheckpointConfig, FaultToleranceConfig, TrackersConfig
from boost_core.config.training import DataConfig, SourceConfig
from boost_core.plan.machine import Basis, Fitted
from boost_core.plan.resolve import ChosenLayouts
from boost_core.plan.run_cost import CONDITIONS, RunConditions
from boost_core.plan.search import PlanSearch, SearchReport
from boost_core.plan.search_process import SearchFailed, TooLong, layouts_apart, search_apart
from service.api.errors import RateLimited, at_fault

_SECONDS = 20.0
_TOGETHER = 2
_RETRY_SECONDS = 5
_REMEMBERED_LAYOUTS = 256  # about ten kilobytes each
_REMEMBERED_PLANS = 32  # up to 400 kilobytes each
_TOKENS = SourceConfig(kind="tokenized", paths=("/any",))  # suits every vocabulary


Answer = TypeVar("Answer")


@dataclass(eq=False)
class Results(Generic[Answer]):
    """The results of the latest searches of one kind, of which a tenant has one at a time under way, and all have two.

    Attributes:
        most: Maximum number of results.
    """

    most: int
    _answers: OrderedDict[bytes, Answer] = field(default_factory=OrderedDict)
    _tenants: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def turn(self, tenant: str) -> Iterator[None]:
        """Hold a tenant's turn while it searches.

        Raises:
            RateLimited: The tenant has a search under way, or too many others have.
        """
        with self._lock:
            if tenant in self._tenants:
                raise RateLimited("another search of this tenant is running", _RETRY_SECONDS)
            if len(self._tenants) >= _TOGETHER:
                raise RateLimited("too many searches of other tenants are running", _RETRY_SECONDS)
            self._tenants.add(tenant)
        try:
            yield
        finally:
            with self._lock:
                self._tenants.discard(tenant)

    def get(self, search: Callable[[], Answer], tenant: str, field: str, *requested: Config) -> Answer:
        """Return the result of a search, without searching if the same was requested before.

        Args:
            search: The search.
            tenant: The tenant that searches.
            field: At fault if the search fails.
            requested: All that the result depends on.
        """
        key = sha256("\n".join(part.model_dump_json() for part in requested).encode()).digest()
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]
        with self.turn(tenant), at_fault(field, TooLong, SearchFailed):
            answer = search()
        with self._lock:
            self._answers[key] = answer
            if len(self._answers) > self.most:
                self._answers.popitem(last=False)
        return answer


@dataclass(eq=False)
class Searches:
    """Runs searches, and remembers their results.

    Attributes:
        for_plans: The searches for plans.
        for_layouts: Those for layouts, separate so that searches for plans never block a submission.
    """

    for_plans: Results[SearchReport] = field(default_factory=partial(Results, _REMEMBERED_PLANS))
    for_layouts: Results[ChosenLayouts] = field(default_factory=partial(Results, _REMEMBERED_LAYOUTS))

    def plans(
        self, job: JobSpec, requested: PlanSearch, tenant: str, fitted: Fitted | None = None,
        conditions: RunConditions = CONDITIONS,
    ) -> SearchReport:  # fmt: skip
        """Return the best ways to train a job, without a search if the same was requested before.

        Args:
            job: The job.
            requested: The search.
            tenant: The job's tenant.
            fitted: Correction by earlier jobs of predictions by the requested profile.
            conditions: Prices, failures and the checkpoints' store.

        Raises:
            InvalidJob: The search takes too long or fails.
            RateLimited: The tenant has a search under way, or too many others have.
        """
        often = job.checkpoint.model_dump(include={"every_steps", "keep_last", "store_wait_seconds"})
        recovery = FaultToleranceConfig(memory_copy_every_steps=job.fault_tolerance.memory_copy_every_steps)
        matters = {"elasticity": None, "checkpoint": CheckpointConfig(**often), "fault_tolerance": recovery}
        shape = _without_what_does_not_matter(job).model_copy(update=matters)
        search = partial(search_apart, job, requested, _SECONDS, fitted, conditions)
        return self.for_plans.get(search, tenant, "search", shape, requested, conditions, *filter(None, [fitted]))

    def layouts(self, spec: JobSpec, tenant: str, basis: Basis) -> ChosenLayouts:
        """Return the layouts of a job with ``layouts: auto``, without a search if the same was requested before.

        Args:
            spec: The job.
            tenant: The job's tenant.
            basis: The basis of its predictions.

        Raises:
            InvalidJob: No layout is legal and fits, or choosing takes too long or fails.
            RateLimited: The tenant has a search under way, or too many others have.
        """
        requested = _without_what_does_not_matter(spec)
        search = partial(layouts_apart, requested, _SECONDS, basis)
        return self.for_layouts.get(search, tenant, "elasticity.gpus", requested, basis)


def _without_what_does_not_matter(spec: JobSpec) -> JobSpec:
    """The job with defaults for everything that affects neither its layouts nor the best ways to train it."""
    every = spec.fault_tolerance.memory_copy_every_steps  # copies take hosts' memory
    described = "queue", "credentials", "priority", "group", "tags", "notes"
    defaults = {field: JobSpec.model_fields[field].get_default() for field in described} | {
        "name": "auto",
        "training": spec.training.model_copy(update={"seed": 0, "sample": None}),
        "data": DataConfig(source=_TOKENS, documents_apart=spec.data.documents_apart),
        "checkpoint": CheckpointConfig(),
        "fault_tolerance": FaultToleranceConfig(memory_copy_every_steps=every and 10),
        "trackers": TrackersConfig(),
    }
    return spec.with_layouts(None).model_copy(update=defaults)
