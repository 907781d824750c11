"""Whether the trainer's packages are installed here; the service does not need them where a Ray cluster trains."""

from importlib.util import find_spec

REMEDY = "install boost-service[trainer]"


def has_trainer() -> bool:
    """Whether jobs can train in this installation."""
    return find_spec("torch") is not None
