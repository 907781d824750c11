"""Writes the dashboards where Grafana's provisioning finds them: ``python -m deploy.grafana.source``."""

from pathlib import Path

from deploy.grafana.source import build

_FOLDER = Path(__file__).parents[1] / "dashboards"


def main() -> None:
    """Write all files."""
    _FOLDER.mkdir(exist_ok=True)
    for name, text in build().items():
        (_FOLDER / name).write_text(text, encoding="utf-8")


main()
