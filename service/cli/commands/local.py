"""What runs on this machine without a service: ``boost serve``, ``bench``, ``data``, ``import-config``, ``demo``."""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from service.cli.commands.demo import run_demo
from service.cli.failures import read_foreign_config, read_settings
from service.cli.output.printing import Terminal, say
from service.cli.trainer_process import run_trainer

HANDED_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on (default: BOOST_HOST, or 127.0.0.1).")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="Port to listen on (default: BOOST_PORT, or 8900).")
    ] = None,
    auth: Annotated[
        bool | None,
        typer.Option("--auth/--no-auth", help="Require API keys (default: BOOST_AUTH, or --auth)."),
    ] = None,
    tls: Annotated[
        bool | None,
        typer.Option(
            "--tls/--no-tls", help="--no-tls: a proxy in front of the service terminates TLS (default: BOOST_TLS)."
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file with the certificate and its chain (default: BOOST_TLS_CERT).")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="PEM file with the certificate's private key (default: BOOST_TLS_KEY).")
    ] = None,
) -> None:
    """Run the service until it is interrupted. Every option can be set as a variable, such as BOOST_HOST."""
    from service.serve import run  # the engine takes seconds to import, and no other command needs it

    given = {"host": host, "port": port, "auth": auth, "tls": tls, "tls_cert": tls_cert, "tls_key": tls_key}
    run(read_settings(**{name: value for name, value in given.items() if value is not None}))


def bench(context: typer.Context) -> None:
    """Benchmark the trainer on this machine; see `boost bench --help`."""
    raise typer.Exit(run_trainer("boost_core.bench", context.args))


def data(context: typer.Context) -> None:
    """Tokenize documents; see `boost data tokenize --help`."""
    raise typer.Exit(run_trainer("boost_core.data", context.args))


def import_configuration(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.YAML", help="A configuration of nanotron or of BOOST's fork of it.")
    ],
    out: Annotated[Path | None, typer.Option(help="File to write the job to (default: standard output).")] = None,
) -> None:
    """Convert another trainer's configuration into a job file; list what was not converted or is still to be set."""
    imported = read_foreign_config(config)
    for note in imported.notes:
        say(f"not converted exactly: {note}", err=True)
    for field, remedy in imported.unset.items():
        say(f"to be set before the job runs: {field}: {remedy}", err=True)
    text = yaml.safe_dump(imported.job, sort_keys=False)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")


def demo() -> None:
    """Start a service, train the example job on it and show the result."""
    raise typer.Exit(run_demo(read_settings(), Terminal()))
