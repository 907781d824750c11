"""Write what is made of other files: ``python -m deploy.build``.

That is the dashboards, and the chart's dashboards and rules, which read one installation of several: a chart reads no
file outside its folder.
"""

from pathlib import Path

from deploy.grafana import source
from deploy.scope import scoped_dashboard, scoped_rules

_ROOT = Path(__file__).parents[1]
_RULES = _ROOT / "deploy" / "prometheus" / "rules"
_DASHBOARDS = _ROOT / "deploy" / "grafana" / "dashboards"
_CHART = _ROOT / "helm" / "boost" / "files"

FOLDERS = (_DASHBOARDS, _CHART / "dashboards", _CHART / "rules")


def built() -> dict[Path, str]:
    """What each file in ``FOLDERS`` is to hold."""
    dashboards, rules = source.build(), {path.name: path.read_text() for path in _RULES.glob("*.yml")}
    of_chart = {name: scoped_dashboard(text) for name, text in dashboards.items()}
    rules_of_chart = {name: scoped_rules(text) for name, text in rules.items()}
    contents = dict(zip(FOLDERS, (dashboards, of_chart, rules_of_chart), strict=True))
    return {folder / name: text for folder, files in contents.items() for name, text in files.items()}


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


if __name__ == "__main__":
    main()
