"""Several installations in one Prometheus and one Grafana: rules and dashboards of each see its own series alone.

What they give there is held to what the same rules and dashboards give for an installation that is by itself.
"""

import json
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import pytest
import yaml

from tests.deploy import dashboards
from tests.deploy.chart import Object, chart, of_kind, the, values
from tests.prometheus import PROMETHEUS, Prometheus, program, prometheus, promtool

RUNBOOKS = "https://wiki.example.org/boost/"
ON = {"enabled": True}
MONITORED = values(
    monitoring={
        "existingSecret": "key", "serviceMonitor": ON | {"interval": "1m30s"}, "scrapeConfig": ON,
        "rules": ON | {"runbookBase": RUNBOOKS}, "dashboards": ON,
    },
    networkPolicy__enabled=False,
)  # fmt: skip


class Installation(NamedTuple):
    namespace: str
    release: str

    @property
    def labels(self) -> dict[str, str]:
        """Those that all series of ours have."""
        return dict(self._asdict())

    def of(self, name: str) -> dict[str, str]:
        """The labels that tell of a series with this name to whom it belongs."""
        full = self.release if "boost" in self.release else f"{self.release}-boost"
        pods = {"namespace": self.namespace, "pod": f"{full}-gpu-worker-x5k2p"}
        claims = {"namespace": self.namespace, "persistentvolumeclaim": f"{full}-checkpoints"}
        told = {"kube_": pods, "ray_": pods, "kubelet_": claims, "node_": {}, "DCGM_": {}}
        return next((labels for prefix, labels in told.items() if name.startswith(prefix)), self.labels)


OWN = Installation("ml", "lab")
# The first has a name that goes on where ours ends.
OTHERS = (Installation("ml", "lab-boost-two"), Installation("research", "lab"))


@cache
def rendered(installation: Installation) -> list[Object]:
    texts = chart().render(MONITORED, name=installation.release, namespace=installation.namespace)
    manifests = (text for path, text in sorted(texts.items()) if "/monitoring/" in path)
    return [found for text in manifests for found in yaml.safe_load_all(text) if found]


def boards(installation: Installation) -> dict[str, dict[str, Any]]:
    """The dashboards of an installation by the names of their files."""
    files = (found["data"].items() for found in of_kind(rendered(installation), "ConfigMap"))
    return {name: json.loads(text) for ((name, text),) in files}


def test_all_that_is_scraped_of_an_installation_says_which_it_is() -> None:
    (endpoint,) = the(rendered(OWN), "ServiceMonitor")["spec"]["endpoints"]
    ranks = the(rendered(OWN), "ScrapeConfig")["spec"]
    for relabelings in (endpoint["relabelings"], ranks["relabelings"]):
        assert OWN.labels.items() <= {each["targetLabel"]: each["replacement"] for each in relabelings}.items()


# Grafana's sidecar writes all files into one folder, and Grafana wants a uid and a title in it to be there once.
def test_dashboards_of_two_installations_replace_none_of_each_other() -> None:
    every = [board | {"file": name} for each in (OWN, *OTHERS) for name, board in boards(each).items()]
    assert len(every) == 3 * len(dashboards.dashboards())
    for field in ("file", "uid", "title"):
        assert len({board[field] for board in every}) == len(every), field
    assert all(len(board["uid"]) <= 40 for board in every), "what Grafana takes"


def test_dashboards_lead_to_those_of_the_same_installation() -> None:
    uids = {board["uid"] for board in boards(OWN).values()}
    for board in boards(OWN).values():
        assert set(re.findall(r'"/d/([\w-]+)', json.dumps(board))) <= uids
        (menu,) = (link for link in board["links"] if link["type"] == "dashboards")
        assert {"ml/lab"} <= set(menu["tags"]) <= set(board["tags"])


def test_dashboards_do_not_ask_more_often_than_prometheus_does() -> None:
    assert {board["refresh"] for board in boards(OWN).values()} == {"90s"}
    shipped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert {board["refresh"] for board in dashboards.dashboards().values()} == {shipped}


