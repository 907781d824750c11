"""The table of the chart's values in its README: ``python -m tests.deploy.values_table`` writes it anew.

What a value means is said once: in the ``# --`` comment above it in values.yaml, and for what is within lists in the
description of values.schema.json.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "helm" / "boost"
BEGIN, END = "<!-- values: written by python -m tests.deploy.values_table -->", "<!-- end of values -->"

Row = tuple[str, str, str]


def rows(text: str, schema: dict[str, Any]) -> Iterator[Row]:
    """Name, default and meaning of each value.

    Args:
        text: The content of values.yaml.
        schema: That of values.schema.json.

    Raises:
        ValueError: A value has no comment.
    """
    lines = text.splitlines()
    for path, key, value in _leaves(yaml.compose(text, yaml.SafeLoader), ()):
        comment: list[str] = []  # the one that ends right above the value
        for line in reversed(lines[: key.start_mark.line]):
            if not line.lstrip().startswith("#"):
                break
            comment.insert(0, line.lstrip().removeprefix("#").strip())
            if comment[0].startswith("-- "):
                break
        if not comment or not comment[0].startswith("-- "):
            raise ValueError(f"{'.'.join(path)} in values.yaml has no comment; write `# -- …` in the line above it")
        meaning = " ".join(comment).removeprefix("-- ")
        default = json.dumps(yaml.safe_load(yaml.serialize(value)), ensure_ascii=False)
        described = schema
        for part in path:
            described = described["properties"][part]
        items = described.get("items", {}).get("properties", {})
        yield ".".join(path), default if not items or default == "[]" else "see values.yaml", meaning
        for name, item in items.items():
            yield f"{'.'.join(path)}[].{name}", "", item["description"]


def current() -> str:
    """The README as it should be, with the table of values in Markdown."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = rows((CHART / "values.yaml").read_text(encoding="utf-8"), schema)
    cells = ((f"`{name}`", f"`{default}`" if default else "", meaning) for name, default, meaning in values)
    body = "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in cells)
    before, _, rest = (CHART / "README.md").read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n| value | default | meaning |\n|---|---|---|\n{body}\n{END}{after}"


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Values and maps without a shape of their own, which are written with braces or as the last that is commented."""
    for key, value in node.value:
        here = (*path, key.value)
        is_one_value = key.value in ("resources", "labels", "annotations")
        if isinstance(value, yaml.MappingNode) and value.value and not is_one_value:
            yield from _leaves(value, here)
        else:
            yield here, key, value


if __name__ == "__main__":
    (CHART / "README.md").write_text(current(), encoding="utf-8")
