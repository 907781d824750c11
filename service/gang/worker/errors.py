"""Why a rank stopped: whether it would happen again, and how to describe it.

The only place that recognises errors by other libraries' messages. Imports torch; for workers.
"""

from torch.distributed import DistError

from boost_core.train import LastSaveFailed, StateLost
from service.gang.assignment import End, RankEnd
from service.security.redaction import redact

REFUSALS = (ValueError, ArithmeticError)  # the trainer's own messages about a job, its data or its numbers
DEFECTS = (TypeError, AttributeError, LookupError, NameError, AssertionError, ImportError)
BROKEN_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


def end_of(error: Exception) -> RankEnd:
    """Describe an error of the trainer in a line or two, without secrets."""
    text = redact(str(error))
    if isinstance(error, (*REFUSALS, LastSaveFailed)):
        return RankEnd(End.LASTING, text)
    named = f"{type(error).__name__}: {text}"
    if isinstance(error, DEFECTS):
        return RankEnd(End.LASTING, named)
    if isinstance(error, StateLost):
        return RankEnd(End.STATE_LOST, text)
    # gloo's errors are RuntimeErrors, distinguished only by their messages.
    if isinstance(error, DistError) or any(sign in text for sign in BROKEN_CONNECTION):
        return RankEnd(End.CONNECTION, f"lost its connection to another rank: {text}")
    return RankEnd(End.FAILED, named)
