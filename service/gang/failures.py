"""What made a rank stop: whether it would happen again, and how to say it. Imports torch; for ranks' processes."""

from torch.distributed import DistError

from boost_core.train import StateLost
from service.gang.assignment import End, RankEnd

REFUSALS = (ValueError, ArithmeticError)  # the trainer's own words about a job, its data or its numbers
DEFECTS = (TypeError, AttributeError, LookupError, NameError, AssertionError, ImportError)
BROKEN_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


def end_of(error: Exception) -> RankEnd:
    """An error of the trainer in a line or two for people."""
    if isinstance(error, REFUSALS):
        return RankEnd(End.LASTING, str(error))
    named = f"{type(error).__name__}: {error}"
    if isinstance(error, DEFECTS):
        return RankEnd(End.LASTING, named)
    if isinstance(error, StateLost):
        return RankEnd(End.STATE_LOST, str(error))
    # gloo's errors are RuntimeErrors, told apart by their words.
    if isinstance(error, DistError) or any(sign in str(error) for sign in BROKEN_CONNECTION):
        return RankEnd(End.CONNECTION, f"lost its connection to another rank: {error}")
    return RankEnd(End.FAILED, named)
