"""Jobs for tests of the service, driven by hand through the store."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec, ParallelismConfig
from boost_core.messages import (
    Cause,
    CheckpointReport,
    ComparisonReport,
    EvaluationReport,
    FaultReport,
    InterruptionReport,
    LogLine,
    NamedLoss,
    Report,
    RestartReport,
    Sample,
    SampleReport,
    Score,
    Scores,
    ShapeReport,
    SpareReport,
    StartReport,
    StepReport,
)
from boost_core.plan.machine import MeasuredProfile
from service.jobs.model import JobRecord
from service.jobs.states import Reason
from service.jobs.store import JobStore

GOOD = {
    "name": "tiny",
    "model": {"preset": "tiny"},
    "parallelism": {"tensor_parallel_size": 2},
    "data": {"source": {"kind": "text", "paths": ["boost_core/**/*.py"]}},
    "training": {"steps": 10, "sequence_length": 64},
}


SCORES = Scores(
    step=10,
    evaluated_by="lm-eval 0.4.13",
    scores=(
        Score(
            task="colors", metric="acc", value=0.75, stderr=0.125, higher_is_better=True, samples=12, version="1.0",
            task_hash="0123456789abcdef",
        ),
        Score(task="colors", metric="perplexity", value=None, samples=12, task_hash="0123456789abcdef"),
    ),
)  # fmt: skip

# Of a GPU on which products are slow beside all else.
PROFILE = MeasuredProfile(
    device="NVIDIA H100 80GB HBM3", commit="0123456789abcdef", torch_version="2", triton_version="3",
    measured_at=datetime(2026, 1, 1, tzinfo=UTC), precision="bf16", cores=1, cases=("made up",), product_flops=1e13,
    attention_flops=4e14, bandwidth=2e12, start_seconds=1e-6, block_seconds=1e-4, correction=1.25, spread=0.1,
)  # fmt: skip


def a_spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate(GOOD | changes)


def a_step(step: int, **changes: Any) -> StepReport:
    numbers = {
        "step": step, "steps": 10, "loss": 5.0 - step / 10, "learning_rate": 1e-3, "gradient_norm": 1.0,
        "tokens": 1024 * step, "tokens_per_second": 2048.0, "step_seconds": 0.5, "communication_seconds": 0.25,
        "exposed_communication_seconds": 0.125,
        "communication_bytes": 4096, "model_flops_per_second": 1e9, "eta_seconds": 5.0 - step / 2,
    }  # fmt: skip
    return StepReport(**numbers | changes)


def an_evaluation(step: int = 10, loss: float = 2.5, sets: tuple[str, ...] = ()) -> EvaluationReport:
    named = tuple(NamedLoss(name=name, loss=loss + 0.5, tokens=320, bits_per_byte=1.25) for name in sets)
    return EvaluationReport(step=step, loss=loss, tokens=640, unigram_entropy=3.0, sets=named, seconds=0.1)


def a_sample(step: int, *texts: str) -> SampleReport:
    return SampleReport(step=step, samples=tuple(Sample(prompt="Once", text=each) for each in texts), seconds=0.1)


def a_checkpoint(step: int = 10) -> CheckpointReport:
    return CheckpointReport(step=step, url=f"file:///checkpoints/step-{step}", bytes=2**20, seconds=0.25)


def a_start(step: int = 0) -> StartReport:
    return StartReport(step=step, world_size=2, parameters=123_456, resumed_from=None)


def a_shape(data: int = 1) -> ShapeReport:
    nodes = ["node-a", "node-b"] * data
    return ShapeReport(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=data, nodes=nodes)


def an_interruption(step: int = 3, cause: Cause = Cause.WORKER_LOST) -> InterruptionReport:
    return InterruptionReport(cause=cause, message="rank 1 was killed by signal 9", step=step)


def a_restart(step: int = 3, cause: Cause = Cause.WORKER_LOST, **changes: Any) -> RestartReport:
    numbers = {
        "message": "rank 1 was killed by signal 9", "resumed_step": step - 1, "recovered_from": "memory",
        "seconds": 4.0, "waiting_seconds": 1.0, "parts": {"detect": 0.5, "place": 3.0, "first_step": 0.5},
    }  # fmt: skip
    return RestartReport(cause=cause, step=step, **numbers | changes)


def a_fault(step: int = 3) -> FaultReport:
    return FaultReport(what="slow_rank", step=step, rank=1, share=0.75, message="rank 1 computes 75% of the step")


def a_log_line(message: str) -> LogLine:
    return LogLine(rank=1, level="INFO", message=message)


def a_spare(step: int | None = 3) -> SpareReport:
    return SpareReport(step=step, node=None if step is None else "node-z")


def a_comparison(step: int = 7, step_seconds: float | None = 0.5) -> ComparisonReport:
    return ComparisonReport(
        step=step, tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1,
        planned_bytes=[4_000_000_000, 4_000_000_000], peak_bytes=[3_500_000_000, 3_750_000_000],
        predicted_step_seconds=0.4, predicted_step_seconds_range=(0.3, 0.5), step_seconds=step_seconds,
    )  # fmt: skip


def numbered(*reports: Report, first: int = 1) -> list[tuple[int, datetime, Report]]:
    return [(number, datetime.now(UTC), report) for number, report in enumerate(reports, first)]


def start(store: JobStore, job_id: str) -> JobRecord:
    """Bring a queued job to RUNNING in its first attempt."""
    store.change(job_id, Reason.HEAD_OF_QUEUE, "is next")
    store.change(job_id, Reason.GANG_STARTING, "2 workers start", attempt=1)
    return store.change(job_id, Reason.GANG_STARTED, "2 workers train")


def write_checkpoints(job: JobRecord, *steps: int) -> None:
    """Leave checkpoints of one file each, as a job's trainer does."""
    folder = CheckpointFolder(job.checkpoint_url)
    for step in steps:
        folder.prepare(step)
        (Path(job.checkpoint_url.removeprefix("file://")) / f"step-{step:08}" / "part").write_bytes(b"12345")
        folder.commit_written(job.spec, ParallelismConfig(), step, step * 8, {"part": 0xCBF53A1C})


def finish(store: JobStore, job_id: str) -> JobRecord:
    return store.change(job_id, Reason.TRAINING_FINISHED, "all steps done")


def run_to_the_end(store: JobStore, job_id: str) -> JobRecord:
    start(store, job_id)
    steps = [a_step(step) for step in range(1, 11)]
    store.append_reports(job_id, 1, numbered(a_start(), *steps, an_evaluation(), a_checkpoint()))
    return finish(store, job_id)
