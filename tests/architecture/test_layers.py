"""The tests that `make test` runs reach everything, and start only as many clusters as it has time for."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What starts a Ray cluster, a whole service or hosts of its own: ten seconds at least.
EXPENSIVE = {
    "service.gang.ray.gangs", "tests.deploy.scenario", "tests.elastic.autoscaled", "tests.elastic.ray_cluster",
    "tests.hosts", "tests.joined_cluster", "tests.service.serving",
}  # fmt: skip
# Who may all the same: for these every change is worth it, or those of their tests that do are marked one by one.
MAY = {
    "tests/deploy/test_images.py", "tests/elastic/test_ray_contract.py",
    "tests/elastic/test_ray_train_contract.py", "tests/service/test_end_to_end.py", "tests/service/test_gang.py",
    "tests/service/test_rank_metrics.py",
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """All of ours, product and tests, by their names."""
    files = [file for package in ("boost_core", "service", "tests") for file in (ROOT / package).rglob("*.py")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return dict(zip(names, files, strict=True))


def is_test(name: str) -> bool:
    return name.rpartition(".")[2].startswith("test_")


def imports(name: str) -> set[str]:
    """The modules of ours that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return found & modules().keys()


def used_by(test: str) -> set[str]:
    """What a file of tests imports, itself or through helpers that are no tests."""
    used, new = set[str](), {test}
    while new:
        used |= new
        new = {each for name in new for each in imports(name)} - used
        used |= {name for name in new if not name.startswith("tests.")}
        new = {name for name in new if name.startswith("tests.")}
    return used - {test}


def is_full(test: str) -> bool:
    """Whether all tests of a file are left out by `make test`."""
    marks = [
        ast.unparse(node.value)
        for node in ast.parse(modules()[test].read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return any("pytest.mark.full" in mark for mark in marks)


def test_what_any_test_uses_is_used_by_one_of_every_run() -> None:
    tests = [name for name in modules() if is_test(name)]
    everywhere, in_every_run = set[str](), set[str]()
    for test in tests:
        used = {name for name in used_by(test) if not name.startswith("tests.")}
        everywhere |= used
        in_every_run |= set() if is_full(test) else used
    assert len(everywhere) > 100
    assert everywhere - in_every_run == set(), "leave a test that is not marked full for each of these"


def test_only_those_that_are_worth_it_start_a_cluster_in_every_run() -> None:
    tests = [name for name in modules() if is_test(name) and not is_full(name)]
    starting = {str(modules()[test].relative_to(ROOT)) for test in tests if used_by(test) & EXPENSIVE}
    assert starting == MAY, "mark their tests full, or say here that every run is to start what they start"
