"""``boost``: the program and its commands."""

from collections.abc import Callable

import typer

from service.cli.commands import access, checkpoints, cluster, comparison, jobs, local, plan, sweeps
from service.cli.console import ReadableErrors

app = typer.Typer(
    cls=ReadableErrors,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # a key may be among them
    help="Train low-rank-bottleneck models.",
)

_COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Jobs": {
        "submit": jobs.submit,
        "clone": jobs.clone,
        "plan": plan.plan,
        "ls": jobs.list_jobs,
        "show": jobs.show,
        "diff": comparison.diff,
        "compare": comparison.compare,
        "watch": jobs.watch,
        "events": jobs.events,
        "logs": jobs.logs,
        "pause": jobs.pause,
        "resume": jobs.resume,
        "cancel": jobs.cancel,
        "retry": jobs.retry,
        "patch": jobs.patch,
        "steer": jobs.steer,
        "drill": jobs.drill,
        "profile": jobs.profile,
        "export": checkpoints.export,
        "generate": checkpoints.generate,
        "eval": checkpoints.evaluate,
        "ckpt": checkpoints.app,
        "sweep": sweeps.app,
        "datasets": cluster.datasets_app,
    },
    "Shared by jobs": {"nodes": cluster.nodes, "queues": cluster.queues_app, "profiles": cluster.profiles_app},
    "Signing in": {"login": access.login, "logout": access.logout, "whoami": access.whoami},
    "For operators": {
        "audit": access.audit,
        "migrate": local.migrate,
        "keys": access.app,
        "tenants": cluster.tenants_app,
    },
    "On this machine": {
        "serve": local.serve,
        "demo": local.demo,
        "import-config": local.import_configuration,
        "bench": local.bench,
        "data": local.data,
    },
}

for panel, commands in _COMMANDS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            settings = local.HANDED_ON if command in (local.bench, local.data) else {}
            app.command(name, rich_help_panel=panel, **settings)(command)

if __name__ == "__main__":
    app()
