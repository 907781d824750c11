"""What queues and tenants have in common on the command line: limits, what is held of them, and jobs by state."""

from collections.abc import Mapping
from typing import Annotated

import typer

from service.cli.failures import BadInput
from service.cli.output.printing import number

_NO_LIMIT = "none"

Gpus = Annotated[str | None, typer.Option(metavar="N|none", help="Maximum GPUs its jobs may hold; none: no limit.")]
Cpus = Annotated[str | None, typer.Option(metavar="N|none", help="Maximum CPUs its jobs may hold; none: no limit.")]


def limit(option: str | None, otherwise: float | None) -> float | None:
    """A limit as given, or the one there is if none was given.

    Raises:
        BadInput: It is neither a number nor ``none``.
    """
    if option is None:
        return otherwise
    if option == _NO_LIMIT:
        return None
    try:
        return float(option)
    except ValueError:
        raise BadInput(f"{option!r} is not a limit; give a number, or {_NO_LIMIT}") from None


def held(used: float, of: float | None) -> str:
    """What is held of a limit."""
    return number(used) if of is None else f"{number(used)}/{number(of)}"


def by_state(jobs: Mapping[str, int]) -> str:
    """Jobs by state, those that there are."""
    return ", ".join(f"{count} {state}" for state, count in jobs.items() if count) or "-"
