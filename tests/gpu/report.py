"""What a run on a GPU has found, for people: tables in Markdown, and pictures."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from boost_core.bench.results import Environment, Row, table
from tests.benchmarks.figures import draw_lines
from tests.gpu.stages import StageEnd

Curves = Mapping[str, Sequence[float]]
# Rounding to bf16 goes another way on another device: twice as far from fp32 is still that, a fault is orders beyond.
FACTOR = 2.0


def write_report(out: Path, environment: Environment, ends: Sequence[StageEnd]) -> bool:
    """Write ``report.md`` and the pictures beside it.

    Returns:
        Whether all ended well, and the losses are as they should be.
    """
    parts, well = [_stages(ends)], not any(end.problem for end in ends)
    if (out / "losses.json").exists():
        curves = json.loads((out / "losses.json").read_text())
        draw_lines(out / "losses.svg", [("loss, nats a token", curves, False)], "optimizer step")
        text, right = losses(curves)
        parts.append(text)
        well &= right
    if (out / "results.csv").exists():
        parts += [_figures(benchmark, rows) for benchmark, rows in _read(out / "results.csv").items()]
    parts.append(
        f"Measured at commit {environment.commit} on {environment.device}, torch {environment.torch_version}, Triton "
        f"{environment.triton_version or 'none'}."
    )
    (out / "report.md").write_text("\n\n".join(parts) + "\n")
    return well


def losses(curves: Curves) -> tuple[str, bool]:
    """A table of how far each curve is from the CPU's in fp32, and whether the GPU's are as near as the CPU's is."""
    exact = curves["CPU, fp32"]
    off = {name: _largest_difference(curve, exact) for name, curve in curves.items()}
    lines = ["| curve | last loss | largest relative difference to CPU, fp32 |", "| --- | --- | --- |"]
    lines += [f"| {name} | {curve[-1]:.5f} | {off[name]:.1e} |" for name, curve in curves.items()]
    if "GPU, bf16" not in curves:
        return "\n".join([*lines, "", "There is no GPU."]), True
    captured, plain = curves["GPU, bf16"], curves["GPU, bf16, not captured"]
    right = max(off[name] for name in curves if name.startswith("GPU")) <= FACTOR * off["CPU, bf16"]
    verdict = f"The GPU's are {'within' if right else '**not within**'} {FACTOR:g} times what bf16 makes on the CPU."
    between = f"Steps as CUDA graphs are {_largest_difference(captured, plain):.1e} from the same kernel by kernel."
    return "\n".join([*lines, "", verdict, between]), right


def _largest_difference(curve: Sequence[float], exact: Sequence[float]) -> float:
    if len(curve) != len(exact):
        return float("inf")
    return max(abs(mine - theirs) / theirs for mine, theirs in zip(curve, exact, strict=True))


def _stages(ends: Sequence[StageEnd]) -> str:
    lines = ["| stage | seconds | |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {end.name} | {end.seconds:.0f} | {end.problem or 'well'} |" for end in ends)])


def _read(path: Path) -> dict[str, list[Row]]:
    """The rows of a file of results by benchmark."""
    rows: dict[str, list[Row]] = {}
    with path.open(newline="", encoding="utf-8") as stream:
        for line in csv.DictReader(stream):
            values = {
                each.name: float(line[each.name]) if each.type is float else line[each.name] for each in fields(Row)
            }
            rows.setdefault(line["benchmark"], []).append(Row(**values))  # type: ignore[arg-type]
    return rows


def _figures(benchmark: str, rows: Sequence[Row]) -> str:
    return f"`{benchmark}`\n\n```\n{table(rows)}\n```"
