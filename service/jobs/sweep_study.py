"""A sweep's trials: kept, sampled, judged and pruned, by Optuna's samplers and pruners.

Optuna stores trials with many small transactions, and what its samplers and pruners choose depends on what is stored.
So that a service that dies between two of these loses, doubles or changes nothing, each choice is made on a copy in
memory, by a sampler or pruner that has just been made, and then written down whole:

- a new trial with all its parameters, in one transaction;
- a verdict on a trial at a step as one attribute, before any of its effects; they are then carried out, again if need
  be, until the trial has them all.

A choice thus depends only on the sweep, the trials before it and their verdicts. ``next_milestone`` says in which order
these come.
"""

import json
import math
import threading
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from sqlalchemy import Engine, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from service.jobs.database import TO_POSTGRESQL, WAIT_SECONDS, open_engine, watch_file
from service.jobs.model import JobRecord
from service.models.sweeps import SweepRequest, SweepTrial, TrialState

if TYPE_CHECKING:  # Optuna and NumPy are imported when the first sweep needs them
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

_SCHEMA = "optuna"  # in PostgreSQL
LEAST_COMPLETED = 4  # trials for importances: PED-ANOVA compares the best, at least two, with the others
_MOST_IMPORTANCES = 256  # that are remembered
_CREATION = threading.Lock()  # among threads, and in PostgreSQL among processes:
_CREATION_LOCK = 0x6F7074756E61  # any number, the same in all processes
_START, VERDICT, REFUSED, _STOPPED = "start", "verdict", "refused", "stopped"  # attributes of trials
# By Optuna's names, three of which are ours, too.
_STATES = {state.name: state for state in (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED)}
_STATES["FAIL"] = TrialState.STOPPED


class Verdict(BaseModel):
    """What becomes of a trial at one of its milestones.

    Attributes:
        step: The milestone.
        value: The metric; ``None``: the trial has failed, which counts as the worst value.
        reason: Why it ends; ``None``: it goes on, or is complete.
        ends: Whether it ends here.
        pruner: What the pruner stores with the trial.
    """

    step: int
    value: float | None
    reason: str | None = None
    ends: bool = False
    pruner: dict[str, Any] = {}


def distributions(request: SweepRequest) -> "dict[str, BaseDistribution]":
    """What Optuna draws parameters from. A choice is its JSON, because Optuna stores only plain values."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    made: dict[str, BaseDistribution] = {}
    for path, dimension in request.space.items():
        if dimension.choices is not None:
            made[path] = CategoricalDistribution([json.dumps(each, sort_keys=True) for each in dimension.choices])
        elif dimension.int_uniform is not None:
            made[path] = IntDistribution(*dimension.int_uniform)
        else:
            low, high = dimension.uniform or dimension.log_uniform or (0.0, 1.0)
            made[path] = FloatDistribution(low, high, log=dimension.log_uniform is not None)
    return made


def parameters_of(request: SweepRequest, trial: "FrozenTrial") -> dict[str, Any]:
    """A trial's values by the paths of their fields."""
    listed = {path for path, dimension in request.space.items() if dimension.choices is not None}
    return {path: json.loads(trial.params[path]) if path in listed else trial.params[path] for path in request.space}


def ask(request: SweepRequest, trials: "Sequence[FrozenTrial]") -> "FrozenTrial":
    """Choose the next trial's parameters.

    Args:
        request: The sweep.
        trials: All trials so far, in order.
    """
    study = _copy(request, trials, len(trials))
    # It starts at the time of the newest verdict.
    verdicts = (int(each.user_attrs[_START]) + max(each.intermediate_values, default=0) for each in trials)
    study.ask(distributions(request)).set_user_attr(_START, max(verdicts, default=0))
    return study.get_trials(deepcopy=False)[-1]


def judge(
    request: SweepRequest, trials: "Sequence[FrozenTrial]", number: int, step: int, value: float | None,
    reason: str | None, *, last: bool,
) -> Verdict:  # fmt: skip
    """Judge a trial by its value at a milestone, which it compares with others' values there.

    Args:
        request: The sweep.
        trials: All trials so far.
        number: The trial to judge.
        step: The milestone.
        value: The metric at that step; ``None`` if it has failed.
        reason: Why it has failed.
        last: Whether it is the last step.
    """
    study = _copy(request, trials, number)
    trial = copy(study.get_trials(deepcopy=False)[number])
    # Only the value at this rung, because the pruner of the median takes the best so far.
    trial.intermediate_values = {step: _told(request, value)}
    before = dict(trial.system_attrs)
    pruned = request.stop_early is not None and not last and study.pruner.prune(study, trial)
    stored = study.get_trials(deepcopy=False)[number].system_attrs
    pruner = {name: each for name, each in stored.items() if name not in before}
    if value is not None and pruned:
        reason = f"its {request.metric} of {value:.6g} at step {step} is worse than others' there"
    return Verdict(step=step, value=value, reason=reason, ends=last or pruned or value is None, pruner=pruner)


