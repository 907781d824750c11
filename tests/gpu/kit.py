"""Prepares the kit: ``python -m tests.gpu.kit``; ``make gpu-kit`` calls it.

The folder has the trainer and these stages as they stand in the working tree, wheels of what the GPU machine lacks, the
curves of a CPU that its own are compared with, and ``run.sh``. The machine needs Python and torch's GPU build, which
brings Triton, and NumPy; it needs no network.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from boost_core.bench.results import Environment
from tests.gpu.stages import curve_of

ROOT = Path(__file__).parents[2]
PACKED = (
    "boost_core",
    "tests/__init__.py",
    "tests/gpu",
    *(f"tests/benchmarks/{name}.py" for name in ("__init__", "kernels", "rank")),
)
WHEELS = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "PyYAML", "tokenizers")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MEBIBYTES = 10  # at most
RUN = """\
#!/bin/sh
# sh run.sh [STAGE …]: what this machine's GPU shows, in eight minutes at most. Two files come out: figures.jsonl and
# log.txt, in $OUT or in ./gpu-figures. `sh run.sh --help` names the stages.
set -eu
kit=$(cd "$(dirname "$0")" && pwd)
scratch=${TMPDIR:-/tmp}/gpu-kit-$(id -u)
site=$scratch/site
out=${OUT:-$PWD/gpu-figures}
mkdir -p "$site" "$out"
if [ ! -e "$site/.installed" ]; then
    python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$kit"/wheels/*.whl
    touch "$site/.installed"
fi
out=$(cd "$out" && pwd)
cd "$kit/tree"
export PYTHONPATH="$kit/tree:$site" PYTHONUNBUFFERED=1
export PYTHONPYCACHEPREFIX="$scratch/pycache" TRITON_CACHE_DIR="$scratch/triton"
exec python3 -m tests.gpu "$out" "$@"
"""


def main() -> None:
    """Prepare the folder, anew each time.

    Raises:
        SystemExit: It has become too large to be copied quickly.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kit", description=__doc__)
    parser.add_argument("--python", default="3.12", help="the GPU machine's Python (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu", help="default: %(default)s")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    _copy_tree(options.out / "tree")
    _download(options.python, options.out / "wheels")
    _write_curves(options.out)
    (options.out / "run.sh").write_text(RUN)
    size = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file()) / 2**20
    if size > MEBIBYTES:
        sys.exit(f"{options.out} has {size:.1f} MiB, and may have {MEBIBYTES}")
    print(f"{options.out}: {size:.1f} MiB; copy it to the GPU machine and run there: sh {options.out.name}/run.sh")


def _copy_tree(target: Path) -> None:
    """Copy what the stages import, with changes that are not committed, and note which commit it is."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z", *PACKED]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():  # it may have been removed since the last commit
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    commit = Environment.of(torch.device("cpu")).commit
    (target / "boost_core/bench/commit.txt").write_text(commit + "\n")


def _download(python: str, folder: Path) -> None:
    """Fetch wheels for the machine, in the versions that the product is tested with."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    versions = {_normal(name): version for name, version in pins.items()}
    platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--implementation", "cp", "--python-version", python, *platforms, "--dest", str(folder),
        *(f"{name}=={versions[_normal(name)]}" for name in WHEELS),
    ]  # fmt: skip
    subprocess.run(command, check=True)


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def _write_curves(folder: Path) -> None:
    """Train on a CPU what the GPU machine will train, on some of our own source as its text."""
    corpus, text = folder / "corpus", ROOT / "boost_core/plan/**/*.py"
    options = ("--kind", "text", "--validation", "0.2")
    command = [sys.executable, "-m", "boost_core.data", "tokenize", *options, str(text), str(corpus)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    curves = {
        name: curve_of("cpu", name, "off", corpus, folder / "curves" / name, stdout=subprocess.DEVNULL)
        for name in ("fp32", "bf16")
    }
    shutil.rmtree(folder / "curves")
    (folder / "cpu_losses.json").write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
