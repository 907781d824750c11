"""Conversion of configurations of nanotron, and of BOOST's published fork of it, to job specs.

Settings that mean the same here are carried over. Settings that would give another model or optimizer are refused.
All others that affect training are listed as not carried over. The data must always be set anew.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from boost_core.config.nanotron.data import data_section
from boost_core.config.nanotron.model import model_section
from boost_core.config.nanotron.reader import Reader
from boost_core.config.nanotron.run import (
    checkpoint_section,
    name,
    optimizer_section,
    parallelism_section,
    training_section,
)
from boost_core.config.parsing.yaml_text import read_yaml


@dataclass(frozen=True)
class Imported:
    """A job spec converted from another configuration.

    Attributes:
        job: The job spec, as a mapping; it does not validate until the data is set.
        notes: What was not carried over, or was changed.
        unset: Fields that must be set before the job validates, and what to do about each.
    """

    job: dict[str, Any]
    notes: list[str]
    unset: dict[str, str]


def import_config(path: str | Path) -> Imported:
    """Read a YAML configuration of nanotron or of BOOST's fork.

    Raises:
        ValueError: The file is not YAML, is not such a configuration, or has an unsupported model or optimizer; with
            one line per problem.
        OSError: The file cannot be read.
    """
    try:
        content = read_yaml(Path(path).read_text(encoding="utf-8"), foreign=True)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict) or "tokens" not in content:
        raise ValueError(f"{path} is not a nanotron configuration: it lacks model and tokens")
    reader = Reader(content)
    model = model_section(reader)
    data, unset = data_section(reader)
    job = {
        "name": name(reader),
        "model": model,
        "parallelism": parallelism_section(reader),
        "data": data,
        "training": training_section(reader),
        "optimizer": optimizer_section(reader),
        "checkpoint": checkpoint_section(reader),
        "resources": {"gpus_per_worker": 1},
    }
    reader.raise_if_refused()
    reader.note_the_rest()
    return Imported({section: content for section, content in job.items() if content}, reader.notes, unset)
