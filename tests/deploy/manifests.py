"""Checks objects against Kubernetes' own schemas, and custom ones against those in ``crds/``."""

from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from tests.deploy.chart import Object

KUBERNETES = "1.37"
_CRDS = Path(__file__).parent / "crds"


def check(manifest: Object) -> None:
    """Check one object.

    Raises:
        kubernetes_validate.ValidationError, jsonschema.ValidationError: It is not as its schema wants it.
    """
    if (_CRDS / f"{manifest['kind']}.yaml").exists():
        _custom(manifest["kind"]).validate(manifest)
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@cache
def _custom(kind: str) -> Any:
    schema = yaml.safe_load((_CRDS / f"{kind}.yaml").read_text())
    return extend(Draft202012Validator, {"x-kubernetes": _check_part})(schema)


def _check_part(_validator: Any, what: str, part: Any, _schema: Any) -> Any:
    """A part of a custom object that is one of Kubernetes' own, put into a whole of which Kubernetes has the schema."""
    container = {"name": "c", "image": "i"}
    if what == "podTemplate":
        whole = {**part}
    else:
        whole = {"spec": {"containers": [container | {what.removeprefix("container."): part}]}}
    try:
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {}, **whole}, KUBERNETES, strict=True
        )
    except kubernetes_validate.ValidationError as error:
        yield ValidationError(f"{what}: {error}")
