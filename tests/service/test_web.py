"""The web page in a real browser, against the real API over a record that the test fills."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, Page, Request, Route, ViewportSize, expect

from service.accounts.keys import KeyStore
from service.jobs.model import Owner
from service.jobs.outlook import Outlook
from service.jobs.patch import JobPatch
from service.jobs.states import JobState, Reason
from service.jobs.store import JobStore
from service.models.access import Scope
from service.models.jobs import QueueSettings
from service.settings import Settings
from tests.service.browser import PHONE, Visit, color_at, drawn, visit
from tests.service.conftest import RunningApi
from tests.service.records import (
    GOOD,
    SCORES,
    a_checkpoint,
    a_sample,
    a_spare,
    a_spec,
    an_evaluation,
    finish,
    run_to_the_end,
)
from tests.service.sample_jobs import (
    DONE,
    SLOW_RANK,
    STEPS,
    SampleJob,
    log_line,
    rank_times,
    shape_report,
    show_nodes,
    step_report,
)

MARKUP = '<img src=x onerror="document.title=1"><b>bold</b>'
TALL: ViewportSize = {"width": 1280, "height": 6000}  # the log is in view, whatever comes above it


@pytest.fixture
def job(store: JobStore, tmp_path: Path) -> SampleJob:
    """A job that trains."""
    made = SampleJob(store, tmp_path / "checkpoints")
    made.start()
    made.train()
    return made


def row(page: Page, name: str):
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))


def test_the_list_shows_how_jobs_stand_and_keeps_up(
    visitor: Visit, api: RunningApi, store: JobStore, job: SampleJob
) -> None:
    waiting = SampleJob(store, Path("/checkpoints"), name="later", priority=7)
    store.explain({waiting.id: "needs 4 CPUs; 2 are free"})
    page = visitor.open()
    running = row(page, "tiny")
    expect(running).to_contain_text("RUNNING")
    expect(running).to_contain_text(f"{DONE} / {STEPS}")
    expect(running).to_contain_text("tp 2 × pp 1 × dp 2")
    expect(running.get_by_role("progressbar")).to_have_attribute("aria-valuenow", str(DONE))
    curves = running.locator("svg.spark path")
    expect(curves).to_have_count(2)
    for number in range(2):
        expect(curves.nth(number)).to_have_attribute("d", re.compile(r"^M[\d.,]+(L[\d.,]+){29,}$"))
    expect(row(page, "later")).to_contain_text("needs 4 CPUs; 2 are free")
    expect(row(page, "later")).to_contain_text("priority 7")
    assert [link.inner_text() for link in page.locator(".job-link").all()] == ["later", "tiny"]
    api.outlook = Outlook("Ray cannot be reached", datetime.now(UTC) - timedelta(minutes=4))
    expect(running).to_contain_text("As last seen")
    expect(running).to_contain_text("Ray cannot be reached")
    expect(row(page, "later")).to_contain_text("nothing is scheduled at present: Ray cannot be reached")
    api.outlook = Outlook()
    job.report(step_report(DONE + 1, loss=1.2345))
    expect(running).to_contain_text(f"{DONE + 1} / {STEPS}")
    expect(running).to_contain_text("1.23")
    finish(store, job.id)
    expect(running).to_contain_text("SUCCEEDED")


@pytest.mark.nightly
def test_jobs_are_found_by_what_is_known_of_them(
    visitor: Visit, api: RunningApi, store: JobStore, job: SampleJob
) -> None:
    api.app.state.context.quotas.put_queue("night", QueueSettings())
    owl = SampleJob(store, Path("/checkpoints"), name="owl", queue="night")
    names = visitor.page.locator(".job-link")
    visitor.open()
    expect(names).to_have_text(["owl", "tiny"])
    visitor.page.get_by_role("button", name="Queued").click()
    expect(names).to_have_text(["owl"])
    visitor.page.get_by_role("button", name="Queued").click()
    visitor.page.get_by_label("Queue", exact=True).select_option("default")
    expect(names).to_have_text(["tiny"])
    visitor.page.get_by_label("Queue", exact=True).select_option("night")
    expect(names).to_have_text(["owl"])
    visitor.page.get_by_label("Queue", exact=True).select_option("")
    visitor.page.get_by_label("Part of a name, group, tag or note").fill("TIN")
    expect(names).to_have_text(["tiny"])
    visitor.page.reload()  # the address keeps what was asked for
    expect(names).to_have_text(["tiny"])
    visitor.page.get_by_label("Part of a name, group, tag or note").fill("nothing like it")
    expect(visitor.page.get_by_text("No jobs here")).to_be_visible()
    assert owl.record.state is JobState.QUEUED


OVERFLOWING = """() => [...document.querySelectorAll("table.jobs tbody :is(td, th)")].filter((cell) => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    const [text, box] = [range.getBoundingClientRect(), cell.getBoundingClientRect()];
    return text.width && (text.right > box.right + 1 || text.left < box.left - 1);
}).map((cell) => `${cell.dataset.label}: ${cell.textContent}`)"""


@pytest.mark.full
@pytest.mark.parametrize("width", [800, 1024, 1280, 1600])
def test_no_column_of_the_list_reaches_into_the_next(visitor: Visit, job: SampleJob, width: int) -> None:
    page = visitor.open()
    page.set_viewport_size({"width": width, "height": 900})
    expect(row(page, "tiny").locator(".cell-5")).to_contain_text("tp 2")
    assert page.evaluate(OVERFLOWING) == []


@pytest.mark.nightly
def test_older_jobs_are_on_further_pages(visitor: Visit, store: JobStore) -> None:
    for number in range(30):
        SampleJob(store, Path("/checkpoints"), name=f"job {number}")
    page = visitor.open()
    names = page.locator(".job-link")
    expect(names).to_have_text([f"job {number}" for number in range(29, 4, -1)])
    page.get_by_role("button", name="Older").click()
    expect(names).to_have_text([f"job {number}" for number in range(4, -1, -1)])
    expect(page.get_by_role("button", name="Older")).to_be_disabled()
    page.get_by_role("button", name="Newer").click()
    expect(names).to_have_count(25)


@pytest.mark.nightly
def test_queues_and_nodes_show_what_is_used(visitor: Visit, api: RunningApi, store: JobStore, job: SampleJob) -> None:
    api.app.state.context.quotas.put_queue("default", QueueSettings(description="for everything", cpus=8))
    show_nodes(store, zone="cellar")
    page = visitor.open()
    queue = page.locator("#queues li").filter(has_text="default")
    expect(queue).to_contain_text("1 running")
    expect(queue).to_contain_text("4 of 8")
    first, second = page.locator("#nodes > ul > li").all()
    expect(first).to_contain_text("node-a")
    expect(first.locator(".gpu-cells i.used")).to_have_count(2)
    expect(second).to_contain_text("draining")
    first.get_by_role("link", name="tiny × 2").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("tiny")
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("Jobs")


def test_curves_are_drawn_and_grow(visitor: Visit, job: SampleJob) -> None:
    page = visitor.open(f"/jobs/{job.id}")
    loss = page.locator("#loss .chart")
    expect(loss).to_have_attribute("aria-label", f"Loss: {job.record.progress.loss:.3f} at step {DONE}")
    for card, color in (("#loss", "--curve"), ("#loss", "--second"), ("#throughput", "--succeeded")):
        assert drawn(page, f"{card} canvas", color) > 50, (card, color)
    before = drawn(page, "#loss canvas", "--curve")
    job.report(step_report(DONE + 1, loss=7.5))
    expect(loss).to_have_attribute("aria-label", f"Loss: 7.500 at step {DONE + 1}")
    assert drawn(page, "#loss canvas", "--curve") != before
    page.get_by_label("Steps shown").select_option("100")
    expect(page.get_by_label("Steps shown")).to_have_value("100")
    page.get_by_label("Logarithmic").check()
    assert drawn(page, "#loss canvas", "--curve") > 50


@pytest.mark.full
def test_a_change_of_values_is_marked_on_the_curves_and_told(visitor: Visit, job: SampleJob) -> None:
    page = visitor.open(f"/jobs/{job.id}")
    expect(page.locator("#loss")).to_contain_text("went on after an interruption.")
    assert drawn(page, "#throughput canvas", "--paused") == 0
    job.store.patch(job.id, JobPatch.model_validate({"optimizer": {"learning_rate": 1e-4}}), by="ann")
    (steer,) = job.store.get(job.id).steers
    job.report(steer.made(job.record.spec, DONE)[1], step_report(DONE + 1), step_report(DONE + 2))
    expect(page.locator("#loss")).to_contain_text(f"Dashed in violet: steered after step {DONE}.")
    assert drawn(page, "#throughput canvas", "--paused") > 5
    page.get_by_text("What happened").click()
    told = f"from step {DONE + 1} on optimizer.learning_rate from 0.003 to 0.0001, by ann"
    expect(page.locator(".story")).to_contain_text(told)


@pytest.mark.full
def test_validation_sets_have_curves_and_a_table(visitor: Visit, store: JobStore, tmp_path: Path) -> None:
    data = {"validation": [{"name": "books", "kind": "text", "paths": ["/books"]}]}
    made = SampleJob(store, tmp_path, data={**GOOD["data"], **data})
    made.start()
    made.train()
    page = visitor.open(f"/jobs/{made.id}")
    rows = page.locator("#validation tbody tr")
    expect(rows).to_have_count(2)
    loss = made.record.evaluation.loss
    expect(rows.nth(0)).to_contain_text(f"{loss:.3f}")
    expect(rows.nth(1)).to_contain_text("books")
    expect(rows.nth(1)).to_contain_text(f"{loss + 0.5:.3f}")
    expect(rows.nth(1)).to_contain_text("1.250")
    expect(page.locator("#loss .u-legend")).to_contain_text("books")
    assert drawn(page, "#loss canvas", "--productive") > 10
    made.report(an_evaluation(DONE, 3.0, ("books",)))
    expect(rows.nth(1)).to_contain_text("33.1")  # its perplexity


@pytest.mark.full
def test_samples_are_text_of_a_step_and_come_live(visitor: Visit, job: SampleJob) -> None:
    job.report(a_sample(40, " upon a time"), a_sample(80, MARKUP, "\x1b[31m two"))
    page = visitor.open(f"/jobs/{job.id}")
    texts = page.locator("#samples dd")
    expect(texts).to_have_count(2)
    expect(texts.first).to_have_text(MARKUP)
    expect(page.locator("#samples dd *")).to_have_count(0)
    page.get_by_label("Step of the samples").select_option("40")
    expect(texts).to_have_text([" upon a time"])
    expect(page.locator("#samples dt")).to_have_text(["Once"])
    job.report(a_sample(120, " there was"))
    expect(page.get_by_label("Step of the samples").locator("option")).to_have_count(3)
    expect(texts).to_have_text([" upon a time"])  # what was chosen stays
    page.get_by_label("Step of the samples").select_option("120")
    job.report(a_sample(160, " and they lived"))
    expect(texts).to_have_text([" and they lived"])  # the newest is followed


@pytest.mark.full
def test_scores_are_listed_as_they_are_recorded(visitor: Visit, store: JobStore, job: SampleJob) -> None:
    store.add_scores(job.id, SCORES)
    page = visitor.open(f"/jobs/{job.id}")
    rows = page.locator("#scores tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("colors")
    expect(rows.first).to_contain_text("0.75")
    expect(rows.nth(1)).to_contain_text("–")  # no finite number
    markup = SCORES.scores[0].model_copy(update={"task": MARKUP})
    store.add_scores(job.id, SCORES.model_copy(update={"step": 20, "scores": (markup,)}))
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text(MARKUP)
    expect(page.locator("#scores tbody img")).to_have_count(0)


@pytest.mark.full
def test_a_job_without_samples_shows_none(visitor: Visit, job: SampleJob) -> None:
    page = visitor.open(f"/jobs/{job.id}")
    expect(page.locator("#validation")).to_be_visible()
    expect(page.locator("#samples")).to_be_hidden()


@pytest.mark.nightly
def test_a_stretch_of_the_curves_is_looked_at_closely(visitor: Visit, job: SampleJob) -> None:
    page = visitor.open(f"/jobs/{job.id}")
    expect(page.locator("#loss .chart")).to_have_attribute("aria-label", loss_at(DONE))
    page.locator("#loss .chart").scroll_into_view_if_needed()
    box = page.locator("#loss .u-over").bounding_box()
    assert box
    with page.expect_request(lambda request: "from_step=" in request.url) as asked:
        page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 30)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30, steps=4)
        page.mouse.up()
    query = dict(pair.split("=") for pair in asked.value.url.split("?")[1].split("&"))
    assert abs(int(query["from_step"]) - DONE / 4) < 5
    assert abs(int(query["to_step"]) - DONE / 2) < 5
    expect(page.get_by_label("Steps shown")).to_have_value("zoom")
    page.get_by_label("Steps shown").select_option("all")
    expect(page.locator("#loss .chart")).to_have_attribute("aria-label", loss_at(DONE))


def loss_at(step: int) -> re.Pattern[str]:
    return re.compile(rf"^Loss: [\d.]+ at step {step}$")


@pytest.mark.nightly
def test_a_slow_rank_is_hot(visitor: Visit, job: SampleJob) -> None:
    page = visitor.open(f"/jobs/{job.id}")
    expect(page.locator("#ranks .lead")).to_contain_text(f"Rank {SLOW_RANK} on node-b computes 1.89 times")
    rows = [color_at(page, "#ranks canvas", 0.5, (rank + 0.5) * 20 / (4 * 20 + 18)) for rank in range(4)]
    slow, others = rows.pop(SLOW_RANK), rows
    for other in others:
        assert slow[0] - slow[2] > 100  # orange
        assert abs(other[0] - other[2]) < 40  # about grey
    page.locator("#ranks canvas").focus()
    page.keyboard.press("ArrowUp")
    expect(page.locator("#ranks")).to_contain_text("× the median rank")


@pytest.mark.full
def test_ranks_are_drawn_as_one_picture(visitor: Visit, job: SampleJob) -> None:
    visitor.page.add_init_script("""
        const fill = CanvasRenderingContext2D.prototype.fillRect;
        CanvasRenderingContext2D.prototype.fillRect = function (...where) {
            if (this.canvas.matches?.(".heat")) window.cells = (window.cells ?? 0) + 1;
            return fill.apply(this, where);
        };
    """)
    page = visitor.open(f"/jobs/{job.id}")
    expect(page.locator("#ranks .lead")).to_contain_text("1.89 times")
    assert page.evaluate("window.cells") is None, "a gang of a thousand ranks has half a million cells"
    again = page.evaluate("""async () => {
        const { tableOf } = await import('/static/heat.js');
        const read = last => [[1, 2, 3], [2, 2, last]].map((busy_seconds, step) => ({ step, busy_seconds }));
        const drawn = tableOf(read(4), []);
        return [4, 6].map(last => tableOf(read(last), drawn).map((row, at) => [row === drawn[at], row.ratios]));
    }""")
    first = [True, [0.5, 1, 1.5]]
    assert again == [[first, [True, [1, 1, 2]]], [first, [False, [1, 1, 3]]]], "rows read again are not sorted again"


@pytest.mark.nightly
def test_ranks_come_live(visitor: Visit, job: SampleJob) -> None:
    page = visitor.open(f"/jobs/{job.id}")
    expect(page.locator("#ranks .lead")).to_contain_text("1.89 times")
    for step in range(DONE + 5, DONE + 5 * 60, 5):
        job.report(rank_times(step, slow=0.1))
    expect(page.locator("#ranks .lead")).to_contain_text("All 4 ranks take about as long as each other")


@pytest.mark.full
def test_logs_follow_and_are_text(visitor: Visit, job: SampleJob) -> None:
    page = visitor.open(f"/jobs/{job.id}")
    expect(page.get_by_role("heading", level=1)).to_have_text("tiny")
    assert f"/v1/jobs/{job.id}/logs" not in visitor.requests  # it is out of view
    page.set_viewport_size(TALL)
    log = page.get_by_role("log")
    expect(log).to_contain_text("training begins")
    job.report(log_line(MARKUP, rank=1), log_line("a defect", rank=1, level="ERROR"))
    expect(log.get_by_text(MARKUP)).to_be_visible()
    expect(log.locator("img, b")).to_have_count(0)
    page.get_by_label("Level").select_option("Errors")
    expect(log.locator(".message")).to_have_text(["a defect"])
    page.get_by_label("Level").select_option("All levels")
    page.get_by_label("Rank", exact=True).select_option(str(SLOW_RANK - 1))
    expect(log.locator(".message")).to_have_text([MARKUP, "a defect"])
    pause = page.get_by_role("button", name="Pause the log")
    pause.click()
    job.report(log_line("while paused", rank=SLOW_RANK - 1))
    expect(page.locator("#logs")).to_contain_text("newer lines: 1")
    expect(log).not_to_contain_text("while paused")
    pause.click()
    expect(log).to_contain_text("while paused")


@pytest.mark.full
def test_a_log_that_is_cut_off_goes_on(visitor: Visit, job: SampleJob) -> None:
    visitor.page.set_viewport_size(TALL)
    finish(job.store, job.id)

    def cut_off(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=answer.text().partition("\n\n")[0] + "\n\n")

    visitor.page.route("**/logs?*", cut_off, times=1)
    log = visitor.open(f"/jobs/{job.id}").get_by_role("log")
    expect(log.locator(".message")).to_have_text(["training begins", "this rank is late"])


@pytest.mark.full
def test_a_request_without_an_answer_is_told(visitor: Visit) -> None:
    visitor.page.route("**/v1/queues", lambda _: None)
    script = """async () => {
        AbortSignal.timeout = () => AbortSignal.abort(new DOMException('', 'TimeoutError'));
        const { get } = await import('/static/api.js');
        return get('/v1/queues').catch((problem) => [problem.passing, problem.message]);
    }"""
    passing, message = visitor.open().evaluate(script)
    assert passing
    assert "does not answer" in message


@pytest.mark.full
def test_addresses_that_mean_nothing_leave_the_page_working(visitor: Visit, job: SampleJob) -> None:
    visitor.refused = {404}
    expect(row(visitor.open("/?state=running"), "tiny")).to_be_visible()
    expect(visitor.open("/jobs/100%").get_by_text("there is no job '100%'")).to_be_visible()


@pytest.mark.full
def test_what_was_being_typed_leaves_the_next_page_alone(visitor: Visit, job: SampleJob) -> None:
    visitor.page.clock.install()
    page = visitor.open()
    page.clock.pause_at(datetime.now(UTC) + timedelta(hours=1))  # however slow this machine is
    page.get_by_label("Part of a name, group, tag or note").fill("tin")
    page.get_by_role("link", name="Compare").click()
    page.get_by_label("Group or sweep").fill("rates")
    page.get_by_role("link", name="← Jobs").click()
    page.clock.run_for(2_000)
    assert page.url.removeprefix(visitor.url) == "/"


@pytest.mark.full
def test_the_list_of_checkpoints_is_read_once_for_all_old_ones(visitor: Visit, job: SampleJob) -> None:
    job.report(*(a_checkpoint(step) for step in range(1, 51)))
    finish(job.store, job.id)
    page = visitor.open(f"/jobs/{job.id}")
    page.get_by_text("What happened").click()
    expect(page.locator(".story")).to_contain_text("step 50")
    page.wait_for_load_state("networkidle")
    assert visitor.requests.count(f"/v1/jobs/{job.id}/checkpoints") < 10


def test_what_others_wrote_is_never_markup(visitor: Visit, api: RunningApi, store: JobStore, job: SampleJob) -> None:
    api.app.state.context.quotas.put_queue("default", QueueSettings(description=MARKUP))
    show_nodes(store, **{"ray.io/node-name": MARKUP})
    store.change(job.id, Reason.GANG_RECOVERING, MARKUP)
    page = visitor.open()
    expect(page.get_by_text(MARKUP)).to_have_count(4)  # the queue, two nodes, the job's message
    page.goto(f"{api.url}/jobs/{job.id}")
    expect(page.locator(".explanation")).to_have_text(MARKUP)
    page.get_by_text("What happened").click()
    expect(page.locator(".story").get_by_text(MARKUP)).to_be_visible()
    expect(page.locator("main img, main b b")).to_have_count(0)
    assert page.title() != "1"


@pytest.mark.full
def test_the_timeline_tells_shapes_and_restarts(visitor: Visit, job: SampleJob) -> None:
    page = visitor.open(f"/jobs/{job.id}")
    bar = page.locator(".timeline-bar > span")
    expect(bar.filter(has_text="tp 2 × pp 1 × dp 2")).to_have_count(2)
    expect(bar.filter(has_text="tp 2 × pp 1 × dp 1")).to_have_count(1)
    expect(page.locator(".timeline-bar .phase-recovering")).to_have_count(2)
    page.get_by_role("button", name="worker lost after step 60").hover()
    told = page.locator(".told")
    expect(told).to_contain_text("rank 1 was killed by signal 9")
    expect(told).to_contain_text("Cost 4 s")
    expect(told).to_contain_text("1 step done again")
    page.get_by_text("What happened").click()
    expect(page.locator(".story")).to_contain_text("rank 1 computes 75% of the step")
    store = job.store
    waits = page.locator(".timeline-bar .phase-waiting")
    before = waits.count()
    store.change(job.id, Reason.WAITING_FOR_RESOURCES, "waits for 4 × {CPU: 1}")
    expect(waits).to_have_count(before + 1)
    store.request_pause(job.id)
    store.change(job.id, Reason.PAUSED_BY_USER, "paused by its user")
    expect(page.locator(".timeline-bar .phase-paused")).to_have_count(1)
    expect(page.locator(".job-head .badge")).to_have_text("PAUSED")


@pytest.mark.nightly
def test_the_job_leads_to_the_ray_dashboard(
    browser: Browser, store: JobStore, database_url: str, tmp_path: Path
) -> None:
    there = "https://ray.example.org/cluster/"
    settings = Settings(home=tmp_path / "home", database_url=database_url, auth=False, ray_dashboard_url=there)
    running = RunningApi(store, settings)
    job = SampleJob(store, tmp_path / "checkpoints")
    job.start()
    with visit(browser, running.url) as visiting:
        page = visiting.open(f"/jobs/{job.id}")
        expect(page.get_by_role("heading", name="tiny")).to_be_visible()
        link = page.get_by_role("link", name="Ray dashboard")
        expect(link).to_have_count(0)
        job.report(shape_report().model_copy(update={"supervisor": "0a1b"}))
        expect(link).to_have_attribute("href", "https://ray.example.org/cluster/#/actors/0a1b")
    running.stop()


@pytest.mark.nightly
def test_the_head_tells_of_a_spare_copy(visitor: Visit, job: SampleJob) -> None:
    page = visitor.open(f"/jobs/{job.id}")
    fact = page.locator(".job-head .facts div", has_text="Spare copy").locator("dd")
    expect(fact).to_have_text("–")
    job.report(a_spare(8))
    expect(fact).to_have_text("step 8 on node-z")


@pytest.mark.nightly
def test_goodput_is_told_by_kind(visitor: Visit, job: SampleJob) -> None:
    page = visitor.open(f"/jobs/{job.id}")
    legend = page.locator("#goodput .legend li")
    expect(legend).to_have_count(7)
    expect(legend.nth(0)).to_contain_text("Productive")
    seconds = job.record.goodput
    total = sum(seconds.seconds.values())
    expect(legend.nth(0)).to_contain_text(f"{round(100 * seconds.productive / total)}%")
    expect(page.locator("#goodput [role=img]")).to_have_attribute("aria-label", re.compile("Productive"))


@pytest.mark.full
def test_buttons_act_after_they_asked(visitor: Visit, job: SampleJob) -> None:
    page = visitor.open(f"/jobs/{job.id}")
    actions = page.get_by_role("group", name="Actions")
    actions.get_by_role("button", name="Pause").click()
    page.get_by_role("dialog").get_by_role("button", name="Back").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert not job.record.pause_requested
    press(page, "Pause")
    expect(page.locator(".explanation")).to_have_text("finishes its step, then pauses")
    assert job.record.pause_requested
    press(page, "Resume")
    expect(actions.get_by_role("button", name="Pause")).to_be_visible()
    assert not job.record.pause_requested
    press(page, "Cancel")
    expect(page.locator(".explanation")).to_have_text("is being cancelled")
    job.store.change(job.id, Reason.CANCELLED_BY_USER, "cancelled by its user")
    expect(page.locator(".job-head .badge")).to_have_text("CANCELLED")
    press(page, "Retry")
    expect(page.locator(".job-head .badge")).to_have_text("QUEUED")
    assert job.record.reason is Reason.RETRIED_BY_USER


def press(page: Page, label: str) -> None:
    page.get_by_role("group", name="Actions").get_by_role("button", name=label).click()
    page.get_by_role("dialog").get_by_role("button", name=label).click()
    expect(page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.nightly
def test_a_clone_is_made_with_changes(visitor: Visit, job: SampleJob) -> None:
    visitor.refused = {422}
    page = visitor.open(f"/jobs/{job.id}")
    page.get_by_role("button", name="Clone").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("longer")
    for wrong, answer in (("{", "not JSON"), ('{"training": {"stepz": 9}}', "training.stepz")):
        dialog.get_by_label("Changes").fill(wrong)
        dialog.get_by_role("button", name="Submit").click()
        expect(dialog.get_by_role("alert")).to_contain_text(answer)
    dialog.get_by_label("Changes").fill('{"training": {"steps": 400}}')
    dialog.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("longer")
    (clone, _) = job.store.page()[0]
    assert (clone.cloned_from, clone.spec.training.steps, page.url.split("/")[-1]) == (job.id, 400, clone.id)
    assert clone.spec.checkpoint.origin is None


@pytest.mark.nightly
def test_a_clone_starts_from_a_checkpoint_as_its_user_says(visitor: Visit, job: SampleJob) -> None:
    job.save(40)
    visitor.refused = {422}
    page = visitor.open(f"/jobs/{job.id}")
    page.get_by_role("button", name="Clone").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Start").select_option(label="Continue from step 40: with the optimizer, to more steps")
    dialog.get_by_label("Changes").fill('{"training": {"steps": 40}}')
    dialog.get_by_role("button", name="Submit").click()
    expect(dialog.get_by_role("alert")).to_contain_text("set training.steps above 40")
    dialog.get_by_label("Start").select_option(label="Start from the weights of step 40: at step 0")
    dialog.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    (clone, _) = job.store.page()[0]
    assert clone.spec.checkpoint.origin == ("weights_from", job.record.checkpoint_url)


@pytest.mark.full
def test_a_job_is_described_and_found_by_that(visitor: Visit, store: JobStore, job: SampleJob) -> None:
    SampleJob(store, Path("/checkpoints"), name="other")
    visitor.refused = {422}
    page = visitor.open(f"/jobs/{job.id}")
    page.get_by_role("button", name="Describe").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Group").fill("my sweep")
    dialog.get_by_label("Tags").fill(" baseline  350m ")
    dialog.get_by_label("Notes").fill(f"As published.\n{MARKUP}")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("group: ")
    dialog.get_by_label("Group").fill("sweep-1")
    dialog.get_by_role("button", name="Save").click()
    expect(page.locator(".notes")).to_have_text(f"As published.\n{MARKUP}")
    assert job.record.spec.tags == ("baseline", "350m")
    names = page.locator(".job-link")
    page.get_by_role("link", name="350m").click()
    expect(names).to_have_text(["tiny"])
    expect(row(page, "tiny")).to_contain_text("sweep-1 · baseline · 350m")
    page.get_by_role("button", name="tag 350m").click()
    expect(names).to_have_text(["other", "tiny"])
    page.get_by_label("Part of a name, group, tag or note").fill("PUBLISHED")
    expect(names).to_have_text(["tiny"])


@pytest.mark.full
def test_specs_are_compared(visitor: Visit, store: JobStore, job: SampleJob) -> None:
    other = SampleJob(store, Path("/checkpoints"), name="other", priority=7)
    visitor.refused = {404}
    page = visitor.open(f"/jobs/{job.id}")
    which = page.get_by_label("ID of another job")
    which.fill("job-0")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".spec-diff .refusal")).to_contain_text("there is no job 'job-0'")
    which.fill(other.id)
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".spec-diff tbody").first.get_by_role("row").filter(has_text="priority")).to_have_text(
        "priority07"
    )


@pytest.mark.full
def test_a_refusal_is_told(visitor: Visit, job: SampleJob) -> None:
    visitor.refused = {409}
    page = visitor.open(f"/jobs/{job.id}")
    page.get_by_role("button", name="Cancel").click()
    finish(job.store, job.id)  # meanwhile
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("has already SUCCEEDED")


@pytest.mark.full
def test_all_jobs_that_the_filters_leave_are_cancelled(visitor: Visit, store: JobStore) -> None:
    study = [store.create(a_spec(group="study"), "file:///checkpoints") for _ in range(30)]
    other = store.create(a_spec(), "file:///checkpoints")
    run_to_the_end(store, study[0].id)
    page = visitor.open("/")
    expect(page.locator(".job-link").first).to_be_visible()
    expect(page.get_by_role("button", name="Cancel these")).to_be_hidden()
    page = visitor.open("/?group=study")
    page.get_by_role("button", name="Cancel these").click()
    expect(page.get_by_role("heading", name="Cancel 29 jobs?")).to_be_visible()
    page.get_by_role("button", name="Cancel them").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator("table.jobs .badge").first).to_have_text("CANCELLED")
    assert store.counts()[JobState.CANCELLED] == 29
    assert store.get(other.id).state is JobState.QUEUED


@pytest.mark.nightly
def test_a_job_that_is_not_there(visitor: Visit) -> None:
    visitor.refused = {404}
    page = visitor.open("/jobs/job-00000000000000000000000000")
    expect(page.get_by_text("there is no job")).to_be_visible()
    page.get_by_role("main").get_by_role("link", name="Jobs").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Jobs")


@pytest.mark.nightly
def test_checkpoints_are_pinned_and_deleted(visitor: Visit, job: SampleJob) -> None:
    job.save(40, 80)
    visitor.refused = {409}
    page = visitor.open(f"/jobs/{job.id}")
    rows = page.locator("#checkpoints tbody tr")
    expect(rows).to_have_count(2)
    oldest = rows.nth(1)
    oldest.get_by_role("button", name="Pin").click()
    expect(oldest).to_contain_text("pinned")
    expect(oldest.get_by_role("button", name="Delete")).to_be_disabled()
    oldest.get_by_role("button", name="Unpin").click()
    expect(oldest).not_to_contain_text("pinned")
    rows.nth(0).get_by_role("button", name="Delete").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Delete").click()
    expect(dialog.get_by_role("alert")).to_contain_text("80")  # the newest of a job that goes on
    dialog.get_by_role("button", name="Back").click()
    oldest.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(rows).to_have_count(1)
    (Path(job.record.checkpoint_url.removeprefix("file://")) / "step-00000080" / "manifest.json").write_bytes(b"")
    job.save(120)
    expect(rows).to_have_count(2)
    expect(rows.nth(1)).to_contain_text("step-00000080/manifest.json is empty")
    rows.nth(1).get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(rows).to_have_count(1)


@pytest.mark.nightly
def test_the_plan_is_shown_by_shape(visitor: Visit, api: RunningApi, job: SampleJob) -> None:
    plan = httpx.post(f"{api.url}/v1/plans", json=job.record.spec.model_dump(mode="json")).json()
    page = visitor.open(f"/jobs/{job.id}")
    rows = page.locator("#plan tbody tr")
    expect(rows).to_have_count(len(plan["shapes"]))
    expect(page.locator("#plan .budget")).to_have_text(plan["shapes"][plan["fastest"]]["words"])
    expect(rows.nth(0)).to_contain_text("tp 2 × pp 1 × dp 2")
    kinds = re.compile("weights .*gradients .*optimizer .*activations .*logits ", re.DOTALL)
    expect(rows.nth(0).get_by_role("img")).to_have_attribute("aria-label", kinds)
    page.get_by_text("As it is now").click()
    expect(page.locator("#spec pre")).to_contain_text('"tensor_parallel_size": 2')


@pytest.mark.nightly
def test_the_page_finds_the_service_again(visitor: Visit, api: RunningApi, job: SampleJob) -> None:
    visitor.page.set_viewport_size(TALL)
    page = visitor.open(f"/jobs/{job.id}")
    messages = page.get_by_role("log").locator(".message")
    expect(messages).to_have_count(2)
    api.stop()
    expect(page.get_by_role("status").filter(has_text="No connection")).to_be_visible()
    api.start()
    job.report(step_report(DONE + 1), log_line("back again"))
    expect(messages).to_have_text(["training begins", "this rank is late", "back again"])
    expect(page.get_by_role("status").filter(has_text="No connection")).to_have_count(0)
    expect(page.locator("#loss .chart")).to_have_attribute("aria-label", loss_at(DONE + 1))


@pytest.mark.nightly
def test_a_tab_that_nobody_sees_does_nothing(visitor: Visit, job: SampleJob) -> None:
    visitor.page.clock.install()
    visitor.page.set_viewport_size(TALL)
    page = visitor.open(f"/jobs/{job.id}")
    expect(page.get_by_role("log")).to_contain_text("training begins")
    hide = """hidden => {
        Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    expect(page.locator(".timeline-bar .phase-running").first).to_be_visible()
    job.report(step_report(DONE + 1))  # both streams are open when this is seen
    page.clock.run_for(2_000)
    expect(page.locator("#loss .chart")).to_have_attribute("aria-label", loss_at(DONE + 1))
    streams = {"logs", "events"}

    def ends_the_last(request: Request) -> bool:
        streams.discard(urlsplit(request.url).path.rsplit("/", 1)[1])
        return not streams

    with page.expect_event("requestfailed", ends_the_last):
        page.evaluate(hide, True)
    page.clock.run_for(10_000)  # what was under way ends
    before = len(visitor.requests)
    job.report(log_line("unseen"))
    page.clock.run_for(120_000)
    assert visitor.requests[before:] == []
    expect(page.get_by_role("log")).not_to_contain_text("unseen")
    page.evaluate(hide, False)
    expect(page.get_by_role("log")).to_contain_text("unseen")
    expect(page.get_by_role("log").locator(".message")).to_have_count(3)


@pytest.mark.nightly
@pytest.mark.parametrize(("path", "scheme"), [("/", "light"), ("/", "dark"), ("job", "light"), ("job", "dark")])
def test_a_phone_shows_all_without_scrolling_sideways(
    browser: Browser, api: RunningApi, store: JobStore, job: SampleJob, path: str, scheme: str
) -> None:
    show_nodes(store)
    job.save(40)
    with visit(browser, api.url, viewport=PHONE, color_scheme=scheme, has_touch=True) as visiting:
        page = visiting.open("/" if path == "/" else f"/jobs/{job.id}")
        expect(page.get_by_text("tp 2 × pp 1 × dp 2").first).to_be_visible()
        expect(page.locator("#nodes li, #plan tr").first).to_be_attached()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, background.removeprefix("rgb(").removesuffix(")").split(", "))) / 3
        assert brightness < 60 if scheme == "dark" else brightness > 220


