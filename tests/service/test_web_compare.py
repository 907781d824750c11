"""The page that compares jobs, and what steers a job on its page, in a real browser against the real API."""

import csv
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from service.jobs.states import Reason
from service.jobs.store import JobStore
from tests.service.browser import PATIENCE_MS, Visit, drawn, visit
from tests.service.conftest import RunningApi
from tests.service.many_runs import GROUP, frames, hover, serving, zoom
from tests.service.many_runs import SPIKE as SPIKE_OF_MANY
from tests.service.records import a_checkpoint, a_spec, a_step, an_evaluation, finish, start
from tests.service.sample_jobs import DONE, SampleJob, loss_at, step_report

MARKUP = '<img src=x onerror="document.title=1">'
NAMES = ("low", "middle", "high")
RATES = (0.001, 0.003, 0.009)
SVG = "{http://www.w3.org/2000/svg}"
STEPS = 1200
SPIKE_AT, SPIKE = 700, 9.0


def a_run(store: JobStore, number: int) -> str:
    """A job of a group, which ends at a loss of its number and one, as the others but for a spike in the second."""
    settings = {"optimizer": {"learning_rate": RATES[number]}, "training": {"steps": STEPS, "sequence_length": 64}}
    paths = [MARKUP if number == 2 else "plain"]
    data = {
        "source": {"kind": "text", "paths": paths},
        "validation": [{"name": "books", "kind": "text", "paths": ["b"]}],
    }
    notes, tags = MARKUP, ["all", f"n{number}"]
    spec = a_spec(name=NAMES[number], group="rates", notes=notes, tags=tags, data=data, **settings)
    job = store.create(spec, "/c")
    start(store, job.id)
    losses = [1 + number + 3 / step for step in range(1, STEPS + 1)]
    if number == 1:
        losses[SPIKE_AT - 1] = SPIKE
    reports = [a_step(step, loss=loss) for step, loss in enumerate(losses, 1)]
    reports += [an_evaluation(STEPS, 1.5 - number / 4, ("books",))]
    now = datetime.now(UTC)
    store.append_reports(job.id, 1, [(place, now, report) for place, report in enumerate(reports, 1)])
    finish(store, job.id)
    return job.id


@pytest.fixture
def runs(store: JobStore) -> list[str]:
    return [a_run(store, number) for number in range(3)]


@pytest.fixture
def visitor(browser: Browser, api: RunningApi) -> Iterator[Visit]:
    with visit(browser, api.url, viewport={"width": 1440, "height": 900}, accept_downloads=True) as visiting:
        visiting.refused = {404}  # of groups that are no sweeps
        yield visiting


def curves(page: Page, jobs: int) -> None:
    """Wait until so many curves are drawn."""
    expect(page.locator("#curves .picture")).to_have_attribute("aria-label", re.compile(f"curves of {jobs} jobs"))


def downloaded(page: Page, card: str, button: str) -> str:
    with page.expect_download() as download:
        page.locator(card).get_by_role("button", name=button, exact=True).click()
    return Path(download.value.path()).read_text()


@pytest.mark.full
def test_a_group_is_compared_by_any_result_and_only_what_differs(visitor: Visit, runs: list[str]) -> None:
    page = visitor.open("/compare#group=rates")
    curves(page, 3)
    heads = page.locator(".compared thead button")
    assert sorted(heads.all_inner_texts()[8:]) == ["data.source.paths", "optimizer.learning_rate", "tags"]
    names = page.locator(".compared tbody th a")
    expect(names).to_have_text([*reversed(NAMES)])
    for head, order in (("Best validation loss", NAMES[::-1]), ("Loss", NAMES), ("optimizer.learning_rate", NAMES)):
        page.locator(".compared").get_by_role("button", name=head, exact=True).click()
        expect(names).to_have_text([*order])
    page.locator(".compared").get_by_role("button", name="optimizer.learning_rate").click()
    expect(names).to_have_text([*reversed(NAMES)])
    expect(page.locator(".compared th[aria-sort=descending]")).to_have_count(1)
    table = [*csv.reader(downloaded(page, "#results", "CSV").splitlines())]
    assert table[0][:4] == ["id", "name", "state", "final_loss"]
    assert [row[0] for row in table[1:]] == runs[::-1]
    first = dict(zip(table[0], table[1], strict=True))
    assert (first["name"], first["optimizer.learning_rate"]) == ("high", "0.009")
    assert first["data.source.paths"] == json.dumps([MARKUP])
    expect(page.locator(".compared tbody tr").first).to_contain_text(MARKUP.replace('"', '\\"'))
    page.get_by_label("Across").select_option("data.source.paths")
    drawing = ET.fromstring(downloaded(page, "#scatter", "SVG"))
    assert json.dumps([MARKUP])[:9] + "…" in {text.text for text in drawing.iter(f"{SVG}text")}
    assert page.locator("main img").count() == 0
    assert page.title() == "Compare · BOOST"


