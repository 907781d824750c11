"""What a rank takes until it is up: as a fork of its node's server, and by itself.

``python -m tests.benchmarks.rank_start`` writes docs/figures/rank_start.md; it takes two minutes on two cores. The
ranks are those of gangs, on a Ray of their own, and its server is up before. Time is from the order to a rank's answer;
CPU is what all processes have worked that were started for it; memory is what is the rank's alone.
"""

import argparse
import logging
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import psutil
import ray

from service.gang.assignment import GangContext, Message
from service.gang.ray.fork_server import PYTHON_OF_FORKS
from service.gang.ray_train.rank_worker import CALLS_AT_ONCE, RankWorker
from service.gang.status import JobTag
from service.logs import LogFormat
from service.security.access import Access
from tests.benchmarks.figures import FIGURES, write_table

AT_ONCE = 4
CASES = [(count, forks) for count in (1, AT_ONCE) for forks in (False, True)]
HEADER = ["started", "how", "time", "CPU per rank", "memory per rank"]


class Gang:
    """In the place of a supervisor."""

    def push(self, message: Message) -> None:
        """Take what a rank reports: nothing."""

    def start(self, count: int, forks: bool) -> list[float]:
        """Start ranks at once: seconds until all are up, and CPU seconds and MiB of one."""
        context = GangContext(JobTag("job", 1, "", "", ""), Access(), range(0), LogFormat.TEXT)
        supervisor: Any = ray.get_runtime_context().current_actor
        rank: Any = ray.remote(RankWorker)
        options = {"runtime_env": {"py_executable": PYTHON_OF_FORKS}} if forks else {}
        started = rank.options(max_concurrency=CALLS_AT_ONCE, **options)
        began = time.monotonic()
        ranks = [started.remote("rank", number, supervisor, context) for number in range(count)]
        places = ray.get([each.place.remote() for each in ranks])
        seconds = time.monotonic() - began
        processes = [psutil.Process(place.pid) for place in places]
        worked = sum(map(_worked, {*processes, *_clients()})) / count
        own = statistics.mean(process.memory_full_info().uss for process in processes)
        for each in ranks:
            ray.kill(each)
        psutil.wait_procs(processes)
        return [seconds, worked, own / 2**20]


def _worked(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _clients() -> list[psutil.Process]:
    children = psutil.Process(int(os.environ["RAY_RAYLET_PID"])).children()
    return [child for child in children if any("fork_client" in argument for argument in child.cmdline())]


def main() -> None:
    """Measure the cases in turns, so that all have the same machine, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    ray.init("local", num_cpus=AT_ONCE, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    gang: Any = ray.remote(Gang).options(num_cpus=0).remote()
    ray.get(gang.start.remote(1, True))
    taken = [[ray.get(gang.start.remote(*case)) for case in CASES] for _ in range(rounds)]
    ray.shutdown()
    rows = [_row(count, forks, case) for (count, forks), case in zip(CASES, zip(*taken, strict=True), strict=True)]
    write_table(FIGURES / "rank_start.md", HEADER, rows)


def _row(count: int, forks: bool, taken: Sequence[Sequence[float]]) -> list[str]:
    seconds, worked, own = (sorted(values) for values in zip(*taken, strict=True))
    return [
        "a rank" if count == 1 else f"{count} ranks at once",
        "forked" if forks else "by itself",
        f"{statistics.median(seconds):.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f})",
        f"{statistics.median(worked):.2f} s",
        f"{statistics.median(own):.0f} MiB",
    ]


if __name__ == "__main__":
    main()
