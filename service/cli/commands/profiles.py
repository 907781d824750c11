"""``boost profiles``: measured profiles of kinds of GPU; ``boost profile``: traces of a job's steps."""

from pathlib import Path
from typing import Annotated

import typer

from boost_core.messages import Profile
from service.cli.connection import open_client
from service.cli.failures import Failed, read_profile
from service.cli.options import AsJson, JobId, Url
from service.cli.output.jobs import line_of
from service.cli.output.printing import print_facts, print_json, print_list, say
from service.jobs.model import EventKind
from service.models.cluster import StoredProfile

app = typer.Typer(no_args_is_help=True, help="List, store and delete measured profiles of kinds of GPU.")

Kind = Annotated[str, typer.Argument(metavar="KIND", help="The kind of GPU by its name in Ray, such as H100.")]

Precision = Annotated[str | None, typer.Option(help="Only the profile at this precision: bf16 or fp32.")]


@app.command("ls")
def list_profiles(as_json: AsJson = False, url: Url = None) -> None:
    """List the profiles that jobs are planned with."""
    with open_client(url) as client:
        result = client.profiles()
    rows = (
        (
            each.kind,
            each.profile.precision,
            _measured(each),
            each.profile.commit[:12],
            f"{each.stored_at:%Y-%m-%d}",
            each.stored_by or "-",
            each.profile.device,
        )
        for each in result.profiles
    )
    print_list(result, as_json, ("KIND", "PRECISION", "MEASURED", "COMMIT", "STORED", "BY", "DEVICE"), rows)


@app.command()
def show(kind: Kind, precision: Precision = None, as_json: AsJson = False, url: Url = None) -> None:
    """Show the profile of a kind of GPU (bf16 if there are two); with --json as stored."""
    with open_client(url) as client:
        stored = client.stored_profile(kind, precision)
    if as_json:
        print_json(stored)
        return
    profile = stored.profile
    facts = {
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
    }
    for name, link in (("node", profile.link), ("between nodes", profile.between_nodes)):
        facts[name] = f"{link.bytes_per_second / 1e9:.4g} GB/s among {link.ranks} ranks" if link else "-"
    print_facts(facts.items(), 14)


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


def _measured(stored: StoredProfile) -> str:
    return "-" if stored.profile.measured_at is None else f"{stored.profile.measured_at:%Y-%m-%d}"


_OUTCOMES: tuple[EventKind, ...] = ("profile", "fault", "interruption")  # of a profile
_READERS = "a trace opens at https://ui.perfetto.dev, or in TensorBoard"


def profile(
    job_id: JobId,
    steps: Annotated[int, typer.Option(help="Number of steps, 1 to 20.")] = Profile().steps,
    rank: Annotated[list[int] | None, typer.Option(help="Rank to trace (default: 0); repeatable.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the traces and print their locations.")] = False,
    url: Url = None,
) -> None:
    """Trace some steps of a running job with torch's profiler. The traces are stored next to its checkpoints."""
    ranks = rank or [0]
    with open_client(url) as client:
        seen = max((event.id for event in client.events(job_id, follow=False, kinds=_OUTCOMES)), default=0)
        job = client.profile(job_id, {"steps": steps, "ranks": ranks})
        if not wait:
            say(f"{steps} step(s) of {job.id} will be traced; for the traces' locations: boost events {job.id} -f")
            say(_READERS)
            return

        untraced = set(ranks)
        for event in client.events(job_id, after=seen, kinds=_OUTCOMES):
            is_of_them = event.data.get("rank") in untraced
            failed = event.kind == "fault" and event.data["what"] == "profile" and is_of_them
            if event.kind == "interruption" or failed:
                raise Failed(f"{line_of(event)}; incomplete profiles are lost; run the command again")
            if event.kind == "profile" and is_of_them:
                untraced.remove(event.data["rank"])
                say(event.data["url"])
            if not untraced:
                return
    raise Failed(f"the job ended before the steps of rank {min(untraced)} were traced")
