"""What runs on this machine without a service: ``boost serve``, ``bench``, ``data``, ``import-config``, ``demo``."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml
from pydantic import ValidationError
from typer import Argument, Option

from boost_core.config import JobSpec
from boost_core.config.nanotron import import_config
from boost_core.messages import EvaluationReport, StepReport
from service.cli.console import BadInput, ExitStatus, Failed, Terminal, read_job, read_settings, say, say_raw
from service.cli.job_text import follow, report_of
from service.client import ApiError, Client, ServiceUnreachable
from service.jobs.states import JobState
from service.models.problems import job_errors
from service.trainer import REMEDY, has_trainer

EXAMPLE = Path("examples/cola-tiny.yaml")

_START_SECONDS = 120.0
_STOP_SECONDS = 15.0
_LOG_LINES = 20


@contextmanager
def _service(log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a service in its own process on a free port, and stop it in any case, also on SIGTERM and SIGHUP."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in signals}
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port: int = listener.getsockname()[1]
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        address = ["--host", "127.0.0.1", "--port", str(port)]
        command = [sys.executable, "-m", "service.cli.main", "serve", "--no-auth", *address]
        with log.open("wb") as output:
            # A session of its own, so that Ctrl-C reaches the service only through us, and only once.
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}
HANDED_ON: dict[str, Any] = {"context_settings": _ANY_ARGUMENTS, "add_help_option": False}


_TLS_HELP = "--no-tls: a proxy in front of the service terminates TLS (default: BOOST_TLS)."
_PORT_HELP = "Port to listen on (default: BOOST_PORT, or 8900)."
_AUTH_HELP = "Require API keys (default: BOOST_AUTH, or --auth)."
_TLS_CERT_HELP = "PEM file with the certificate and its chain (default: BOOST_TLS_CERT)."
_TLS_KEY_HELP = "PEM file with the certificate's private key (default: BOOST_TLS_KEY)."


def serve(
    host: Annotated[str | None, Option(help="Address to listen on (default: BOOST_HOST, or 127.0.0.1).")] = None,
    port: Annotated[int | None, Option(min=1, max=65_535, help=_PORT_HELP)] = None,
    auth: Annotated[bool | None, Option("--auth/--no-auth", help=_AUTH_HELP)] = None,
    tls: Annotated[bool | None, Option("--tls/--no-tls", help=_TLS_HELP)] = None,
    tls_cert: Annotated[Path | None, Option(help=_TLS_CERT_HELP)] = None,
    tls_key: Annotated[Path | None, Option(help=_TLS_KEY_HELP)] = None,
) -> None:
    """Run the service until it is interrupted. Every option can be set as a variable, such as BOOST_HOST."""
    from service.serve import run  # the engine takes seconds to import, and no other command needs it

    run(read_settings(host=host, port=port, auth=auth, tls=tls, tls_cert=tls_cert, tls_key=tls_key))


_HEARS_IT_SECONDS = 2.0  # how long an interrupted program may take to end before it is sent SIGINT itself
_TIDIES_UP_SECONDS = 10.0  # how long it may take to end when this program is terminated, before it is killed

# Like python -m, except that an interrupt while modules are loading ends it without a traceback.
_RUN_MODULE = (
    "import runpy, signal, sys; "
    "signal.getsignal(signal.SIGINT) == signal.default_int_handler and signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def run_trainer(module: str, arguments: Iterable[str]) -> int:
    """Run one of the trainer's programs.

    Args:
        module: Its module, such as ``boost_core.bench``.
        arguments: Its command-line arguments.

    Returns:
        Its exit status.

    Raises:
        Failed: The trainer is not installed here.
    """
    if not has_trainer():
        remedy = f"{REMEDY}, or run this command where it is installed"
        raise Failed(f"this needs the trainer, which is not installed here; {remedy}")

    def terminate(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with subprocess.Popen([sys.executable, "-c", _RUN_MODULE, module, *arguments]) as process:
            try:
                try:
                    status = process.wait()
                except KeyboardInterrupt:  # the terminal interrupts it as well: it removes what it has partly written
                    try:
                        status = process.wait(_HEARS_IT_SECONDS)
                    except subprocess.TimeoutExpired:
                        process.send_signal(signal.SIGINT)  # only this program was interrupted
                        status = process.wait()
                except _Terminated:
                    process.send_signal(signal.SIGINT)
                    try:
                        status = process.wait(_TIDIES_UP_SECONDS)
                    except (subprocess.TimeoutExpired, _Terminated):
                        process.kill()
                        status = process.wait()
            except KeyboardInterrupt:  # interrupted again
                process.kill()
                raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return status if status >= 0 else 128 - status  # the shells' convention for an exit by a signal


class _Terminated(Exception):
    """This program is to end, together with the one that it runs."""


def bench(context: typer.Context) -> None:
    """Benchmark the trainer on this machine; see `boost bench --help`."""
    raise typer.Exit(run_trainer("boost_core.bench", context.args))


def data(context: typer.Context) -> None:
    """Tokenize documents; see `boost data tokenize --help`."""
    raise typer.Exit(run_trainer("boost_core.data", context.args))


_CONFIG_HELP = "A configuration of nanotron or of BOOST's fork of it."


def import_configuration(
    config: Annotated[Path, Argument(metavar="CONFIG.YAML", help=_CONFIG_HELP)],
    out: Annotated[Path | None, Option(help="File to write the job to (default: standard output).")] = None,
) -> None:
    """Convert another trainer's configuration into a job file; list what was not converted or is still to be set."""
    if out is not None and out.exists():
        raise BadInput(f"{out} exists; give --out a new file")
    try:
        imported = import_config(config)
        # It is valid but for the fields still to be set.
        JobSpec.model_validate({section: fields for section, fields in imported.job.items() if section != "data"})
    except ValidationError as error:
        raise BadInput(*(f"{fault.field}: {fault.message}" for fault in job_errors(error.errors()))) from error
    except ValueError as error:
        raise BadInput(*str(error).splitlines()) from error
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
    settings, console = read_settings(), Terminal()
    if not EXAMPLE.exists():
        raise BadInput(f"{EXAMPLE} is not under {Path.cwd()}; run this in the root of the repository")
    spec = read_job(EXAMPLE)
    log = settings.home / "demo.log"
    try:
        with _service(log) as (process, url), Client(url) as client:
            with console.status("starting the service"):
                deadline = time.monotonic() + _START_SECONDS
                while True:
                    with suppress(httpx.TransportError):
                        if httpx.get(f"{url}/readyz", trust_env=False).is_success:
                            break
                    if process.poll() is not None:
                        raise Failed(f"the service ended with exit status {process.returncode}")
                    if time.monotonic() > deadline:
                        raise Failed(f"the service was not ready after {_START_SECONDS:.0f} s")
                    time.sleep(0.2)

            job_id = client.submit(spec).id
            console.say(f"submitted {EXAMPLE} as {job_id}")
            try:
                record = follow(client, job_id, console)
            except BaseException:  # the next demo would have to wait for it
                with suppress(ServiceUnreachable, ApiError):
                    client.cancel(job_id)
                raise
            reports = [report_of(event) for event in client.events(job_id, follow=False)]
    except (Failed, ServiceUnreachable) as error:
        console.say(f"{error}\nlast lines of {log}:", style="red")
        say_raw("\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]))
        raise typer.Exit(ExitStatus.FAILED) from None

    steps = [report for report in reports if isinstance(report, StepReport)]
    evaluations = [report for report in reports if isinstance(report, EvaluationReport)]
    lines = [""]
    status = ExitStatus.FAILED
    if record.state is not JobState.SUCCEEDED or not steps or not evaluations or record.checkpoint is None:
        lines.append(f"the job is {record.state}: {record.message}; the service's log is {log}")
    else:
        last = evaluations[-1]
        lines += [
            f"checkpoint     {record.checkpoint.url}",
            f"training loss  {steps[0].loss:.3f} → {steps[-1].loss:.3f} nats/token in {steps[-1].steps} steps",
            f"validation loss  {last.loss:.3f} nats/token; unigram entropy {last.unigram_entropy:.3f}",
        ]
        if last.loss >= last.unigram_entropy:
            lines.append("the model learned no more than byte frequencies: the demo failed")
        else:
            status, boost = ExitStatus.OK, Path(sys.argv[0])  # as the user can call this program from here
            if boost.name != "boost" or shutil.which("boost") == str(boost):
                boost = Path("boost")
            elif boost.is_relative_to(Path.cwd()):
                boost = boost.relative_to(Path.cwd())
            commands = "serve --no-auth", f"submit {EXAMPLE} --follow", "ls"
            lines += ["\nTry next:", *(f"  {boost} {command}" for command in commands)]
    for line in lines:
        console.say(line)
    raise typer.Exit(status)


def migrate() -> None:
    """Migrate the database at BOOST_DATABASE_URL to this version. `boost serve` also does this when it starts."""
    # Imported here because few commands need SQL.
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    from service.jobs.database import in_words
    from service.jobs.database import migrate as bring_up_to_date

    settings = read_settings()
    try:
        place = make_url(settings.database_url).render_as_string(hide_password=True)
        bring_up_to_date(settings.database_url)
    except (ArgumentError, ValueError) as error:  # ValueError: of the port
        raise BadInput(f"BOOST_DATABASE_URL: {error}") from error
    except (OSError, SQLAlchemyError) as error:
        raise Failed(f"the database {place} could not be migrated: {in_words(error)}") from error
    say(f"the database {place} is up to date")
