"""What one GPU shows in eight minutes: ``python -m tests.gpu OUT [STAGE …]``; two files come out of it.

Each stage is a process with a time limit, and each of its cases, too; a figure is in OUT/figures.jsonl as soon as it is
known, and all output in OUT/log.txt. A case that fails or hangs is recorded and the next one runs, in a new process
where the fault has spoiled the GPU's context. The last thing printed is a table.
"""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tests.gpu.page import cell

# Seconds by stage, in the order of their worth. Those that run by default take eight minutes at most.
LIMITS = {"smoke": 75, "single": 90, "rank7b": 140, "train": 50, "models": 50, "profile": 45, "kernels": 180, "fp8": 60}
DEFAULT = ["smoke", "single", "rank7b", "train", "models", "profile"]
CASE_LIMIT = 60.0
SPOILED = 3  # exit status of a stage whose failure is recorded, but which cannot use the device any more
SHUTDOWN_SECONDS = 2.0  # of the limit, for ending a process and starting the next


@dataclass(frozen=True)
class Limits:
    """Seconds that a case may take, and until when the stage may run on the clock of ``time.monotonic``."""

    case: float
    stage_end: float


class Output:
    """The two files of a run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log: TextIO = (folder / "log.txt").open("a")
        self._figures = (folder / "figures.jsonl").open("a")
        self.environment: dict[str, Any] = {
            "gpu": False,
            "device": "unknown",
            "commit": "unknown",
            "versions": "unknown",
        }
        self.lines: list[dict[str, Any]] = []

    def write(self, stage: str, case: str, quantity: str, value: object, unit: str = "") -> None:
        """Append a figure, with what it was measured on."""
        figure = {"stage": stage, "case": case, "quantity": quantity, "value": value, "unit": unit}
        self.lines.append(figure | self.environment)
        print(json.dumps(self.lines[-1]), file=self._figures, flush=True)


def main() -> int:
    """Run stages; 0 if no case has failed, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for figures.jsonl and log.txt")
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"of {', '.join(LIMITS)} (default: {' '.join(DEFAULT)})"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float(sum(LIMITS[name] for name in DEFAULT)),
        help="limit of all stages together (default: %(default)g)",
    )
    parser.add_argument(
        "--kit", type=Path, default=Path(__file__).parents[3], help="the prepared folder (default: %(default)s)"
    )
    parser.add_argument(
        "--no-values",
        action="store_true",
        help="the GPU computes nothing (docs/mock-gpu.md): compare and judge no numbers",
    )
    options = parser.parse_args()
    if unknown := [name for name in options.stages if name not in LIMITS]:
        parser.error(f"there is no stage {unknown[0]!r}; use {', '.join(LIMITS)}")
    started, output = time.monotonic(), Output(options.out)
    end = started
    for stage in options.stages or DEFAULT:
        # What a stage leaves over is for those after it. A GPU that computes nothing has the host's time.
        end = min(end + (options.seconds if options.no_values else LIMITS[stage]), started + options.seconds)
        command = [sys.executable, "-m", "tests.gpu.stages", stage, "--kit", str(options.kit)]
        command += ["--no-values"] * options.no_values
        run_stage(command, stage, output, Limits(CASE_LIMIT, end))
        print(f"{stage}: until second {time.monotonic() - started:.0f}", flush=True)
    print(table(output.lines))
    return int(any(line["quantity"] == "failed" for line in output.lines))


def run_stage(command: Sequence[str], stage: str, output: Output, limits: Limits) -> None:
    """Run a stage's cases; after a fault that ends its process go on with the next case, in a new one.

    Args:
        command: Starts the stage. It gets ``--messages FD``, and in a later process ``--cases NAME …``, what is left.
        stage: Its name.
        output: Where its figures and its log go.
        limits: Of a case, and of the stage.
    """
    waiting: list[str] | None = None
    while waiting is None or waiting:
        waiting = _run_process(command, stage, output, limits, waiting)


def _run_process(
    command: Sequence[str], stage: str, output: Output, limits: Limits, wanted: list[str] | None
) -> list[str]:
    """Run one process of a stage until it ends or is ended; returns the cases that are yet to run."""
    receive, send = os.pipe()
    arguments = [*command, "--messages", str(send), *(["--cases", *wanted] if wanted else [])]
    process = subprocess.Popen(arguments, stdout=output.log, stderr=output.log, pass_fds=[send], start_new_session=True)
    os.close(send)
    waiting, current = wanted or [], "start"
    stage_end = case_end = limits.stage_end - SHUTDOWN_SECONDS
    messages = _Messages(receive)
    while (message := messages.next(min(case_end, stage_end))) is not None:
        match message:
            case {"cases": waiting, "environment": environment}:
                output.environment = environment
            case {"begin": current}:
                waiting, case_end = waiting[1:], time.monotonic() + limits.case
            case {"figure": figure}:
                output.write(stage, current, *figure)
            case {"say": text}:
                print(text, flush=True)
    messages.close()
    timed_out = time.monotonic() >= min(case_end, stage_end)
    try:
        status = process.wait(0 if timed_out else SHUTDOWN_SECONDS)
    except subprocess.TimeoutExpired:  # also one that has sent its last message, and hangs while it ends
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status = 0
    if timed_out:
        which = "stage had left" if case_end >= stage_end else "case may"
        output.write(stage, current, "failed", f"took longer than the {which}")
    elif status not in (0, SPOILED):
        output.write(stage, current, "failed", f"exit status {status}, see log.txt")
    if current == "start" or time.monotonic() >= stage_end:  # what cannot start does not start a second time, either
        return []
    return waiting


class _Messages:
    """A process's messages, a line of JSON each."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._buffer = pipe, b""

    def next(self, deadline: float) -> dict[str, Any] | None:
        """Return the next one; ``None`` if it does not come in time, or the process has ended."""
        while b"\n" not in self._buffer:
            seconds = deadline - time.monotonic()
            if seconds <= 0 or not select.select([self._pipe], [], [], seconds)[0]:
                return None
            received = os.read(self._pipe, 1 << 16)
            if not received:
                return None
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Hear no more."""
        os.close(self._pipe)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """A line for each case with all of its figures."""
    cases = dict.fromkeys((line["stage"], line["case"]) for line in lines)
    rows = []
    for stage, case in cases:
        figures = [line for line in lines if (line["stage"], line["case"]) == (stage, case)]
        shown = ", ".join(f"{line['quantity']} {cell(line)}" for line in figures)
        rows.append(f"{stage} | {case} | {shown}"[:600])
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
