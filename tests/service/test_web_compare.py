"""The page that compares jobs, in a real browser against the real API."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from service.jobs.store import JobStore
from tests.service.browser import Visit
from tests.service.sample_jobs import SampleJob

RATES = (0.001, 0.003, 0.01)


@pytest.fixture
def runs(store: JobStore) -> list[SampleJob]:
    """A group of jobs that differ in their learning rate; the second has a spike of one step."""
    made = [
        SampleJob(store, Path("/c"), name=f"rate {rate}", group="rates", tags=["a"], optimizer={"learning_rate": rate})
        for rate in RATES
    ]
    for job in made:
        job.start()
        job.train()
    return made


def test_x(visitor: Visit, runs: list[SampleJob]) -> None:
    visitor.refused = {404}
    page = visitor.open("/compare#group=rates")
    page.set_viewport_size({"width": 1440, "height": 900})
    expect(page.locator(".compared tbody tr")).to_have_count(3)
    page.wait_for_timeout(1000)
    page.locator("#curves .picture").hover(position={"x": 500, "y": 200})
    page.wait_for_timeout(300)
    page.screenshot(path="/tmp/shot.png", full_page=True)
    page.set_viewport_size({"width": 360, "height": 900})
    page.wait_for_timeout(300)
    page.screenshot(path="/tmp/shot360.png", full_page=True)
    print(page.evaluate("document.documentElement.scrollWidth"))
