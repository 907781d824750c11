"""``boost sweep``: trials of a job with other values of some fields."""

import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from service.cli.commands.comparison import value_in_words
from service.cli.connection import retry_longer
from service.cli.console import BadInput, ExitStatus, Failed, number, print_answer, read_as, say, say_raw
from service.cli.options import UNOPENED, AsJson, Changes, Quiet, Service, merge_patch
from service.client import Client
from service.models.sweeps import Sweep, SweepRequest, SweepState, TrialState, parameters_in_words

app = typer.Typer(no_args_is_help=True, help="Create, list, follow and stop sweeps, and continue their best trials.")

_POLL_SECONDS = 2.0

Name = Annotated[str, Argument(metavar="NAME", help="The sweep; `boost sweep list` shows them.")]
Follow = Annotated[bool, Option("--follow", "-f", help="Follow until the sweep ends.")]


@app.command("create")
def create_sweep(
    file: Annotated[Path, Argument(metavar="SWEEP.YAML", help="The sweep, as YAML or JSON.")],
    follow: Follow = False,
    client: Service = UNOPENED,
) -> None:
    """Begin a sweep. Its trials become jobs in the group of its name."""
    request = read_as(SweepRequest, file, inlined="job")
    sweep = client.create_sweep(request)
    say(f"sweep {sweep.name} ({sweep.id}) is {sweep.state}: boost sweep status {sweep.name}")
    if follow and _follow(client, sweep.name).state is SweepState.FAILED:
        raise typer.Exit(ExitStatus.FAILED)


@app.command("list")
def list_sweeps(as_json: AsJson = False, client: Service = UNOPENED) -> None:
    """List sweeps, newest first, at most 500."""
    result = client.sweeps(500)
    rows = []
    for sweep in result.sweeps:
        best = f"{number(sweep.best.value, '.4g')} ({sweep.best.number})" if sweep.best else "-"
        trials, created = str(sum(sweep.trials.values())), f"{sweep.created_at:%Y-%m-%d %H:%M}"
        rows.append((sweep.name, sweep.state, trials, best, sweep.spec.metric, created, sweep.submitted_by))
    print_answer(result, as_json, rows, ("NAME", "STATE", "TRIALS", "BEST (TRIAL)", "METRIC", "CREATED", "BY"))


@app.command("status")
def show_sweep(name: Name, follow: Follow = False, as_json: AsJson = False, client: Service = UNOPENED) -> None:
    """Show a sweep, its best trial, and how much each field matters."""
    if follow:
        _follow(client, name)
    sweep = client.sweep(name)
    facts = [("sweep", f"{sweep.name}, {sweep.state}"), ("", sweep.message), ("best", _best_in_words(sweep))]
    shares = sorted((sweep.importance or {}).items(), key=lambda each: -each[1])
    if shares:
        facts.append(("importance", f"over {sweep.trials[TrialState.COMPLETE]} completed trials:"))
    facts += [("", f"{share:.0%} {path}") for path, share in shares]
    print_answer(sweep, as_json, facts)
    if follow and sweep.state is SweepState.FAILED:
        raise typer.Exit(ExitStatus.FAILED)


@app.command("trials")
def list_trials(
    name: Name,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV.")] = False,
    as_json: AsJson = False,
    client: Service = UNOPENED,
) -> None:
    """List a sweep's trials; --json and --csv have their values at all rungs."""
    if as_csv and as_json:
        raise BadInput("give one of --csv and --json")
    metric, result = client.sweep(name).spec.metric, client.sweep_trials(name)
    if as_csv:
        say_raw(result.as_csv().removesuffix("\n"))
        return
    paths = list(result.trials[0].parameters) if result.trials else []
    rows = []
    for trial in result.trials:
        newest, values = str(max(trial.rungs, default="-")), map(value_in_words, trial.parameters.values())
        judged = str(trial.number), trial.state, number(trial.value), newest
        rows.append((*judged, trial.job_id or "-", *values, trial.reason or ""))
    print_answer(result, as_json, rows, ("TRIAL", "STATE", metric.upper(), "STEP", "JOB", *paths, "REASON"))


@app.command("stop")
def stop_sweep(name: Name, client: Service = UNOPENED) -> None:
    """Stop a sweep; its trials save a checkpoint and end."""
    sweep = client.stop_sweep(name)
    say(f"sweep {sweep.name} is {sweep.state}: {sweep.message}")


_CONTINUE_HELP = "Continue from its checkpoint, up to this step."


@app.command("best")
def show_best(
    name: Name,
    steps: Annotated[int | None, Option("--continue", min=1, metavar="STEPS", help=_CONTINUE_HELP)] = None,
    changes: Changes = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    client: Service = UNOPENED,
) -> None:
    """Show the best trial of a sweep, or continue it as a new job, which is not in the sweep's group."""
    if changes and steps is None:
        raise BadInput("--set goes with --continue STEPS, which makes a new job")
    sweep = client.sweep(name)
    if (best := sweep.best) is None:
        raise Failed(f"no trial of sweep {name} has completed yet; boost sweep status {name} shows them")
    if steps is None:
        text = f"{_best_in_words(sweep)}\ncontinue it: boost sweep best {name} --continue STEPS"
        print_answer(best, as_json, str(best.job_id) if quiet else text)
        return
    described = {"name": f"{name}-{best.number}-continued", "group": None, "tags": ["continued"]}
    described |= merge_patch([*(changes or []), f"training.steps={steps}"])
    job = client.clone(str(best.job_id), described, from_checkpoint=True)
    text = f"job {job.id} continues trial {best.number} from its checkpoint up to step {steps}"
    print_answer(job, as_json, job.id if quiet else text)


def _follow(client: Client, name: str) -> Sweep:
    """Print what a sweep is doing whenever that changes, until the sweep has ended."""
    told = None
    retry_longer(client)
    try:
        while (sweep := client.sweep(name)).finished_at is None:
            if sweep.message != told:
                told = sweep.message
                say(f"{sweep.state}: {told}", err=True)
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        say(f"stopped following; the sweep continues. Follow it again: boost sweep status {name} -f", err=True)
        raise typer.Exit(ExitStatus.INTERRUPTED) from None
    say(f"{sweep.state}: {sweep.message}", err=True)
    return sweep


def _best_in_words(sweep: Sweep) -> str:
    if (best := sweep.best) is None:
        return "no trial has completed yet"
    value = f"{number(best.value)}{' so far' if sweep.finished_at is None else ''}"
    return f"trial {best.number}, {value}, job {best.job_id}: {parameters_in_words(best.parameters)}"
