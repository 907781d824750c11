"""Writes docs/figures/gpu.md from what the kit has brought back: ``python -m tests.gpu.page [figures.jsonl]``.

The figures of a run are appended to tests/benchmarks/gpu.jsonl first. The page has the newest of each, for each kind of
GPU; what has not been measured is an empty cell. It knows the stages' cases by name and imports none of them.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/figures/gpu.md"
STORED = ROOT / "tests/benchmarks/gpu.jsonl"
INTRODUCTION = """\
# On a GPU

What the product claims of a GPU, and what has been measured. An empty cell has not been measured yet. To fill them,
with a GPU machine that has Python 3.12, torch's GPU build and NumPy, and needs no network:

```sh
make gpu-kit                                  # prepares .gpu; GPU_PYTHON=3.11 for a machine with another Python
scp -r .gpu gpu-machine: && ssh gpu-machine sh .gpu/run.sh    # eight minutes at most; kernels and fp8: name them
scp gpu-machine:gpu-figures/figures.jsonl . && python -m tests.gpu.page figures.jsonl
```
"""

Line = dict[str, Any]
Figures = Mapping[tuple[str, str, str], Line]  # by stage, case and quantity


@dataclass(frozen=True)
class Table:
    """A table of the page.

    Attributes:
        claim: What it is to show.
        stage: Whose figures it has.
        cases: A row each; all that there are if none are named.
        quantities: A column each; all that there are if none are named.
    """

    claim: str
    stage: str
    cases: tuple[str, ...] = ()
    quantities: tuple[str, ...] = ()


_STEP = ("step", "step, not captured", "throughput", "MFU", "peak memory", "launches")
_VARIANTS = (
    "cola, btp", "cola, as its 7B config", "cola, vanilla", "dense, fullrank", "cola, btp, fp8",
    "cola, btp, recompute latent",
)  # fmt: skip
TABLES = (
    Table("The device.", "smoke", ("facts",), ("memory", "bf16 matrix product", "copy", "driver")),
    Table("Every kernel agrees with its float64 reference.", "smoke", (), ("operations checked", "disagreements")),
    Table("Loss and gradients of whole models agree with the references, as relative errors.", "models"),
    Table(
        "Forty steps in bf16 stay as near to fp32 on a CPU as bf16 on a CPU does (twice at most), captured and not.",
        "train", ("captured", "not captured"),
        ("last loss", "largest difference to fp32 on a CPU", "as bf16 on a CPU differs"),
    ),
    Table(
        "One GPU, 1B, 4 × 4096 tokens: a low-rank step takes less time than a dense one (published: about 1.6 times "
        "less), and its memory is as planned.",
        "single", ("dense", "svd", "cola", "lax", "cola, recompute latent"),
        ("step", "step, not captured", "throughput", "MFU", "peak memory", "peak memory, planned", "launches"),
    ),
    Table(
        "One rank of four, 7B, 4096 tokens a sequence, without the exchanges: our step takes less time than the "
        "published code's, and than vanilla pairs and full rank.",
        "rank7b", tuple(f"{name}, × {count}" for count in (1, 4) for name in _VARIANTS), _STEP,
    ),
    Table("8-bit products pay, 7B, tp 4, 8 × 4096 tokens.", "fp8", ("cola, btp, × 8", "cola, btp, fp8, × 8"), _STEP),
    Table("Each kernel is faster than plain torch and torch.compile, and near the roofline.", "kernels"),
)  # fmt: skip


def main() -> None:
    """Store the figures of a run, if one is named, and write the page.

    Raises:
        SystemExit: None of them was measured on a GPU.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.page", description=__doc__)
    parser.add_argument(
        "figures", type=Path, nargs="?", help="a figures.jsonl; default: none, only the page is written"
    )
    options = parser.parse_args()
    if options.figures is not None:
        lines = [line for line in read(options.figures) if line["gpu"]]
        if not lines:
            sys.exit(f"{options.figures} has no figure that was measured on a GPU")
        with STORED.open("a") as stored:
            stored.writelines(json.dumps(line) + "\n" for line in lines)
    PAGE.write_text(page(read(STORED)))


def read(path: Path) -> list[Line]:
    """Read figures, a line of JSON each; none if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def page(lines: Sequence[Line]) -> str:
    """Write the page for the figures of all runs, oldest first."""
    by_device: dict[str, dict[tuple[str, str, str], Line]] = {}
    for line in lines:
        by_device.setdefault(line["device"], {})[line["stage"], line["case"], line["quantity"]] = line
    sections = [INTRODUCTION]
    for device, figures in (by_device or {"No GPU yet": {}}).items():
        sections.append(f"## {device}\n")
        sections += [f"{table.claim}\n\n{_markdown(table, figures)}\n" for table in TABLES]
        if runs := sorted({f"{line['commit']} ({line['versions']})" for line in figures.values()}):
            sections.append(f"Measured at commit {', '.join(runs)}.\n")
    return "\n".join(sections)


def _markdown(table: Table, figures: Figures) -> str:
    of_stage = {(case, quantity): line for (stage, case, quantity), line in figures.items() if stage == table.stage}
    cases = table.cases or tuple(dict.fromkeys(case for case, _ in of_stage)) or ("",)
    quantities = table.quantities or tuple(dict.fromkeys(quantity for _, quantity in of_stage)) or ("",)
    rows = [(table.stage, *quantities), ("---",) * (1 + len(quantities))]
    for case in cases:
        if any((case, quantity) in of_stage for quantity in quantities) or case in (*table.cases, ""):
            rows.append(
                (case, *(cell(of_stage[case, each]) if (case, each) in of_stage else "" for each in quantities))
            )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def cell(line: Line) -> str:
    """A figure with its unit, to four digits."""
    value = line["value"]
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{text} {line['unit']}".rstrip()


if __name__ == "__main__":
    main()
