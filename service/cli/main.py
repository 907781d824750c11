"""``boost``: the program and its commands."""

from collections.abc import Callable

import typer

from service.cli.commands import access, checkpoints, cluster, comparison, jobs, local, plan, sweeps
from service.cli.console import ReadableErrors

_JOBS = "Jobs"
_CLUSTER = "Shared by jobs"
_ACCOUNT = "Signing in"
_OPERATORS = "For operators"
_HERE = "On this machine"

app = typer.Typer(
    cls=ReadableErrors,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # a key may be among them
    help="Train low-rank-bottleneck models.",
)

_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    _JOBS: {
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
    },
    _CLUSTER: {"nodes": cluster.nodes},
    _ACCOUNT: {"login": access.login, "logout": access.logout, "whoami": access.whoami},
    _OPERATORS: {"audit": access.audit, "migrate": local.migrate},
    _HERE: {"serve": local.serve, "demo": local.demo, "import-config": local.import_configuration},
}

for panel, commands in _COMMANDS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)

for name, command in (("bench", local.bench), ("data", local.data)):
    app.command(name, rich_help_panel=_HERE, **local.HANDED_ON)(command)

app.add_typer(checkpoints.app, name="ckpt", rich_help_panel=_JOBS)
app.add_typer(sweeps.app, name="sweep", rich_help_panel=_JOBS)
app.add_typer(cluster.datasets_app, name="datasets", rich_help_panel=_JOBS)
app.add_typer(cluster.queues_app, name="queues", rich_help_panel=_CLUSTER)
app.add_typer(cluster.profiles_app, name="profiles", rich_help_panel=_CLUSTER)
app.add_typer(access.app, name="keys", rich_help_panel=_OPERATORS)
app.add_typer(cluster.tenants_app, name="tenants", rich_help_panel=_OPERATORS)

if __name__ == "__main__":
    app()
