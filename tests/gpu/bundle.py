"""Packs what a GPU machine without a network needs: ``python -m tests.gpu.bundle``; ``make gpu-bundle`` calls it.

The archive has the tree at HEAD, wheels of what the machine lacks, and ``run``, which installs those beside the tree
and runs ``python -m tests.gpu``.
"""

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_THE_TESTS = {"hypothesis", "matplotlib", "psutil", "pytest", "pytest-timeout"}  # what the stages import of dev's
PLATFORMS = "manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"
RUN = """\
#!/bin/sh
# run OUT [STAGE ...]: what the GPU of this machine shows; see tests/gpu
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "$1")
shift
if [ ! -d "$here/site" ]; then
    mkdir "$here/site"
    for wheel in "$here"/wheels/*.whl; do
        [ ! -e "$wheel" ] || python3 -m pip install --quiet --no-index --no-deps --target "$here/site" "$wheel"
    done
fi
cd "$here/tree"
PYTHONPATH="$here/tree:$here/site" exec python3 -m tests.gpu "$out" "$@"
"""


def main() -> None:
    """Write the archive."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.bundle", description=__doc__)
    parser.add_argument("--python", default="3.12", help="the GPU machine's Python (default: %(default)s)")
    parser.add_argument(
        "--has", nargs="*", default=["torch", "triton"], help="packages that it has (default: torch triton)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "gpu-bundle.tar.gz")
    given = parser.parse_args()
    has = {_normal(name) for name in given.has}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wanted = requirements(has)
        wheels = download(wanted, given.python, has, Path(folder)) if wanted else []
        write(given.out, wheels)
    print(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB, {len(wheels)} wheels")


def requirements(has: Collection[str]) -> list[str]:
    """What the trainer, its benchmarks and its tests need besides what the machine has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    wanted = project["dependencies"] + optional["trainer"]
    wanted += [each for each in optional["dev"] if _normal(each) in OF_THE_TESTS]
    return [each for each in wanted if _normal(each) not in has]


def download(wanted: Collection[str], python: str, has: Collection[str], folder: Path) -> list[Path]:
    """Fetch wheels for the machine, in the versions that the product is tested with.

    Raises:
        subprocess.CalledProcessError: One of them does not exist, or nothing can be fetched.
    """
    platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--implementation", "cp",
        "--python-version", python, *platforms, "--constraint", str(ROOT / "constraints.txt"), "--dest", str(folder),
        *wanted,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return [wheel for wheel in sorted(folder.iterdir()) if _normal(wheel.name.partition("-")[0]) not in has]


def write(path: Path, wheels: Collection[Path]) -> None:
    """Write an archive with the tree at HEAD and these wheels."""
    tree = subprocess.run(["git", "-C", str(ROOT), "archive", "HEAD"], check=True, capture_output=True).stdout
    with tarfile.open(path, "w:gz") as archive:
        run = tarfile.TarInfo("run")
        run.size, run.mode = len(RUN), 0o755
        archive.addfile(run, io.BytesIO(RUN.encode()))
        for wheel in wheels:
            archive.add(wheel, f"wheels/{wheel.name}")
        with tarfile.open(fileobj=io.BytesIO(tree)) as files:
            for member in files:
                content = files.extractfile(member) if member.isfile() else None
                member.name = f"tree/{member.name}"
                archive.addfile(member, content)


def _normal(requirement: str) -> str:
    """The name of a requirement's package, as indexes compare it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]).lower()


if __name__ == "__main__":
    main()
