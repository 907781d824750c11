"""What jobs took beside their predictions, and what that makes of predictions of others."""

import math
import random
from dataclasses import replace

import pytest

from boost_core.config import JobSpec, Layout
from boost_core.config.model import SparseAttentionConfig
from boost_core.config.parallelism import StageModes
from boost_core.plan.machine import (
    LEAST_SHARE,
    NOMINAL,
    Basis,
    Correction,
    Factors,
    Fitted,
    Machine,
    PredictedCommunication,
    Ran,
    Ratios,
    ShapeCorrection,
    kind_of_device,
    machine_for,
    model_of,
    range_of,
    shape_of,
)
from boost_core.plan.recompute_mix import BlockCosts, legal_modes
from boost_core.plan.report import at, plan, predicted_communication, step_parts
from boost_core.plan.resolve import choose_layouts
from boost_core.plan.search import PlanSearch, search, search_report
from boost_core.plan.throughput import ORDER, Step
from service.scheduler.demand import demand_of
from tests.jobs import tiny_job
from tests.planning_truth import replayed_parts

JOB = tiny_job(
    "corpus", "checkpoints", elasticity={"data_parallel_size": {"min": 1, "max": 1}, "layouts": [[1, 1], [2, 1]]}
)


def ran(job: str, model: str, shape: str, rest: float, communication: float | None = None) -> Ran:
    return Ran(job, model, shape, Ratios(rest, communication))


def fitted(*ran: Ran, spread: float = 0.2) -> Fitted | None:
    return Fitted.to(ran, spread, "CPU", "fp32", "m")


def known(*ran: Ran) -> Fitted:
    found = fitted(*ran)
    assert found is not None
    return found


def test_a_correction_counts_as_much_as_the_jobs_that_it_is_of() -> None:
    for jobs in (1, 3, 9):
        found = known(*(ran(str(number), "m", "s", 2.0) for number in range(jobs)))
        weight = jobs / (jobs + 3)
        assert found.jobs == jobs
        assert found.factor == pytest.approx(2**weight)
        left = math.log(2) * (1 - weight)
        assert found.spread**2 == pytest.approx((3 * 0.2**2 + jobs * left**2) / (jobs + 3))
        (shape,) = found.shapes
        assert shape.factor == pytest.approx(found.factor ** (1 - weight) * 2**weight), "what holds for the kind, first"


def test_a_job_counts_once_whatever_it_has_run_as() -> None:
    shapes = [ran("wild", "m", str(number), 9.0) for number in range(20)]
    calm = [ran(str(number), "m", "s", 1.0) for number in range(3)]
    found = known(*shapes, *calm)
    assert (found.jobs, found.factor) == (4, pytest.approx(1.0)), "the median of four jobs"


@pytest.mark.parametrize("ratio", [0.0, 0.09, 11.0, math.inf, math.nan])
def test_what_no_device_explains_counts_for_nothing(ratio: float) -> None:
    predicted = PredictedCommunication(seconds=0.3, share=0.3)
    for each, seconds in ((predicted, 0.3 * ratio), (PredictedCommunication(0.0, 0.0), 0.0)):
        assert Ratios.of(ratio, seconds, each) is None


@pytest.mark.parametrize("ratio", [0.0, 0.09, 11.0])
def test_what_no_link_explains_says_nothing_about_links(ratio: float) -> None:
    found = Ratios.of(0.7 * 1.2 + 0.3 * ratio, 0.3 * ratio, PredictedCommunication(0.3, 0.3))
    assert found == Ratios(pytest.approx(1.2), None)


def test_communication_and_the_rest_are_told_apart() -> None:
    predicted = PredictedCommunication(seconds=0.1, share=0.3)  # of which 0.2 wait for other pipeline ranks
    found = Ratios.of(0.7 * 1.2 + 0.3 * 4.0, 0.4, predicted)
    assert found is not None
    assert (found.rest, found.communication) == (pytest.approx(1.2), pytest.approx(4.0))
    assert Ratios.of(1.2, 0.05, PredictedCommunication(0.0, 0.0)) == Ratios(1.2, None), "none was predicted"
    little = PredictedCommunication(seconds=0.5 * LEAST_SHARE, share=0.5 * LEAST_SHARE)
    hardly = Ratios.of(1.0, 5 * little.seconds, little)
    assert hardly is not None
    assert (hardly.rest, hardly.communication) == (pytest.approx((1 - 5 * little.share) / (1 - little.share)), None)


