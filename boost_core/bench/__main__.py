"""Benchmarks of the trainer: ``python -m boost_core.bench --help``."""

import argparse
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from boost_core.bench.comm import comm_rows, levels, measured_link, symmetric_rows
from boost_core.bench.kernels import AWKWARD, Draw, Sizes, cases, disagreements, kernel_rows
from boost_core.bench.profile import measure, measure_job
from boost_core.bench.rank import RunShape, rank_rows
from boost_core.bench.results import (
    NO_GPU,
    PUBLISHED_SIZES,
    RESULTS,
    VARIANTS,
    Environment,
    Row,
    append,
    matrix_rate,
    memory_bandwidth,
    table,
)
from boost_core.config import load_job
from boost_core.config.base import hear_interrupts, in_lines
from boost_core.config.model import PRESETS
from boost_core.hardware import LINKS
from boost_core.kernels.fp8_product import unavailable
from boost_core.kernels.launch import Implementation
from boost_core.plan.machine import MeasuredLink, MeasuredProfile
from boost_core.terminal import columns_here, print_lines

_FIELDS = {"node": "link", "between nodes": "between_nodes"}  # of ``MeasuredProfile``, by level


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns 0 on success, 1 for wrong results, 2 if it cannot be measured."""
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
        _try_to_write(options.out if "out" in options else options.results)
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
        if wrong := _wrong(device):
            print_lines("\n".join(["Nothing was timed, because results are wrong:", *wrong]), to=sys.stderr)
            return 1
        {"rank": _rank, "kernels": _kernels, "profile": _profile}[options.benchmark](options, device)
        if device.type != "cuda" and options.benchmark != "profile":
            print_lines(NO_GPU)
    except (OSError, ValueError) as error:
        print_lines(in_lines(error), to=sys.stderr)
        return 2
    except FloatingPointError as error:
        print_lines(str(error), to=sys.stderr)
        return 1
    return 0


def _wrong(device: torch.device) -> list[str]:
    """Return where the operations, as run by this device, disagree with the reference."""
    implementation: Implementation = "triton" if device.type == "cuda" else "naive"
    return [
        f"{dtype}: {problem}"
        for sizes in AWKWARD
        for dtype in (torch.float32, torch.bfloat16)
        for case in cases(sizes, Draw(dtype, device))
        for problem in disagreements(case, implementation)
    ]


def _rank(options: argparse.Namespace, device: torch.device) -> None:
    if options.tp and not options.model:
        raise ValueError("--tp is for one model, and each of BOOST's runs has its own; give --model, or leave --tp out")
    variants = [
        variant
        for variant in VARIANTS
        if options.family in (None, variant.family)
        and options.strategy in (None, variant.parallelism["strategy"])
        and (device.type == "cuda" or variant.kernels is None)  # without a GPU everything is eager
        and not (variant.fp8 and unavailable(device))
    ]
    if not variants:
        raise ValueError(f"no variant is of family {options.family} under {options.strategy}; leave one of the two out")
    rate = matrix_rate(torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    environment = Environment.of(device)
    sizes = {options.model: options.tp or PUBLISHED_SIZES.get(options.model, 1)} if options.model else PUBLISHED_SIZES
    for (model, ranks), sequences in product(sizes.items(), options.micro_batch):
        shape = RunShape(model, ranks, sequences, options.sequence, options.layers)
        results: list[Row] = []
        for variant in variants:
            if variant.fp8:
                try:
                    shape.job(variant, device)
                except ValueError as error:  # the model's sizes do not fit
                    print_lines(f"{shape}: {variant.name} is skipped: {in_lines(error)}")
                    continue
            rows = rank_rows(shape, variant, device, options.repeats, rate, options.interconnect)
            append(options.results, environment, rows)
            results += rows
        print(table(results, columns_here()), flush=True)
    print_lines(
        f"{environment.device}, {rate / 1e12:.3g} TFLOP/s in a large matrix product, the reference for MFU and HFU."
    )
    print_lines("Steps exclude communication. Its time, with none of it hidden, is modelled for")
    for name in options.interconnect:
        print_lines(f"  {name}: {LINKS[name].description}")


def _kernels(options: argparse.Namespace, device: torch.device) -> None:
    tp = options.tp or PUBLISHED_SIZES.get(options.model, 1)
    shape = RunShape(options.model, tp, options.micro_batch, options.sequence)
    model = shape.job(next(variant for variant in VARIANTS if variant.name == "cola, btp"), device).model
    sizes = Sizes.of_model(model, tp, options.micro_batch, options.sequence)
    bandwidth, environment = memory_bandwidth(device), Environment.of(device)
    rows: list[Row] = []
    for case in cases(sizes, Draw(torch.bfloat16 if device.type == "cuda" else torch.float32, device)):
        rows += kernel_rows(case, device, bandwidth, options.repeats)
    print(table(rows, columns_here()))
    append(options.results, environment, rows)
    print_lines(f"{environment.device}, {bandwidth / 1e9:.4g} GB/s in a large copy, which is the roofline.")


def _profile(options: argparse.Namespace, device: torch.device) -> None:
    shape = RunShape(options.model, options.tp, options.micro_batch, options.sequence)
    measured = measure(shape, device, options.repeats)
    options.out.write_text(measured.model_dump_json(indent=2) + "\n", encoding="utf-8")
    for name, value in measured.model_dump(exclude={"cases", *_FIELDS.values()}).items():
        print_lines(f"{name:<16}{value:.4g}" if isinstance(value, float) else f"{name:<16}{value}")
    print_lines("\n".join(map(str, measured.cases)))
    print_lines(f"written to {options.out}; use it with boost plan JOB.YAML --profile {options.out}")


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
            append(options.results, Environment.of(device), rows)
            if device.type != "cuda":
                print_lines(NO_GPU)
    finally:
        dist.destroy_process_group()
    return 0


def _check_comm(options: argparse.Namespace, ranks: int) -> None:
    if ranks < 2:
        raise ValueError("one rank has no other to exchange with; start two or more")
    _try_to_write(options.results)
    if options.profile is not None:
        _profile_at(options.profile)
        _try_to_write(options.profile)


def _try_to_write(path: Path) -> None:
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

    rank = commands.add_parser("rank", help="the whole step of one rank, without the other ranks' work")
    rank.add_argument("--model", choices=PRESETS, help="a preset (default: all in BOOST's systems runs)")
    rank.add_argument("--tp", type=_count, help="tensor parallel ranks (default: as in BOOST's systems runs)")
    rank.add_argument("--family", choices=sorted({variant.family for variant in VARIANTS}))
    rank.add_argument("--strategy", choices=sorted({variant.parallelism["strategy"] for variant in VARIANTS}))
    sequences = "sequences per micro-batch; give several to compare them"
    rank.add_argument("--micro-batch", type=_count, nargs="+", default=[1, 4], help=sequences)
    rank.add_argument("--sequence", type=_count, default=4096, help="tokens per sequence")
    rank.add_argument("--layers", type=_count, help="decoder blocks (default: the preset's)")
    links = list(LINKS)
    among = f"interconnects to model communication on, of {', '.join(links)} (default: all)"
    rank.add_argument("--interconnect", choices=links, nargs="+", default=links, metavar="LINK", help=among)

    kernels = commands.add_parser("kernels", help="each kernel against plain torch, torch.compile and the roofline")
    kernels.add_argument("--model", choices=PRESETS, default="7b")
    kernels.add_argument("--tp", type=_count, help="tensor parallel ranks (default: as in BOOST's systems runs)")
    kernels.add_argument("--micro-batch", type=_count, default=4)
    kernels.add_argument("--sequence", type=_count, default=4096)

    profile = commands.add_parser("profile", help="this device's speed at each kind of work, for boost plan")
    profile.add_argument("--model", choices=PRESETS, default="7b", help="preset whose blocks are measured")
    profile.add_argument("--tp", type=_count, default=4, help="tensor parallel ranks that share one")
    profile.add_argument("--micro-batch", type=_count, default=1)
    profile.add_argument("--sequence", type=_count, default=4096)
    profile.add_argument("--repeats", type=_count, default=20, help="repetitions of each measurement")
    profile.add_argument("--out", type=Path, default=Path("profile.json"), help="file to write")

    job = commands.add_parser("job", help="a job's own steps on this machine's CPUs for a second, for boost plan")
    job.add_argument("job", type=Path, help="the job file")
    job.add_argument("--out", type=Path, default=Path("profile.json"), help="file to write")

    comm = commands.add_parser("comm", help="collectives among live ranks of one or more nodes, fitted to α + n/β")
    comm.add_argument("--ranks", type=_count, help="ranks to start here (default: one per GPU, or torchrun's)")
    comm.add_argument("--largest", type=_count, default=256, help="largest payload in MiB")
    comm.add_argument("--profile", type=Path, help="profile to add the links to, for boost plan; on rank 0's node")

    for command in (rank, kernels, comm):
        command.add_argument("--repeats", type=_count, default=20, help="repetitions of each measurement")
        command.add_argument("--results", type=Path, default=RESULTS, help="file to append to")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
