"""What needs torch or reads much data runs in a process of its own, which this program does not load."""

import subprocess
import sys
from collections.abc import Iterable

from service.cli.failures import Failed
from service.trainer import REMEDY, has_trainer

# As python -m does, but that an interrupt while modules are loaded ends it without a traceback.
_RUN_MODULE = (
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def run_trainer(module: str, arguments: Iterable[str]) -> int:
    """Run one of the trainer's programs.

    Args:
        module: Its module, such as ``boost_core.bench``.
        arguments: Its command line.

    Returns:
        Its exit status.

    Raises:
        Failed: The trainer is not installed here.
    """
    if not has_trainer():
        raise Failed(f"this needs the trainer, which is not installed here; {REMEDY}, or run it where that is")
    with subprocess.Popen([sys.executable, "-c", _RUN_MODULE, module, *arguments]) as process:
        try:
            status = _end_of(process)
        except KeyboardInterrupt:  # once more
            process.kill()
            raise
    return status if status >= 0 else 128 - status  # as shells say which signal has ended it


def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for a program that the terminal interrupts, too: it removes what it has written in part."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        return process.wait()
