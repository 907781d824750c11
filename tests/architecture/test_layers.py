"""The tests that `make test` runs reach everything, and start only as many clusters as it has time for."""

import ast

from tests.used import ROOT, modules, starts_cluster, used_by

# Who may start a cluster in every run: for these every change is worth it, or those of their tests that do are marked.
MAY = {
    "tests/deploy/test_images.py", "tests/elastic/test_corpus_on_ray.py", "tests/elastic/test_ray_contract.py",
    "tests/elastic/test_ray_train_contract.py", "tests/service/test_end_to_end.py", "tests/service/test_gang.py",
    "tests/service/test_rank_metrics.py",
}  # fmt: skip


def is_test(name: str) -> bool:
    return name.rpartition(".")[2].startswith("test_")


def is_full(test: str) -> bool:
    """Whether all tests of a file are left out by `make test`."""
    marks = [
        ast.unparse(node.value)
        for node in ast.parse(modules()[test].read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return any(f"pytest.mark.{layer}" in mark for mark in marks for layer in ("full", "nightly"))


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
    starting = {str(modules()[test].relative_to(ROOT)) for test in tests if starts_cluster(test)}
    assert starting == MAY, "mark their tests full, or say here that every run is to start what they start"
