"""Measurements of this machine for the planner: ``python -m boost_core.bench --help``."""

import argparse
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from boost_core.bench.comm import comm_rows, levels, measured_link, symmetric_rows
from boost_core.bench.profile import measure, measure_job
from boost_core.bench.rank import RunShape
from boost_core.bench.results import NO_GPU, Row, table
from boost_core.config import load_job
from boost_core.config.base import hear_interrupts, in_lines
from boost_core.config.model import PRESETS
from boost_core.plan.machine import MeasuredLink, MeasuredProfile
from boost_core.terminal import columns_here, print_lines

_FIELDS = {"node": "link", "between nodes": "between_nodes"}  # of ``MeasuredProfile``, by level


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns 0 on success, 1 if a step diverges, 2 if it cannot be measured."""
    hear_interrupts()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if options.benchmark == "comm":
            if dist.is_torchelastic_launched():
                return _comm(options, device)
            gpus = torch.cuda.device_count()
            ranks = options.ranks or max(2, gpus)
            if 0 < gpus < ranks:
                remedy = "give --ranks no more than there are GPUs, or " if gpus > 1 else ""
                raise ValueError(
                    f"{ranks} ranks need a GPU each, and this machine has {gpus}: NCCL does not connect ranks of one "
                    f"GPU; {remedy}run it where there are {'more' if gpus > 1 else 'two or more'}"
                )
            _check_comm(options, ranks)  # in one line, before ranks that would each say it
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            return subprocess.run([*launcher, "-m", "boost_core.bench", *arguments]).returncode
        try_to_write(options.out)
        if options.benchmark == "job":
            job = load_job(options.job)
            if job.resources.gpus_per_worker:
                raise ValueError(f"{job.name} is for GPUs, of which boost bench profile measures one")
            # As many at once as train together here: they share the memory's bandwidth, and the slowest is waited for.
            together = min(job.parallelism.world_size, int((os.cpu_count() or 1) / job.resources.cpus_per_worker)) or 1
            with ProcessPoolExecutor(together, multiprocessing.get_context("spawn")) as processes:
                slowest = max(processes.map(measure_job, [job] * together), key=lambda measured: measured.correction)
            options.out.write_text(slowest.model_dump_json(indent=2) + "\n", encoding="utf-8")
            return 0
        shape = RunShape(options.model, options.tp, options.micro_batch, options.sequence)
        measured = measure(shape, device, options.repeats)
        options.out.write_text(measured.model_dump_json(indent=2) + "\n", encoding="utf-8")
        for name, value in measured.model_dump(exclude={"cases", *_FIELDS.values()}).items():
            print_lines(f"{name:<16}{value:.4g}" if isinstance(value, float) else f"{name:<16}{value}")
        print_lines("\n".join(map(str, measured.cases)))
        print_lines(f"written to {options.out}; use it with boost plan JOB.YAML --profile {options.out}")
    except (OSError, ValueError) as error:
        print_lines(in_lines(error), to=sys.stderr)
        return 2
    except FloatingPointError as error:
        print_lines(str(error), to=sys.stderr)
        return 1
    return 0


def _comm(options: argparse.Namespace, device: torch.device) -> int:
    if device.type == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        problem: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                _check_comm(options, dist.get_world_size())
            except (OSError, ValueError) as error:
                problem = [in_lines(error)]
        dist.broadcast_object_list(problem)  # now, not after everything has been measured
        if problem[0] is not None:
            raise ValueError(problem[0])
        links, rows = dict[str, MeasuredLink](), list[Row]()
        for level in levels(device):
            link, timed = comm_rows(level, device, options.largest << 20, options.repeats)
            rows += timed
            if options.profile is not None:
                links[_FIELDS[level.name]] = measured_link(level, device, link, options.repeats)
            if level.name == "node":
                try:
                    limits, timed = symmetric_rows(level, device, options.largest << 20, options.repeats)
                except ValueError as error:  # not available here
                    if dist.get_rank() == 0:
                        print_lines(str(error))
                    continue
                rows += timed
                if limits is not None and dist.get_rank() == 0:
                    print_lines(f"worth trying in the job file: parallelism.symmetric_memory: {limits.model_dump()}")
                if limits is not None and options.profile is not None:
                    links["link"] = links["link"].model_copy(update={"symmetric_memory": limits})
        if dist.get_rank() == 0:
            print(table(rows, columns_here()))
            if options.profile is not None:
                _add_links(options.profile, links)
            if device.type != "cuda":
                print_lines(NO_GPU)
    finally:
        dist.destroy_process_group()
    return 0


def _check_comm(options: argparse.Namespace, ranks: int) -> None:
    if ranks < 2:
        raise ValueError("one rank has no other to exchange with; start two or more")
    if options.profile is not None:
        _profile_at(options.profile)
        try_to_write(options.profile)


def try_to_write(path: Path) -> None:
    """Open a file for what is about to be measured, which is lost if that fails later; leave no empty one."""
    new = not os.path.lexists(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("ab").close()
    if new:
        path.unlink()


def _profile_at(path: Path) -> MeasuredProfile:
    if not path.is_file():
        raise ValueError(f"no profile at {path}; write one with boost bench profile --out {path}")
    return MeasuredProfile.model_validate_json(path.read_text("utf-8"))


def _add_links(path: Path, links: Mapping[str, MeasuredLink]) -> None:
    """Add measured links to a profile, by field."""
    path.write_text(_profile_at(path).model_copy(update=links).model_dump_json(indent=2) + "\n", encoding="utf-8")
    print_lines(f"added to {path}: {', '.join(links)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="boost bench", description="Benchmark the trainer on this machine.")
    commands = parser.add_subparsers(dest="benchmark", required=True)

    profile = commands.add_parser("profile", help="this device's speed at each kind of work, for boost plan")
    profile.add_argument("--model", choices=PRESETS, default="7b", help="preset whose blocks are measured")
    profile.add_argument("--tp", type=positive, default=4, help="tensor parallel ranks that share one")
    profile.add_argument("--micro-batch", type=positive, default=1)
    profile.add_argument("--sequence", type=positive, default=4096)
    profile.add_argument("--repeats", type=positive, default=20, help="repetitions of each measurement")
    profile.add_argument("--out", type=Path, default=Path("profile.json"), help="file to write")

    job = commands.add_parser("job", help="a job's own steps on this machine's CPUs for a second, for boost plan")
    job.add_argument("job", type=Path, help="the job file")
    job.add_argument("--out", type=Path, default=Path("profile.json"), help="file to write")

    comm = commands.add_parser("comm", help="collectives among live ranks of one or more nodes, fitted to α + n/β")
    comm.add_argument("--ranks", type=positive, help="ranks to start here (default: one per GPU, or torchrun's)")
    comm.add_argument("--largest", type=positive, default=256, help="largest payload in MiB")
    comm.add_argument("--profile", type=Path, help="profile to add the links to, for boost plan; on rank 0's node")

    comm.add_argument("--repeats", type=positive, default=20, help="repetitions of each measurement")
    return parser


def positive(text: str) -> int:
    """Return the number above 0 that an argument is."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