def test_the_shipped_alertmanager_tells_installations_apart() -> None:
    shipped = yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text())
    for labels in (shipped["route"]["group_by"], *(rule["equal"] for rule in shipped["inhibit_rules"])):
        assert {"namespace", "release"} <= set(labels)


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The rules of all three installations, as files."""
    folder = tmp_path_factory.mktemp("rules")
    for installation in (OWN, *OTHERS):
        for found in of_kind(rendered(installation), "PrometheusRule"):
            name = f"{installation.namespace}-{installation.release}-{found['metadata']['name']}.yml"
            (folder / name).write_text(yaml.safe_dump(found["spec"]))
    return sorted(folder.glob("*.yml"))


# The others are well, and Prometheus has none of their jobs: an alert of theirs would be about this one's.
@pytest.mark.full
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.nightly if path.stem == "jobs" else (), id=path.stem)
        for path in sorted((PROMETHEUS / "tests").glob("*.yml"))
    ],
)
def test_alerts_are_about_their_own_installation(path: Path, rules: list[Path], tmp_path: Path) -> None:
    content = yaml.safe_load(re.sub(r"values: (.+)", r"values: '\1'", path.read_text()))  # 0x60 is no number here
    content["rule_files"] = list(map(str, rules))
    for test in content["tests"]:
        for given in test["input_series"]:
            given["series"] = labelled(given["series"], OWN)
        test["input_series"] += [
            {"series": labelled('up{job="boost-api"}', other), "values": "1x1000"} for other in OTHERS
        ]
        for sample in (sample for case in test.get("promql_expr_test", ()) for sample in case["exp_samples"]):
            sample["labels"] = labelled(sample["labels"], OWN)
        for alert in (alert for case in test["alert_rule_test"] for alert in case["exp_alerts"]):
            alert["exp_labels"] = alert["exp_labels"] | OWN.labels
            page = Path(alert["exp_annotations"]["runbook_url"]).name
            alert["exp_annotations"] = alert["exp_annotations"] | {"runbook_url": f"{RUNBOOKS}{page}"}
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump(content))
    promtool("test", "rules", file)


def labelled(series: str, installation: Installation) -> str:
    return series.replace("{", f'{{namespace="{installation.namespace}", release="{installation.release}", ', 1)


SECONDS, LAST = 60, 80  # between two values, and how many there are
# What the series of a test have besides the labels that a query asks for.
USUAL = {
    "job_id": dashboards.CHOICES["job_id"], "job_name": "a", "tenant": "lab", "queue": "default", "rank": "0",
    "gpu": "GPU-0", "state": "RUNNING", "family": "cola", "kind": "productive", "cause": "HANG", "what": "store",
    "condition": "total", "resource": "GPU", "part": "data", "collective": "all_reduce", "group": "tp",
    "method": "GET", "route": "/", "status": "404", "outcome": "ok", "instance": "one", "le": "+Inf",
    "alertname": "BoostRankSlow", "severity": "warning", "transport": "net/ib", "UUID": "GPU-0", "device": "eth0",
    "mountpoint": "/", "fstype": "ext4", "container": "ray-worker", "Location": "MMAP_SHM",
}  # fmt: skip


def selectors(expr: Any) -> Iterator[promql_parser.VectorSelector]:
    """All series that a query reads."""
    found: list[promql_parser.VectorSelector] = []
    promql_parser.walk(
        promql_parser.parse(expr),
        lambda part: found.append(part) if isinstance(part, promql_parser.VectorSelector) else None,
    )
    yield from found


def read_by(exprs: Iterable[str]) -> list[tuple[str, dict[str, str]]]:
    """A series for each selector of some queries: its name and its labels."""
    found = {}
    for selector in (selector for expr in exprs for selector in selectors(expr)):
        labels = dict(USUAL)
        for matcher in selector.matchers.matchers:
            if matcher.op == promql_parser.MatchOp.Equal:
                labels[matcher.name] = matcher.value
            elif matcher.op == promql_parser.MatchOp.NotEqual and labels.get(matcher.name) == matcher.value:
                labels[matcher.name] = "another"
        assert selector.name
        for bound in ("1", "+Inf") if selector.name.endswith("_bucket") else (labels["le"],):
            of_bound = labels | {"le": bound}
            found[(selector.name, *sorted(of_bound.items()))] = (selector.name, of_bound)
    return list(found.values())


def backfill(folder: Path, series: Iterable[tuple[str, dict[str, str]]], times: float, begin: int) -> None:
    """Write series into a Prometheus' folder.

    Args:
        folder: Prometheus'.
        series: Name and labels of each.
        times: What their values are multiplied with.
        begin: When they begin, in seconds since 1970.
    """
    lines = []
    for number, (name, labels) in enumerate(series, start=1):
        text = ",".join(f'{label}="{value}"' for label, value in labels.items())
        lines += [f"{name}{{{text}}} {times * number * (place + 1)} {begin + place * SECONDS}" for place in range(LAST)]
    file = folder / "series.txt"
    file.write_text("\n".join([*lines, "# EOF", ""]))
    command = [program("promtool"), "tsdb", "create-blocks-from", "openmetrics", file, folder / "data"]
    subprocess.run(command, check=True, capture_output=True)


def answers(server: Prometheus, expr: str, at: float) -> dict[frozenset[tuple[str, str]], float]:
    found = server.query(expr, at)
    return {frozenset(without_installation(series.labels).items()): series.value for series in found}


def without_installation(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name not in OWN.labels}


@pytest.mark.full
def test_dashboards_show_their_own_installation_alone(rules: list[Path], tmp_path: Path) -> None:
    choices = {"__rate_interval": "5m", "__interval": "1m", "__range": "1h"}
    by_itself = sorted(dashboards.queries(choices), key=lambda query: query.dashboard)
    beside_others = sorted(dashboards.queries(choices, boards(OWN).values()), key=lambda query: query.dashboard)
    series = read_by(query.expr for query in by_itself)
    begin = int(time.time()) - LAST * SECONDS
    at = begin + (LAST - 1) * SECONDS
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for folder in (alone, shared):
        folder.mkdir()
    backfill(alone, [(name, labels | without_installation(OWN.of(name))) for name, labels in series], 1, begin)
    backfill(shared, [(name, labels | OWN.of(name)) for name, labels in series], 1, begin)
    for other, times in zip(OTHERS, (1e3, 1e6), strict=True):
        backfill(shared, [(name, labels | other.of(name)) for name, labels in series if other.of(name)], times, begin)
    with prometheus(alone, []) as one, prometheus(shared, [], rules) as several:
        for plain, scoped in zip(by_itself, beside_others, strict=True):
            assert plain.panel == scoped.panel
            expected = answers(one, plain.expr, at)
            assert expected, f"no data: {plain}"
            assert answers(several, scoped.expr, at) == pytest.approx(expected), scoped
        several.until(lambda: all(rule["health"] != "unknown" for rule in several.rules()), "rules are evaluated")
        assert [rule for rule in several.rules() if rule["health"] != "ok"] == []
