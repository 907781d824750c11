"""Reports for people: the reporter of a trainer that runs without the service."""

from pathlib import Path

from boost_core.config import Layout
from boost_core.messages.reports import (
    CheckpointReport,
    EvaluationReport,
    FaultReport,
    InterruptionReport,
    LogLine,
    ProfileReport,
    RankTimesReport,
    Report,
    RestartReport,
    ShapeReport,
    StartReport,
    StepReport,
)


class ConsoleReporter:
    """Prints one line a report.

    Args:
        path: A file to append every report to as well, one JSON object a line.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def report(self, report: Report) -> None:
        """Print a report."""
        print(_line(report), flush=True)
        if self._path:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(report.model_dump_json() + "\n")


def _line(report: Report) -> str:
    match report:
        case StartReport():
            origin = f"resumes from {report.resumed_from}" if report.resumed_from else "starts from scratch"
            return f"{report.parameters:,} parameters on {report.world_size} rank(s); {origin} at step {report.step}"
        case StepReport():
            return (
                f"step {report.step}/{report.steps}  loss {report.loss:.4f}  "
                f"{report.tokens_per_second:,.0f} tokens/s  communication {report.exposed_communication_share:.0%}"
            )
        case EvaluationReport():
            return f"validation loss {report.loss:.4f} (unigram entropy {report.unigram_entropy:.4f})"
        case CheckpointReport():
            return f"saved {report.url} ({report.bytes / 2**20:.1f} MiB in {report.commit_seconds:.2f} s)"
        case InterruptionReport():
            return f"training stops after step {report.step}: {report.message}"
        case RestartReport():
            return (
                f"goes on from step {report.resumed_step}, from {report.recovered_from}, after {report.seconds:.1f} s"
            )
        case ShapeReport():
            return str(Layout.of(report))
        case FaultReport():
            return f"{report.what}: {report.message}"
        case RankTimesReport():
            return f"busy seconds by rank: {', '.join(f'{seconds:.3g}' for seconds in report.busy_seconds)}"
        case ProfileReport():
            return f"rank {report.rank}: trace of {report.steps} step(s) after step {report.step} in {report.url}"
        case LogLine():
            return f"rank {report.rank} {report.level}: {report.message}"