@pytest.mark.full
def test_a_spike_of_one_step_is_in_the_curves_and_in_their_files(visitor: Visit, runs: list[str]) -> None:
    page = visitor.open(f"/compare#job={runs[1]}")
    curves(page, 1)
    rows = [*csv.DictReader(downloaded(page, "#curves", "CSV").splitlines())]
    assert len(rows) <= 500
    assert max(float(row["loss_max"]) for row in rows) == SPIKE
    assert float(rows[-1]["step"]) == STEPS
    drawing = ET.fromstring(downloaded(page, "#curves", "SVG"))
    texts = {text.text for text in drawing.iter(f"{SVG}text")}
    assert {"Step", "8", "1k"} <= texts  # up to the spike
    area = page.locator("#curves .picture").bounding_box()
    assert area
    page.mouse.move(area["x"] + 62 + (area["width"] - 76) * SPIKE_AT / STEPS, area["y"] + 200)
    expect(page.locator(".readout li")).to_contain_text(re.compile(r"middle step 70\d: \d.\d+ \(2.00\d to 9.000\)"))
    for _ in range(3):
        page.locator("#curves .picture").press("ArrowRight")
    expect(page.locator(".readout li")).to_contain_text("step 72")


@pytest.mark.full
def test_a_link_shows_the_same_view(visitor: Visit, browser: Browser, api: RunningApi, runs: list[str]) -> None:
    page = visitor.open("/")
    page.get_by_role("link", name="Compare").click()
    page.get_by_label("Group or sweep").fill("rates")
    curves(page, 3)
    page.get_by_label(re.compile("^Tags")).fill("all")
    page.locator(".runs").get_by_role("button", name="low").click()
    curves(page, 2)
    page.get_by_label("Over", exact=True).select_option("tokens")
    page.get_by_label("Smoothing").fill("0.5")
    page.get_by_label("Logarithmic y").check()
    area = page.locator("#curves .picture").bounding_box()
    assert area
    page.mouse.move(area["x"] + 200, area["y"] + 100)
    page.mouse.down()
    page.mouse.move(area["x"] + 600, area["y"] + 120, steps=4)
    page.mouse.up()
    page.get_by_label("Up", exact=True).select_option("tokens_per_second")
    page.locator(".compared").get_by_role("button", name="Tokens", exact=True).click()
    expect(page).to_have_url(re.compile("sort=tokens$|sort=tokens&"))

    def state(shown: Page) -> list[object]:
        labels = ("Value", "Over", "Smoothing", "Up", "Across", "Colour by")
        values = [shown.get_by_label(label, exact=True).input_value() for label in labels]
        hidden = shown.locator(".run[aria-pressed=false]").all_inner_texts()
        order = shown.locator(".compared tbody th").all_inner_texts()
        flags = [shown.get_by_label(f"Logarithmic {axis}").is_checked() for axis in "xy"]
        return [values, hidden, order, flags, shown.locator("#curves canvas").first.evaluate("one => one.toDataURL()")]

    page.mouse.move(5, 5)
    expect(page.get_by_role("button", name="Whole course")).to_be_visible()
    with visit(browser, api.url, viewport={"width": 1440, "height": 900}) as other:
        other.refused = {404}
        again = other.open(page.url.removeprefix(api.url))
        curves(again, 2)
        again.wait_for_load_state("networkidle")
        assert state(again) == state(page)
        assert again.url == page.url


