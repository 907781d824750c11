"""Reading YAML, in which 3e-4 is a number: YAML 1.1, which PyYAML reads, takes it for a string."""

import re
from typing import Any

import yaml

_EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")


def read_yaml(text: str) -> Any:
    """What a YAML or JSON document holds.

    Raises:
        yaml.YAMLError: It is no YAML.
    """
    return yaml.load(text, _Loader)


class _Loader(yaml.SafeLoader):
    """The safe loader, with numbers that JSON has, too."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
