"""What jobs share: ``boost queues``, ``tenants``, ``nodes``, ``profiles`` of kinds of GPU, and ``datasets``."""

import time
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from boost_core.config.base import counted
from service.cli.connection import retry_longer
from service.cli.console import BadInput, Failed, number, print_answer, print_rows, read_as, read_profile, say
from service.cli.options import UNOPENED, AsJson, Service
from service.client import ApiError
from service.models.access import Tenant
from service.models.cluster import Queue
from service.models.datasets import Dataset, DatasetRequest, DatasetState
from service.models.jobs import QueueSettings, TenantSettings

_NO_LIMIT = "none"

_LIMIT_HELP = "Maximum number of {} that its jobs may hold; none: no limit."
Gpus = Annotated[str | None, Option(metavar="N|none", help=_LIMIT_HELP.format("GPUs"))]
Cpus = Annotated[str | None, Option(metavar="N|none", help=_LIMIT_HELP.format("CPUs"))]


def limit(option: str | None, otherwise: float | None) -> float | None:
    """Parse a limit, or return the present one if none was given.

    Raises:
        BadInput: The option is neither a number nor ``none``.
    """
    if option is None:
        return otherwise
    if option == _NO_LIMIT:
        return None
    with suppress(ValueError):
        if isfinite(value := float(option)):
            return value
    raise BadInput(f"{option!r} is not a limit; give a number, or {_NO_LIMIT}")


def usage(each: Queue | Tenant) -> tuple[str, str, str]:
    """Format what is used of the limits of GPUs and of CPUs, and the job counts of all states that occur."""
    pairs = (each.used_gpus, each.gpus), (each.used_cpus, each.cpus)
    gpus, cpus = (number(used) if of is None else f"{number(used)}/{number(of)}" for used, of in pairs)
    return gpus, cpus, ", ".join(f"{count} {state}" for state, count in each.jobs.items() if count) or "-"


queues_app = Typer(no_args_is_help=True, help="List, create, limit and delete queues.")

QueueName = Annotated[str, Argument(metavar="NAME", help="The queue.")]


@queues_app.command("ls")
def list_queues(as_json: AsJson = False, client: Service = UNOPENED) -> None:
    """List the queues, their usage and limits."""
    result = client.queues()
    rows = ((each.name, *usage(each), each.description) for each in result.queues)
    print_answer(result, as_json, rows, ("NAME", "GPUS", "CPUS", "JOBS", "DESCRIPTION"))


@queues_app.command("show")
def show_queue(name: QueueName, as_json: AsJson = False, client: Service = UNOPENED) -> None:
    """Show one queue."""
    queue = client.queue(name)
    row = (queue.name, *usage(queue), queue.description)
    print_answer(queue, as_json, zip(("name", "GPUs", "CPUs", "jobs", "description"), row, strict=True))


@queues_app.command("set")
def set_queue(
    name: QueueName,
    description: Annotated[str | None, Option(help="What it is for.")] = None,
    gpus: Gpus = None,
    cpus: Cpus = None,
    client: Service = UNOPENED,
) -> None:
    """Create a queue or change the given settings of an existing one; for operators."""
    present: Queue | QueueSettings
    try:
        present = client.queue(name)
    except ApiError as error:
        if error.code != "queue-not-found":
            raise
        present = QueueSettings()  # the defaults, because it does not exist
    about = present.description if description is None else description
    limits = {"gpus": limit(gpus, present.gpus), "cpus": limit(cpus, present.cpus)}
    queue = client.put_queue(name, {"description": about, **limits})
    used_gpus, used_cpus, _ = usage(queue)
    say(f"queue {queue.name}: GPUs {used_gpus}, CPUs {used_cpus}")


@queues_app.command("rm")
def remove_queue(name: QueueName, client: Service = UNOPENED) -> None:
    """Delete a queue that has no active jobs; for operators."""
    client.delete_queue(name)
    say(f"deleted the queue {name}")


tenants_app = Typer(no_args_is_help=True, help="List tenants and set their quotas; for operators.")


@tenants_app.command("ls")
def list_tenants(as_json: AsJson = False, client: Service = UNOPENED) -> None:
    """List the tenants, their usage and limits."""
    result = client.tenants()
    rows = ((each.name, *usage(each)) for each in result.tenants)
    print_answer(result, as_json, rows, ("NAME", "GPUS", "CPUS", "JOBS"))


