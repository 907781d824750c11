"""What jobs took beside their predictions, in the record: what is kept of it, and which jobs go by it."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update

from boost_core.config import JobSpec, Layout
from boost_core.messages import ComparisonReport
from boost_core.plan.machine import Basis, Factors, Fitted
from boost_core.plan.report import plan, predicted_communication, step_parts
from service.client import Client
from service.jobs.model import JobRecord, Owner
from service.jobs.observations import Observations, add, observation
from service.jobs.profiles import ProfileStore
from service.jobs.store import JobStore
from service.jobs.tables import ObservationRow
from tests.service.records import PROFILE, a_spec, numbered, start

ROOT = "file:///checkpoints"
CPU = a_spec()
H100 = a_spec(
    resources={"gpus_per_worker": 1, "accelerator_type": "H100"},
    training={"steps": 10, "sequence_length": 64, "precision": "bf16"},
)
_LATER = iter(range(1_000_000))


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def observations(store: JobStore) -> Observations:
    return Observations(store.engine)


def compared(job: JobRecord, ratio: float | None, tensor: int = 2, collectives: float = 1.0) -> ComparisonReport:
    """A job's steps, so many times as long as predicted without a correction, and their collectives so many more."""
    layout = Layout(tensor, 1, 1)
    machine, spec = job.basis.machine(job.spec), job.spec.at(layout)
    predicted, none = step_parts(spec, layout, machine), step_parts(spec, layout, replace(machine, fitted=None))
    communication = predicted_communication(spec, layout, machine)
    factor = machine.correction(spec).factors.communication
    waited = None if ratio is None else ratio * collectives * none.communication
    return ComparisonReport(
        step=10, **layout.sizes, planned_bytes=[1], peak_bytes=[1], predicted_step_seconds=predicted.total,
        predicted_step_seconds_range=(predicted.total / 2, predicted.total * 2),
        correction=predicted.total / none.total,
        predicted_exposed_communication_seconds=factor * communication.seconds,
        communication_correction=factor, communication_share=communication.share,
        step_seconds=None if ratio is None or waited is None else ratio * (none.total - none.communication) + waited,
        exposed_communication_seconds=waited,
    )  # fmt: skip


def ran(
    store: JobStore, *ratios: float | None, spec: JobSpec = CPU, tenant: str = "lab", many: bool = False,
    collectives: float = 1.0, **more: Any,
) -> JobRecord:  # fmt: skip
    """A job that has run with these ratios, one after the other; the later ones at another time."""
    job = store.create(spec, ROOT, Owner(tenant), **more)
    start(store, job.id)
    time = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=next(_LATER))
    told = [
        (number, time, report)
        for number, _, report in numbered(*(compared(job, each, collectives=collectives) for each in ratios))
    ]
    if many:
        store.append_many([(store.get(job.id), told)])
    else:
        store.append_reports(job.id, 1, told)
    return store.get(job.id)


def rows(store: JobStore) -> int:
    with store.engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(ObservationRow)) or 0


def factors(found: Fitted | None) -> tuple[int, float, Sequence[int]]:
    assert found is not None
    return found.jobs, found.factor, [shape.jobs for shape in found.shapes]


@pytest.mark.full
def test_each_job_counts_by_its_newest_comparison(store: JobStore, observations: Observations) -> None:
    assert observations.for_job(CPU, None, None, "lab") is None
    ran(store, None, spec=CPU)
    assert observations.for_job(CPU, None, None, "lab") is None, "no step was timed"
    job = ran(store, 9.0, 3.0, many=True)
    assert factors(observations.for_job(CPU, None, None, "lab")) == (1, pytest.approx(3**0.25), [1])
    store.append_reports(job.id, 1, numbered(compared(job, 5.0), first=3))
    assert factors(observations.for_job(CPU, None, None, "lab")) == (1, pytest.approx(5**0.25), [1])
    other = a_spec(model={"preset": "tiny", "num_hidden_layers": 2})
    assert factors(observations.for_job(other, None, None, "lab")) == (1, pytest.approx(5**0.25), []), (
        "its kind has run, not it"
    )
    for broken in (0.05, 20.0, float("inf"), float("nan")):
        ran(store, broken)
    assert rows(store) == 1


def test_collectives_and_the_rest_are_kept_apart(store: JobStore, observations: Observations) -> None:
    """The correction chases neither: the second job's prediction is corrected already."""
    first = ran(store, 2.0, collectives=2.5)
    found = observations.for_job(CPU, None, None, "lab")
    assert found is not None
    assert found.factors == Factors(pytest.approx(2**0.25), pytest.approx(5**0.25))
    ran(store, 2.0, collectives=2.5, fitted=found)
    again = observations.for_job(CPU, None, None, "lab")
    assert again is not None
    assert again.factors == Factors(pytest.approx(2**0.4), pytest.approx(5**0.4))
    others = observations.for_job(CPU, None, None, "another")
    assert others is not None
    assert others.factors == found.factors, "a tenant counts like one job"
    with store.engine.begin() as connection:
        kept = connection.execute(select(ObservationRow.ratio).where(ObservationRow.job_id == first.id)).scalar_one()
        connection.execute(update(ObservationRow).values(rest_ratio=None, communication_ratio=None))
    before = observations.for_job(CPU, None, None, "lab")
    assert before is not None
    assert 2 < kept < 5
    assert before.factors == Factors(pytest.approx(kept**0.4), pytest.approx(kept**0.4)), "rows of a version before"
    report = compared(first, 2.0).model_copy(update={"exposed_communication_seconds": None})
    row = observation(first, report, datetime.now(UTC))
    assert row is not None
    assert row["rest_ratio"] == row["communication_ratio"] == row["ratio"], "of a trainer before"


