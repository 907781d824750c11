"""The files of ours that a reader visits to follow one flow: those whose functions are called while it runs.

``python -m tests.benchmarks.visited_files plan`` runs a flow in this process and prints each file with the functions
called in it, in the order of first calls. Modules are imported before; what runs while they are is not counted.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
_PACKAGES = tuple(f"{ROOT / package}/" for package in ("boost_core", "service"))


def plan() -> Callable[[], object]:
    """``boost plan`` of the example with 7B parameters."""
    from service.cli.main import app

    return lambda: app(["plan", str(ROOT / "examples/cola-7b.yaml")], standalone_mode=False)


# Each imports what its flow needs and returns the flow.
FLOWS: Mapping[str, Callable[[], Callable[[], object]]] = {"plan": plan}


def visited(flow: Callable[[], object]) -> dict[str, list[str]]:
    """Run a flow and return the functions that it calls, by file, without comprehensions and lambdas."""
    functions: dict[str, dict[str, None]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGES) and not code.co_name.startswith("<"):
            functions.setdefault(str(Path(code.co_filename).relative_to(ROOT)), {})[code.co_qualname] = None

    sys.setprofile(note)
    try:
        with redirect_stdout(StringIO()):
            flow()
    finally:
        sys.setprofile(None)
    return {file: list(names) for file, names in functions.items()}


def main(name: str) -> None:
    """Print the files that a flow visits, with their functions, and both numbers."""
    functions = visited(FLOWS[name]())
    for file, names in functions.items():
        sys.stdout.write(f"{file}: {', '.join(names)}\n")
    folders = Counter(file.rpartition("/")[0] for file in functions)
    sys.stdout.write(", ".join(f"{count} in {folder}" for folder, count in folders.most_common()) + "\n")
    sys.stdout.write(f"{len(functions)} files, {sum(map(len, functions.values()))} functions\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
