"""``boost tenants``: for operators."""

from typing import Annotated

import typer

from service.cli.commands.limits import Cpus, Gpus, by_state, held, limit
from service.cli.connection import open_client
from service.cli.options import AsJson, Url
from service.cli.output.printing import print_list, say
from service.client import Client
from service.models.requests import TenantSettings
from service.models.tenants import Tenant

app = typer.Typer(no_args_is_help=True, help="List tenants and set their quotas; for operators.")


@app.command("ls")
def list_tenants(as_json: AsJson = False, url: Url = None) -> None:
    """List the tenants, their usage and limits."""
    with open_client(url) as client:
        found = client.tenants()
    print_list(found, as_json, ("NAME", "GPUS", "CPUS", "JOBS"), map(_row, found.tenants))


@app.command("set")
def set_tenant(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")],
    gpus: Gpus = None,
    cpus: Cpus = None,
    url: Url = None,
) -> None:
    """Create a tenant or change the given limits of an existing one."""
    with open_client(url) as client:
        present = _present(client, name)
        tenant = client.put_tenant(name, {"gpus": limit(gpus, present.gpus), "cpus": limit(cpus, present.cpus)})
    say(f"tenant {tenant.name}: GPUs {held(tenant.used_gpus, tenant.gpus)}, CPUs {held(tenant.used_cpus, tenant.cpus)}")


def _present(client: Client, name: str) -> Tenant | TenantSettings:
    """Return the tenant; the defaults if it does not exist."""
    found = (tenant for tenant in client.tenants().tenants if tenant.name == name)
    return next(found, TenantSettings())


def _row(tenant: Tenant) -> tuple[str, ...]:
    gpus, cpus = held(tenant.used_gpus, tenant.gpus), held(tenant.used_cpus, tenant.cpus)
    return tenant.name, gpus, cpus, by_state(tenant.jobs)