@pytest.mark.full
def test_single_jobs_are_found_and_added(visitor: Visit, runs: list[str]) -> None:
    page = visitor.open("/compare")
    expect(page.get_by_text("Choose a group")).to_be_visible()
    page.get_by_label("Add single jobs").fill("n1")
    page.get_by_label("middle").check()
    curves(page, 1)
    page.get_by_label("Add single jobs").fill("n2")
    page.get_by_label("high").check()
    curves(page, 2)
    page.get_by_role("button", name="middle ×").click()
    expect(page.locator(".compared tbody th")).to_have_text(["high"])
    expect(page).to_have_url(re.compile(f"#job={runs[2]}$"))
    page.get_by_label(re.compile("^Words")).fill("nothing like it")
    expect(page.locator(".compared tbody tr")).to_have_count(1)
    page.get_by_label("Value", exact=True).select_option("validation_loss/books")
    curves(page, 1)
    assert page.locator("main img").count() == 0


@pytest.mark.full
def test_a_sweep_shows_which_fields_mattered(visitor: Visit, runs: list[str]) -> None:
    shares = {MARKUP: 0.125, "optimizer.learning_rate": 0.75}
    answer = json.dumps({"name": "rates", "importance": shares, "trials": {"COMPLETE": 7}})

    def sweep(route: Route) -> None:
        route.fulfill(body=answer, content_type="application/json")

    visitor.page.route("**/v1/sweeps/rates", sweep)
    page = visitor.open("/compare#group=rates")
    expect(page.locator(".importance dt")).to_have_text(["optimizer.learning_rate", MARKUP])
    expect(page.locator(".importance dd")).to_have_text(["75%", "13%"])
    expect(page.locator("#importance p")).to_contain_text("over 7 completed trials")
    visitor.page.unroute("**/v1/sweeps/rates")
    page.reload()
    curves(page, 3)
    expect(page.locator("#importance")).to_be_hidden()


@pytest.mark.full
@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (768, "dark"), (1440, "light")])
def test_it_fits_three_widths(
    browser: Browser, api: RunningApi, store: JobStore, runs: list[str], width: int, scheme: str
) -> None:
    with visit(browser, api.url, viewport={"width": width, "height": 800}, color_scheme=scheme) as visiting:
        visiting.refused = {404}
        page = visiting.open("/compare#group=rates")
        curves(page, 3)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for card in ("#curves", "#parallel", "#scatter"):
            expect(page.locator(card)).to_be_visible()
            assert drawn(page, f"{card} canvas >> nth=0", "--card") > 1000


@pytest.fixture
def job(store: JobStore, tmp_path: Path) -> SampleJob:
    made = SampleJob(store, tmp_path, elasticity={"data_parallel_size": {"min": 1, "max": 2}})
    made.start()
    return made


def dialog_of(page: Page, button: str, **values: str) -> None:
    """Open a form of the steering, fill it, and send it."""
    page.locator("#steer").get_by_role("button", name=button).click()
    for label, value in values.items():
        control = page.get_by_role("dialog").get_by_label(re.compile(f"^{label.replace('_', ' ')}"))
        control.select_option(value) if label == "Fault" else control.fill(value)
    page.get_by_role("dialog").get_by_role("button", name=button, exact=True).click()


@pytest.mark.full
def test_a_running_job_is_steered(visitor: Visit, job: SampleJob) -> None:
    visitor.refused = {409, 422}
    page = visitor.open(f"/jobs/{job.id}")
    dialog_of(page, "Change", Learning_rate="1e9")
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("optimizer.learning_rate")
    page.get_by_role("dialog").get_by_label("Learning rate").fill("0.00025")
    page.get_by_role("dialog").get_by_label("Steps between evaluations").fill("7")
    page.get_by_role("dialog").get_by_role("button", name="Change").click()
    expect(page.locator("#steer [role=status]")).to_contain_text("change is requested")
    (steer,) = job.record.steers
    steering = steer.steering
    assert (steering.optimizer.learning_rate, steering.training.evaluate_every_steps) == (0.00025, 7)
    dialog_of(page, "Scale", At_least="3", At_most="2")
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("elasticity.data_parallel_size")
    page.get_by_role("dialog").get_by_label("At least").fill("2")
    page.get_by_role("dialog").get_by_role("button", name="Scale").click()
    expect(page.locator("#steer [role=status]")).to_contain_text("limits are changed")
    elasticity = job.record.spec.elasticity
    assert elasticity
    assert elasticity.data_parallel_size
    assert (elasticity.data_parallel_size.min, elasticity.data_parallel_size.max) == (2, 2)
    dialog_of(page, "Drill", Fault="delay_rank", Rank="1", Steps="5", Seconds="0.5")
    expect(page.locator("#steer [role=status]")).to_contain_text("drill is requested")
    dialog_of(page, "Profile", Ranks="0 99")
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("99")
    page.get_by_role("dialog").get_by_label("Ranks").fill("0 1")
    page.get_by_role("dialog").get_by_role("button", name="Profile").click()
    expect(page.locator("#steer [role=status]")).to_contain_text("trace is requested")
    drill, profile = (command.model_dump() for command in job.record.commands)
    assert (drill["kind"], drill["rank"], drill["steps"], drill["seconds"]) == ("delay_rank", 1, 5, 0.5)
    assert (profile["steps"], profile["ranks"]) == (3, (0, 1))


