"""The actor that stands for a gang: it runs the training and keeps what the workers report until it is read."""

import threading
import traceback
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count, islice
from typing import Any

import ray

from boost_core.config import JobSpec
from boost_core.config.reports import LogLine, Report, StartReport
from service.gang.resources import gang_in_words, worker_resources
from service.gang.status import GangPhase, GangReport, GangStatus

REPORTS_A_POLL = 1000
UNREAD_REPORTS = 100_000  # some 100 MB; the oldest go first when nobody reads for long


class Supervisor:
    """Drives one attempt of a job. Its methods return at once; the run has a thread of its own.

    Args:
        name: Unique name of the run.
        spec: The job.
    """

    def __init__(self, name: str, spec: JobSpec) -> None:
        self._name, self._spec = name, spec
        self._workers = spec.parallelism.world_size
        self._phase = GangPhase.STARTING
        self._message = f"placing {gang_in_words(self._workers, worker_resources(spec))}"
        self._reports: deque[GangReport] = deque(maxlen=UNREAD_REPORTS)
        self._sequence = count(1)
        self._lock = threading.Lock()  # between the actor's methods and the thread of the run
        myself = ray.get_runtime_context().current_actor
        threading.Thread(target=self._run, args=(myself,), name="run", daemon=True).start()

    def push(self, reports: Sequence[tuple[datetime, Report]]) -> None:
        """Take reports of a worker."""
        with self._lock:
            for time, report in reports:
                self._keep(time, report)
                if isinstance(report, StartReport):
                    self._phase, self._message = GangPhase.TRAINING, f"{self._workers} workers are training"
                elif self._phase is GangPhase.STARTING:
                    self._message = f"{self._workers} workers are loading the data and the model"

    def restarting(self, cause: str) -> None:
        """Take note that Ray Train starts the workers again."""
        with self._lock:
            self._message = f"{cause}; restarting from the last checkpoint"
            self._keep(datetime.now(UTC), LogLine(rank=0, level="WARNING", message=self._message))

    def poll(self, after_sequence: int) -> GangStatus:
        """The status with reports after ``after_sequence``; those up to it are forgotten.

        A final phase is told together with the last report and never before.
        """
        with self._lock:
            while self._reports and self._reports[0].sequence <= after_sequence:
                self._reports.popleft()
            more = len(self._reports) > REPORTS_A_POLL
            phase = GangPhase.TRAINING if more else self._phase
            return GangStatus(phase, self._message, list(islice(self._reports, REPORTS_A_POLL)))

    def _run(self, myself: Any) -> None:
        # Torch takes seconds to import: meanwhile the actor answers polls already.
        from service.gang.failures import root_cause
        from service.gang.run import run_gang

        try:
            run_gang(self._name, self._spec, myself)
        except Exception as error:
            self._end(GangPhase.FAILED, root_cause(error), traceback.format_exc())
        else:
            self._end(GangPhase.SUCCEEDED, f"trained {self._spec.training.steps} steps")

    def _end(self, phase: GangPhase, message: str, log: str | None = None) -> None:
        with self._lock:
            self._phase, self._message = phase, message
            if log:
                self._keep(datetime.now(UTC), LogLine(rank=0, level="ERROR", message=log))

    def _keep(self, time: datetime, report: Report) -> None:
        self._reports.append(GangReport(next(self._sequence), time, report))