def test_each_factor_is_of_the_jobs_that_say_something_about_it() -> None:
    alone = known(ran("1", "m", "s", 2.0), ran("2", "m", "s", 2.0))
    assert alone.factors == Factors(pytest.approx(2**0.4), 1.0)
    assert alone.communication == Correction(jobs=0, factor=1.0, spread=0.2)
    both = known(ran("1", "m", "s", 2.0), ran("2", "m", "t", 2.0, 5.0), ran("3", "m", "t", 2.0, 5.0))
    assert both.communication is not None
    assert (both.jobs, both.communication.jobs) == (3, 2)
    assert both.factors == Factors(pytest.approx(2**0.5), pytest.approx(5**0.4))
    without, having = both.shapes
    assert (without.communication, without.jobs) == (both.communication.model_copy(update={"jobs": 0}), 1)
    assert having.communication is not None
    assert having.communication.factor == pytest.approx(both.communication.factor**0.6 * 5**0.4)
    left = math.log(5) * 0.6
    assert both.communication.spread**2 == pytest.approx((3 * 0.2**2 + 2 * left**2) / 5)


def test_only_shapes_of_the_same_model_are_kept_and_no_more_than_a_record_may_hold() -> None:
    found = known(ran("other", "n", "t", 1.5), *(ran(str(number), "m", str(number), 1.5) for number in range(50)))
    assert found.jobs == 51
    assert [shape.shape for shape in found.shapes] == [str(number) for number in range(32)], "the newest"
    assert len(found.model_dump_json()) < 10_000


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


def corrected(on: Machine, rest: float, communication: float) -> Machine:
    of_collectives = Correction(jobs=3, factor=communication, spread=0.5)
    fitted = Fitted(jobs=3, factor=rest, spread=0.1, communication=of_collectives, kind="CPU", precision="fp32")
    return replace(on, fitted=fitted)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(2, 2, 1), Layout(1, 2, 2)], ids=str)
def test_each_factor_is_of_its_own_parts_and_waiting_follows(layout: Layout, schedule: str) -> None:
    """The last stage, which has the head, is the slowest by any factors here: then all is linear in them."""
    parallelism = {**layout.sizes, "pipeline_schedule": schedule if layout.pp > 1 else "1f1b"}
    changes = {"model": {"num_hidden_layers": 4}, "training": {"micro_batch_size": 1}}
    job = tiny_job("corpus", "checkpoints", parallelism=parallelism, **changes)
    on = machine_for(job.resources, "fp32")
    plain, other = step_parts(job, layout, on), step_parts(job, layout, corrected(on, 1.5, 3.0))
    for name in ("arithmetic", "sends", "update"):
        assert getattr(other, name) == pytest.approx(1.5 * getattr(plain, name)), name
    for name in ("exchange", "reduction"):
        assert getattr(other, name) == pytest.approx(3 * getattr(plain, name)), name
    predicted = predicted_communication(job, layout, corrected(on, 1.5, 3.0))
    assert predicted == predicted_communication(job, layout, on), "which the correction does not chase"
    along = predicted.share * plain.total
    assert other.total == pytest.approx(1.5 * (plain.total - along) + 3 * along)
    assert along >= plain.communication * (1 - 1e-9)
    if layout.pp == 1:
        assert predicted.seconds == pytest.approx(plain.communication)
    ratios = Ratios.of(other.total / plain.total, 3 * predicted.seconds, predicted)
    assert ratios is not None
    assert (ratios.rest, ratios.communication) == (pytest.approx(1.5), pytest.approx(3.0)), "as it was corrected by"
    played, slower = replayed_parts(job, layout, on), replayed_parts(job, layout, corrected(on, 1.5, 3.0))
    assert slower.arithmetic == pytest.approx(1.5 * played.arithmetic)
    assert slower.communication == pytest.approx(3 * played.communication)
    assert 1.5 * played.total < slower.total < 3 * played.total


def test_a_range_is_the_sum_of_the_parts_ranges_and_a_note_says_both_factors() -> None:
    layout = Layout(2, 1, 1)
    job = tiny_job("corpus", "checkpoints", parallelism=layout.sizes)
    on = corrected(machine_for(job.resources, "fp32"), 1.5, 3.0)
    found = plan(job, on)
    (shape,) = found.shapes
    assert any("1.50 times" in note and "3.00 times" in note for note in found.notes)
    seconds = shape.step_parts
    parts = range_of(seconds.total - seconds.communication, 0.1), range_of(seconds.communication, 0.5)
    assert shape.step_seconds_range == pytest.approx([sum(ends) for ends in zip(*parts, strict=True)])


