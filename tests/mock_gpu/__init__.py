"""torch's CUDA build on a CUDA device that computes nothing: how it is built, started, and what it logged.

See docs/mock-gpu.md for what of it is real.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.used import ROOT

HERE = Path(__file__).parent
TORCH = ("2.13", "2.11")  # both are in the tests: the one that is pinned, and the oldest supported
_LIBRARIES = ("c10_cuda", "torch_cuda", "torch_cuda_linalg", "torch_python", "torch_nvshmem")
_UNMODELLED = {"cu": 801, "__cuda": 801, "cublas": 15, "nccl": 3}  # each library's error for what it does not support
_TROUBLE = ("ILLEGAL", "UNMODELLED", "MISMATCH", "FORKED", "REFUSED")


class MockGpuMissing(Exception):
    """Torch's CUDA build is not there."""


def environment(torch: str) -> Path:
    """Return the folder of the virtual environment with a version of torch's CUDA build.

    Raises:
        MockGpuMissing: There is none.
    """
    folder = ROOT / f".venv-cuda{torch.replace('.', '')}"
    if not (folder / "bin/python").exists():
        raise MockGpuMissing(f"{folder.name} with torch {torch} for CUDA is missing; run: make mock-gpu")
    return folder


@dataclass(frozen=True)
class MockGpu:
    """A mock that has been built for one version of torch.

    Attributes:
        python: The interpreter that has torch's CUDA build.
        folder: Where the libraries are.
    """

    python: Path
    folder: Path

    def variables(self, log: Path | None = None, nvml: bool = False, **ordered: object) -> dict[str, str]:
        """Return the environment of a process on the mock.

        Args:
            log: Where calls are logged; by default only what is wrong is, to standard error.
            nvml: Whether there is NVML.
            ordered: What the mock is told, as in docs/mock-gpu.md: ``count=2`` for ``MOCK_GPU_COUNT=2``.
        """
        libraries = [self.folder / "driver"] + [self.folder / "nvml"] * nvml
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MOCK_GPU_")},
            "LD_PRELOAD": str(self.folder / "libmock_gpu.so"),
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "TRITON_LIBCUDA_PATH": str(self.folder / "driver"),
            "TRITON_CACHE_DIR": str(self.folder.parent / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder.parent / "inductor"),
            "PYTHONPATH": f"{HERE / 'site'}:{ROOT}",
            "MOCK_GPU_PACKAGES": sysconfig.get_path("purelib"),
            "PYTHONWARNINGS": "ignore",
            **{f"MOCK_GPU_{name.upper()}": str(value) for name, value in ordered.items()},
        }
        variables.pop("TRITON_INTERPRET", None)
        if log is not None:
            variables["MOCK_GPU_LOG"] = str(log)
        return variables

    def start(self, *arguments: object, variables: dict[str, str]) -> "subprocess.Popen[str]":
        """Start Python with these arguments; what it prints is the tests' to read."""
        return subprocess.Popen(
            [str(self.python), *map(str, arguments)],
            env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *arguments: object, variables: dict[str, str], seconds: float = 240) -> str:
        """Run Python with these arguments and return what it prints.

        Raises:
            AssertionError: It fails.
        """
        process = self.start(*arguments, variables=variables)
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"it does not end within {seconds:g} s; it said:\n{output}") from None
        assert process.returncode == 0, f"exit code {process.returncode}; it said:\n{output}"
        return output


def build(torch: str) -> MockGpu:
    """Build the mock for a version of torch, unless that has been done.

    Raises:
        MockGpuMissing: There is no such torch, or no C compiler.
    """
    venv = environment(torch)
    if shutil.which("gcc") is None:
        raise MockGpuMissing("gcc is missing; run: make mock-gpu")
    sources = sorted((HERE / "c").glob("*"))
    packages = next((venv / "lib").glob("python3.*/site-packages"))
    version = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, Path(__file__)]))
    version.update((packages / "torch/version.py").read_bytes())
    folder = ROOT / ".mock-gpu" / f"{torch}-{version.hexdigest()[:12]}"
    mock = MockGpu(venv / "bin/python", folder)
    if not folder.exists():
        # Beside it first, as two processes may build at once.
        making = folder.with_name(f"{folder.name}-{os.getpid()}")
        for part in ("driver", "nvml"):
            (making / part).mkdir(parents=True)
        _compile(making, packages)
        try:
            making.rename(folder)
        except OSError:  # the other was faster
            shutil.rmtree(making)
    return mock


def _compile(folder: Path, packages: Path) -> None:
    headers = [packages / "nvidia/cu13/include", packages / "triton/backends/nvidia/include"]
    headers += [packages / "nvidia/nccl/include"]
    # A header that CUDA's own ask for and that is in no package of torch's; in C they use nothing of it.
    (folder / "nv").mkdir()
    (folder / "nv/target").touch()
    headers.append(folder)
    sources = [path for path in (HERE / "c").glob("*.c") if path.name != "nvml.c"]
    # Whatever else of these libraries torch may call says that it is not modelled.
    stubs = folder / "unmodelled.c"
    missing = sorted(_called(packages) - _defined(sources))
    stubs.write_text("int mock_unmodelled(const char *function, int error);\n" + "".join(map(_stub, missing)))
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]
    common = ["gcc", "-std=gnu11", "-O1", "-fPIC", "-shared", *warnings]
    includes = [f"-I{HERE / 'c'}", *(f"-isystem{path}" for path in headers)]
    library = folder / "libmock_gpu.so"
    _run(*common, *includes, f"-Wl,-soname,{library.name}", "-o", library, *sources, stubs, "-lpthread", "-ldl")
    # For whoever opens the driver: everything is in the library that is loaded before all others.
    empty = folder / "empty.c"
    empty.write_text("typedef int nothing;\n")
    driver = folder / "driver/libcuda.so.1"
    _run(*common, f"-Wl,--no-as-needed,-soname,{driver.name}", "-o", driver, empty, library)
    _run(*common, "-o", folder / "nvml/libnvidia-ml.so.1", HERE / "c/nvml.c")


def _stub(name: str) -> str:
    error = next(error for prefix, error in reversed(_UNMODELLED.items()) if name.startswith(prefix))
    return f'int {name}(void) {{ return mock_unmodelled("{name}", {error}); }}\n'


def _called(packages: Path) -> set[str]:
    """Return which functions torch calls of CUDA's runtime, cuBLAS and NCCL, and Triton's launcher of the driver."""
    libraries = [packages / f"torch/lib/lib{name}.so" for name in _LIBRARIES]
    symbols = _run("nm", "-D", "--undefined-only", *(path for path in libraries if path.exists()))
    launcher = (packages / "triton/backends/nvidia/driver.c").read_text()
    torchs = re.findall(r"U ((?:cuda|__cuda|cublas|nccl)\w+)", symbols)
    return {*torchs, *re.findall(r"\b(cu[A-Z]\w+)\(", launcher)}


def _defined(sources: list[Path]) -> set[str]:
    pattern = re.compile(r"^[A-Za-z_].*?\b(\w+)\(", re.MULTILINE)
    return {name for path in sources for name in pattern.findall(path.read_text())}


def _run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def json_lines(output: str) -> list[Any]:
    """Return what a process printed as JSON, a line each, among what libraries say."""
    return [json.loads(line) for line in output.splitlines() if line.startswith(('{"', '["'))]


def trouble(log: Path) -> list[str]:
    """Return the lines of a log that tell of what a real device would not have let pass, or of what is not modelled."""
    return [line for line in log.read_text().splitlines() if line.startswith(_TROUBLE)]
