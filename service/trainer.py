"""Whether the trainer's own packages are installed here. The service does without them where a Ray cluster trains."""

from importlib.util import find_spec

REMEDY = "install boost-service[trainer]"


def has_trainer() -> bool:
    """Whether jobs can train on this installation."""
    return find_spec("torch") is not None
