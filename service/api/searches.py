"""What is searched for requests: plans, and the layouts of jobs that leave them to the service.

Each search keeps a core busy, so it has a process of its own, and few are under way at a time.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Generic, TypeVar

from boost_core.config import JobSpec
from boost_core.config.base import Config
from boost_core.config.checkpoint import CheckpointConfig
from boost_core.config.data import DataConfig, SourceConfig
from boost_core.config.faults import FaultToleranceConfig
from boost_core.config.trackers import TrackersConfig
from boost_core.plan.auto_layouts import ChosenLayouts
from boost_core.plan.fitted import Fitted
from boost_core.plan.measured import Basis
from boost_core.plan.search_process import SearchFailed, TooLong, layouts_apart, search_apart
from boost_core.plan.search_report import PlanSearch, SearchReport
from service.api.errors import InvalidJob
from service.api.exceptions import RateLimited
from service.models.problems import FieldError

_SECONDS = 20.0
_TOGETHER = 2
_RETRY_SECONDS = 5
_REMEMBERED_LAYOUTS = 256  # answers; some ten kilobytes each
_REMEMBERED_PLANS = 32  # up to 400 kilobytes each
_TOKENS = SourceConfig(kind="tokenized", paths=("/any",))  # goes with every vocabulary


Answer = TypeVar("Answer")


class Turns:
    """Lets each tenant have one search under way, and all tenants two."""

    def __init__(self) -> None:
        self._tenants: set[str] = set()
        self._lock = threading.Lock()

    @contextmanager
    def of(self, tenant: str) -> Iterator[None]:
        """While a tenant searches.

        Raises:
            RateLimited: It does so already, or too many others do.
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


class Found(Generic[Answer]):
    """What the last searches found.

    Args:
        most: How many of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Answer | None:
        """What was found, if it is still known."""
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
            return self._answers.get(key)

    def add(self, key: bytes, answer: Answer) -> None:
        """Remember it, and forget what nobody has asked for the longest."""
        with self._lock:
            self._answers[key] = answer
            if len(self._answers) > self._most:
                self._answers.popitem(last=False)


class Searches:
    """Searches, and remembers what was found.

    Attributes:
        for_plans: Whose turn it is to search for plans.
        for_layouts: The same of layouts, so that searches for plans keep no job from being submitted.
    """

    def __init__(self) -> None:
        self.for_plans, self.for_layouts = Turns(), Turns()
        self._plans: Found[SearchReport] = Found(_REMEMBERED_PLANS)
        self._layouts: Found[ChosenLayouts] = Found(_REMEMBERED_LAYOUTS)

    def plans(self, job: JobSpec, asked: PlanSearch, tenant: str, fitted: Fitted | None = None) -> SearchReport:
        """The best ways to train a job; without a search if the same was asked for before.

        Args:
            job: The job.
            asked: What for.
            tenant: Whose it is.
            fitted: What jobs took beside predictions by the profile that is asked for.

        Raises:
            InvalidJob: It takes too long, or it fails.
            RateLimited: The tenant's other search is under way, or too many of others are.
        """
        key = _digest(
            _without_what_does_not_matter(job).model_copy(update={"elasticity": None}),
            asked,
            *([fitted] if fitted else []),
        )
        if known := self._plans.get(key):
            return known
        with self.for_plans.of(tenant):
            try:
                found = search_apart(job, asked, _SECONDS, fitted)
            except (TooLong, SearchFailed) as error:
                raise InvalidJob([FieldError(field="search", message=str(error))]) from error
        self._plans.add(key, found)
        return found

    def layouts(self, spec: JobSpec, tenant: str, basis: Basis) -> ChosenLayouts:
        """The layouts of a job with ``layouts: auto``; without a search if the same was asked for before.

        Args:
            spec: The job.
            tenant: Whose it is.
            basis: What its seconds are predicted by.

        Raises:
            InvalidJob: None is legal and fits, or choosing takes too long, or fails.
            RateLimited: The tenant's other search is under way, or too many of others are.
        """
        asked = _without_what_does_not_matter(spec)
        key = _digest(asked, basis)
        if known := self._layouts.get(key):
            return known
        with self.for_layouts.of(tenant):
            try:
                found = layouts_apart(asked, _SECONDS, basis)
            except (ValueError, TooLong, SearchFailed) as error:
                raise InvalidJob([FieldError(field="elasticity.gpus", message=str(error))]) from error
        self._layouts.add(key, found)
        return found


def _digest(*parts: Config) -> bytes:
    """What tells these from others, however long they are."""
    return sha256("\n".join(part.model_dump_json() for part in parts).encode()).digest()


def _without_what_does_not_matter(spec: JobSpec) -> JobSpec:
    """A job with defaults for all that neither its layouts nor the best ways to train it depend on."""
    return spec.with_layouts(None).model_copy(
        update={
            "name": "auto",
            "training": spec.training.model_copy(update={"seed": 0, "sample": None}),
            "data": DataConfig(source=_TOKENS, documents_apart=spec.data.documents_apart),
            "checkpoint": CheckpointConfig(),
            "fault_tolerance": FaultToleranceConfig(),
            "trackers": TrackersConfig(),
            "queue": "default",
            "credentials": None,
            "priority": 0,
        }
    )
