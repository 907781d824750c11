"""What jobs took beside their predictions, and what that makes of predictions of others."""

import math
import random
from dataclasses import replace

import pytest

from boost_core.config import JobSpec, Layout
from boost_core.config.attention import SparseAttentionConfig
from boost_core.plan.devices import at
from boost_core.plan.fitted import Correction, Fitted, Ran, ShapeCorrection, model_of, shape_of
from boost_core.plan.machine import kind_of_device, machine_for
from boost_core.plan.measured import NOMINAL, Basis
from boost_core.plan.profile import range_of
from boost_core.plan.report import plan
from boost_core.plan.search import search
from boost_core.plan.search_report import PlanSearch, search_report
from boost_core.plan.throughput import replayed_parts
from service.scheduler.demand import demand_of
from tests.jobs import tiny_job

JOB = tiny_job(
    "corpus", "checkpoints", elasticity={"data_parallel_size": {"min": 1, "max": 1}, "layouts": [[1, 1], [2, 1]]}
)


def fitted(*ran: Ran, spread: float = 0.2) -> Fitted | None:
    return Fitted.to(ran, spread, "CPU", "fp32", "m")


def known(*ran: Ran) -> Fitted:
    found = fitted(*ran)
    assert found is not None
    return found


def test_a_correction_counts_as_much_as_the_jobs_that_it_is_of() -> None:
    for jobs in (1, 3, 9):
        found = known(*(Ran(str(number), "m", "s", 2.0) for number in range(jobs)))
        weight = jobs / (jobs + 3)
        assert found.jobs == jobs
        assert found.factor == pytest.approx(2**weight)
        left = math.log(2) * (1 - weight)
        assert found.spread**2 == pytest.approx((3 * 0.2**2 + jobs * left**2) / (jobs + 3))
        (shape,) = found.shapes
        assert shape.factor == pytest.approx(found.factor ** (1 - weight) * 2**weight), "what holds for the kind, first"


def test_a_job_counts_once_whatever_it_has_run_as() -> None:
    shapes = [Ran("wild", "m", str(number), 9.0) for number in range(20)]
    calm = [Ran(str(number), "m", "s", 1.0) for number in range(3)]
    found = known(*shapes, *calm)
    assert (found.jobs, found.factor) == (4, pytest.approx(1.0)), "the median of four jobs"


@pytest.mark.parametrize("ratio", [0.0, 0.09, 11.0, math.inf, math.nan])
def test_what_no_device_explains_counts_for_nothing(ratio: float) -> None:
    assert fitted(Ran("broken", "m", "s", ratio)) is None
    assert known(Ran("broken", "m", "s", ratio), Ran("sound", "m", "s", 1.5)).jobs == 1


def test_only_shapes_of_the_same_model_are_kept_and_no_more_than_a_record_may_hold() -> None:
    found = known(Ran("other", "n", "t", 1.5), *(Ran(str(number), "m", str(number), 1.5) for number in range(50)))
    assert found.jobs == 51
    assert [shape.shape for shape in found.shapes] == [str(number) for number in range(32)], "the newest"
    assert len(found.model_dump_json()) < 5000


def test_a_shape_that_has_run_is_corrected_by_itself_and_others_by_their_kind() -> None:
    ran = shape_of(at(JOB, Layout(2, 1, 1)))
    correction = Fitted(
        jobs=4, factor=1.5, spread=0.3, kind="CPU", precision="fp32",
        shapes=(ShapeCorrection(jobs=2, factor=0.5, spread=0.1, shape=ran),),
    )  # fmt: skip
    basis = Basis(fitted=correction)
    assumed, found = plan(JOB), plan(JOB, basis.machine(JOB))
    assert (assumed.provenance, found.provenance) == ("assumed", "fitted")
    ratios = [
        after.step_seconds / before.step_seconds for before, after in zip(assumed.shapes, found.shapes, strict=True)
    ]
    assert ratios == pytest.approx([1.5, 0.5])
    assert [shape.observed_jobs for shape in found.shapes] == [0, 2]
    for shape, spread in zip(found.shapes, (0.3, 0.1), strict=True):
        assert shape.step_seconds_range == pytest.approx(range_of(shape.step_seconds, spread))
        assert sum(shape.step_parts.model_dump().values()) == pytest.approx(shape.step_seconds)
    assert any("corrected by 4 jobs that ran in fp32 on CPU" in note and "1.50 times" in note for note in found.notes)
    demand = demand_of(JOB, basis)
    assert [demand.seconds(layout) for layout in JOB.layouts()] == [shape.step_seconds for shape in found.shapes]


