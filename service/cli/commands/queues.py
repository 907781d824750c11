"""``boost queues``."""

from collections.abc import Mapping
from typing import Annotated

import typer

from service.cli.connection import open_client
from service.cli.failures import BadInput
from service.cli.options import AsJson, Url
from service.cli.output.printing import number, print_facts, print_json, print_list, print_table, say
from service.client import ApiError, Client
from service.models.access import Tenant
from service.models.cluster import Node, Queue
from service.models.jobs import QueueSettings, TenantSettings

# What ``queues`` and ``tenants`` share: limits, their usage, and job counts by state.

_NO_LIMIT = "none"

Gpus = Annotated[
    str | None, typer.Option(metavar="N|none", help="Maximum number of GPUs that its jobs may hold; none: no limit.")
]
Cpus = Annotated[
    str | None, typer.Option(metavar="N|none", help="Maximum number of CPUs that its jobs may hold; none: no limit.")
]


def limit(option: str | None, otherwise: float | None) -> float | None:
    """Parse a limit, or return the present one if none was given.

    Raises:
        BadInput: The option is neither a number nor ``none``.
    """
    if option is None:
        return otherwise
    if option == _NO_LIMIT:
        return None
    try:
        return float(option)
    except ValueError:
        raise BadInput(f"{option!r} is not a limit; give a number, or {_NO_LIMIT}") from None


def held(used: float, of: float | None) -> str:
    """Format the usage of a limit."""
    return number(used) if of is None else f"{number(used)}/{number(of)}"


def by_state(jobs: Mapping[str, int]) -> str:
    """Format the job counts of all states that occur."""
    return ", ".join(f"{count} {state}" for state, count in jobs.items() if count) or "-"


app = typer.Typer(no_args_is_help=True, help="List, create, limit and delete queues.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The queue.")]


@app.command("ls")
def list_queues(as_json: AsJson = False, url: Url = None) -> None:
    """List the queues, their usage and limits."""
    with open_client(url) as client:
        found = client.queues()
    print_list(found, as_json, ("NAME", "GPUS", "CPUS", "JOBS", "DESCRIPTION"), map(_queue_row, found.queues))


@app.command()
def show(name: Name, as_json: AsJson = False, url: Url = None) -> None:
    """Show one queue."""
    with open_client(url) as client:
        queue = client.queue(name)
    if as_json:
        print_json(queue)
        return
    print_facts(zip(("name", "GPUs", "CPUs", "jobs", "description"), _queue_row(queue), strict=True))


@app.command("set")
def set_queue(
    name: Name,
    description: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    gpus: Gpus = None,
    cpus: Cpus = None,
    url: Url = None,
) -> None:
    """Create a queue or change the given settings of an existing one; for operators."""
    with open_client(url) as client:
        present = _present_queue(client, name)
        settings = {
            "description": present.description if description is None else description,
            "gpus": limit(gpus, present.gpus),
            "cpus": limit(cpus, present.cpus),
        }
        queue = client.put_queue(name, settings)
    say(f"queue {queue.name}: GPUs {held(queue.used_gpus, queue.gpus)}, CPUs {held(queue.used_cpus, queue.cpus)}")


@app.command("rm")
def remove(name: Name, url: Url = None) -> None:
    """Delete a queue that has no active jobs; for operators."""
    with open_client(url) as client:
        client.delete_queue(name)
    say(f"deleted the queue {name}")


def _present_queue(client: Client, name: str) -> Queue | QueueSettings:
    """Return the queue's settings; the defaults if it does not exist."""
    try:
        return client.queue(name)
    except ApiError as error:
        if error.code != "queue-not-found":
            raise
        return QueueSettings()


def _queue_row(queue: Queue) -> tuple[str, ...]:
    gpus, cpus = held(queue.used_gpus, queue.gpus), held(queue.used_cpus, queue.cpus)
    return queue.name, gpus, cpus, by_state(queue.jobs), queue.description


# ``boost tenants``: for operators.

tenants_app = typer.Typer(no_args_is_help=True, help="List tenants and set their quotas; for operators.")


@tenants_app.command("ls")
def list_tenants(as_json: AsJson = False, url: Url = None) -> None:
    """List the tenants, their usage and limits."""
    with open_client(url) as client:
        found = client.tenants()
    print_list(found, as_json, ("NAME", "GPUS", "CPUS", "JOBS"), map(_tenant_row, found.tenants))


@tenants_app.command("set")
def set_tenant(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")],
    gpus: Gpus = None,
    cpus: Cpus = None,
    url: Url = None,
) -> None:
    """Create a tenant or change the given limits of an existing one."""
    with open_client(url) as client:
        present = _present_tenant(client, name)
        tenant = client.put_tenant(name, {"gpus": limit(gpus, present.gpus), "cpus": limit(cpus, present.cpus)})
    say(f"tenant {tenant.name}: GPUs {held(tenant.used_gpus, tenant.gpus)}, CPUs {held(tenant.used_cpus, tenant.cpus)}")


def _present_tenant(client: Client, name: str) -> Tenant | TenantSettings:
    """Return the tenant; the defaults if it does not exist."""
    found = (tenant for tenant in client.tenants().tenants if tenant.name == name)
    return next(found, TenantSettings())


def _tenant_row(tenant: Tenant) -> tuple[str, ...]:
    gpus, cpus = held(tenant.used_gpus, tenant.gpus), held(tenant.used_cpus, tenant.cpus)
    return tenant.name, gpus, cpus, by_state(tenant.jobs)


# ``boost nodes``.

_RESOURCES = ("GPU", "CPU")  # by Ray's names; all others are in the JSON


def nodes(as_json: AsJson = False, url: Url = None) -> None:
    """List the cluster's nodes, their free resources and their jobs."""
    with open_client(url) as client:
        found = client.nodes()
    if as_json:
        print_json(found)
        return
    if found.seen_at is None:
        say("no scheduler has seen the cluster yet")
        return
    print_table(("NODE", "STATE", "FREE GPUS", "FREE CPUS", "JOBS", "LABELS"), map(_node_row, found.nodes))
    for node in found.nodes:
        if node.unusable:
            say(f"{node.node_id} is not used: it {node.unusable}")
    say(f"(as seen at {found.seen_at.astimezone():%H:%M:%S})")


def _node_row(node: Node) -> tuple[str, ...]:
    state = "draining" if node.draining else "unusable" if node.unusable else "ready"
    labels = ", ".join(f"{name}={value}" for name, value in sorted(node.labels.items()))
    return node.node_id, state, *(_free(node, resource) for resource in _RESOURCES), _jobs(node), labels or "-"


def _free(node: Node, resource: str) -> str:
    total = node.total.get(resource, 0.0)
    return f"{number(node.free.get(resource, 0.0))}/{number(total)}" if total else "-"


def _jobs(node: Node) -> str:
    own = [f"{job.name} ({job.id}): {job.ranks} rank(s)" for job in node.jobs]
    others = [f"others: {node.other_ranks} rank(s)"] if node.other_ranks else []
    return ", ".join(own + others + _dataset(node)) or "-"


def _dataset(node: Node) -> list[str]:
    if node.dataset is None:
        return []
    what = f"dataset {node.dataset.name}" if node.dataset.name else "a dataset"
    return [f"{what}: {number(node.dataset.cpus)} CPU(s)"]
