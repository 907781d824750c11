"""``boost submit``, ``clone`` and ``plan``: submit jobs, or show what they would need."""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from boost_core.config.reading import read_yaml
from boost_core.plan.machine import Basis, NetworkConfig, machine_of
from boost_core.plan.report import Plan, PlanSearch, SearchReport, search_report
from boost_core.plan.report import plan as plan_of
from boost_core.plan.resolve import choose_layouts
from service.cli.connection import open_client
from service.cli.failures import BadInput, read_job, read_profile, read_yaml_as
from service.cli.options import AsJson, Follow, IdempotencyKey, JobId, Url
from service.cli.output.jobs import exit_as, follow_until_interrupted
from service.cli.output.plan_table import print_chosen, print_plan, print_search, print_stored
from service.cli.output.printing import Terminal, print_json, say
from service.client import Client
from service.jobs.model import JobRecord
from service.models.jobs import PlanAnswer

JobFile = Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job spec, as YAML or JSON.")]


def submit(
    job: JobFile,
    name: Annotated[str | None, typer.Option(help="Override the job's name.")] = None,
    queue: Annotated[str | None, typer.Option(help="Override the job's queue.")] = None,
    priority: Annotated[int | None, typer.Option(help="Override the job's priority.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and plan the job without submitting it.")] = False,
    idempotency_key: IdempotencyKey = None,
    follow_it: Follow = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Submit a job."""
    spec = read_job(job, {"name": name, "queue": queue, "priority": priority})
    with open_client(url) as client:
        if dry_run:
            result = client.dry_run(spec)
            if as_json:
                print_json(result)
                return
            say(f"{result.spec.name} could be submitted to the queue {result.spec.queue}")
            print_plan(result.plan, result.spec)
            if result.chosen is not None:
                print_chosen(result.chosen)
            print_stored(result.profile)
            return
        _go_on(client, client.submit(spec, idempotency_key=idempotency_key), follow_it, as_json)


def clone(
    job_id: JobId,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Field to change, such as training.steps=500; repeatable."),
    ] = None,
    from_checkpoint: Annotated[
        bool, typer.Option("--from-checkpoint", help="Continue from the job's newest checkpoint, at its step.")
    ] = False,
    from_weights: Annotated[
        bool, typer.Option("--from-weights", help="Start at step 0 from the weights of the job's newest checkpoint.")
    ] = False,
    idempotency_key: IdempotencyKey = None,
    follow_it: Follow = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Submit a copy of a job."""
    patch = merge_patch(changes or [])
    if from_checkpoint and from_weights:
        raise BadInput("--from-checkpoint continues and --from-weights starts at step 0; give one of them")
    with open_client(url) as client:
        record = client.clone(
            job_id, patch, from_checkpoint=from_checkpoint, from_weights=from_weights, idempotency_key=idempotency_key
        )
        _go_on(client, record, follow_it, as_json)


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
    top: Annotated[int, typer.Option(min=1, max=100, help="With --gpus: number of choices to show.")] = 5,
    explain: Annotated[bool, typer.Option("--explain", help="With --gpus: show what would change the choice.")] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Show a job's memory, communication, throughput and time in each layout. Only --service needs a service."""
    spec = read_job(job)
    network, measured = (
        read_yaml_as(NetworkConfig, cluster) if cluster else None,
        read_profile(profile) if profile else None,
    )
    if service:
        if gpus is None and (network or measured):
            raise BadInput("--service without --gpus takes neither --profile nor --cluster; leave them out")
        search = None
        if gpus is not None:
            search = PlanSearch(gpus=gpus, cluster=network, profile=measured, top=top, explain=explain)
        with open_client(url) as client:
            answer = client.plan(spec, search)
        if as_json:
            print_json(answer)
            return
        if answer.search is not None:
            print_search(answer.search)
        else:
            print_plan(answer, spec if answer.chosen is None else spec.with_layouts(answer.chosen.sizes))
            if answer.chosen is not None:
                print_chosen(answer.chosen)
        print_stored(answer.profile)
        return

    if url is not None:
        raise BadInput("--url goes with --service")
    result: Plan | SearchReport
    chosen = None
    try:
        if gpus is None:
            if spec.leaves_layouts:
                chosen = choose_layouts(spec, Basis(profile=measured))
                spec = spec.with_layouts(chosen.sizes)
            machine = machine_of(spec, measured) if network is None else network.machine(spec, measured)
            result = plan_of(spec, machine)
        else:
            search = PlanSearch(gpus=gpus, cluster=network, profile=measured, top=top, explain=explain)
            result = search_report(spec, search)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if as_json:
        print_json(result if chosen is None else PlanAnswer(**dict(result), chosen=chosen))
    elif isinstance(result, SearchReport):
        print_search(result)
    else:
        print_plan(result, spec)
        if chosen is not None:
            print_chosen(chosen)


def merge_patch(changes: list[str]) -> dict[str, Any]:
    """Build a JSON merge patch from ``section.field=value`` changes; values are read as YAML.

    Raises:
        BadInput: A change does not have this form, or conflicts with another one.
    """
    patch: dict[str, Any] = {}
    for change in changes:
        path, equals, text = change.partition("=")
        *sections, field = path.split(".")
        if not equals or not all([*sections, field]):
            raise BadInput(f"--set {change}: give a field and its value, such as training.steps=500")
        section = patch
        for name in sections:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise BadInput(f"--set {change}: {name} is also set to a value; set one or the other")
        try:
            section[field] = read_yaml(text)
        except yaml.YAMLError as error:
            raise BadInput(f"--set {change}: {text!r} is not YAML: {error}") from error
    return patch


def _go_on(client: Client, record: JobRecord, follow_it: bool, as_json: bool) -> None:
    """Print a job that has just been submitted, or follow it."""
    if not as_json:
        say(f"submitted {record.id}")
    if follow_it:
        record = follow_until_interrupted(client, record.id, Terminal(stderr=as_json))
    elif not as_json:
        say(f"watch it with: boost watch {record.id}")
    if as_json:
        print_json(record)
    exit_as(record)