def test_a_shape_is_all_that_its_seconds_depend_on() -> None:
    def changed(**changes: object) -> JobSpec:
        return tiny_job(
            "corpus",
            "checkpoints",
            elasticity={"data_parallel_size": {"min": 1, "max": 1}, "layouts": [[1, 1], [2, 1]]},
            **changes,
        )

    own = shape_of(at(JOB, Layout(1, 1, 1)))
    assert shape_of(at(changed(name="other", training={"seed": 5, "steps": 7}), Layout(1, 1, 1))) == own
    attention = SparseAttentionConfig(kind="vertical_slash", budget=0.1)
    sparse = JOB.model_copy(update={"training": JOB.training.model_copy(update={"attention": attention})})
    others = {
        shape_of(at(changed(model={"num_hidden_layers": 3}), Layout(1, 1, 1))),
        shape_of(at(changed(training={"micro_batch_size": 1}), Layout(1, 1, 1))),
        shape_of(at(changed(parallelism={"recompute": "full"}), Layout(1, 1, 1))),
        shape_of(at(sparse, Layout(1, 1, 1))),
        shape_of(at(changed(resources={"cpus_per_worker": 3}), Layout(1, 1, 1))),
        shape_of(at(JOB, Layout(1, 1, 2))),
        shape_of(at(JOB, Layout(2, 1, 1))),
    }
    assert len(others - {own}) == 7
    assert kind_of_device(JOB.resources) == "CPU"


def test_predictions_get_nearer_with_the_jobs_that_run_and_ranges_hold_eight_of_ten() -> None:
    """Devices that take 1.6 times as long as their data sheets promise, each job give or take a tenth."""
    luck = random.Random(7)
    ratios = [1.6 * math.exp(luck.gauss(0, 0.1)) for _ in range(400)]
    before, inside = [], 0
    for number, ratio in enumerate(ratios):
        newest = [
            Ran(str(number - back), "m", str(back), each) for back, each in enumerate(ratios[:number][-32:][::-1])
        ]
        holds = fitted(*newest) or Correction(jobs=0, factor=1.0, spread=0.2)
        before.append(abs(math.log(ratio / holds.factor)))
        low, high = range_of(holds.factor, holds.spread)
        inside += low <= ratio <= high
    assert before[0] > 0.3
    assert sum(before[20:]) / len(before[20:]) < 0.12
    assert inside / len(ratios) > 0.8


def test_a_search_finds_the_fastest_where_some_shapes_have_run() -> None:
    spec = tiny_job("corpus", "checkpoints")
    machine = machine_for(spec.resources, "fp32")
    every = search(spec, 4, machine, top=10_000).choices
    later = [each for each in every if each.seconds.total < 5 * every[0].seconds.total][-1]
    slow, last = [each.job for each in every[:3]], later.job
    shapes = tuple(ShapeCorrection(jobs=9, factor=2.0, spread=0.1, shape=shape_of(job)) for job in slow)
    fast = ShapeCorrection(
        jobs=9, factor=0.5 * every[0].seconds.total / later.seconds.total, spread=0.1, shape=shape_of(last)
    )
    correction = Fitted(jobs=9, factor=1.0, spread=0.1, kind="CPU", precision="fp32", shapes=(*shapes, fast))
    corrected = replace(machine, fitted=correction)
    choices = search(spec, 4, corrected, top=5).choices
    assert choices[0].job.parallelism == last.parallelism
    assert choices == search(spec, 4, corrected, top=10_000).choices[:5], "none is given up too early"
    for each in choices:
        assert each.seconds == replayed_parts(each.job, each.layout, corrected)
    report = search_report(spec, PlanSearch(gpus=4), correction)
    assert (report.provenance, report.choices[0].step_seconds) == ("fitted", choices[0].seconds.total)
    assert model_of(spec) == model_of(last)
    assert NOMINAL.machine(spec) == machine
