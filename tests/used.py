"""What a file of tests uses, and which files start clusters."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What starts a Ray cluster, a whole service or hosts of its own: ten seconds at least.
EXPENSIVE = {
    "service.gang.ray.gangs", "tests.deploy.scenario", "tests.elastic.autoscaled", "tests.elastic.ray_cluster",
    "tests.hosts", "tests.joined_cluster", "tests.service.serving",
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """All of ours, product and tests, by their names."""
    files = [file for package in ("boost_core", "service", "tests") for file in (ROOT / package).rglob("*.py")]
    return {module_name(file): file for file in files}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(name: str) -> frozenset[str]:
    """The modules of ours that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(found & modules().keys())


def used_by(test: str) -> set[str]:
    """What a file of tests imports, itself or through helpers that are no tests."""
    used, new = set[str](), {test}
    while new:
        used |= new
        new = {each for name in new for each in imports(name)} - used
        used |= {name for name in new if not name.startswith("tests.")}
        new = {name for name in new if name.startswith("tests.")}
    return used - {test}


@cache
def starts_cluster(test: str) -> bool:
    """Whether a file of tests starts a cluster, a service or hosts of its own."""
    return bool(used_by(test) & EXPENSIVE)
