"""Drives sweeps: has trials chosen, judged and pruned (``jobs.sweep_study``), and submits and stops their jobs.

Each pass compares what is stored of a sweep, its trials and their jobs, and makes the changes that follow, one after
the other. Nothing is remembered between two changes, so a service that dies at any moment is continued by the next.
"""

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from service.jobs import sweep_study
from service.jobs.comparison import gpu_hours_of
from service.jobs.leases import Lease, LeaseLost, refuse_if_lost
from service.jobs.model import JobRecord, TooManyJobs
from service.jobs.queries import results_of
from service.jobs.states import JobState
from service.jobs.store import JobStore
from service.jobs.sweep_study import Studies
from service.jobs.sweeps import SweepStore
from service.jobs.writes import AlreadyFinished
from service.logs import RecurringFaults
from service.models.sweeps import MOST_TRIALS, IllegalTrial, Sweep, SweepState, TrialState

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

logger = logging.getLogger(__name__)

_MOST_CHANGES, _MOST_SECONDS = 200, 10.0  # in a pass, after which other sweeps have their turn
_STOP_SECONDS = 5.0  # for a pass to end when the service stops; another service completes what is cut off
_SUBMIT_SECONDS = 2.0  # of a tenant's submissions in a pass, then its next one waits for the next: they may be slow
_PUT_OFF = 10  # times as long as a submission took that failed, its tenant's next one waits: stores that hang take long

# Creates the job of a trial, given its sweep, number and parameters, as the API does; calls a function in the same
# transaction. Raises ``IllegalTrial`` if there can be no such job.
Submit = Callable[[Sweep, int, Mapping[str, Any], Callable[[Connection], None]], JobRecord]


class _View(NamedTuple):
    """A sweep as stored now.

    Attributes:
        sweep: The sweep.
        trials: Its trials, in order.
        jobs: Their jobs, by number.
        running: The trials without a final verdict.
        lost: Whether trials that have jobs are stored no more.
    """

    sweep: Sweep
    trials: "Sequence[FrozenTrial]"
    jobs: Mapping[int, JobRecord]
    running: "Sequence[FrozenTrial]"
    lost: bool