def next_milestone(trial: "FrozenTrial", milestones: Sequence[int]) -> tuple[int, int, int]:
    """When a running trial is judged next: on the sweep's clock, with its number, and at which step.

    The clock counts steps, as if all jobs trained equally fast: a trial starts when the verdict that made room for it
    came. So verdicts in the order of this clock do not depend on how fast jobs really are.
    """
    start = int(trial.user_attrs[_START])
    if REFUSED in trial.user_attrs:  # it needs no step to fail
        return start, trial.number, 0
    # The last one again if steering has made a step the last at which it has been judged before.
    step = next((step for step in milestones if step not in trial.intermediate_values), milestones[-1])
    return start + step, trial.number, step


def shown(request: SweepRequest, trial: "FrozenTrial", job_id: str | None) -> SweepTrial:
    """A trial as the API shows it."""
    verdict = Verdict.model_validate(trial.user_attrs[VERDICT]) if VERDICT in trial.user_attrs else None
    state, reason = _STATES[trial.state.name], verdict.reason if verdict else None
    if state is TrialState.COMPLETE and verdict is not None and verdict.value is None:
        state = TrialState.FAILED
    if state is TrialState.STOPPED:
        reason = str(trial.user_attrs[_STOPPED])
    worst = _told(request, None)
    reported = sorted((step, value) for step, value in trial.intermediate_values.items() if step > 0)
    rungs = {step: None if value == worst else value for step, value in reported}
    value, parameters = None if trial.value == worst else trial.value, parameters_of(request, trial)
    reason = reason if trial.state.is_finished() else None
    return SweepTrial(
        number=trial.number, state=state, parameters=parameters, value=value, rungs=rungs, reason=reason, job_id=job_id
    )


def all_shown(
    request: SweepRequest, trials: "Sequence[FrozenTrial]", jobs: Mapping[int, JobRecord]
) -> list[SweepTrial]:  # fmt: skip
    """The trials as the API shows them; ``jobs``: those that they have, by number."""
    return [shown(request, each, jobs[each.number].id if each.number in jobs else None) for each in trials]


def importance(request: SweepRequest, trials: "Sequence[FrozenTrial]") -> dict[str, float] | None:
    """How much of the difference between good and bad trials each field explains; ``None`` if it cannot be told."""
    complete = (trial for trial in trials if _STATES[trial.state.name] is TrialState.COMPLETE)
    values = [trial.value for trial in complete if trial.value != _told(request, None)]
    if len(values) < LEAST_COMPLETED or len(set(values)) < 2:
        return None
    from optuna import importance as importances

    study, evaluator = _copy(request, trials, 0), importances.PedAnovaImportanceEvaluator()
    return importances.get_param_importances(study, evaluator=evaluator, params=list(request.space))