@tenants_app.command("set")
def set_tenant(
    name: Annotated[str, Argument(metavar="NAME", help="The tenant.")],
    gpus: Gpus = None,
    cpus: Cpus = None,
    client: Service = UNOPENED,
) -> None:
    """Create a tenant or change the given limits of an existing one."""
    existing = (tenant for tenant in client.tenants().tenants if tenant.name == name)
    present: Tenant | TenantSettings = next(existing, TenantSettings())
    tenant = client.put_tenant(name, {"gpus": limit(gpus, present.gpus), "cpus": limit(cpus, present.cpus)})
    used_gpus, used_cpus, _ = usage(tenant)
    say(f"tenant {tenant.name}: GPUs {used_gpus}, CPUs {used_cpus}")


_RESOURCES = ("GPU", "CPU")  # by Ray's names; all others are in the JSON


def nodes(as_json: AsJson = False, client: Service = UNOPENED) -> None:
    """List the cluster's nodes, their free resources and their jobs."""
    result = client.nodes()
    if as_json or result.seen_at is None:
        print_answer(result, as_json, "no scheduler has seen the cluster yet")
        return
    rows = []
    for node in result.nodes:
        state = "draining" if node.draining else "unusable" if node.unusable else "ready"
        free = []
        for resource in _RESOURCES:
            total = node.total.get(resource, 0.0)
            free.append(f"{number(node.free.get(resource, 0.0))}/{number(total)}" if total else "-")
        uses = [f"{job.name} ({job.id}): {job.ranks} rank(s)" for job in node.jobs]
        if node.other_ranks:
            uses.append(f"others: {node.other_ranks} rank(s)")
        if node.dataset is not None:
            what = f"dataset {node.dataset.name}" if node.dataset.name else "a dataset"
            uses.append(f"{what}: {number(node.dataset.cpus)} CPU(s)")
        labels = ", ".join(f"{name}={value}" for name, value in sorted(node.labels.items()))
        rows.append((node.node_id, state, *free, ", ".join(uses) or "-", labels or "-"))
    print_rows(("NODE", "STATE", "FREE GPUS", "FREE CPUS", "JOBS", "LABELS"), rows)
    for node in result.nodes:
        if node.unusable:
            say(f"{node.node_id} is not used: it {node.unusable}")
    say(f"(as seen at {result.seen_at.astimezone():%H:%M:%S})")


profiles_app = Typer(no_args_is_help=True, help="List, store and delete measured profiles of kinds of GPU.")

Kind = Annotated[str, Argument(metavar="KIND", help="The kind of GPU by its name in Ray, such as H100.")]

Precision = Annotated[str | None, Option(help="Only the profile at this precision: bf16 or fp32.")]


@profiles_app.command("ls")
def list_profiles(as_json: AsJson = False, client: Service = UNOPENED) -> None:
    """List the profiles that jobs are planned with."""
    result = client.profiles()
    rows = []
    for each in result.profiles:
        profile, stored = each.profile, (f"{each.stored_at:%Y-%m-%d}", each.stored_by or "-")
        measured = f"{profile.measured_at:%Y-%m-%d}" if profile.measured_at else "-"
        rows.append((each.kind, profile.precision, measured, profile.commit[:12], *stored, profile.device))
    print_answer(result, as_json, rows, ("KIND", "PRECISION", "MEASURED", "COMMIT", "STORED", "BY", "DEVICE"))


@profiles_app.command("show")
def show_profile(kind: Kind, precision: Precision = None, as_json: AsJson = False, client: Service = UNOPENED) -> None:
    """Show the profile of a kind of GPU (bf16 if there are two); with --json as stored."""
    stored = client.stored_profile(kind, precision)
    profile = stored.profile
    measured = f"{profile.measured_at:%Y-%m-%d}" if profile.measured_at else "-"
    facts = {
        "kind": stored.kind,
        "device": profile.device,
        "measured": f"{measured}, commit {profile.commit}, torch {profile.torch_version}",
        "stored": f"{stored.stored_at:%Y-%m-%d %H:%M} UTC{f' by {stored.stored_by}' if stored.stored_by else ''}",
        "precision": profile.precision,
        "products": f"{profile.product_flops / 1e12:.4g} TFLOP/s",
        "attention": f"{profile.attention_flops / 1e12:.4g} TFLOP/s",
        "bandwidth": f"{profile.bandwidth / 1e12:.4g} TB/s",
        "correction": f"{profile.correction:.3f}",
        "spread": f"{profile.spread:.3f}",
        "host": f"{profile.host_bandwidth / 1e9:.4g} GB/s" if profile.host_bandwidth else "-",
    }
    for name, link in (("node", profile.link), ("between nodes", profile.between_nodes)):
        facts[name] = f"{link.bytes_per_second / 1e9:.4g} GB/s among {link.ranks} ranks" if link else "-"
    print_answer(stored, as_json, facts.items(), indent=14)