@pytest.mark.full
def test_what_does_not_fit_a_job_is_not_offered(visitor: Visit, store: JobStore, job: SampleJob) -> None:
    page = visitor.open(f"/jobs/{job.id}")
    buttons = page.locator("#steer button")
    expect(buttons).to_have_text(["Change", "Scale", "Drill", "Profile"])
    job.report(a_checkpoint(40))
    expect(buttons).to_have_text(["Change", "Scale", "Drill", "Profile", "Export"])
    page.locator("#steer").get_by_role("button", name="Export").click()
    expect(page.get_by_role("dialog").locator("pre")).to_have_text(f"boost export {job.id} my-model --step 40")
    page.get_by_role("dialog").get_by_role("button", name="Back").click()
    store.change(job.id, Reason.TRAINING_FINISHED, "done")
    expect(buttons).to_have_text(["Export"], timeout=PATIENCE_MS)


@pytest.mark.nightly
def test_curves_of_jobs_that_train_grow(visitor: Visit, runs: list[str], job: SampleJob) -> None:
    job.train()
    page = visitor.open(f"/compare#job={runs[0]}&job={job.id}")
    curves(page, 2)
    with page.expect_response(lambda answer: "/curves" in answer.url and runs[0] not in answer.url):
        job.report(step_report(DONE + 1, loss=8.5))
    newest = [*(loss_at(step) for step in range(DONE - 18, DONE + 1)), 8.5]  # of which the table has the mean
    expect(page.locator(".compared tbody tr").nth(1)).to_contain_text(f"{fmean(newest):.3f}")
    page.wait_for_load_state("networkidle")
    rows = [row for row in csv.DictReader(downloaded(page, "#curves", "CSV").splitlines()) if row["id"] == job.id]
    assert (float(rows[-1]["step"]), float(rows[-1]["loss_mean"])) == (DONE + 1, 8.5)


@pytest.mark.full
def test_the_curve_of_a_job_that_is_retried_goes_on(visitor: Visit, store: JobStore, job: SampleJob) -> None:
    job.train()
    store.change(job.id, Reason.TRAINING_FAILED, "broke")
    visitor.page.clock.install()
    page = visitor.open(f"/compare#job={job.id}")
    curves(page, 1)
    page.wait_for_load_state("networkidle")
    asked = visitor.requests.count("/v1/jobs/compare")
    page.clock.run_for(12_000)  # it has ended, so that it is asked for less often
    page.wait_for_load_state("networkidle")
    assert visitor.requests.count("/v1/jobs/compare") == asked
    with page.expect_response(lambda answer: "/curves" in answer.url):
        store.retry(job.id)
        page.clock.run_for(12_000)


@pytest.mark.nightly
def test_200_jobs_of_10000_steps_stay_smooth(browser: Browser) -> None:
    with serving(200, 10_000) as api, visit(browser, api.url, viewport={"width": 1440, "height": 900}) as visiting:
        visiting.refused = {404}
        page = visiting.open(f"/compare#group={GROUP}")
        drawing = page.locator("#curves .picture")
        expect(drawing).to_have_attribute("aria-label", re.compile("curves of 200 jobs"), timeout=300_000)
        page.wait_for_load_state("networkidle")
        rows = [*csv.DictReader(downloaded(page, "#curves", "CSV").splitlines())]
        assert len(rows) <= 40_000
        assert max(float(row["loss_max"]) for row in rows) == SPIKE_OF_MANY
        for act in (hover, zoom):
            # Of five times, because other processes share the machine's cores.
            assert any(frames(page, partial(act, page))[-1] < 100 for _ in range(5)), act
