"""The record of jobs' measured times relative to their predictions, which correct the predictions of later jobs.

Each job has two ratios per shape, of exposed collectives and of the rest of its steps, from its newest comparison; a
row that has only the ratio of whole steps counts with that for both. For each tenant, those of the newest jobs
on a kind of device at a precision are kept. Another tenant counts for a kind of device like one job, with the medians
of its ratios, so that none outweighs others by its number of jobs; only the tenant itself sees which of its shapes have
run. Predictions from another profile, for nodes of another size, or by another version of the plan have another base:
ratios of one base say nothing about another.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, delete, func, insert, select, union_all

from boost_core import __version__
from boost_core.config import JobSpec, Layout
from boost_core.messages import ComparisonReport
from boost_core.plan import machine
from boost_core.plan.machine import Basis, Fitted, MeasuredProfile, Ran, Ratios, kind_of_device, median_of, model_of
from boost_core.plan.report import at
from service.jobs.database import read_rows
from service.jobs.model import JobRecord
from service.jobs.tables import ObservationRow

_KEPT = 32  # jobs of a tenant on a kind of device at a precision
_READ = 1024  # newest rows of the tenant, and as many of others
_ROW = ObservationRow
_DIGITS = 16


# Built once, because building it takes longer than running it.
_RATIOS = _ROW.ratio, _ROW.rest_ratio, _ROW.communication_ratio
_OF_ALIKE = [column == bindparam(column.key) for column in (_ROW.kind, _ROW.precision, _ROW.base)]
_NEWEST = select(_ROW.tenant, _ROW.job_id, _ROW.model, _ROW.shape, *_RATIOS, _ROW.time).where(*_OF_ALIKE)
_NEWEST = _NEWEST.order_by(_ROW.time.desc()).limit(_READ)
_OWN = _ROW.tenant == bindparam("tenant")
_ALIKE = union_all(*(select(_NEWEST.where(whose).subquery()) for whose in (_OWN, ~_OWN)))


def observation(record: JobRecord, report: ComparisonReport, time: datetime) -> dict[str, Any] | None:
    """The observation in a comparison for later jobs, by columns; ``None`` if there is none.

    Args:
        record: The job.
        report: Its steps compared with their prediction.
        time: Time of the report.
    """
    kind, seconds = kind_of_device(record.spec.resources), report.step_seconds
    if kind is None or seconds is None or not report.predicted_step_seconds > 0:
        return None
    # How many times as long as predicted without a correction the steps took.
    whole = seconds / report.predicted_step_seconds * report.correction
    ratios: Ratios | None = Ratios(whole, whole)  # from a trainer that compared whole steps
    if (measured := report.exposed_communication_seconds) is not None:
        predicted = report.predicted_exposed_communication_seconds / report.communication_correction
        ratios = Ratios.of(whole, measured, machine.PredictedCommunication(predicted, report.communication_share))
    if ratios is None or not machine.plausible(whole):
        return None
    job = at(record.spec, Layout.of(report), record.basis.machine(record.spec))
    return {
        "job_id": record.id, "shape": machine.shape_of(job), "tenant": record.tenant, "kind": kind,
        "precision": job.training.precision, "base": _base(job, record.basis.profile, record.node_gpus),
        "model": model_of(job), "ratio": whole, "rest_ratio": ratios.rest,
        "communication_ratio": ratios.communication, "time": time,
    }  # fmt: skip


def add(connection: Connection, observed: Sequence[Mapping[str, Any]]) -> None:
    """Store observations, replacing older ones, and drop those of a tenant beyond the number kept."""
    for each in observed:
        connection.execute(delete(_ROW).filter_by(job_id=each["job_id"], shape=each["shape"]))
        connection.execute(insert(_ROW).values(each))
        alike = (_ROW.tenant == each["tenant"]) & (_ROW.kind == each["kind"]) & (_ROW.precision == each["precision"])
        jobs = select(_ROW.job_id).where(alike).group_by(_ROW.job_id).order_by(func.max(_ROW.time).desc())
        if older := connection.scalars(jobs.offset(_KEPT)).all():
            connection.execute(delete(_ROW).where(alike, _ROW.job_id.in_(older)))


@dataclass(frozen=True)
class Observations:
    """Observations in the record's database.

    Attributes:
        engine: Engine of that database.
    """

    engine: Engine

    def for_job(
        self, spec: JobSpec, profile: MeasuredProfile | None, node_gpus: int | None, tenant: str
    ) -> Fitted | None:
        """The correction of a job's predictions.

        Args:
            spec: The job.
            profile: The profile that predicts its seconds; ``None``: data sheets.
            node_gpus: GPUs per node, as in ``Basis``.
            tenant: The job's tenant.

        Returns:
            ``None`` if it names no kind of GPU, or no relevant job has run.
        """
        kind, precision = kind_of_device(spec.resources), spec.training.precision
        if kind is None:
            return None
        parameters = {"kind": kind, "precision": precision, "base": _base(spec, profile, node_gpus), "tenant": tenant}
        rows = sorted(read_rows(self.engine, _ALIKE, parameters), key=attrgetter("time"), reverse=True)
        if not rows:
            return None
        ran: list[Ran] = []
        others: dict[str, dict[str, list[Ratios]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            whole = row.rest_ratio is None
            ratios = Ratios(row.ratio, row.ratio) if whole else Ratios(row.rest_ratio, row.communication_ratio)
            if row.tenant == tenant:
                ran.append(Ran(row.job_id, row.model, row.shape, ratios))
            else:
                others[row.tenant][row.job_id].append(ratios)
        for number, jobs in enumerate(others.values()):  # each as one job without a shape
            ran.append(Ran(f"tenant {number}", "", "", median_of([median_of(each) for each in jobs.values()])))
        return Fitted.to(ran, Basis(profile=profile).machine(spec).profile.spread, kind, precision, model_of(spec))


def _base(spec: JobSpec, profile: MeasuredProfile | None, node_gpus: int | None) -> str:
    """A key that distinguishes predictions by their figures, formulas and node size."""
    figures = "" if profile is None else profile.model_dump_json(exclude={"cases"})
    nodes = "" if node_gpus in (None, machine.machine_of(spec).cluster.levels[0].fan_out) else f" {node_gpus}"
    return sha256(f"{__version__} {figures}{nodes}".encode()).hexdigest()[:_DIGITS]
