"""Many jobs of many steps, seeded in the record, and how smoothly the compare page moves over their curves."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page
from sqlalchemy import text

from service.jobs.database import migrate
from service.jobs.store import JobStore
from service.settings import Settings
from tests.service.conftest import RunningApi
from tests.service.records import a_spec, a_step, an_evaluation, finish, numbered, start

GROUP = "width-and-rate"
SPIKE = 9.5  # of the first job, in the middle of its course

# Steps of all jobs in the order in which jobs that train at once report them. The losses fall as fast as the job's
# learning rate has it, with noise.
_STEPS = text(
    """
    INSERT INTO events (job_id, attempt, sequence, kind, time, data)
    WITH RECURSIVE steps (step) AS (SELECT 1 UNION ALL SELECT step + 1 FROM steps WHERE step < :steps)
    SELECT id, 1, step, 'progress', datetime(started_at, step || ' seconds') || '.000000', json_object(
        'step', step,
        'loss', CASE WHEN id = :spiked AND step = :steps / 2 THEN :spike ELSE
            2.2 + 0.9 * share + (5.5 - 0.9 * share) * exp(-12.0 * step / :steps * (0.25 + share))
            + 0.0001 * (abs(random()) % 1000) END,
        'learning_rate', 0.001 * min(1.0, 10.0 * step / :steps), 'gradient_norm', 0.5 + 0.001 * (abs(random()) % 500),
        'tokens', 1024 * step, 'tokens_per_second', 2000.0 + abs(random()) % 100, 'step_seconds', 0.5,
        'exposed_communication_seconds', 0.1, 'model_flops_per_second', 1e9)
    FROM steps
    CROSS JOIN (SELECT id, started_at, (row_number() OVER (ORDER BY id) - 1.0) / :jobs AS share FROM jobs)
    ORDER BY step
    """
)


def seed(store: JobStore, jobs: int, steps: int) -> list[str]:
    """Fill an empty SQLite record with jobs that differ in learning rate, rank and batch; return their ids."""
    ids = []
    for place in range(jobs):
        settings = {
            "optimizer": {"learning_rate": float(f"{3e-4 * 30 ** (place / jobs):.2g}")},
            "model": {"preset": "tiny", "rank": (16, 24, 32)[place % 3]},
            "training": {"steps": steps, "sequence_length": 64, "global_batch_size": (32, 64)[place // 3 % 2]},
        }
        job = store.create(a_spec(name=f"run-{place:03}", group=GROUP, **settings), "/c")
        start(store, job.id)
        ids.append(job.id)
    values = {"steps": steps - 1, "jobs": jobs, "spiked": ids[0], "spike": SPIKE}
    with store.engine.begin() as connection:
        connection.execute(_STEPS, values)
    for place, job_id in enumerate(ids):
        loss = 2.25 + 0.9 * place / jobs + 0.15 * (place % 3 - 1)
        last = a_step(steps, steps=steps, loss=loss, tokens_per_second=1900.0 + 40 * (place % 7))
        store.append_reports(job_id, 1, numbered(last, an_evaluation(steps, loss + 0.1), first=steps))
        finish(store, job_id)
    return ids


@contextmanager
def serving(jobs: int, steps: int) -> Iterator[RunningApi]:
    """A server over a record with these jobs, which takes half a kilobyte of disk for each step while it runs."""
    with tempfile.TemporaryDirectory(prefix="many-runs-") as folder:
        url = f"sqlite:///{folder}/boost.db"
        migrate(url)
        store = JobStore(url)
        seed(store, jobs, steps)
        api = RunningApi(store, Settings(home=Path(folder), database_url=url, auth=False))
        yield api
        api.stop()
        store.close()


def frames(page: Page, act: Callable[[], None]) -> list[float]:
    """Milliseconds between the frames that a page shows while something is done, the longest last."""
    page.evaluate("""() => {
        window.lengths = [];
        let last = performance.now();
        const turn = (now) => {
            window.lengths.push(now - last);
            last = now;
            window.turning = requestAnimationFrame(turn);
        };
        window.turning = requestAnimationFrame(turn);
    }""")
    act()
    return sorted(page.evaluate("() => (cancelAnimationFrame(window.turning), window.lengths)"))


def hover(page: Page) -> None:
    """Move the pointer over the curves."""
    area = page.locator("#curves .picture").bounding_box()
    assert area
    for place in range(40):
        page.mouse.move(area["x"] + 80 + place * (area["width"] - 100) / 40, area["y"] + 60 + place % 7 * 40)


def zoom(page: Page) -> None:
    """Zoom in by dragging over a part of the curves, read them anew, and zoom out."""
    area = page.locator("#curves .picture").bounding_box()
    assert area
    with page.expect_response(lambda response: "/curves" in response.url and "low=" in response.url):
        page.mouse.move(area["x"] + area["width"] / 3, area["y"] + 90)
        page.mouse.down()
        page.mouse.move(area["x"] + area["width"] / 2, area["y"] + 120, steps=8)
        page.mouse.up()
    page.wait_for_load_state("networkidle")
    with page.expect_response(lambda response: "/curves" in response.url and "low=" not in response.url):
        page.get_by_role("button", name="Whole course").click()
    page.wait_for_timeout(1500)
