"""Runs what needs torch or reads much data in a process of its own, so that this program need not load it."""

import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress

from service.cli.failures import Failed
from service.trainer import REMEDY, has_trainer

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
        raise Failed(
            f"this needs the trainer, which is not installed here; {REMEDY}, or run this command where it is installed"
        )
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with subprocess.Popen([sys.executable, "-c", _RUN_MODULE, module, *arguments]) as process:
            try:
                status = _end_of(process)
            except KeyboardInterrupt:  # interrupted again
                process.kill()
                raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return status if status >= 0 else 128 - status  # the shells' convention for an exit by a signal


class _Terminated(Exception):
    """This program is to end, together with the one that it runs."""


def _terminate(*_: object) -> None:
    raise _Terminated


def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for a program that the terminal interrupts as well: it removes what it has partly written."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_HEARS_IT_SECONDS)
        process.send_signal(signal.SIGINT)  # only this program was interrupted
        return process.wait()
    except _Terminated:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired, _Terminated):
            return process.wait(_TIDIES_UP_SECONDS)
        process.kill()
        return process.wait()
