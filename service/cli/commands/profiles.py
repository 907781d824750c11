"""``boost profiles``."""

from pathlib import Path
from typing import Annotated

import typer

from boost_core.plan.measured import MeasuredLink
from service.cli.connection import open_client
from service.cli.failures import read_profile
from service.cli.options import AsJson, Url
from service.cli.output.printing import print_facts, print_json, print_list, say
from service.models.profiles import StoredProfile

app = typer.Typer(no_args_is_help=True, help="List, store and delete measured profiles of kinds of GPU.")

Kind = Annotated[str, typer.Argument(metavar="KIND", help="The kind of GPU by its name in Ray, such as H100.")]

Precision = Annotated[str | None, typer.Option(help="Only the profile at this precision: bf16 or fp32.")]


@app.command("ls")
def list_profiles(as_json: AsJson = False, url: Url = None) -> None:
    """List the profiles that jobs are planned with."""
    with open_client(url) as client:
        found = client.profiles()
    print_list(
        found, as_json, ("KIND", "PRECISION", "MEASURED", "COMMIT", "STORED", "BY", "DEVICE"), map(_row, found.profiles)
    )


@app.command()
def show(kind: Kind, precision: Precision = None, as_json: AsJson = False, url: Url = None) -> None:
    """Show the profile of a kind of GPU (bf16 if there are two); with --json as stored."""
    with open_client(url) as client:
        stored = client.stored_profile(kind, precision)
    if as_json:
        print_json(stored)
        return
    print_facts(_facts(stored).items(), 14)


@app.command("set")
def set_profile(
    kind: Kind,
    file: Annotated[Path, typer.Argument(metavar="PROFILE.JSON", help="What `boost bench profile` wrote.")],
    url: Url = None,
) -> None:
    """Store the profile of a kind of GPU, replacing the one of the same precision; for operators."""
    profile = read_profile(file)
    with open_client(url) as client:
        stored = client.put_profile(kind, profile)
    jobs = f"jobs in {stored.profile.precision} on {stored.kind}"
    say(f"{jobs} are now planned with what was measured on {stored.profile.device}")


@app.command("rm")
def remove(kind: Kind, precision: Precision = None, url: Url = None) -> None:
    """Delete the profiles of a kind of GPU, whose jobs are then planned from data sheets; for operators."""
    with open_client(url) as client:
        client.delete_profile(kind, precision)
    say(f"deleted the profile of {kind} in {precision}" if precision else f"deleted all profiles of {kind}")


def _row(stored: StoredProfile) -> tuple[str, ...]:
    profile = stored.profile
    kept = f"{stored.stored_at:%Y-%m-%d}"
    return (
        stored.kind,
        profile.precision,
        _measured(stored),
        profile.commit[:12],
        kept,
        stored.stored_by or "-",
        profile.device,
    )


def _facts(stored: StoredProfile) -> dict[str, str]:
    profile = stored.profile
    return {
        "kind": stored.kind,
        "device": profile.device,
        "measured": f"{_measured(stored)}, commit {profile.commit}, torch {profile.torch_version}",
        "stored": f"{stored.stored_at:%Y-%m-%d %H:%M} UTC{f' by {stored.stored_by}' if stored.stored_by else ''}",
        "precision": profile.precision,
        "products": f"{profile.product_flops / 1e12:.4g} TFLOP/s",
        "attention": f"{profile.attention_flops / 1e12:.4g} TFLOP/s",
        "bandwidth": f"{profile.bandwidth / 1e12:.4g} TB/s",
        "correction": f"{profile.correction:.3f}",
        "spread": f"{profile.spread:.3f}",
        "host": f"{profile.host_bandwidth / 1e9:.4g} GB/s" if profile.host_bandwidth else "-",
        "node": _link(profile.link),
        "between nodes": _link(profile.between_nodes),
    }


def _link(link: MeasuredLink | None) -> str:
    return f"{link.bytes_per_second / 1e9:.4g} GB/s among {link.ranks} ranks" if link else "-"


def _measured(stored: StoredProfile) -> str:
    return "-" if stored.profile.measured_at is None else f"{stored.profile.measured_at:%Y-%m-%d}"
