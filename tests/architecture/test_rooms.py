"""Fewer, deeper rooms: how finely the code may be cut. Lower a limit when the code has got better, never raise one."""

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

MOST_FILES = 234  # with code
MOST_CODE_LINES = 38_000
MOST_FUNCTIONS = 75.1  # per 1,000 code lines; 75 is wanted
LEAST_SHARE_OF_LARGE_FILES = 0.58  # of the code, in files of LARGE code lines and more
MOST_SMALL_NEIGHBOURS = 8  # modules of at most SMALL code lines that only one module imports, in the same folder
MOST_IN_CIRCLES = 0  # modules that import themselves by way of others, for type checking included
MOST_VISITED_FILES = {"plan": 14, "reshard": 10, "block": 12, "context_block": 14}  # of ours, to follow a flow

LARGE, SMALL = 200, 120
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """A module of ours."""

    path: Path
    code_lines: int
    functions: int
    imports: frozenset[str]


def code_lines(text: str, tree: ast.Module) -> int:
    """The number of lines with code; the lines of a string that is no docstring count."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def imported(tree: ast.Module, names: set[str]) -> frozenset[str]:
    """Those of ``names`` that a module imports, wherever in it."""
    targets = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {alias: f"{node.module}.{alias.name}" for alias in node.names}
            targets |= {name if name in names else node.module for name in full.values()}
    return frozenset(targets & names)


@cache
def modules() -> Mapping[str, Module]:
    paths = [path for package in ("boost_core", "service", "deploy") for path in (ROOT / package).rglob("*.py")]
    named = {}
    for path in paths:
        if "versions" not in path.parts:  # migrations, of which each release adds some
            parts = path.relative_to(ROOT).with_suffix("").parts
            named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    made = {}
    for name, path in named.items():
        tree = ast.parse(text := path.read_text())
        functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(tree))
        made[name] = Module(path, code_lines(text, tree), functions, imported(tree, named.keys() - {name}))
    return made


def test_code_lines_are_counted_without_docstrings_and_comments() -> None:
    text = (
        '"""A docstring\nof two lines."""\n\n# A comment.\nx = """a\nb"""\ndef f():\n    """Another."""\n    return x\n'
    )
    assert code_lines(text, ast.parse(text)) == 4


def test_imports_within_functions_count() -> None:
    tree = ast.parse("def f():\n    import a.b\n    from a import c, d\n    from e import g\n")
    assert imported(tree, {"a", "a.b", "a.c", "e.g"}) == {"a", "a.b", "a.c", "e.g"}


def test_files_are_few_and_long() -> None:
    sizes = [module.code_lines for module in modules().values() if module.code_lines]
    assert len(sizes) <= MOST_FILES
    assert sum(sizes) <= MOST_CODE_LINES
    assert sum(size for size in sizes if size >= LARGE) / sum(sizes) >= LEAST_SHARE_OF_LARGE_FILES


def test_functions_are_few() -> None:
    functions = sum(module.functions for module in modules().values())
    lines = sum(module.code_lines for module in modules().values())
    assert 1000 * functions / lines <= MOST_FUNCTIONS, (
        "a helper earns its name by two callers, or by the field's use of it"
    )


def test_small_modules_have_several_importers() -> None:
    small = set()
    for name, module in modules().items():
        importers = [other for other in modules().values() if name in other.imports]
        if len(importers) == 1 and importers[0].path.parent == module.path.parent and module.code_lines <= SMALL:
            small.add(name)
    assert len(small) <= MOST_SMALL_NEIGHBOURS, f"let their importers have what is in some of {sorted(small)}"


def test_modules_do_not_import_each_other() -> None:
    circular = set()
    for name, module in modules().items():
        reached, new = set[str](), set(module.imports)
        while new:
            reached |= new
            new = {target for each in new for target in modules()[each].imports} - reached
        if name in reached:
            circular.add(name)
    assert len(circular) <= MOST_IN_CIRCLES, circular


@pytest.mark.parametrize(
    "flow",
    ["plan", *(pytest.param(each, marks=pytest.mark.nightly) for each in sorted(MOST_VISITED_FILES.keys() - {"plan"}))],
)
def test_a_flow_is_followed_through_few_files(flow: str) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.visited_files", flow]
    *_, last = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert int(last.split()[0]) <= MOST_VISITED_FILES[flow]
