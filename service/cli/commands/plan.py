"""``boost plan``: what a job needs and takes in each layout, and the best ways to train it, as tables."""

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from typer import Option

from boost_core.config import JobSpec, Layout
from boost_core.hardware import BYTES
from boost_core.messages import Provenance
from boost_core.plan.machine import Basis, NetworkConfig, machine_of, refuse_unfit_gpu
from boost_core.plan.report import Plan
from boost_core.plan.report import plan as plan_of
from boost_core.plan.resolve import ChosenLayouts, choose_layouts
from boost_core.plan.run_cost import GPU_MTBF_HOURS, RunConditions
from boost_core.plan.search import PlanSearch, SearchReport, search_report
from boost_core.terminal import duration_in_words, rounded, size_in_words
from service.cli.commands.local import run_trainer
from service.cli.connection import open_client
from service.cli.console import BadInput, print_answer, print_facts, print_rows, read_as, read_job, read_profile, say
from service.cli.options import AsJson, JobFile, Url, hours
from service.models.cluster import StoredProfile
from service.models.jobs import PlanAnswer

_GPUS_HELP = (
    "Search for the best way to train the job on N GPUs, of this kind if not the job's: 64, 64xH100; H100 alone plans "
    "the job's own layouts on that kind."
)
_CLUSTER_HELP = "The network's levels, as YAML (default: what the kind usually has; with --service, its nodes)."
_NETWORK_HELP = "Gb/s of each GPU to other nodes (default: what its kind usually has, as the notes show)."
_MTBF_HELP = (
    f"Mean time between failures of one GPU, in hours or such as 32d (default: {GPU_MTBF_HOURS:,.0f} hours, as in "
    "Llama 3's training); 64 GPUs fail 64 times as often: 768, or 32d, is one failure in 12 hours. Nodes of 8 that "
    "fail once in 21 days: 168d."
)
_STORE_HELP = (
    "GB/s at which all ranks together write a checkpoint (default: as the notes show; with --service, as it has "
    "measured)."
)
_PROFILE_HELP = "Profile of the devices, from `boost bench profile` (default: data sheets)."
_SERVICE_HELP = "Let the service plan it, with its stored profile of the GPUs."
_PRICE_HELP = "Price of a GPU-hour, to show what all steps cost."
_MEASURE_HELP = "For a job without GPUs: first time its steps here, on CPUs, for a second."


