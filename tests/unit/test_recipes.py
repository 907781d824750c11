"""The recipes of published sizes: each is a job that the door takes, with the published number of parameters."""

from pathlib import Path

import pytest

from boost_core.config import load_job
from boost_core.plan.machine import machine_of
from boost_core.plan.report import plan

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
# Millions, of CoLA (arXiv 2502.10940); LORO's products have the same widths.
PARAMETERS = {"60m": 42.8, "130m": 94.0, "350m": 185.2, "1b": 609.3, "7b": 2821}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_is_of_the_published_size_and_can_be_planned(path: Path) -> None:
    job = load_job(path)
    assert job.name == path.stem
    planned = plan(job, machine_of(job))
    assert planned.parameters / 1e6 == pytest.approx(PARAMETERS[path.stem.partition("-")[2]], abs=0.1)
    assert planned.shapes
    assert f"[{path.stem}]({path.name})" in (RECIPES / "README.md").read_text()
