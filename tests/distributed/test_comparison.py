"""What real ranks take, beside their plan."""

from pathlib import Path

import pytest

from boost_core.config import JobSpec, Layout
from boost_core.messages import ComparisonReport
from boost_core.plan.machine import Basis, Fitted, MeasuredProfile, machine_of
from boost_core.plan.memory import pipeline_rank_memory, rank_memory
from boost_core.plan.report import predicted_communication, step_seconds
from boost_core.train import train
from tests.distributed.recording import Recorder
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

MEASURED = MeasuredProfile(
    device="a test's", commit="0123456789abcdef", torch_version="2", triton_version="", precision="fp32", cores=1,
    cases=("made up",), product_flops=1e11, attention_flops=5e10, bandwidth=1e10, start_seconds=1e-5,
    block_seconds=1e-4, correction=1.25, spread=0.1,
)  # fmt: skip


def compared(spec: JobSpec, basis: Basis) -> list[ComparisonReport]:
    recorder = Recorder()
    train(spec, recorder, basis=basis)
    return [report for report in recorder.reports if isinstance(report, ComparisonReport)]


FITTED = Fitted(jobs=2, factor=1.5, spread=0.3, kind="CPU", precision="fp32")


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "basis"),
    [((2, 1), Basis()), ((1, 2), Basis(profile=MEASURED, fitted=FITTED))],
    ids=["tp 2", "pp 2, measured and corrected"],
)
def test_ranks_report_what_they_take_beside_the_plan(
    ranks: Ranks, tmp_path: Path, sizes: tuple[int, int], basis: Basis
) -> None:
    parallelism = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    changes = {"model": {"num_hidden_layers": 4}, "training": {"steps": 11}, "parallelism": parallelism}
    spec = tiny_job(write_corpus(tmp_path), tmp_path / "out", **changes)
    layout = Layout.of(spec.parallelism)
    first, others = ranks.run(2, compared, spec, basis)
    assert others == []
    early, timed = first
    assert (early.step, timed.step) == (2, 10)
    planned = [pipeline_rank_memory(spec, layout, rank if sizes[1] == 2 else 0).total for rank in range(2)]
    assert early.planned_bytes == planned
    assert max(planned) == rank_memory(spec, layout).total
    for taken, most in zip(early.peak_bytes, planned, strict=True):
        assert 0.5 * most < taken <= most
    assert early.step_seconds is None
    assert timed.step_seconds is not None
    assert timed.step_seconds > 0
    uncorrected = step_seconds(spec, layout, machine_of(spec, basis.profile))
    assert timed.predicted_step_seconds == pytest.approx(timed.correction * uncorrected)
    expected = (pytest.approx(1.5), "measured_fitted") if basis.fitted else (1.0, "assumed")
    assert (timed.correction, timed.provenance) == expected
    predicted = predicted_communication(spec, layout, machine_of(spec, basis.profile))
    assert timed.communication_share == predicted.share
    assert timed.communication_correction == (FITTED.factor if basis.fitted else 1.0)
    uncorrected_part = timed.predicted_exposed_communication_seconds / timed.communication_correction
    assert uncorrected_part == pytest.approx(predicted.seconds)
    assert (predicted.seconds > 0) == (layout.tp > 1)
    assert early.exposed_communication_seconds is None
    assert timed.exposed_communication_seconds is not None
    assert 0 < timed.exposed_communication_seconds < timed.step_seconds
    least, most_seconds = timed.predicted_step_seconds_range
    assert least < timed.predicted_step_seconds < most_seconds
