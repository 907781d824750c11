"""What made a rank stop: whether it would happen again, and how to say it.

The one place that tells errors by the words of others. Imports torch; for workers.
"""

from torch.distributed import DistError

from boost_core.train import LastSaveFailed, StateLost
from service.gang.assignment import End, RankEnd
from service.security.redaction import redact

REFUSALS = (ValueError, ArithmeticError)  # the trainer's own words about a job, its data or its numbers
DEFECTS = (TypeError, AttributeError, LookupError, NameError, AssertionError, ImportError)
BROKEN_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


def end_of(error: Exception) -> RankEnd:
    """An error of the trainer in a line or two for people, without secrets."""
    text = redact(str(error))
    if isinstance(error, (*REFUSALS, LastSaveFailed)):
        return RankEnd(End.LASTING, text)
    named = f"{type(error).__name__}: {text}"
    if isinstance(error, DEFECTS):
        return RankEnd(End.LASTING, named)
    if isinstance(error, StateLost):
        return RankEnd(End.STATE_LOST, text)
    # gloo's errors are RuntimeErrors, told apart by their words.
    if isinstance(error, DistError) or any(sign in text for sign in BROKEN_CONNECTION):
        return RankEnd(End.CONNECTION, f"lost its connection to another rank: {text}")
    return RankEnd(End.FAILED, named)
