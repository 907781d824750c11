"""The jobs that ``boost watch`` shows, and the curves of their losses and throughputs."""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from service.client import ApiError, Client
from service.jobs.model import JobRecord
from service.jobs.states import TERMINAL_STATES, JobState

_POINTS = 24  # of a curve
_ENDED = 10  # ended jobs that stay visible while all active jobs are watched
_UNFINISHED = [state for state in JobState if state not in TERMINAL_STATES]


class Curve:
    """The newest numbers of a job, as many as fit into a line."""

    def __init__(self) -> None:
        self.losses: deque[float | None] = deque(maxlen=_POINTS)
        self.throughputs: deque[float | None] = deque(maxlen=_POINTS)
        self._step = 0

    def begin(self, client: Client, job_id: str) -> None:
        """Load the job's past; without it, the curve just starts now."""
        with suppress(ApiError):
            for sample in client.metrics(job_id, _POINTS).samples:
                self._add(sample.step, sample.loss, sample.tokens_per_second)

    def go_on(self, job: JobRecord) -> None:
        """Add the job's newest step, if it is new."""
        if job.progress and job.progress.step != self._step:
            self._add(job.progress.step, job.progress.loss, job.progress.tokens_per_second)

    def _add(self, step: int, loss: float | None, throughput: float | None) -> None:
        self._step = step
        self.losses.append(loss)
        self.throughputs.append(throughput)


class Watched:
    """Some jobs, as of the last poll.

    Args:
        client: The service.
        job_ids: The jobs; if empty, all active ones, including new ones.
    """

    def __init__(self, client: Client, job_ids: Sequence[str]) -> None:
        self._client = client
        self._named = list(dict.fromkeys(job_ids))
        self._curves: dict[str, Curve] = {}
        self.jobs: list[JobRecord] = []

    def look(self) -> None:
        """Poll the jobs.

        Raises:
            ApiError: One of the named jobs does not exist.
            ServiceUnreachable: The service does not answer.
        """
        self.jobs = [self._client.get(job_id) for job_id in self._named] if self._named else self._unfinished()
        for job in self.jobs:
            self.curve(job).go_on(job)

    def curve(self, job: JobRecord) -> Curve:
        """Return the curve of a job."""
        if job.id not in self._curves:
            self._curves[job.id] = curve = Curve()
            if job.progress:
                curve.begin(self._client, job.id)
        return self._curves[job.id]

    @property
    def is_over(self) -> bool:
        """Whether all named jobs have ended."""
        return bool(self._named) and all(job.finished for job in self.jobs)

    def _unfinished(self) -> list[JobRecord]:
        """Return the active jobs, and those that ended while they were watched."""
        going_on = self._client.list(_UNFINISHED).jobs
        known = {job.id for job in going_on}
        ended = [job if job.finished else self._client.get(job.id) for job in self.jobs if job.id not in known]
        return going_on + ended[:_ENDED]
