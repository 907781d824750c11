"""Write what is made of other files: ``python -m deploy.build``.

That is the dashboards, and the chart's copies of dashboards and rules: a chart reads no file outside its folder.
"""

from pathlib import Path

from deploy.grafana import source

_ROOT = Path(__file__).parents[1]
_RULES = _ROOT / "deploy" / "prometheus" / "rules"
_DASHBOARDS = _ROOT / "deploy" / "grafana" / "dashboards"
_CHART = _ROOT / "helm" / "boost" / "files"

FOLDERS = (_DASHBOARDS, _CHART / "dashboards", _CHART / "rules")


def built() -> dict[Path, str]:
    """What each file in ``FOLDERS`` is to hold."""
    dashboards, rules = source.build(), {path.name: path.read_text() for path in _RULES.glob("*.yml")}
    contents = dict(zip(FOLDERS, (dashboards, dashboards, rules), strict=True))
    return {folder / name: text for folder, files in contents.items() for name, text in files.items()}


def differing() -> list[Path]:
    """Files that are not as they are to be: missing, other, or there without reason."""
    wanted = built()
    present = {path for folder in FOLDERS for path in folder.glob("*")}
    return sorted(path for path in present | set(wanted) if not path.exists() or path.read_text() != wanted.get(path))


def main() -> None:
    """Write them, and remove what is no longer built."""
    wanted = built()
    for path in differing():
        if path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
        else:
            path.unlink()


if __name__ == "__main__":
    main()
