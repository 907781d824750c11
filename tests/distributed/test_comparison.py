"""What real ranks take, beside their plan."""

from pathlib import Path

import pytest

from boost_core.config import JobSpec, Layout
from boost_core.messages.reports import ComparisonReport
from boost_core.plan.memory import pipeline_rank_memory, rank_memory
from boost_core.plan.throughput import step_seconds
from boost_core.train import train
from tests.distributed.recording import Recorder
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks


def compared(spec: JobSpec) -> list[ComparisonReport]:
    recorder = Recorder()
    train(spec, recorder)
    return [report for report in recorder.reports if isinstance(report, ComparisonReport)]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["tp 2", "pp 2"])
def test_ranks_report_what_they_take_beside_the_plan(ranks: Ranks, tmp_path: Path, sizes: tuple[int, int]) -> None:
    parallelism = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    changes = {"model": {"num_hidden_layers": 4}, "training": {"steps": 11}, "parallelism": parallelism}
    spec = tiny_job(write_corpus(tmp_path), tmp_path / "out", **changes)
    layout = Layout.of(spec.parallelism)
    first, others = ranks.run(2, compared, spec)
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
    assert timed.predicted_step_seconds == step_seconds(spec, layout)
    least, most_seconds = timed.predicted_step_seconds_range
    assert least < timed.predicted_step_seconds < most_seconds