@dataclass(frozen=True)
class SweepDriver:
    """Makes passes over all sweeps that have not ended.

    Attributes:
        record: The sweeps, written under the scheduler's lease.
        studies: Their trials.
        submit: Creates a job.
        may_submit: Whether a tenant's jobs may be submitted now.
    """

    record: SweepStore
    studies: Studies
    submit: Submit
    may_submit: Callable[[str], bool] = lambda _: True

    def drive(self, sweep: Sweep) -> None:
        """Make the changes that are due in one sweep.

        Raises:
            LeaseLost: Another process schedules now.
            Exception: The record or a store cannot be reached; the next pass tries again.
        """
        until = time.monotonic() + _MOST_SECONDS
        for _ in range(_MOST_CHANGES):
            if time.monotonic() > until:
                return  # the next pass goes on
            with self.record.jobs.engine.connect() as connection:
                refuse_if_lost(connection, self.record.lease)  # Optuna's tables know of no lease
            trials, jobs = self.studies.trials(sweep.id), self.record.jobs.of_sweep(sweep.id)
            running = [trial for trial in trials if not trial.state.is_finished()]
            view = _View(sweep, trials, jobs, running, lost=max(jobs, default=-1) >= len(trials))
            if not self._change(view):
                break
        else:
            return  # the next pass goes on
        shown = sweep_study.all_shown(sweep.spec, view.trials, view.jobs)
        complete = [trial for trial in shown if trial.state is TrialState.COMPLETE]
        best = min(complete, key=lambda trial: (trial.value or 0.0) * (1 if sweep.spec.minimize else -1), default=None)
        counts = {state: number for state in TrialState if (number := sum(trial.state is state for trial in shown))}
        told = {"trials": counts, "best": best.model_dump(mode="json") if best else None}
        words = ", ".join(f"{number} {state.lower()}" for state, number in counts.items()) or "none"
        stopping = sweep.state is SweepState.STOPPING
        unfinished = (view.running and not view.lost) or any(not job.finished for job in view.jobs.values())
        if unfinished and (stopping or not view.lost):
            if (counts, best) != (sweep.trials, sweep.best):
                message = sweep.message if stopping else f"trials: {words}"
                self.record.update(sweep, **told, message=message)
            return
        message = f"trials: {words}" + (f"; the best is trial {best.number} with {best.value:.6g}" if best else "")
        state = SweepState.FINISHED
        if view.lost and not stopping:
            what = "trials that have jobs are not in its database, which was removed or is an older copy"
            state, message = SweepState.FAILED, f"{what}; the jobs go on; {message}"
        elif self._too_many_failed(view):
            state, message = SweepState.FAILED, f"more than {sweep.spec.max_failures} trials have failed; {message}"
        elif stopping:
            state, message = SweepState.STOPPED, f"stopped by its user; {message}"
        logger.info("%s: sweep %r of %s has %s: %s", sweep.id, sweep.name, sweep.tenant, state, message)
        self.record.update(sweep, **told, state=state, message=message, finished_at=datetime.now(UTC))

    def _change(self, view: _View) -> bool:
        """Make the next change that is due; return whether there was one."""
        sweep, request = view.sweep, view.sweep.spec
        if view.lost:  # its user may still stop its jobs
            stops = sweep.state is SweepState.STOPPING
            why = f"sweep {sweep.name} was stopped by its user"
            return stops and any(self._stop_job(job, why) for job in view.jobs.values() if not job.finished)
        # What a verdict implies, perhaps of a service that died meanwhile.
        for trial in view.running:
            if self.studies.carry_out(request, trial):
                return True
        # The jobs of ended trials stop gracefully: a pause saves a checkpoint, and then nothing is left to be ended.
        for number, job in view.jobs.items():
            if job.finished or not view.trials[number].state.is_finished():
                continue
            # That of a complete one is about to end by itself, with its last checkpoint; stopped, it could lose it.
            ended = sweep_study.shown(request, view.trials[number], job.id)
            if ended.state is TrialState.COMPLETE and sweep.state is not SweepState.STOPPING:
                continue
            why = f"{ended.state.lower()} as trial {number} of sweep {sweep.name}"
            if self._stop_job(job, f"{why}: {ended.reason}" if ended.reason else why):
                return True
        if view.running and (sweep.state is SweepState.STOPPING or self._too_many_failed(view)):
            why = "by its user" if sweep.state is SweepState.STOPPING else "because too many trials have failed"
            self.studies.stop(view.running[0], f"the sweep was stopped {why}")
            return True
        for trial in view.running:
            if trial.number in view.jobs or sweep_study.REFUSED in trial.user_attrs:
                continue
            if not self.may_submit(sweep.tenant):
                return False  # if it is refused, that verdict comes before all others
            try:
                parameters = sweep_study.parameters_of(request, trial)
                job = self.submit(sweep, trial.number, parameters, partial(refuse_if_lost, lease=self.record.lease))
            except IllegalTrial as error:
                self.studies.note(trial, sweep_study.REFUSED, str(error))
            except TooManyJobs as error:
                logger.warning("%s: trial %d of sweep %r waits: %s", sweep.id, trial.number, sweep.name, error)
                return self._judge(view)
            else:
                logger.info("%s: trial %d of sweep %r is %s", sweep.id, trial.number, sweep.name, job.id)
            return True
        if len(view.running) < request.parallel and not self._is_over(view):
            trial = sweep_study.ask(request, view.trials)
            self.studies.add(sweep.id, request, trial)
            return True
        return self._judge(view)

    def _is_over(self, view: _View) -> bool:
        """Whether no more trials start."""
        sweep, request, budget = view.sweep, view.sweep.spec, view.sweep.spec.budget
        most = min(request.grid_size if request.search == "grid" else MOST_TRIALS, budget.trials or MOST_TRIALS)
        if sweep.state is SweepState.STOPPING or self._too_many_failed(view) or len(view.trials) >= most:
            return True
        if budget.tokens is not None:
            tokens = 0  # of each trial up to its newest milestone, which a failed one may not have reached
            for number, job in view.jobs.items():
                done, training = job.progress.step if job.progress else 0, job.spec.training
                values = view.trials[number].intermediate_values.items()
                steps = (step if math.isfinite(value) else min(step, done) for step, value in values)
                tokens += training.samples(max(steps, default=0)) * training.sequence_length
            if tokens >= budget.tokens:
                return True
        if budget.gpu_hours is None:
            return False
        with Session(self.record.jobs.engine) as session:
            _, ranks = results_of(session, [job.id for job in view.jobs.values()])
        now = datetime.now(UTC)
        return sum(gpu_hours_of(job, ranks.get(job.id, ()), now) for job in view.jobs.values()) >= budget.gpu_hours

    def _too_many_failed(self, view: _View) -> bool:
        request = view.sweep.spec
        if request.max_failures is None:
            return False
        shown = sweep_study.all_shown(request, view.trials, view.jobs)
        return sum(trial.state is TrialState.FAILED for trial in shown) > request.max_failures

    def _stop_job(self, job: JobRecord, why: str) -> bool:
        if job.pause_requested and job.state is not JobState.PAUSED:
            return False  # it is about to pause
        try:
            if job.state is JobState.PAUSED:
                self.record.jobs.request_cancel(job.id, why)
            else:
                self.record.jobs.request_pause(job.id)
        except AlreadyFinished:
            return False
        return True

    def _judge(self, view: _View) -> bool:
        """Judge the trial whose turn it is, if its job has come far enough."""
        request = view.sweep.spec
        milestones = {number: request.milestones(job.spec) for number, job in view.jobs.items()}
        # Those with a job, and those that were refused; others have yet to be submitted.
        tried = (each for each in view.running if each.number in view.jobs or sweep_study.REFUSED in each.user_attrs)
        turns = [(sweep_study.next_milestone(each, milestones.setdefault(each.number, [0])), each) for each in tried]
        while turns:
            turns.sort()
            (_, number, step), trial = turns.pop(0)
            job, at_end = view.jobs.get(number), step == milestones[number][-1]
            # A rung without a report is passed over: the job began later, or steering has moved its evaluations.
            if job and not at_end:
                newest = job.evaluation if request.metric.startswith("validation") else job.progress
                if newest and newest.step > step and self.record.value(job, request.metric, step) is None:
                    milestones[number].remove(step)
                    turns.append((sweep_study.next_milestone(trial, milestones[number]), trial))
                    continue
            value, reason = self._outcome(view, trial, step)
            if value is not None or reason is not None:
                last = job is not None and at_end
                verdict = sweep_study.judge(request, view.trials, number, step, value, reason, last=last)
                self.studies.note(trial, sweep_study.VERDICT, verdict.model_dump())
                return True
            if request.search == "tpe" or request.stop_early is not None:
                break  # otherwise verdicts decide nothing about other trials, and none waits for its turn
        return False

    def _outcome(self, view: _View, trial: "FrozenTrial", step: int) -> tuple[float | None, str | None]:
        """A trial's value at a step, or else why it has failed; neither: it is still under way."""
        if sweep_study.REFUSED in trial.user_attrs:
            return None, str(trial.user_attrs[sweep_study.REFUSED])
        job, metric = view.jobs[trial.number], view.sweep.spec.metric
        if (value := self.record.value(job, metric, step)) is not None:
            number = float(value)
            return (number, None) if math.isfinite(number) else (None, f"its {metric} at step {step} is {number}")
        if job.state in (JobState.FAILED, JobState.CANCELLED):
            return None, f"its job {job.state.lower()}: {job.message}"
        if job.state is JobState.SUCCEEDED:
            return None, f"its job has reported no {metric} at step {step}"
        return None, None