@pytest.fixture
def guarded(store: JobStore, database_url: str, tmp_path: Path) -> Iterator[RunningApi]:
    """The API with authentication."""
    running = RunningApi(store, Settings(home=tmp_path / "home", database_url=database_url))
    yield running
    running.stop()


@pytest.mark.full
def test_people_sign_in_with_a_key(browser: Browser, guarded: RunningApi, store: JobStore) -> None:
    spec = SampleJob(store, Path("/c"), name="mine").record.spec
    store.create(spec, guarded.settings.checkpoint_root, Owner("birds", "ada"))
    reader = KeyStore(store.engine).create("ada", "birds", [Scope.READ])
    with visit(browser, guarded.url) as visiting:
        visiting.refused = {401}
        page = visiting.open()
        key = page.get_by_label("API key")
        key.fill("boost_wrongkey_x")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("main").get_by_role("alert")).not_to_be_empty()
        key.fill(reader.key)
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator("#identity")).to_contain_text("ada · birds")
        expect(page.locator(".job-link")).to_have_text(["mine"])  # and not the other tenant's
        page.locator(".job-link").click()
        expect(page.get_by_role("button", name="Cancel")).to_be_disabled()  # the key may only read
        assert "boost_" not in page.evaluate("document.cookie + JSON.stringify([localStorage, sessionStorage])")
        other = page.context.new_page()
        other.goto(f"{guarded.url}/new")
        expect(other.locator("#identity")).to_contain_text("ada · birds")
        other.evaluate("sessionStorage.setItem('draft of a job', '{}')")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("API key")).to_be_visible()
        expect(other.get_by_label("API key")).to_be_visible()
        assert other.evaluate("sessionStorage.length") == 0
        other.get_by_label("API key").fill(reader.key)
        other.get_by_role("button", name="Sign in").click()
        expect(page.locator("#identity")).to_contain_text("ada · birds")


