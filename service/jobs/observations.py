"""The record of what jobs took beside their predictions, by which those of jobs to come are corrected.

Each job has one ratio in each of its shapes, that of its newest comparison; of a tenant those of the newest jobs on a
kind of device at a precision are kept. Another tenant counts for a kind of device like one job, with the median of its
own, so that none outweighs others by the number of its jobs; which shapes have run is for their own tenant to know. A
prediction by another profile, for nodes of another size, or by another version of the plan, is another base: what is
known of one says nothing of the next.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from operator import attrgetter
from statistics import median
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Select,
    bindparam,
    delete,
    func,
    insert,
    select,
    union_all,
)

from boost_core import __version__
from boost_core.config import JobSpec, Layout
from boost_core.messages.reports import ComparisonReport
from boost_core.plan.devices import at
from boost_core.plan.fitted import MOST, Fitted, Ran, model_of, shape_of
from boost_core.plan.machine import NODE_GPUS, kind_of_device
from boost_core.plan.measured import Basis, MeasuredProfile
from service.jobs.model import JobRecord
from service.jobs.tables import ObservationRow

_KEPT = 32  # jobs of a tenant on a kind of device at a precision
_READ = 1024  # rows of the tenant's and as many of others', the newest
_ROW = ObservationRow
_DIGITS = 16


def _newest(whose: ColumnElement[bool]) -> Select[Any]:
    alike = (
        (_ROW.kind == bindparam("kind")) & (_ROW.precision == bindparam("precision")) & (_ROW.base == bindparam("base"))
    )
    rows = select(_ROW.tenant, _ROW.job_id, _ROW.model, _ROW.shape, _ROW.ratio, _ROW.time).where(alike, whose)
    return select(rows.order_by(_ROW.time.desc()).limit(_READ).subquery())


_OWN = _ROW.tenant == bindparam("tenant")
_ALIKE = union_all(_newest(_OWN), _newest(~_OWN))  # made once: to make it takes longer than to ask


def observation(record: JobRecord, report: ComparisonReport, time: datetime) -> dict[str, Any] | None:
    """What a comparison says for jobs to come, by columns; ``None`` if that is nothing.

    Args:
        record: The job.
        report: Its steps beside their prediction.
        time: Of the report.
    """
    kind, seconds = kind_of_device(record.spec.resources), report.step_seconds
    if kind is None or seconds is None or not report.predicted_step_seconds > 0:
        return None
    ratio = seconds / report.predicted_step_seconds * report.correction
    if not 1 / MOST <= ratio <= MOST:
        return None
    job = at(record.spec, Layout.of(report))
    return {
        "job_id": record.id, "shape": shape_of(job), "tenant": record.tenant, "kind": kind,
        "precision": job.training.precision, "base": _base(record.basis.profile, record.node_gpus),
        "model": model_of(job), "ratio": ratio, "time": time,
    }  # fmt: skip


def keep(connection: Connection, observed: Sequence[Mapping[str, Any]]) -> None:
    """Keep observations in place of older ones, and of each tenant no more than count."""
    for each in observed:
        same = (_ROW.job_id == each["job_id"]) & (_ROW.shape == each["shape"])
        connection.execute(delete(_ROW).where(same))
        connection.execute(insert(_ROW).values(each))
        alike = (_ROW.tenant == each["tenant"]) & (_ROW.kind == each["kind"]) & (_ROW.precision == each["precision"])
        jobs = select(_ROW.job_id).where(alike).group_by(_ROW.job_id).order_by(func.max(_ROW.time).desc())
        older = connection.scalars(jobs.offset(_KEPT)).all()
        if older:
            connection.execute(delete(_ROW).where(alike, _ROW.job_id.in_(older)))


class Observations:
    """What jobs took, in the record's database.

    Args:
        engine: Of that database.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def for_job(
        self, spec: JobSpec, profile: MeasuredProfile | None, node_gpus: int | None, tenant: str
    ) -> Fitted | None:
        """What a job's predictions are corrected by.

        Args:
            spec: The job.
            profile: What its seconds are predicted by; ``None``: data sheets.
            node_gpus: GPUs of a node, as of ``Basis``.
            tenant: Whose it is.

        Returns:
            ``None`` if it names no kind of GPU, or no job has run that says anything of it.
        """
        kind, precision = kind_of_device(spec.resources), spec.training.precision
        if kind is None:
            return None
        asked = {"kind": kind, "precision": precision, "base": _base(profile, node_gpus), "tenant": tenant}
        with self._engine.connect() as connection:
            rows = sorted(connection.execute(_ALIKE, asked), key=attrgetter("time"), reverse=True)
        if not rows:
            return None
        own, others = [row for row in rows if row.tenant == tenant], [row for row in rows if row.tenant != tenant]
        spread = Basis(profile=profile).machine(spec).profile.spread
        counting = [*(Ran(*row[1:-1]) for row in own), *_as_jobs((row.tenant, row.job_id, row.ratio) for row in others)]
        return Fitted.to(counting, spread, kind, precision, model_of(spec))


def _as_jobs(rows: Iterable[tuple[str, str, float]]) -> Iterator[Ran]:
    """Other tenants, each as one job that has run in no shape of anybody's."""
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for tenant, job, ratio in rows:
        ratios[tenant][job].append(ratio)
    for number, jobs in enumerate(ratios.values()):
        yield Ran(f"tenant {number}", "", "", median(map(median, jobs.values())))


def _base(profile: MeasuredProfile | None, node_gpus: int | None) -> str:
    """What tells predictions from those that other figures, other formulas or nodes of another size give."""
    figures = "" if profile is None else profile.model_dump_json(exclude={"cases"})
    nodes = "" if node_gpus in (None, NODE_GPUS) else f" {node_gpus}"
    return sha256(f"{__version__} {figures}{nodes}".encode()).hexdigest()[:_DIGITS]