def test_records_of_one_factor_correct_whole_steps() -> None:
    stored = '{"jobs": 2, "factor": 1.5, "spread": 0.3, "kind": "CPU", "precision": "fp32", "shapes": []}'
    found = Fitted.model_validate_json(stored)
    assert found.factors == Factors(1.5, 1.5)
    layout = Layout(2, 1, 2)
    job = tiny_job("corpus", "checkpoints", parallelism=layout.sizes)
    on = machine_for(job.resources, "fp32")
    seconds = step_parts(job, layout, replace(on, fitted=found))
    assert seconds.total == pytest.approx(1.5 * step_parts(job, layout, on).total)
    low, high = replace(on, fitted=found).range_of(job, seconds.total, seconds.communication)
    assert (low, high) == pytest.approx(range_of(seconds.total, 0.3))


LONG = tiny_job(
    "corpus", "checkpoints", parallelism={"tensor_parallel_size": 1},
    training={"global_batch_size": 1, "micro_batch_size": 1, "sequence_length": 2048},
    elasticity={"layouts": "auto", "gpus": {"max": 2}},
)  # fmt: skip


def test_slow_collectives_make_tensor_parallel_groups_smaller() -> None:
    """All of both machines' jobs took as long as predicted, but for collectives on one of them."""
    machine = machine_for(LONG.resources, "fp32")
    for factor, sizes in ((1.0, [1, 2]), (9.0, [1])):
        correction = known(*(ran(str(job), "m", "s", 1.0, factor) for job in range(32)))
        (best, *_) = search(LONG, 2, replace(machine, fitted=correction)).choices
        assert best.layout.tp == sizes[-1]
        chosen = choose_layouts(LONG, Basis(fitted=correction))
        assert [layout.tp for layout in chosen.sizes] == sizes


def test_a_search_finds_the_shape_whose_collectives_are_faster_than_others() -> None:
    machine = machine_for(LONG.resources, "fp32")
    (best, *_) = search(LONG, 2, machine).choices
    assert best.layout.tp == 2
    fast, slow = (Correction(jobs=9, factor=factor, spread=0.1) for factor in (0.2, 9.0))
    shape = ShapeCorrection(jobs=9, factor=1.0, spread=0.1, communication=fast, shape=shape_of(best.job))
    correction = Fitted(
        jobs=9, factor=1.0, spread=0.1, communication=slow, kind="CPU", precision="fp32", shapes=(shape,)
    )
    assert correction.least == Factors(1.0, 0.2)
    found = search(LONG, 2, replace(machine, fitted=correction), top=1)
    assert [choice.job for choice in found.choices] == [best.job]
    assert found.choices[0].seconds.exchange == pytest.approx(0.2 * best.seconds.exchange)


def test_modes_are_chosen_by_what_they_cost_with_the_correction() -> None:
    layout = Layout(2, 1, 1)
    job = at(tiny_job("corpus", "checkpoints", parallelism=layout.sizes), layout)
    on = corrected(machine_for(job.resources, "fp32"), 1.5, 9.0)
    modes = legal_modes(job, on)
    jobs = {mode: job.with_parallelism(recompute=mode) for mode in modes}
    costs = BlockCosts(Step(jobs["none"], layout, on, ORDER, modes), modes)
    layers, micro_batches = job.model.num_hidden_layers, job.training.micro_batches(1)
    without = costs.of([StageModes(none=layers)], True)
    for mode in modes:
        slower = step_parts(jobs[mode], layout, on).total - step_parts(jobs["none"], layout, on).total
        assert micro_batches * (costs.of([StageModes(**{mode: layers})], True) - without) == pytest.approx(
            slower, abs=1e-12
        )


def test_waiting_for_the_hosts_memory_is_no_communication() -> None:
    parallelism = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "recompute": "offload"}
    training = {"precision": "bf16", "global_batch_size": 4, "micro_batch_size": 1, "sequence_length": 64}
    resources = {"gpus_per_worker": 1, "accelerator_type": "H100"}
    job = tiny_job("corpus", "checkpoints", parallelism=parallelism, training=training, resources=resources)
    layout = Layout(1, 2, 1)
    on = corrected(machine_for(job.resources, "bf16"), 1.0, 9.0)
    assert step_parts(job, layout, on) == step_parts(job, layout, replace(on, fitted=None))


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
            ran(str(number - back), "another", "s", each) for back, each in enumerate(ratios[:number][-32:][::-1])
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