@dataclass
class Studies:
    """Optuna's storage of all sweeps' trials, in the record's database. Threads may share it.

    Optuna's tables include an ``alembic_version``, as the record's do. So in PostgreSQL they have a schema of their
    own; in SQLite, which has none, a file beside the record's.

    Attributes:
        engine: The record's database.
    """

    engine: Engine
    # By sweep, with how many trials had ended. Computing takes a third of a second, and pages ask every few seconds.
    _importances: dict[str, tuple[int, dict[str, float] | None]] = field(default_factory=dict, init=False, repr=False)
    _computing: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @cached_property
    def storage(self) -> "BaseStorage":
        """The storage; its tables are made when it is first used."""
        import optuna

        with _CREATION:
            optuna.logging.disable_default_handler()  # errors are raised, too
            optuna.logging.set_verbosity(optuna.logging.WARNING)  # else each choice is a line of the log
            url, arguments = self.engine.url, dict[str, Any]()
            if url.get_backend_name() == "sqlite":
                file = str(url.database).removesuffix(".db") + "-sweeps.db"
                url, arguments = url.set(database=file), {"timeout": WAIT_SECONDS}
                own = open_engine(url)
                own.connect().close()  # which keeps it from other users' eyes
                own.dispose()
            else:
                options = f"{url.query.get('options', '')} -csearch_path={_SCHEMA}".strip()
                arguments = {**TO_POSTGRESQL, "options": options}
            address = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
            with self.engine.begin() as connection:  # one process makes the tables
                if connection.dialect.name == "postgresql":
                    connection.execute(select(func.pg_advisory_xact_lock(_CREATION_LOCK)))
                    there = text("SELECT 1 FROM pg_namespace WHERE nspname = :name")
                    if connection.execute(there, {"name": _SCHEMA}).first() is None:
                        with self.engine.begin() as other:  # committed before Optuna connects
                            other.execute(text(f"CREATE SCHEMA {_SCHEMA}"))
                else:
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
                kwargs = {"connect_args": arguments, "pool_pre_ping": True}
                storage = optuna.storages.RDBStorage(address, engine_kwargs=kwargs)
                if url.get_backend_name() == "sqlite":
                    watch_file(storage.engine, file)
                return optuna.storages.get_storage(storage)

    def trials(self, sweep_id: str) -> "list[FrozenTrial]":
        """A sweep's trials, in order; none if it has not begun.

        Raises:
            SQLAlchemyError: The database cannot be read.
        """
        from optuna.exceptions import StorageInternalError

        try:
            return self.storage.get_all_trials(self.storage.get_study_id_from_name(sweep_id), deepcopy=False)
        except KeyError:
            return []
        except StorageInternalError as error:
            if isinstance(error.__cause__, SQLAlchemyError):
                raise error.__cause__ from None
            raise

    def importance(self, sweep_id: str, request: SweepRequest) -> dict[str, float] | None:
        """The importance of a sweep's fields, which is computed again only once more of its trials have ended."""
        trials = self.trials(sweep_id)
        ended = sum(trial.state.is_finished() for trial in trials)
        with self._computing:
            known = self._importances.pop(sweep_id, None)
            if known is None or known[0] != ended:
                known = ended, importance(request, trials)
            self._importances[sweep_id] = known
            if len(self._importances) > _MOST_IMPORTANCES:
                del self._importances[next(iter(self._importances))]
        return known[1]

    def add(self, sweep_id: str, request: SweepRequest, trial: "FrozenTrial") -> None:
        """Store a new trial."""
        try:
            study_id = self.storage.get_study_id_from_name(sweep_id)
        except KeyError:
            from optuna.study import StudyDirection

            direction = StudyDirection.MINIMIZE if request.minimize else StudyDirection.MAXIMIZE
            study_id = self.storage.create_new_study([direction], sweep_id)
        self.storage.create_new_trial(study_id, template_trial=trial)

    def note(self, trial: "FrozenTrial", attribute: str, value: Any) -> None:
        """Store with a trial its ``VERDICT``, for ``carry_out``, or why its job was ``REFUSED``: a verdict follows."""
        self.storage.set_trial_user_attr(trial._trial_id, attribute, value)

    def carry_out(self, request: SweepRequest, trial: "FrozenTrial") -> bool:
        """Carry out what is left to do of a running trial's newest verdict; return whether there was anything."""
        if VERDICT not in trial.user_attrs:
            return False
        verdict, told = Verdict.model_validate(trial.user_attrs[VERDICT]), trial.intermediate_values
        if verdict.step in told and not verdict.ends:
            return False
        value = _told(request, verdict.value)
        for name, each in verdict.pruner.items():
            self.storage.set_trial_system_attr(trial._trial_id, name, each)
        self.storage.set_trial_intermediate_value(trial._trial_id, verdict.step, value)
        if verdict.ends:
            from optuna.trial import TrialState as OptunaState

            pruned = verdict.value is not None and verdict.reason is not None
            state = OptunaState.PRUNED if pruned else OptunaState.COMPLETE
            self.storage.set_trial_state_values(trial._trial_id, state, [value])
        return True

    def stop(self, trial: "FrozenTrial", reason: str) -> None:
        """End a running trial with its sweep."""
        from optuna.trial import TrialState as OptunaState

        self.storage.set_trial_user_attr(trial._trial_id, _STOPPED, reason)
        self.storage.set_trial_state_values(trial._trial_id, OptunaState.FAIL)


def _copy(request: SweepRequest, trials: "Sequence[FrozenTrial]", number: int) -> "optuna.Study":
    """The study in memory, with the sampler and pruner for a choice that concerns the trial ``number``."""
    import optuna
    from numpy.random import SeedSequence

    seed = int(SeedSequence([request.seed, number]).generate_state(1)[0])
    sampler: optuna.samplers.BaseSampler
    match request.search:
        case "grid":  # the seed shuffles the grid, from which trials then take one combination after the other
            drawn = distributions(request).items()
            values = {path: getattr(each, "choices", request.space[path].listed or ()) for path, each in drawn}
            sampler = optuna.samplers.GridSampler(values, seed=request.seed)
        case "random":
            sampler = optuna.samplers.RandomSampler(seed=seed)
        case "tpe":
            sampler = optuna.samplers.TPESampler(seed=seed)
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if (rule := request.stop_early) is not None:
        first, factor = rule.first_step, rule.reduction_factor
        match rule.kind:
            case "successive_halving":
                pruner = optuna.pruners.SuccessiveHalvingPruner(first, factor)
            case "hyperband":
                pruner = optuna.pruners.HyperbandPruner(first, request.job.training.steps, factor)
            case "median":
                pruner = optuna.pruners.MedianPruner(n_warmup_steps=first, interval_steps=rule.every_steps or first)
    # Hyperband derives a trial's bracket from the study's name, so equal sweeps need equal ones.
    direction = optuna.study.StudyDirection.MINIMIZE if request.minimize else optuna.study.StudyDirection.MAXIMIZE
    study = optuna.create_study(sampler=sampler, pruner=pruner, study_name="sweep", direction=direction)
    study.add_trials(trials)
    return study


def _told(request: SweepRequest, value: float | None) -> float:
    """A value as Optuna is told it: that of a failed trial is the worst, since Optuna would leave out failed trials."""
    worst = math.inf if request.minimize else -math.inf
    return worst if value is None else value