class SweepLoop:
    """Drives sweeps in a thread of its own, while this service schedules: checks of a trial's data may take long.

    Args:
        store: The record.
        studies: The trials of all sweeps.
        lease: Returns the scheduler's lease; ``None`` while another service has it.
        submit: Creates a job.
        interval_seconds: From the end of one pass to the start of the next.
    """

    def __init__(
        self, store: JobStore, studies: Studies, lease: Callable[[], Lease | None], submit: Submit,
        interval_seconds: float,
    ) -> None:  # fmt: skip
        self._store, self._studies, self._lease = store, studies, lease
        self._submit, self._interval = submit, interval_seconds
        self._faults = RecurringFaults(logger)
        self._put_off = dict[str, float]()  # until when no job is submitted, by tenant
        self._spent = defaultdict[str, float](float)  # seconds that submissions took in this pass, by tenant
        self._waits = False  # whether one could not be tried in this pass
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweeps", daemon=True)

    def start(self) -> None:
        """Start, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """End after the present sweep's pass, and return when that is done: soon, even if a store hangs."""
        self._stop.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if (lease := self._lease()) is not None:
                    record = SweepStore(self._store.under(lease), lease)
                    driver = SweepDriver(record, self._studies, self._submit_or_put_off, self._may_submit)
                    self._spent.clear()
                    self._waits = False
                    for sweep in record.unfinished():
                        if self._stop.is_set():
                            return
                        try:
                            driver.drive(sweep)
                        except LeaseLost:
                            raise
                        except Exception as error:  # errors with one sweep do not hold up the others
                            self._faults.occurred(f"{sweep.id}: this pass failed", error)
                    if not self._waits:
                        self._faults.settle()
            except LeaseLost as overtaken:
                logger.warning("%s", overtaken)
            except Exception as error:
                self._faults.occurred("a pass over the sweeps failed", error)
            self._stop.wait(self._interval)

    def _may_submit(self, tenant: str) -> bool:
        may = self._spent[tenant] < _SUBMIT_SECONDS and time.monotonic() >= self._put_off.get(tenant, 0.0)
        self._waits |= not may
        return may

    def _submit_or_put_off(
        self, sweep: Sweep, number: int, parameters: Mapping[str, Any], alongside: Callable[[Connection], None]
    ) -> JobRecord:
        began = time.monotonic()
        try:
            return self._submit(sweep, number, parameters, alongside)
        except IllegalTrial:
            raise
        except Exception:
            ended = time.monotonic()  # what came before it in the pass has not failed
            self._put_off[sweep.tenant] = ended + _PUT_OFF * (ended - began)
            raise
        finally:
            self._spent[sweep.tenant] += time.monotonic() - began