@pytest.mark.full
def test_kinds_precisions_and_profiles_are_apart(store: JobStore, observations: Observations) -> None:
    stored = ProfileStore(store.engine).put("H100", PROFILE, "ops")
    ran(store, 2.0, spec=CPU)
    ran(store, 3.0, spec=H100)
    ran(store, 4.0, spec=H100, profile=stored)
    anywhere = a_spec(resources={"gpus_per_worker": 1})
    ran(store, 5.0, spec=anywhere)
    found = {
        "CPU": observations.for_job(CPU, None, None, "lab"),
        "data sheets": observations.for_job(H100, None, None, "lab"),
        "profile": observations.for_job(H100, PROFILE.model_copy(update={"cases": ()}), None, "lab"),
    }
    assert {name: factors(each)[1] ** 4 for name, each in found.items()} == {
        "CPU": pytest.approx(2), "data sheets": pytest.approx(3), "profile": pytest.approx(4),
    }  # fmt: skip
    assert observations.for_job(H100, PROFILE.model_copy(update={"spread": 0.3}), None, "lab") is None, (
        "another profile"
    )
    assert observations.for_job(H100, None, 4, "lab") is None, "smaller nodes"
    assert observations.for_job(H100, None, 8, "lab") == observations.for_job(H100, None, None, "lab")
    assert observations.for_job(anywhere, None, None, "lab") is None, "whichever kind it gets"
    assert observations.for_job(a_spec(training={"steps": 1, "precision": "bf16"}), None, None, "lab") is None


@pytest.mark.full
def test_no_tenant_outweighs_others_by_the_number_of_its_jobs(store: JobStore, observations: Observations) -> None:
    job = ran(store, 1.0, tenant="calm")
    for tenant, jobs, ratio in (("calm", 4, 1.0), ("quiet", 4, 1.0), ("wild", 34, 9.0)):
        for number in range(jobs):
            like = job.with_values({"id": f"{tenant}-{number}", "tenant": tenant})
            slower = compared(job, ratio)
            row = observation(like, slower, datetime.now(UTC))
            assert row is not None
            with store.engine.begin() as connection:
                add(connection, [row])
    for tenant, jobs, shapes in (("calm", 5 + 2, 1), ("another", 3, 0)):
        found = observations.for_job(CPU, None, None, tenant)
        assert found is not None
        assert (found.jobs, found.factor) == (jobs, pytest.approx(1.0)), "another tenant counts like one job"
        assert len(found.shapes) == shapes, "what others have run is not told"
    own = observations.for_job(CPU, None, None, "wild")
    assert own is not None
    assert (own.jobs, own.factor > 5) == (32 + 2, True), "its own jobs are what it is after"
    assert rows(store) == 5 + 4 + 32


@pytest.mark.full
@pytest.mark.parametrize("database", ["sqlite"])
def test_jobs_are_corrected_by_those_before_them_and_keep_that(client: Client, store: JobStore) -> None:
    """The correction does not chase itself: what is kept is beside the prediction without it."""
    left = CPU.model_dump(mode="json") | {"parallelism": {}}
    left |= {"elasticity": {"layouts": "auto", "gpus": {"max": 2}}}
    first = client.submit(CPU)
    assert first.fitted is None
    for _ in range(3):
        ran(store, 4.0, tenant=first.tenant)
    tried = client.dry_run(CPU)
    assert tried.fitted is not None
    assert (tried.fitted.jobs, tried.fitted.factor, tried.plan.provenance) == (3, pytest.approx(2.0), "fitted")
    assert tried.plan == plan(CPU, Basis(fitted=tried.fitted).machine(CPU))
    (shape,) = tried.plan.shapes
    assert shape.step_seconds == pytest.approx(plan(CPU).shapes[0].step_seconds * 2 * 2**0.5)
    found = client.plan(CPU)
    assert (found.fitted, found.shapes, found.provenance) == (tried.fitted, tried.plan.shapes, "fitted")
    searched = client.plan(CPU, {"gpus": 2})
    assert searched.search is not None
    assert searched.search.provenance == "fitted"
    described = {"levels": [{"name": "node", "fan_out": 8, "gigabytes_per_second": 1}]}
    for network in ({"cluster": described}, {"network_gigabits": 10}):
        networked = client.plan(CPU, {"gpus": 2} | network)
        assert networked.search is not None
        assert networked.search.provenance == "assumed", "jobs ran on another network"
    chosen = client.submit(left)
    (told,) = client.events(chosen.id, follow=False, kinds=["layouts"])
    assert (chosen.fitted is not None, told.data["provenance"]) == (True, "fitted")

    job = client.submit(CPU)
    assert job.fitted == tried.fitted
    start(store, job.id)
    store.append_reports(job.id, 1, numbered(compared(job, 4.0)))
    after = client.dry_run(CPU).fitted
    assert after is not None
    assert (after.jobs, after.factor) == (4, pytest.approx(4 ** (4 / 7)))
    assert client.get(job.id).fitted == tried.fitted, "a job keeps what it was submitted with"
    assert client.get(first.id).fitted is None
