"""Write what is made of other files: ``python -m deploy.build``.

That is the dashboards, and the chart's dashboards and rules: a chart reads no file outside its folder. The chart's read
the series of their own installation alone. Several installations may share a Prometheus and a Grafana: Helm calls each
by its namespace and its release, and so do two labels of all its series. What is built here has placeholders for the
two, which the chart's templates fill in.
"""

import json
import re
from pathlib import Path

import yaml

from deploy.grafana import source
from deploy.grafana.source.panels import GPU_HOUR_PRICE

_ROOT = Path(__file__).parents[1]
_RULES = _ROOT / "deploy" / "prometheus" / "rules"
_DASHBOARDS = _ROOT / "deploy" / "grafana" / "dashboards"
_CHART = _ROOT / "helm" / "boost" / "files"

FOLDERS = (_DASHBOARDS, _CHART / "dashboards", _CHART / "rules")

# What the chart's templates replace.
INSTALLATION = {"namespace": "@namespace@", "release": "@release@"}
RUNBOOKS, UID, PRICE = "@runbooks@", "@uid@", "@price@"

_NAME = f"{INSTALLATION['namespace']}/{INSTALLATION['release']}"
_MATCHERS = {
    # Series that we export or record, and those that Prometheus makes of our targets and rules.
    r"(?:\w+:)?boost_[\w:]+|up|process_\w+|ALERTS": 'namespace="@namespace@", release="@release@"',
    # What others tell of the installation's pods, and of its volume of checkpoints.
    r"kube_pod_\w+|ray_\w+": 'namespace="@namespace@", pod=~"@name@-((@groups@)-worker|[a-z0-9]+)-[a-z0-9]+"',
    r"kubelet_volume_stats_\w+": 'namespace="@namespace@", persistentvolumeclaim="@claim@"',
}


def built() -> dict[Path, str]:
    """What each file in ``FOLDERS`` is to hold."""
    contents = {}
    for name, text in source.build().items():
        contents[_DASHBOARDS / name] = text
        # A dashboard for one installation, which Grafana tells from the same dashboard of another.
        board = json.loads(text)
        targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
        variables = [variable for variable in board["templating"]["list"] if variable["type"] == "query"]
        for query in [*targets, *variables, *board["annotations"].get("list", ())]:
            for field in ("expr", "query", "definition"):
                if isinstance(query.get(field), str):
                    query[field] = scoped(query[field])
        for variable in board["templating"]["list"]:
            if variable["name"] == GPU_HOUR_PRICE:
                variable["query"] = PRICE
        board["title"] += f" ({_NAME})"
        board["tags"].append(_NAME)
        for link in board["links"]:
            if link["type"] == "dashboards":
                link["tags"].append(_NAME)
        board["uid"] += f"-{UID}"
        text = json.dumps(board, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        contents[_CHART / "dashboards" / name] = re.sub(r'"/d/([\w-]+)', rf'"/d/\1-{UID}', text)
    for path in _RULES.glob("*.yml"):
        # Rules for one installation, whose name is in the labels of all that they give.
        rules = yaml.safe_load(path.read_text())
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            rule["expr"] = scoped(rule["expr"])
            rule["labels"] = rule.get("labels", {}) | INSTALLATION
            if "alert" in rule:
                rule["annotations"]["runbook_url"] = f"{RUNBOOKS}/{rule['alert']}.md"
        text = "# Written by python -m deploy.build from deploy/prometheus/rules.\n"
        contents[_CHART / "rules" / path.name] = text + yaml.dump(rules, Dumper=_Dumper, sort_keys=False, width=120)
    return contents


def differing() -> list[Path]:
    """Files that are not as they are to be: missing, other, or there without reason."""
    expected = built()
    paths = set(expected) | {path for folder in FOLDERS for path in folder.glob("*")}
    return sorted(path for path in paths if not path.exists() or path.read_text() != expected.get(path))


def main() -> None:
    """Write them, and remove what is no longer built."""
    expected = built()
    for path in differing():
        if path in expected:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(expected[path])
        else:
            path.unlink()


def scoped(expr: str) -> str:
    """An expression that reads the series of one installation alone; those of nodes and GPUs stay as they are."""
    for names, matchers in _MATCHERS.items():
        # What is before the first name, and then each name, whether it has matchers, what follows.
        before, *parts = re.split(rf"\b({names})\b(\{{)?", expr)
        named = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
        expr = before + "".join(f"{name}{{{matchers}{', ' if own else '}'}{text}" for name, own, text in named)
    return expr


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


if __name__ == "__main__":
    main()
