"""What ``queues`` and ``tenants`` share: limits, their usage, and job counts by state."""

from collections.abc import Mapping
from typing import Annotated

import typer

from service.cli.failures import BadInput
from service.cli.output.printing import number

_NO_LIMIT = "none"

Gpus = Annotated[
    str | None, typer.Option(metavar="N|none", help="Maximum number of GPUs that its jobs may hold; none: no limit.")
]
Cpus = Annotated[
    str | None, typer.Option(metavar="N|none", help="Maximum number of CPUs that its jobs may hold; none: no limit.")
]


def limit(option: str | None, otherwise: float | None) -> float | None:
    """Parse a limit, or return the present one if none was given.

    Raises:
        BadInput: The option is neither a number nor ``none``.
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
    """Format the usage of a limit."""
    return number(used) if of is None else f"{number(used)}/{number(of)}"


def by_state(jobs: Mapping[str, int]) -> str:
    """Format the job counts of all states that occur."""
    return ", ".join(f"{count} {state}" for state, count in jobs.items() if count) or "-"
