"""The page that starts jobs, in a real browser, against the real API."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from playwright.sync_api import Browser, Locator, Page, Route, expect

from boost_core.config import JobSpec, ModelConfig, load_job
from boost_core.config.base import read_yaml
from boost_core.config.model import PRESETS
from boost_core.config.training import OptimizerConfig
from service.accounts.keys import KeyStore
from service.jobs.patch import JobPatch
from service.jobs.store import JobStore
from service.models.access import Scope
from service.models.jobs import QueueSettings
from tests.service.browser import PHONE, Visit, visit
from tests.service.conftest import RunningApi
from tests.service.records import a_spec
from tests.service.sample_jobs import SampleJob

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
STATIC = ROOT / "service/web/static"
MARKUP = '<img src=x onerror="document.title=1"><script>document.title=2</script>'

GOOD = """\
# of the night
name: owl
model: {preset: tiny}
training:
  steps: 7 # few
"""


def editor(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Job file")


def write(page: Page, text: str) -> None:
    """Put a text into the editor as one that is pasted."""
    editor(page).press("Control+a")
    paste = """(element, text) => {
        const clipboardData = new DataTransfer();
        clipboardData.setData('text/plain', text);
        element.dispatchEvent(new ClipboardEvent('paste', {clipboardData, bubbles: true, cancelable: true}));
    }"""
    editor(page).evaluate(paste, text)


def lines(page: Page) -> list[str]:
    return editor(page).locator(".cm-line").all_inner_texts()


def expect_lines(page: Page, wanted: list[str]) -> None:
    """Wait until the editor, which draws a line anew after what is typed, shows these lines."""
    for _ in range(50):
        if lines(page) != wanted:
            page.wait_for_timeout(100)
    assert lines(page) == wanted


def status(page: Page) -> Locator:
    return page.get_by_role("main").get_by_role("status")


@pytest.mark.full
def test_a_job_is_written_mended_planned_and_submitted_once(visitor: Visit, api: RunningApi, store: JobStore) -> None:
    api.app.state.context.quotas.put_queue("night", QueueSettings())
    visitor.refused = {422}
    page = visitor.open()
    page.get_by_role("link", name="New job").click()
    expect(page.get_by_role("button", name="cola-tiny")).to_be_visible()
    expect(editor(page)).to_be_focused()
    options = page.get_by_role("option")

    def complete(typed: str, wanted: str) -> None:
        page.keyboard.type(typed)
        options.filter(has_text=re.compile(f"^{wanted}")).click()

    complete("na", "name")
    page.keyboard.type("owl\n")
    complete("que", "queue")
    complete("ni", "night")  # what the service knows
    page.keyboard.press("Enter")
    complete("mod", "model")
    complete("pre", "preset")
    complete("ti", "tiny")
    page.keyboard.type("\nrank: wide")
    problems = page.get_by_role("list", name="Problems").get_by_role("listitem")
    expect(problems).to_contain_text(["training: is missing", "model.rank: must be a whole number, not 'wide'"])
    expect(problems.nth(1).get_by_role("button")).to_have_text("Line 5")
    expect(page.locator(".cm-lintRange-error", has_text="rank: wide")).to_be_visible()
    problems.nth(1).get_by_role("button").click()  # leads there
    expect(editor(page)).to_be_focused()
    page.keyboard.press("Shift+End")
    page.keyboard.type("rank: 8\n")
    page.keyboard.press("Backspace")
    complete("tra", "training")
    complete("ste", "steps")
    page.keyboard.type("7")
    expect_lines(page, [
        "name: owl",
        "queue: night",
        "model:",
        "  preset: tiny",
        "  rank: 8",
        "training:",
        "  steps: 7",
    ])  # fmt: skip
    expect(status(page)).to_have_text("Checked: it can be submitted.")
    expect(problems).to_have_count(0)
    expect(page.locator("#plan tbody tr")).to_contain_text("1 rank, as written")
    page.get_by_role("button", name="Submit").dblclick()
    expect(page.get_by_role("heading", level=1)).to_have_text("owl")
    (job,) = store.page()[0]
    assert (job.queue, job.spec.model.rank, job.spec.training.steps) == ("night", 8, 7)
    assert page.url.endswith(job.id)
    visitor.open("/new")
    expect(page.get_by_role("button", name="cola-tiny")).to_be_visible()  # the draft is gone


@pytest.mark.nightly
def test_a_draft_outlives_the_page_and_is_not_overwritten_unasked(visitor: Visit, store: JobStore) -> None:
    page = visitor.open("/new")
    write(page, GOOD)
    page.reload()
    expect(editor(page)).to_contain_text("# of the night")
    page.get_by_label("Examples").select_option("elastic-cola")
    page.get_by_role("dialog").get_by_role("button", name="Back").click()
    expect(editor(page)).to_contain_text("# of the night")
    page.get_by_label("Examples").select_option("elastic-cola")
    page.get_by_role("dialog").get_by_role("button", name="Replace").click()
    expect(page.locator("#plan tbody tr")).to_have_count(3)
    page.get_by_label("Examples").select_option("lax-tiny")  # instead of another example: nobody is asked
    expect(editor(page)).to_contain_text("name: lax-tiny")
    editor(page).press("Control+z")
    expect(editor(page)).to_contain_text("name: elastic-cola")
    editor(page).press("Control+Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("elastic-cola")
    (job,) = store.page()[0]
    assert job.spec == load_job(ROOT / "examples/elastic-cola.yaml")


@pytest.mark.nightly
def test_the_schema_checks_at_once_and_the_service_one_text_at_a_time(visitor: Visit) -> None:
    page = visitor.open("/new")
    held: list[Route] = []
    page.route("**/v1/plans", lambda route: route.continue_() if held else held.append(route))
    problems = page.get_by_role("list", name="Problems").get_by_role("listitem")
    with page.expect_request("**/v1/plans"):
        write(page, "name: '-'\nmodel: {preset: tine}\ntraining: {steps: 0, stepz: 1}\npriority: high")
    expect(problems).to_have_text(
        [
            re.compile("name: is not spelled as it may be"),
            re.compile("model.preset: must be one of tiny, 60m, "),
            re.compile("training.steps: 0 is less than 1"),
            re.compile("training.stepz: there is no such field"),
            re.compile("priority: must be a whole number"),
        ]
    )
    write(page, GOOD)
    expect(problems).to_have_count(0)
    expect(status(page)).to_have_text("Being checked…")
    assert visitor.requests.count("/v1/plans") == 1
    held[0].fulfill(status=200, json={})  # of an old text: it is not looked at
    expect(status(page)).to_have_text("Checked: it can be submitted.")
    assert visitor.requests.count("/v1/plans") == 2
    page.get_by_text("preset", exact=True).hover()
    expect(page.locator(".cm-tooltip")).to_contain_text("Name of a published model to start from.")


@pytest.mark.full
def test_what_is_written_is_never_markup(visitor: Visit) -> None:
    visitor.refused = {422}
    page = visitor.open("/new")
    write(page, f"name: '{MARKUP}'\nmodel: {{preset: tiny}}\ntraining: {{steps: 1}}\n'{MARKUP}': 1")
    expect(status(page)).to_have_text("The service does not take it as it is.")
    expect(page.get_by_role("list", name="Problems")).to_contain_text(MARKUP)
    page.locator(".cm-lintRange-error").first.hover()
    expect(page.locator(".cm-tooltip")).to_contain_text("name")
    expect(page.locator("main img, main script")).to_have_count(0)
    assert page.title() == "New job · BOOST"


@pytest.mark.parametrize(
    "what",
    [pytest.param("away", marks=pytest.mark.nightly), "limited", pytest.param("unknown", marks=pytest.mark.nightly)],
)
@pytest.mark.nightly
def test_a_text_is_kept_when_it_cannot_be_submitted(
    browser: Browser, guarded: RunningApi, store: JobStore, what: str
) -> None:
    keys = KeyStore(store.engine)
    with visit(browser, guarded.url) as visiting:
        visiting.refused = {401, 429}
        page = visiting.open("/new")
        sign_in(page, keys.create("ada", "birds", [Scope.SUBMIT]).key)
        write(page, GOOD)
        expect(status(page)).to_have_text("Checked: it can be submitted.")
        submit = page.get_by_role("button", name="Submit")
        alert = page.get_by_role("main").get_by_role("alert")
        if what == "away":
            guarded.stop()
            submit.click()
            expect(alert).to_contain_text("The service cannot be reached. Your text is kept: submit it again.")
            guarded.start()
        elif what == "limited":
            problem = {"detail": "too many;", "code": "rate-limited"}
            page.route(
                "**/v1/jobs", lambda route: route.fulfill(status=429, headers={"Retry-After": "7"}, json=problem)
            )
            submit.click()
            expect(alert).to_contain_text("too many; Your text is kept: submit it again in 7 s.")
            page.unroute("**/v1/jobs")
        else:
            page.context.clear_cookies()
            submit.click()
            sign_in(page, keys.create("bob", "birds", [Scope.SUBMIT]).key)
            expect(editor(page)).to_contain_text("# of the night")
        submit.click()
        expect(page.get_by_role("heading", level=1)).to_have_text("owl")
        assert len(store.page()[0]) == 1
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("API key")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0


def sign_in(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("New job")


@pytest.mark.nightly
def test_a_key_that_may_only_read_sees_why(browser: Browser, guarded: RunningApi, store: JobStore) -> None:
    with visit(browser, guarded.url) as visiting:
        visiting.refused = {401}
        page = visiting.open("/new")
        sign_in(page, KeyStore(store.engine).create("ada", "birds", [Scope.READ]).key)
        expect(page.get_by_text("Your key may only read")).to_be_visible()
        expect(page.get_by_role("button", name="Submit")).to_be_disabled()
        expect(editor(page)).to_have_attribute("contenteditable", "false")
        page.get_by_role("button", name="cola-tiny").click()
        expect(page.locator("#plan tbody tr")).to_contain_text("2 ranks, as written")
        expect(status(page)).to_have_text("Checked.")


@pytest.mark.nightly
def test_a_job_is_made_from_another(visitor: Visit, store: JobStore, tmp_path: Path) -> None:
    job = SampleJob(store, tmp_path / "checkpoints")
    page = visitor.open(f"/jobs/{job.id}")
    page.get_by_role("button", name="Clone").click()
    page.get_by_role("dialog").get_by_role("link", name="Edit its whole spec").click()
    expect(editor(page)).to_contain_text(f"# From {job.id}, tiny.")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert len(lines(page)) < 30  # without what would be so anyway
    expect(status(page)).to_have_text("Checked: it can be submitted.")
    page.get_by_role("button", name="Submit").click()
    expect(page).not_to_have_url(re.compile("/new"))
    made, _ = store.page()[0]
    assert made.spec == job.record.spec


@pytest.mark.full
def test_the_text_of_a_job_is_what_a_clone_of_it_has(visitor: Visit, store: JobStore) -> None:
    changes: dict[str, Any] = {
        "name": "rates-0001", "group": "rates", "tags": ["trial-0001", "kept"],
        "model": {"preset": "tiny", "family": "svd", "gate_activation": None},
        "optimizer": {"kind": "loro", "learning_rate": 0.003, "weight_decay": 0.01, "clip_norm": 0.5},
        "training": {"tokens": 400_000, "sequence_length": 64, "global_batch_size": 32},
        "elasticity": {"layouts": "auto", "gpus": {"min": 1, "max": 2}, "resolved": [[2, 1, 1]]},
    }  # fmt: skip
    job = SampleJob(store, Path("/c"), **changes)
    job.start()
    for rate in (0.005, 0.007):
        store.patch(job.id, JobPatch.model_validate({"optimizer": {"learning_rate": rate}}))
        (steer,) = job.record.steers
        if rate == 0.005:
            job.report(steer.made(job.record.spec, 1)[1])
    script = """async id => {
        const [{ Schema }, { textOf }] = await Promise.all(
            ['schema', 'origin'].map(name => import(`/static/newjob/${name}.js`)));
        return textOf(id, new Schema(await (await fetch('/openapi.json')).json()));
    }"""
    text = visitor.open().evaluate(script, job.id)
    clone = httpx.post(f"{visitor.url}/v1/jobs/{job.id}/clone", json={}).json()["spec"]
    made = JobSpec.model_validate(read_yaml(text))
    assert made.with_layouts(None) == JobSpec.model_validate(clone).with_layouts(None)
    assert (made.optimizer.learning_rate, made.elasticity and made.elasticity.resolved) == (0.007, None)


@pytest.mark.nightly
def test_a_text_that_is_too_large_is_not_sent(visitor: Visit) -> None:
    page = visitor.open("/new")
    write(page, GOOD + "# " + "a" * 2**20)
    expect(page.get_by_role("list", name="Problems")).to_contain_text("larger than 1 MiB")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("main").get_by_role("alert")).to_contain_text("not submitted")
    assert not {"/v1/jobs", "/v1/plans", "/v1/jobs/dry-run"} & set(visitor.requests)


@pytest.mark.nightly
def test_a_phone_shows_it_without_scrolling_sideways(browser: Browser, api: RunningApi) -> None:
    with visit(browser, api.url, viewport=PHONE, color_scheme="dark", has_touch=True) as visiting:
        page = visiting.open("/new")
        page.get_by_role("button", name="elastic-cola").click()
        expect(page.locator("#plan tbody tr")).to_have_count(3)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"a{depth}: &a{depth} [{', '.join([f'*a{depth - 1}'] * 9)}]" for depth in range(1, 9)
)
READ = [
    "a: 1:30", "a: yes", "a: 010", "a: 0o10", "a: 0x1f", "a: 3e-4", "a: .5", "a: 1_000", "a: 2026-01-01", "a: ~", "a:",
    "a: TRUE", "a: +1", "a: 1.", "a: [1, {b: c}]", "a: &x {b: 1}\nc: *x", "a: &x {b: 1}\nc: {<<: *x, b: 2}", '{"a": 1}',
    "a: |\n  b\n  c\n", "%YAML 1.1\n---\na: yes", "a: 'é'", "# nothing but this",
    *(path.read_text() for path in EXAMPLES),
]  # fmt: skip
REFUSED = [
    "a: 1\na: 2", "a: !!python/object:os.system x", "a: !x 1", "a: [", "a: 1\n---\nb: 2", "? [a]\n: 1", "a: &x [*x]",
    "a: *x", "[" * 20_000, "a: " + "[" * 101 + "]" * 101, LAUGHS,
]  # fmt: skip
WITHOUT_JSON = ["a: .inf", "a: .nan", "a: 1e999", "- a", "a"]


@pytest.mark.full
def test_yaml_is_read_as_the_service_reads_it(visitor: Visit) -> None:
    script = """async texts => {
        const { read } = await import('/static/newjob/text.js');
        return texts.map(read).map(({ content, problems }) => problems.length ? 'refused' : content);
    }"""
    contents = visitor.open().evaluate(script, READ + REFUSED + WITHOUT_JSON)
    assert contents[: len(READ)] == [read_yaml(text) for text in READ]
    assert set(contents[len(READ) :]) == {"refused"}
    for text in set(REFUSED) - {LAUGHS}:
        with pytest.raises(yaml.YAMLError):
            read_yaml(text)


@pytest.mark.full
def test_the_schema_takes_what_the_service_takes_and_knows_its_defaults(visitor: Visit) -> None:
    jobs = [load_job(path) for path in EXAMPLES]
    for section, config, others in (  # what is a default by itself is none beside a preset, or with another optimizer
        ("model", ModelConfig, [{"preset": name, "family": "svd"} for name in PRESETS]),
        ("optimizer", OptimizerConfig, [{"kind": kind} for kind in ("loro", "muon")]),
    ):
        plain = {name: field.default for name, field in config.model_fields.items() if not field.is_required()}
        plain.pop("rank", None)
        svd = {"preset": "tiny", "family": "svd"}
        jobs += [a_spec(**{"parallelism": {}, "model": svd, section: plain | other}) for other in others]
    script = """async jobs => {
        const { Schema } = await import('/static/newjob/schema.js');
        const schema = new Schema(await (await fetch('/openapi.json')).json());
        return jobs.map(job => [schema.errors(job), schema.withoutDefaults(job)]);
    }"""
    looked_at = visitor.open().evaluate(script, [job.model_dump(mode="json") for job in jobs])
    for job, (errors, shortened) in zip(jobs, looked_at, strict=True):
        assert errors == []
        assert JobSpec.model_validate(shortened) == job
        assert "fault_tolerance" not in shortened


def test_the_bundle_is_what_it_says() -> None:
    (bundle,) = STATIC.glob("vendor/editor-*/editor.js")
    code = bundle.read_bytes()
    assert bundle.parent.name == f"editor-{hashlib.sha256(code).hexdigest()[:12]}"  # kept by browsers for ever
    assert len(code) < 10**6
    assert not re.search(rb"\beval\(|new Function\(", code)
    lock: dict[str, Any] = json.loads((ROOT / "deploy/editor/package-lock.json").read_text())["packages"]
    licences = dict(
        re.findall(r"^(@?[\w./-]+) (\d[\w.]+) \(", bundle.with_name("LICENSES.txt").read_text(), re.MULTILINE)
    )
    assert licences.keys() >= lock[""]["dependencies"].keys()
    assert licences == {name: lock[f"node_modules/{name}"]["version"] for name in licences}
