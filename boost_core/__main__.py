"""Train without the service: ``torchrun --nproc-per-node 2 -m boost_core job.yaml``."""

import argparse
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from boost_core.config import Layout, load_job
from boost_core.config.base import in_lines
from boost_core.plan.machine import lacks_precision
from boost_core.plan.report import at, nothing_fits
from boost_core.terminal import print_lines
from boost_core.train import train
from boost_core.train.loop import ConsoleReporter


def main() -> int:
    """Run this rank's part of a job; return 0 on success, 2 for a job that cannot run as written."""
    parser = argparse.ArgumentParser(prog="python -m boost_core", description=__doc__)
    parser.add_argument("job", type=Path, help="job spec, YAML or JSON")
    parser.add_argument("--reports", type=Path, help="also append every report to this file, one JSON object per line")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        spec = load_job(arguments.job)
        if spec.checkpoint.url is None:
            checkpoint = spec.checkpoint.model_copy(update={"url": f"checkpoints/{spec.name}"})
            spec = spec.model_copy(update={"checkpoint": checkpoint})
        if problem := lacks_precision(spec) or nothing_fits(spec):
            raise ValueError(problem)
        # The process group is initialised from the variables that torchrun sets.
        if not dist.is_torchelastic_launched():
            size = spec.parallelism.world_size
            raise ValueError(f"start it with torchrun: torchrun --nproc-per-node {size} -m boost_core job.yaml")
        if spec.resources.gpus_per_worker:
            local_rank = dist.get_node_local_rank()
            torch.cuda.set_device(local_rank)
            dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
        else:
            dist.init_process_group("gloo")
        train(at(spec, Layout.of(spec.parallelism)), ConsoleReporter(arguments.reports))
    except (OSError, ValueError) as error:
        print_lines(in_lines(error), to=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
