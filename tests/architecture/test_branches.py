"""``boost_core.architecture`` says what a model is made of: no other file goes by a family's or strategy's name."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from boost_core.config.model import FamilyName
from boost_core.config.parallelism import StrategyName

ROOT = Path(__file__).parents[2]
NAMES = {*get_args(FamilyName), *get_args(StrategyName)}
MAY_BRANCH = ("boost_core/architecture.py", "boost_core/config/")


def branches(tree: ast.AST) -> Iterator[int]:
    """Lines that compare with such a name, match it, look something up by it, or ask for a strategy's class."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare() if any(map(names_one, (node.left, *node.comparators))):
                yield node.lineno
            case ast.MatchValue() if names_one(node.value):
                yield node.value.lineno
            case ast.Dict() if sum(key is not None and names_one(key) for key in node.keys) > 1:
                yield node.lineno
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]) if "TensorParallel" in ast.unparse(kind):
                yield node.lineno


def names_one(expression: ast.expr) -> bool:
    """Whether an expression is such a name, or holds one as a tuple does."""
    parts = expression.elts if isinstance(expression, ast.Tuple | ast.List | ast.Set) else [expression]
    return any(isinstance(part, ast.Constant) and part.value in NAMES for part in parts)


@pytest.mark.parametrize(
    "code",
    [
        'x = model.family == "cola"',
        'x = "lax" if family != "svd" else 1',
        'x = strategy in ("btp", "vanilla")',
        'x = strategy_of(model, parallelism) is "btp"',
        'x = {"fullrank": 2, "btp": 7}[strategy]',
        'match model.family:\n    case "dense":\n        pass',
        'match strategy:\n    case "btp" | "vanilla":\n        pass',
        "x = isinstance(model.strategy, BottleneckTensorParallel)",
    ],
)
def test_a_branch_is_found(code: str) -> None:
    assert list(branches(ast.parse(code)))


def test_only_the_architecture_and_the_configuration_branch_on_families_and_strategies() -> None:
    paths = [path for package in ("boost_core", "service") for path in (ROOT / package).rglob("*.py")]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in branches(ast.parse(path.read_text()))]
    assert any(place.startswith("boost_core/config/parallelism.py") for place in found)
    assert [place for place in found if not place.startswith(MAY_BRANCH)] == []
