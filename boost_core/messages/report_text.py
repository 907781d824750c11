"""Reports as text, one line each: what the trainer prints when it runs alone, and what ``boost`` prints for a job."""

import json

from boost_core.config import Layout
from boost_core.messages.reports import (
    CheckpointReport,
    ComparisonReport,
    EvaluationReport,
    FaultReport,
    InterruptionReport,
    LogLine,
    ProfileReport,
    RankTimesReport,
    Report,
    RestartReport,
    SampleReport,
    ShapeReport,
    SpareReport,
    StartReport,
    StepReport,
    ValidationLoss,
)


def line_of(report: Report) -> str:
    """Describe a report in one line."""
    match report:
        case StepReport():
            return f"step {report.step}/{report.steps}  {numbers_of(report)}  ETA {duration(report.eta_seconds)}"
        case EvaluationReport():
            named = "".join(f"; {each.name} {validation_in_words(each)}" for each in report.sets)
            return (
                f"step {report.step}  validation loss {validation_in_words(report)}, "
                f"unigram entropy of that text {report.unigram_entropy:.4f}{named}"
            )
        case SampleReport():
            said = (f"{json.dumps(each.prompt + each.text, ensure_ascii=False)}" for each in report.samples)
            return f"step {report.step}  samples {'; '.join(said)}"
        case CheckpointReport():
            size = report.bytes / 2**20
            return f"step {report.step}  checkpoint {report.url} ({size:.1f} MiB, {report.seconds:.2f} s)"
        case StartReport():
            origin = f"from {report.resumed_from}" if report.resumed_from else "from scratch"
            return (
                f"training starts {origin} at step {report.step}: "
                f"{report.parameters:,} parameters on {report.world_size} worker(s)"
            )
        case ShapeReport():
            return f"the gang is {layout_in_words(report)}"
        case InterruptionReport():
            return f"step {report.step}  interrupted by {report.cause}: {report.message}"
        case RestartReport():
            return f"step {report.resumed_step}  continues after {restart_in_words(report)}"
        case FaultReport():
            return f"step {report.step}  {report.what.replace('_', ' ')}: {report.message}"
        case RankTimesReport():
            return (
                f"step {report.step}  busy seconds by rank: {', '.join(f'{each:.3g}' for each in report.busy_seconds)}"
            )
        case ComparisonReport():
            return f"step {report.step}  compared with the plan: {comparison_in_words(report)}"
        case ProfileReport():
            return (
                f"step {report.step}  profile of {report.steps} step(s) of rank {report.rank}: {report.url} "
                f"({report.bytes / 2**20:.1f} MiB)"
            )
        case SpareReport(step=None):
            return "no spare copy of the state is kept any more"
        case SpareReport():
            return f"step {report.step}  spare copy of the state on node {(report.node or '')[:12]}"
        case LogLine():
            return f"rank {report.rank} {report.level}: {report.message}"


def numbers_of(step: StepReport) -> str:
    """A step's loss, throughput and share of time spent waiting for collectives."""
    share = f"{step.exposed_communication_share:.0%}"
    return f"loss {step.loss:.4f}  {step.tokens_per_second:,.0f} tokens/s  communication {share}"


def validation_in_words(validation: ValidationLoss) -> str:
    """A validation loss, with its perplexity, and in bits per byte if known."""
    bits = "" if validation.bits_per_byte is None else f", {validation.bits_per_byte:.4f} bits/byte"
    return f"{validation.loss:.4f} (perplexity {validation.perplexity:.4g}{bits})"


def comparison_in_words(report: ComparisonReport) -> str:
    """Peak memory of the fullest rank, and seconds per step, both measured and planned."""
    rank = report.fullest
    memory = (
        f"{report.peak_bytes[rank] / 1e9:.3g} GB of {report.planned_bytes[rank] / 1e9:.3g} GB planned on rank {rank}"
    )
    if report.step_seconds is None:
        return memory
    return f"{memory}; {report.step_seconds:.3g} s a step, predicted {report.predicted_step_seconds:.3g} s"


def duration(seconds: float) -> str:
    """A duration as hours, minutes and seconds: ``1:02:03``, ``2:03``; from a day on ``193 d 10 h``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def layout_in_words(shape: ShapeReport) -> str:
    """The layout of a gang and the number of its workers and nodes."""
    return f"{Layout.of(shape)}, {len(shape.nodes)} worker(s) on {len(set(shape.nodes))} node(s)"


def restart_in_words(restart: RestartReport) -> str:
    """Why training was interrupted, where it resumed, and what that cost."""
    again = restart.step - restart.resumed_step
    return (
        f"{restart.cause} at step {restart.step}: resumed from {restart.recovered_from} at step "
        f"{restart.resumed_step}; "
        f"cost {again} step(s) and {restart.seconds:.1f} s, {restart.waiting_seconds:.1f} s of it waiting for resources"
    )