def plan(
    job: JobFile,
    profile: Annotated[Path | None, Option(help=_PROFILE_HELP)] = None,
    service: Annotated[bool, Option("--service", help=_SERVICE_HELP)] = False,
    gpus: Annotated[str | None, Option(metavar="N|KIND|NxKIND", help=_GPUS_HELP)] = None,
    cluster: Annotated[Path | None, Option(help=_CLUSTER_HELP)] = None,
    network: Annotated[float | None, Option(metavar="GBITS", min=0.001, max=100_000, help=_NETWORK_HELP)] = None,
    top: Annotated[int | None, Option(min=1, max=100, help="With --gpus N: choices to show (default: 5).")] = None,
    price: Annotated[float | None, Option(min=0, max=1e6, help=_PRICE_HELP)] = None,
    mtbf: Annotated[float | None, Option(metavar="HOURS", parser=hours, help=_MTBF_HELP)] = None,
    store_bandwidth: Annotated[float | None, Option(metavar="GB/S", min=1e-3, max=1e6, help=_STORE_HELP)] = None,
    measure: Annotated[bool, Option("--measure", help=_MEASURE_HELP)] = False,
    explain: Annotated[bool, Option("--explain", help="With --gpus N: show what would change the choice.")] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Show a job's memory, communication, throughput and time in each layout. Only --service needs a service."""
    spec, number = read_job(job), None
    described = read_as(NetworkConfig, cluster) if cluster else None
    measured = read_profile(profile) if profile else None
    if gpus is not None:
        count, *kinds = re.split("x", gpus, maxsplit=1, flags=re.I) if re.match("[-+0-9]", gpus) else ("", gpus)
        number, kind = int(count) if count.strip().isdecimal() else None, "".join(kinds).strip()
        if (count or not kind) and (number is None or not 1 <= number <= 65_536):
            raise BadInput(f"--gpus {gpus}: give a number from 1 to 65536, a kind of GPU, or both, such as 64xH100")
        if kind:
            if described is not None and described.device is not None:
                raise BadInput(f"--gpus {gpus}: --cluster describes the GPUs already; leave out {kind}")
            of_kind = {"accelerator_type": kind.replace(" ", "-"), "gpus_per_worker": 1}
            spec = read_job(job, resources=spec.resources.model_dump(mode="json") | of_kind)
    if number is None and (explain or top):
        raise BadInput("--explain and --top are for searches: give --gpus a number, such as 64, or leave them out")
    if measure:
        if profile or service or spec.resources.gpus_per_worker:
            raise BadInput("--measure is for jobs without GPUs, and goes with neither --profile nor --service")
        with TemporaryDirectory() as folder:
            file = Path(folder) / "profile.json"
            if code := run_trainer("boost_core.bench", ["job", str(job), "--out", str(file)]):
                raise typer.Exit(code)
            measured = read_profile(file)
    conditions = RunConditions(gpu_hour_price=price, mtbf_hours=mtbf, store_gigabytes_per_second=store_bandwidth)
    search = None if number is None else PlanSearch(
        gpus=number, cluster=described, network_gigabits=network, profile=measured, top=top or 5, explain=explain
    )  # fmt: skip
    if service:
        if number is None and (described or network or measured):
            raise BadInput("--service without --gpus takes neither --profile, --cluster nor --network; leave them out")
        with open_client(url) as client:
            answer = client.plan(spec, search, conditions)
        if as_json:
            print_answer(answer, as_json)
            return
        if answer.search is not None:
            print_search(answer.search, spec)
        else:
            print_plan(answer, spec if answer.chosen is None else spec.with_layouts(answer.chosen.sizes), answer.chosen)
        print_stored(answer.profile)
        return

    if url is not None:
        raise BadInput("--url goes with --service")
    result: Plan | SearchReport
    chosen = None
    try:
        if search is None:
            if spec.leaves_layouts:
                if described is not None or network is not None:
                    raise BadInput("layouts: auto takes no --cluster or --network; list layouts, or give --gpus")
                chosen = choose_layouts(spec, Basis(profile=measured))
                spec = spec.with_layouts(chosen.sizes)
            if described is None or described.device is None:
                refuse_unfit_gpu(spec, measured)
            machine = machine_of(spec, measured) if described is None else described.machine(spec, measured)
            result = plan_of(spec, machine.joined_at(network), conditions)
        else:
            result = search_report(spec, search, conditions=conditions)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if as_json:
        print_answer(result if chosen is None else PlanAnswer(**dict(result), chosen=chosen), as_json)
    elif isinstance(result, SearchReport):
        print_search(result, spec)
    else:
        print_plan(result, spec, chosen)


_COLUMNS = ("LAYOUT", "RANKS", "MEMORY", "STEP", "TOKENS/S", "ALL STEPS")
_PROVENANCE: dict[Provenance, str] = {
    "assumed": "from data sheets",
    "fitted": "from data sheets, corrected by measured jobs",
    "measured": "from a measured profile",
    "measured_fitted": "from a measured profile, corrected by measured jobs",
}
_MEMORY = ("weights", "gradients", "optimizer", "activations", "logits")
_INDENT = 17  # of what is said of the fastest


def print_plan(plan: Plan, spec: JobSpec, chosen: ChosenLayouts | None) -> None:
    """Print what a job needs in each of its layouts, what the fastest takes in all, and why ``auto`` chose them."""
    print_facts([*_sizes(plan, spec), ("FLOPs per token", _amount(plan.flops_per_token))], _INDENT)
    say("")
    rows = []
    for each in plan.shapes:
        takes = size_in_words(each.memory.total), f"{rounded(each.step_seconds)} s", _amount(each.tokens_per_second)
        too_large = each.fits_device is False or each.fits_host is False
        total = "does not fit" if too_large else duration_in_words(each.total_seconds)
        rows.append((str(Layout.of(each)), f"{each.world_size:,}", *takes, total))
    print_rows(_COLUMNS, rows, reported=True)
    say("")
    largest = max((one.memory for one in plan.shapes), key=lambda memory: memory.total)
    if plan.fastest is not None:
        fastest = plan.shapes[plan.fastest]
        largest = fastest.memory
        whole, (low, high) = fastest.step_seconds, fastest.step_seconds_range
        parts = sorted(fastest.step_parts.model_dump().items(), key=lambda each: -each[1])
        shares = [f"{name} {part / whole:.0%}" for name, part in parts if part > 0.01 * whole]
        step = f"{rounded(whole)} s, four in five from {rounded(low, 2)} to {rounded(high, 2)} s"
        facts = [("fastest", f"{Layout.of(fastest)}, recompute {fastest.recompute}")]
        facts.append(("a step", f"{step}: {', '.join(shares)}"))
        facts += [line.partition(": ")[::2] for line in fastest.words]
        sent, training = fastest.communication, spec.training
        if sent.all_reduces:
            tokens = training.micro_batch_size * training.sequence_length // fastest.context_parallel_size
            element = BYTES[training.precision]
            size = size_in_words(sent.elements_per_token * tokens * element)
            exchange = f"{size} in {sent.all_reduces:,} collectives"
            if gathered := sent.gathered_elements_per_token * tokens * element:
                exchange += f", {size_in_words(gathered)} gathered"
            facts.append(("exchange", f"a tensor parallel rank sends {exchange} per micro-batch"))
        facts += [("long context", line) for line in (fastest.context.why if fastest.context else ())]
        print_facts(facts, _INDENT)
    uses = ", ".join(f"{part} {size_in_words(getattr(largest, part))}" for part in _MEMORY)
    of = "" if (device := plan.shapes[0].device_memory_bytes) is None else f" of a GPU's {size_in_words(device)}"
    print_facts([("memory of a rank", f"{size_in_words(largest.total)}{of}: {uses}")], _INDENT)
    for note in plan.notes:
        say(f"note: {note}")
    if plan.fastest is None:
        say("note: nothing above fits; boost plan --gpus N finds the layouts of N GPUs that do")
    if chosen is not None:
        say(f"chosen from {chosen.timed} legal layouts:")
        for layout in chosen.layouts:
            say(f"- {layout.layout}: {'; '.join(layout.why)}")


def print_stored(profile: StoredProfile | None) -> None:
    """Print which stored profile the service used to predict times, if any."""
    if profile is not None:
        stored = f"{profile.stored_at:%Y-%m-%d %H:%M} UTC{f' by {profile.stored_by}' if profile.stored_by else ''}"
        say(f"from the service's profile of {profile.kind}: {profile.profile.device}, stored {stored}")


def _sizes(of: Plan | SearchReport, spec: JobSpec) -> Iterator[tuple[str, str]]:
    yield "parameters", _amount(of.parameters)
    all_steps = f"{_amount(spec.training.total_tokens)} in all {spec.training.steps:,} steps"
    yield "tokens per step", f"{_amount(of.tokens_per_step)}, {all_steps}"


def print_search(report: SearchReport, spec: JobSpec) -> None:
    """Print the best ways to train a job, and what the first takes in all."""
    print_facts(_sizes(report, spec), _INDENT)
    say("")
    rows = []
    for number, each in enumerate(report.choices, 1):
        takes = size_in_words(each.memory_bytes), f"{rounded(each.step_seconds)} s", _amount(each.tokens_per_second)
        rows.append((str(number), f"{each.world_size:,}", *takes, duration_in_words(each.total_seconds), each.text))
    if report.choices:
        columns = ("", "RANKS", "MEMORY", "STEP", "TOKENS/S", "ALL STEPS", "CHOICE")
        print_rows(columns, rows, reported=True)
        first = report.choices[0]
        low, high = first.step_seconds_range
        say("")
        facts = [("first", first.text), ("a step", f"four in five from {rounded(low, 2)} to {rounded(high, 2)} s")]
        facts += [line.partition(": ")[::2] for line in first.words]
        print_facts(facts, _INDENT)
        if (most := first.node_host_bytes) and report.node_memory_bytes is None:
            unchecked = "the memory of the nodes is unknown and not checked"
            say(f"hosts: up to {size_in_words(most)} per node for state and copies; {unchecked}")
    else:
        say("nothing fits")
    for line in (*report.why, *report.would_change, *report.other_orders):
        say(f"- {line}")
    for line in report.context.why if report.context else ():
        say(f"long context: {line}")
    by = _PROVENANCE[report.provenance]
    say(f"{report.combinations:,} combinations of sizes, micro-batch and schedule; times are {by}")


def _amount(number: float) -> str:
    """Format a number of tokens or parameters: ``46,514``, ``2.56 billion``."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{rounded(number / size)} {name}"
    return f"{number:,.0f}"