@pytest.mark.full
@pytest.mark.parametrize("scope", [Scope.READ, Scope.ADMIN])
def test_what_belongs_together_is_of_one_tenant(
    browser: Browser, guarded: RunningApi, store: JobStore, scope: Scope
) -> None:
    own, others = (
        store.create(a_spec(name=tenant, group="rates"), guarded.settings.checkpoint_root, Owner(tenant, "ada"))
        for tenant in ("birds", "fish")
    )
    shown = own if scope is Scope.READ else others
    key = KeyStore(store.engine).create("ada", "birds", [scope]).key
    with visit(browser, guarded.url) as visiting:
        visiting.refused = {401, 404}
        page = visiting.open(f"/jobs/{shown.id}")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("link", name="Compare the group").click()
        expect(page.locator(".compared tbody th")).to_have_text([shown.tenant])
        page.go_back()
        page.get_by_role("link", name="rates", exact=True).click()
        expect(page.locator(".job-link")).to_have_text([shown.tenant])
        expect(page.locator("#queues")).to_contain_text("2 queued")
        expect(page.get_by_role("button", name="Queued")).to_have_text("queued")  # and not how many all tenants have
        if scope is Scope.ADMIN:
            assert "/v1/sweeps/rates" not in visiting.requests  # it would be the operator's own
            page.get_by_role("button", name="tenant fish").click()
            expect(page.locator(".job-link")).to_have_text(["fish", "birds"])
            expect(page.get_by_role("button", name="Queued")).to_have_text("queued2")


@pytest.mark.nightly
def test_files_come_as_what_they_are(api: RunningApi) -> None:
    with httpx.Client(base_url=api.url) as http:
        page = http.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert page.text == http.get("/jobs/anything").text
        policy = page.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        script = http.get("/static/app.js")
        assert (script.headers["content-type"], script.headers["cache-control"]) == (
            "text/javascript; charset=utf-8", "no-cache",
        )  # fmt: skip
        again = http.get("/static/app.js", headers={"If-None-Match": script.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert http.get("/static/style/base.css").headers["content-type"] == "text/css; charset=utf-8"
        vendored = http.get("/static/vendor/uplot-1.6.32/uPlot.esm.js")
        assert "immutable" in vendored.headers["cache-control"]
        for absent in ("/static/nothing.js", "/static/../pages.py", "/static/%2e%2e/pages.py", "/static/"):
            assert http.get(absent).status_code == 404, absent
        assert not [path for path in http.get("/openapi.json").json()["paths"] if "static" in path or path == "/"]
