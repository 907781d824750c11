"""What one GPU shows in half an hour: ``python -m tests.gpu OUT [STAGE …]``."""

import argparse
import sys
from pathlib import Path

import torch

from boost_core.bench.results import Environment
from tests.gpu.report import write_report
from tests.gpu.stages import STAGES, StageEnd, run, write_curves


def main() -> int:
    """Run stages, and write a report after each; 0 if all has been found right, 1 otherwise."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for results.csv, report.md, pictures and logs")
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"of {', '.join(names)} (default: all, in this order)"
    )
    parser.add_argument("--curves", action="store_true", help=argparse.SUPPRESS)  # what the stage of losses runs
    given = parser.parse_args()
    if unknown := [name for name in given.stages if name not in names]:
        parser.error(f"there is no stage {unknown[0]!r}; use {', '.join(names)}")
    given.out.mkdir(parents=True, exist_ok=True)
    if given.curves:
        write_curves(given.out, torch.cuda.is_available())
        return 0
    environment = Environment.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    ends: list[StageEnd] = []
    well = True
    for stage in STAGES:
        if not given.stages or stage.name in given.stages:
            ends.append(run(stage, given.out))
            well = write_report(given.out, environment, ends)  # the machine may be taken away before the next
            print(
                f"{stage.name}: {ends[-1].seconds:.0f} s{', ' if ends[-1].problem else ''}{ends[-1].problem}",
                flush=True,
            )
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
