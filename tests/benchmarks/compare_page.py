"""What comparing 200 jobs of 10,000 steps costs the server, and how smoothly the page shows them; and a picture of it.

``python -m tests.benchmarks.compare_page`` writes docs/figures/compare.md and compare.png; it takes three minutes on
two cores and 1 GB of disk. The record is SQLite, in the order in which jobs that train at once report their steps.
Times are of whole requests over one connection; frames are those of a real browser without a GPU.
"""

import re
import time
from io import BytesIO
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import expect

from tests.benchmarks.figures import FIGURES, write_table
from tests.service.browser import open_browser, visit
from tests.service.many_runs import GROUP, frames, hover, serving, zoom

JOBS, STEPS, SHOWN_JOBS, SHOWN_STEPS = 200, 10_000, 18, 4000
SIZE = {"width": 1280, "height": 1230}
PATIENCE_MS = 300_000


def requests(url: str) -> list[list[str]]:
    """What each request takes, and the size of its answer."""
    curves = "/v1/jobs/compare/curves"
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("results of all jobs", "/v1/jobs/compare", {}),
        ("loss of all jobs, for the first time", curves, {}),
        ("the same again", curves, {}),
        ("a tenth of it, after zooming in", curves, {"low": 4000, "high": 5000}),
        ("over time, for the first time", curves, {"axis": "seconds"}),
        ("the same again", curves, {"axis": "seconds"}),
    ]
    rows = []
    with httpx.Client(base_url=url, timeout=600) as http:
        for name, path, query in asked:
            began = time.perf_counter()
            answer = http.get(path, params={"group": GROUP, **query}).raise_for_status()
            rows.append([name, f"{time.perf_counter() - began:.2f} s", f"{len(answer.content) / 1e6:.2f} MB"])
    return rows


def main() -> None:
    """Measure, and write the table and the picture."""
    with open_browser() as browser:
        with serving(JOBS, STEPS) as api:
            rows = requests(api.url)
            with visit(browser, api.url, viewport=SIZE) as visiting:
                visiting.refused = {404}  # the group is no sweep
                page = visiting.open(f"/compare#group={GROUP}")
                drawn = re.compile(f"curves of {JOBS} jobs")
                expect(page.locator("#curves .picture")).to_have_attribute("aria-label", drawn, timeout=PATIENCE_MS)
                page.wait_for_load_state("networkidle")
                for name, act in (("hovering", hover), ("zooming in and out", zoom)):
                    lengths = [frames(page, lambda act=act: act(page)) for _ in range(5)]  # type: ignore[misc]
                    best = min(lengths, key=lambda each: each[-1])
                    rows.append([f"page, {name}: median frame", f"{best[len(best) // 2]:.0f} ms", ""])
                    rows.append([f"page, {name}: longest frame, best of five times", f"{best[-1]:.0f} ms", ""])
        write_table(FIGURES / "compare.md", [f"{JOBS} jobs × {STEPS:,} steps", "time", "answer"], rows)
        with serving(SHOWN_JOBS, SHOWN_STEPS) as api, visit(browser, api.url, viewport=SIZE) as visiting:
            visiting.refused = {404}
            page = visiting.open(f"/compare#group={GROUP}&smooth=0.6&sort=best_validation_loss")
            drawn = re.compile(f"curves of {SHOWN_JOBS} jobs")
            expect(page.locator("#curves .picture")).to_have_attribute("aria-label", drawn)
            area = page.locator("#curves .picture").bounding_box()
            assert area
            page.mouse.move(area["x"] + area["width"] / 2, area["y"] + 230)
            expect(page.locator(".readout li")).not_to_have_count(0)
            picture = Image.open(BytesIO(page.screenshot()))
            picture.quantize(256, dither=Image.Dither.NONE).save(FIGURES / "compare.png", optimize=True)


if __name__ == "__main__":
    main()