@profiles_app.command("set")
def set_profile(
    kind: Kind,
    file: Annotated[Path, Argument(metavar="PROFILE.JSON", help="What `boost bench profile` wrote.")],
    client: Service = UNOPENED,
) -> None:
    """Store the profile of a kind of GPU, replacing the one of the same precision; for operators."""
    profile = read_profile(file)
    stored = client.put_profile(kind, profile)
    jobs = f"jobs in {stored.profile.precision} on {stored.kind}"
    say(f"{jobs} are now planned with what was measured on {stored.profile.device}")


@profiles_app.command("rm")
def remove_profile(kind: Kind, precision: Precision = None, client: Service = UNOPENED) -> None:
    """Delete the profiles of a kind of GPU, whose jobs are then planned from data sheets; for operators."""
    client.delete_profile(kind, precision)
    say(f"deleted the profile of {kind} in {precision}" if precision else f"deleted all profiles of {kind}")


datasets_app = Typer(no_args_is_help=True, help="Create, list, show, cancel and forget datasets that jobs name.")

DatasetName = Annotated[str, Argument(metavar="NAME", help="The dataset.")]

_POLL_SECONDS = 1.0


@datasets_app.command("create")
def create_dataset(
    file: Annotated[Path, Argument(metavar="DATASET.YAML", help="The dataset's description, as YAML or JSON.")],
    follow: Annotated[bool, Option("--follow", "-f", help="Wait until it is built.")] = False,
    client: Service = UNOPENED,
) -> None:
    """Build a dataset; one that failed or was cancelled continues with the remaining files."""
    request = read_as(DatasetRequest, file)
    dataset = client.create_dataset(request)
    say(f"dataset {dataset.name} ({dataset.id}) is {dataset.state}")
    if not follow:
        return
    retry_longer(client)
    printed = ""
    while dataset.state is DatasetState.BUILDING:
        if (line := _progress(dataset)) != printed:
            say(line)
            printed = line
        time.sleep(_POLL_SECONDS)
        dataset = client.dataset(dataset.name)
    if dataset.state is not DatasetState.READY:
        raise Failed(f"dataset {dataset.name} is {dataset.state}: {dataset.message}")
    say(f"dataset {dataset.name} is {dataset.state}: {dataset.message}")


@datasets_app.command("ls")
def list_datasets(as_json: AsJson = False, client: Service = UNOPENED) -> None:
    """List the datasets."""
    result = client.datasets()
    rows = []
    for dataset in result.datasets:
        counts = dataset.counts or {}
        numbers = (number(counts.get(key), ",") for key in ("kept", "tokens"))
        rows.append((dataset.name, dataset.state, *numbers, dataset.message))
    print_answer(result, as_json, rows, ("NAME", "STATE", "DOCUMENTS", "TOKENS", "MESSAGE"))


@datasets_app.command("show")
def show_dataset(name: DatasetName, as_json: AsJson = False, client: Service = UNOPENED) -> None:
    """Show one dataset; with --json also its lineage."""
    dataset = client.dataset(name)
    facts = {"name": dataset.name, "state": dataset.state, "message": dataset.message, "url": dataset.url}
    facts |= {"progress": _progress(dataset), "fingerprint": dataset.fingerprint or "-"}
    counts = dict(dataset.counts or {})
    filtered = counts.pop("filtered", {})
    facts |= {key.replace("_", " "): str(value) for key, value in counts.items()}
    facts |= {f"by {measure}": f"{count} filtered out" for measure, count in filtered.items()}
    print_answer(dataset, as_json, facts.items(), indent=18)


@datasets_app.command("cancel")
def cancel_dataset(
    name: DatasetName,
    tenant: Annotated[str | None, Option(help="Another tenant's; for operators.")] = None,
    client: Service = UNOPENED,
) -> None:
    """Stop building a dataset."""
    dataset = client.cancel_dataset(name, tenant)
    say(f"dataset {dataset.name} is {dataset.state}")


@datasets_app.command("rm")
def remove_dataset(name: DatasetName, client: Service = UNOPENED) -> None:
    """Forget a dataset that no active job names; its files stay where they are."""
    client.delete_dataset(name)
    say(f"forgot the dataset {name}")


def _progress(dataset: Dataset) -> str:
    progress = dataset.progress
    if progress is None:
        return dataset.message
    rate = progress.bytes / 2**20 / max(progress.seconds, 1e-9)
    documents = counted(progress.documents, "document")
    return f"{progress.stage}: {progress.done} of {progress.of}; {documents}, {rate:,.1f} MiB/s"
