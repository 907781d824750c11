"""``boost plan``: what a job needs and takes in each layout, and the best ways to train it, as tables."""

from pathlib import Path
from typing import Annotated

import typer

from boost_core.config import JobSpec, Layout
from boost_core.config.base import rounded
from boost_core.hardware import BYTES
from boost_core.messages import Provenance
from boost_core.plan.machine import Basis, NetworkConfig, machine_of, refuse_unknown_gpu
from boost_core.plan.report import Plan, PlannedShape
from boost_core.plan.report import plan as plan_of
from boost_core.plan.resolve import ChosenLayouts, choose_layouts
from boost_core.plan.search import PlannedChoice, PlanSearch, SearchReport, search_report
from boost_core.terminal import duration
from service.cli.connection import open_client
from service.cli.console import (
    BadInput,
    print_facts,
    print_json,
    print_table,
    read_job,
    read_profile,
    read_yaml_as,
    say,
)
from service.cli.options import AsJson, JobFile, Url
from service.models.cluster import StoredProfile
from service.models.jobs import PlanAnswer


def plan(
    job: JobFile,
    profile: Annotated[
        Path | None, typer.Option(help="Profile of the devices, from `boost bench profile` (default: data sheets).")
    ] = None,
    service: Annotated[
        bool, typer.Option("--service", help="Let the service plan it, with its stored profile of the GPUs.")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Search for the best way to train the job on this many GPUs.")
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="The network's levels, as YAML (default: nodes of 8 GPUs; with --service, the size of its nodes)."
        ),
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(
            metavar="GBITS",
            min=0.001,
            max=100_000,
            help="Gb/s of each GPU to other nodes (default: what its kind usually has, as the notes show).",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=100, help="With --gpus: number of choices to show.")] = 5,
    price: Annotated[
        float | None, typer.Option(min=0, max=1e6, help="Price of a GPU-hour, to show what the fastest costs.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="With --gpus: show what would change the choice.")] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Show a job's memory, communication, throughput and time in each layout. Only --service needs a service."""
    spec = read_job(job)
    described = read_yaml_as(NetworkConfig, cluster) if cluster else None
    measured = read_profile(profile) if profile else None
    search = None
    if gpus is not None:
        search = PlanSearch(
            gpus=gpus, cluster=described, network_gigabits=network, profile=measured, top=top, explain=explain
        )
    if service:
        if gpus is None and (described or network or measured):
            raise BadInput("--service without --gpus takes neither --profile, --cluster nor --network; leave them out")
        with open_client(url) as client:
            answer = client.plan(spec, search)
        if as_json:
            print_json(answer)
            return
        if answer.search is not None:
            print_search(answer.search, price)
        else:
            print_plan(answer, spec if answer.chosen is None else spec.with_layouts(answer.chosen.sizes), price)
            if answer.chosen is not None:
                print_chosen(answer.chosen)
        print_stored(answer.profile)
        return

    if url is not None:
        raise BadInput("--url goes with --service")
    result: Plan | SearchReport
    chosen = None
    try:
        if search is None:
            if spec.leaves_layouts:
                if described is not None and described.device is not None:
                    raise BadInput("layouts: auto takes no GPUs that --cluster describes; list layouts, or give --gpus")
                chosen = choose_layouts(spec, Basis(profile=measured))
                spec = spec.with_layouts(chosen.sizes)
            if measured is None and (described is None or described.device is None):
                refuse_unknown_gpu(spec.resources)
            machine = machine_of(spec, measured) if described is None else described.machine(spec, measured)
            result = plan_of(spec, machine.joined_at(network))
        else:
            result = search_report(spec, search)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if as_json:
        print_json(result if chosen is None else PlanAnswer(**dict(result), chosen=chosen))
    elif isinstance(result, SearchReport):
        print_search(result, price)
    else:
        print_plan(result, spec, price)
        if chosen is not None:
            print_chosen(chosen)


_COLUMNS = ("LAYOUT", "RANKS", "RECOMPUTE", "MEMORY/RANK", "FITS", "EXCHANGE", "STEP", "TOKENS/S", "DURATION", "")
_PROVENANCE: dict[Provenance, str] = {
    "assumed": "from data sheets",
    "fitted": "from data sheets, corrected by measured jobs",
    "measured": "from a measured profile",
    "measured_fitted": "from a measured profile, corrected by measured jobs",
}
_MEMORY = ("weights", "gradients", "optimizer", "activations", "logits")


def print_plan(plan: Plan, spec: JobSpec, price: float | None = None) -> None:
    """Print what a job needs in each of its layouts, and what the fastest costs at a price of a GPU-hour."""
    facts = {
        "parameters": f"{plan.parameters:,}",
        "FLOPs per token": f"{plan.flops_per_token:,}",
        "tokens per step": f"{plan.tokens_per_step:,}, {spec.training.total_tokens:,} in {spec.training.steps:,} steps",
    }
    print_facts(facts.items(), 17)
    rows, training = [], spec.training
    for index, planned in enumerate(plan.shapes):
        if planned.fits_host is False and planned.node_memory_bytes is not None:
            fits = f"no, {_size(planned.node_host_bytes)} of a host's {_size(planned.node_memory_bytes)}"
        elif planned.fits_device is None or planned.device_memory_bytes is None:
            fits = "unknown"
        else:
            fits = f"{'yes' if planned.fits_device else 'no'}, of {_size(planned.device_memory_bytes)}"

        sent, exchange = planned.communication, "none"
        if sent.all_reduces:
            tokens = training.micro_batch_size * training.sequence_length // planned.context_parallel_size
            element = BYTES[training.precision]
            exchange = f"{_size(sent.elements_per_token * tokens * element)} in {sent.all_reduces:,}"
            if gathered := sent.gathered_elements_per_token * tokens * element:
                exchange += f", {_size(gathered)} gathered"

        rows.append(
            (
                str(Layout.of(planned)),
                str(planned.world_size),
                planned.recompute,
                _size(planned.memory.total),
                fits,
                exchange,
                _step(planned),
                f"{planned.tokens_per_second:,.0f}",
                duration(planned.total_seconds),
                "fastest" if index == plan.fastest else "",
            )
        )
    print_table(_COLUMNS, rows)
    largest = max((one.memory for one in plan.shapes), key=lambda memory: memory.total)
    say(f"peak memory per rank: {', '.join(f'{part} {_size(getattr(largest, part))}' for part in _MEMORY)}")
    if plan.fastest is not None:
        fastest = plan.shapes[plan.fastest]
        shares = {name: part / fastest.step_seconds for name, part in fastest.step_parts.model_dump().items()}
        shown = [
            f"{name} {part:.0%}" for name, part in sorted(shares.items(), key=lambda each: -each[1]) if part > 0.01
        ]
        say(f"step time of the fastest: {', '.join(shown)}")
        _print_budget("the fastest", fastest, price)
        for line in fastest.context.why if fastest.context else ():
            say(f"long context: {line}")
    say("exchange: bytes that a rank puts into tensor parallel collectives per micro-batch, and their number")
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


def print_search(report: SearchReport, price: float | None = None) -> None:
    """Print the best ways to train a job, and what the first costs at a price of a GPU-hour."""
    rows = (
        (
            each.text, str(each.world_size), _size(each.memory_bytes), _step(each), f"{each.tokens_per_second:,.0f}",
            duration(each.total_seconds),
        )
        for each in report.choices
    )  # fmt: skip
    if report.choices:
        print_table(("CHOICE", "RANKS", "MEMORY/RANK", "STEP", "TOKENS/S", "DURATION"), rows)
        _print_budget("the first", report.choices[0], price)
        most = max(each.node_host_bytes for each in report.choices)
        if most and report.node_memory_bytes is None:
            say(
                f"hosts: up to {_size(most)} per node for state and copies; the memory of the nodes is unknown and "
                "not checked"
            )
    else:
        say("nothing fits")
    for line in (*report.why, *report.would_change, *report.other_orders):
        say(f"- {line}")
    for line in report.context.why if report.context else ():
        say(f"long context: {line}")
    by = _PROVENANCE[report.provenance]
    say(f"{report.combinations:,} combinations of sizes, micro-batch and schedule; times are {by}")


def _print_budget(which: str, planned: PlannedShape | PlannedChoice, price: float | None) -> None:
    if planned.gpu_hours:
        energy = planned.kilowatt_hours
        amounts = [
            f"{rounded(planned.gpu_hours, 3)} GPU-hours",
            *([] if energy is None else [f"at most {rounded(energy, 3)} kWh"]),
            *([] if price is None else [f"{rounded(price * planned.gpu_hours, 3)} at {price:g} a GPU-hour"]),
        ]
        say(f"all steps of {which}: {', '.join(amounts)}")


def _step(planned: PlannedShape | PlannedChoice) -> str:
    seconds, (low, high) = planned.step_seconds, planned.step_seconds_range
    return f"{rounded(seconds, 3)} s ({rounded(low, 2)} – {rounded(high, 2)})"


def _size(count: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
