"""A plan as a table."""

from boost_core.config import JobSpec, Layout
from boost_core.hardware import BYTES
from boost_core.messages import Provenance, duration
from boost_core.plan.report import Plan, PlannedChoice, PlannedContext, PlannedShape, SearchReport
from boost_core.plan.resolve import ChosenLayouts
from service.cli.output.printing import print_facts, print_table, say
from service.models.cluster import StoredProfile

_COLUMNS = ("LAYOUT", "RANKS", "RECOMPUTE", "MEMORY/RANK", "FITS", "EXCHANGE", "STEP", "TOKENS/S", "DURATION", "")
_PROVENANCE: dict[Provenance, str] = {
    "assumed": "from data sheets",
    "fitted": "from data sheets, corrected by measured jobs",
    "measured": "from a measured profile",
    "measured_fitted": "from a measured profile, corrected by measured jobs",
}
_MEMORY = ("weights", "gradients", "optimizer", "activations", "logits")


def print_plan(plan: Plan, spec: JobSpec) -> None:
    """Print what a job needs in each of its layouts."""
    facts = {
        "parameters": f"{plan.parameters:,}",
        "FLOPs per token": f"{plan.flops_per_token:,}",
        "tokens per step": f"{plan.tokens_per_step:,}",
    }
    print_facts(facts.items(), 17)
    print_table(_COLUMNS, (_row(one, spec, index == plan.fastest) for index, one in enumerate(plan.shapes)))
    largest = max((one.memory for one in plan.shapes), key=lambda memory: memory.total)
    say(f"peak memory per rank: {', '.join(f'{part} {_size(getattr(largest, part))}' for part in _MEMORY)}")
    if plan.fastest is not None:
        fastest = plan.shapes[plan.fastest]
        shares = {name: part / fastest.step_seconds for name, part in fastest.step_parts.model_dump().items()}
        shown = [
            f"{name} {part:.0%}" for name, part in sorted(shares.items(), key=lambda each: -each[1]) if part > 0.01
        ]
        say(f"step time of the fastest: {', '.join(shown)}")
        _print_context(fastest.context)
    say("exchange: bytes that a rank puts into tensor parallel all-reduces per micro-batch, and their number")
    for note in plan.notes:
        say(f"note: {note}")


def print_chosen(chosen: ChosenLayouts) -> None:
    """Print why a job with ``layouts: auto`` gets its layouts."""
    say(f"chosen from {chosen.timed} legal layouts:")
    for layout in chosen.layouts:
        say(f"- {layout.layout}: {'; '.join(layout.why)}")


def print_stored(profile: StoredProfile | None) -> None:
    """Print which stored profile the service used to predict times, if any."""
    if profile is not None:
        say(
            f"from the service's profile of {profile.kind}: {profile.profile.device}, "
            f"stored {profile.stored_at:%Y-%m-%d %H:%M} UTC{f' by {profile.stored_by}' if profile.stored_by else ''}"
        )


def print_search(report: SearchReport) -> None:
    """Print the best ways to train a job."""
    rows = (
        (each.text, str(each.world_size), _size(each.memory_bytes), _step(each), f"{each.tokens_per_second:,.0f}")
        for each in report.choices
    )
    print_table(("CHOICE", "RANKS", "MEMORY/RANK", "STEP", "TOKENS/S"), rows)
    if not report.choices:
        say("nothing fits")
    elif report.node_memory_bytes is None and (most := max(each.node_host_bytes for each in report.choices)):
        say(
            f"hosts: up to {_size(most)} per node for state and copies; the memory of the nodes is unknown and "
            "not checked"
        )
    for line in (*report.why, *report.would_change, *report.other_orders):
        say(f"- {line}")
    _print_context(report.context)
    by = _PROVENANCE[report.provenance]
    say(f"{report.combinations:,} combinations of sizes, micro-batch and schedule; times are {by}")


def _print_context(context: PlannedContext | None) -> None:
    for line in () if context is None else context.why:
        say(f"long context: {line}")


def _step(planned: PlannedShape | PlannedChoice) -> str:
    return "{:.3g} s ({:.2g} – {:.2g})".format(planned.step_seconds, *planned.step_seconds_range)


def _row(planned: PlannedShape, spec: JobSpec, is_fastest: bool) -> tuple[str, ...]:
    if planned.fits_host is False and planned.node_memory_bytes is not None:
        fits = f"no, {_size(planned.node_host_bytes)} of a host's {_size(planned.node_memory_bytes)}"
    elif planned.fits_device is None or planned.device_memory_bytes is None:
        fits = "unknown"
    else:
        fits = f"{'yes' if planned.fits_device else 'no'}, of {_size(planned.device_memory_bytes)}"

    sent, training, exchange = planned.communication, spec.training, "none"
    if sent.all_reduces:
        tokens = training.micro_batch_size * training.sequence_length // planned.context_parallel_size
        element = BYTES[training.precision]
        exchange = f"{_size(sent.elements_per_token * tokens * element)} in {sent.all_reduces:,}"
        if gathered := sent.gathered_elements_per_token * tokens * element:
            exchange += f", {_size(gathered)} gathered"

    return (
        str(Layout.of(planned)),
        str(planned.world_size),
        planned.recompute,
        _size(planned.memory.total),
        fits,
        exchange,
        _step(planned),
        f"{planned.tokens_per_second:,.0f}",
        duration(planned.total_seconds),
        "fastest" if is_fastest else "",
    )


def _size(count: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
