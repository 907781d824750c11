"""A job's events as lines for people."""

from boost_core.config.reports import (
    CheckpointReport,
    EvaluationReport,
    LogLine,
    Report,
    StartReport,
    StepReport,
    report_adapter,
)
from service.jobs.model import JobEvent


def report_of(event: JobEvent) -> Report | None:
    """The trainer's report in an event; ``None`` for a change of state."""
    return None if event.kind == "state" else report_adapter.validate_python(event.data)


def line_of(event: JobEvent) -> str:
    """One line that says what happened, with the local time."""
    report = report_of(event)
    text = f"{event.data['state']}: {event.data['message']}" if report is None else _line(report)
    return f"{event.time.astimezone():%H:%M:%S}  {text}"


def numbers_of(step: StepReport) -> str:
    """A step's numbers: loss, throughput and the share of its time spent waiting for collectives."""
    share = f"{step.exposed_communication_share:.0%}"
    return f"loss {step.loss:.4f}  {step.tokens_per_second:,.0f} tokens/s  communication {share}"


def duration(seconds: float) -> str:
    """A duration as hours, minutes and seconds: ``1:02:03``, ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _line(report: Report) -> str:
    match report:
        case StepReport():
            return f"step {report.step}/{report.steps}  {numbers_of(report)}  ETA {duration(report.eta_seconds)}"
        case EvaluationReport():
            return (
                f"step {report.step}  held-out loss {report.loss:.4f} "
                f"(unigram entropy of that text {report.unigram_entropy:.4f})"
            )
        case CheckpointReport():
            size = report.bytes / 2**20
            return f"step {report.step}  checkpoint {report.url} ({size:.1f} MiB, {report.seconds:.2f} s)"
        case StartReport():
            origin = f"from {report.resumed_from}" if report.resumed_from else "from scratch"
            return (
                f"training starts {origin} at step {report.step}: "
                f"{report.parameters:,} parameters on {report.world_size} worker(s)"
            )
        case LogLine():
            return f"rank {report.rank} {report.level}: {report.message}"
