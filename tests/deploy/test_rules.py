"""Rules, configurations and runbooks: what Prometheus' own tools say of them, and that they fit together."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from service.cli.main import app
from tests.deploy.dashboards import dashboards
from tests.prometheus import PROMETHEUS, promtool

RUNBOOKS = PROMETHEUS.parents[1] / "docs" / "runbooks"
PAGES = sorted(page for page in RUNBOOKS.glob("*.md") if page.stem != "README")
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))


def groups() -> list[dict[str, Any]]:
    return [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in groups() for rule in group["rules"] if "alert" in rule}


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", *sorted((PROMETHEUS / "tests").glob("*.yml")))


def test_every_alert_is_tested_in_both_ways() -> None:
    tested: dict[str, set[bool]] = {name: set() for name in alerts()}
    for path in (PROMETHEUS / "tests").glob("*.yml"):
        for test in yaml.safe_load(path.read_text())["tests"]:
            for case in test["alert_rule_test"]:
                tested[case["alertname"]].add(bool(case["exp_alerts"]))
    assert {name: cases for name, cases in tested.items() if cases != {True, False}} == {}


def test_promtool_finds_nothing_wrong(tmp_path: Path) -> None:
    folder = shutil.copytree(PROMETHEUS, tmp_path / "prometheus")
    (folder / "api-key").write_text("boost_of_nobody\n")
    promtool("check", "rules", "--lint=all", "--lint-fatal", *RULES)
    promtool("check", "config", "--lint=all", "--lint-fatal", folder / "prometheus.yml")
    subprocess.run(["amtool", "check-config", folder / "alertmanager.yml"], check=True)


def test_groups_have_names_of_their_own() -> None:
    names = [group["name"] for group in groups()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", alerts())
def test_an_alert_says_what_people_need(name: str) -> None:
    rule = alerts()[name]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"
    if "job_id" in rule["expr"]:
        assert "$labels.job_name" in rule["annotations"]["summary"]
        assert "$labels.job_id" in rule["annotations"]["description"]


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    assert {page.stem for page in PAGES} == set(alerts())
    for page in PAGES:
        assert page.read_text().startswith(f"# {page.stem}\n")


def test_the_list_of_pages_has_each_with_its_severity() -> None:
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \|", (RUNBOOKS / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted((name, name, rule["labels"]["severity"]) for name, rule in alerts().items())


def commands(text: str) -> list[str]:
    return [" ".join(found.split()) for found in re.findall(r"`(boost [^`]+)`", text)]


def told_to_run() -> list[str]:
    """The commands that pages name, and those of descriptions, in which labels stand for words."""
    pages = [command for page in PAGES for command in commands(page.read_text())]
    described = [re.sub(r"{{.*?}}", "X", rule["annotations"]["description"]) for rule in alerts().values()]
    return pages + [found.strip() for text in described for found in re.findall(r"boost [a-z][^;.]*", text)]


@pytest.mark.parametrize("line", sorted(set(told_to_run())))
def test_a_command_that_is_named_is_there(line: str) -> None:
    command = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    while isinstance(command, TyperGroup):
        assert words and words[0] in command.commands, f"`{line}`: there is {', '.join(command.commands)}"
        command = command.commands[words.pop(0)]
    options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    assert [word for word in words if word.startswith("-") and word not in options] == []


def test_a_dashboard_that_is_named_is_there() -> None:
    titles = {board["title"] for board in dashboards().values()}
    pages = RUNBOOKS.glob("*.md")
    named = {found for page in pages for found in re.findall(r"\*(Boost\s/\s\w+)\*", page.read_text())}
    assert {" ".join(name.split()) for name in named} == titles


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
