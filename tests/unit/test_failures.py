import pytest
from torch import AcceleratorError
from torch.distributed import DistBackendError, DistNetworkError

from boost_core.train import LastSaveFailed, StateLost
from service.gang.assignment import End, RankEnd
from service.gang.worker.worker import end_of


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (ValueError("give a path"), RankEnd(End.LASTING, "give a path")),
        (FloatingPointError("the loss is nan"), RankEnd(End.LASTING, "the loss is nan")),
        (KeyError("rank"), RankEnd(End.LASTING, "KeyError: 'rank'")),
        (StateLost("gone"), RankEnd(End.STATE_LOST, "gone")),
        (
            RuntimeError("[pair.cc] Connection closed by peer"),
            RankEnd(End.CONNECTION, "lost its connection to another rank: [pair.cc] Connection closed by peer"),
        ),
        (DistNetworkError("timed out"), RankEnd(End.CONNECTION, "lost its connection to another rank: timed out")),
        (LastSaveFailed("the last checkpoint"), RankEnd(End.LASTING, "the last checkpoint")),
        (OSError("disk"), RankEnd(End.FAILED, "OSError: disk")),
        (RuntimeError("CUDA out of memory"), RankEnd(End.FAILED, "RuntimeError: CUDA out of memory")),
        (
            RuntimeError("CUDA error: uncorrectable ECC error encountered\nSearch for `cudaErrorECCUncorrectable'"),
            RankEnd(End.DEVICE, "CUDA error: uncorrectable ECC error encountered", reusable=False),
        ),
        (
            DistBackendError("NCCL error\nLast error:\nCuda failure 719 'unspecified launch failure'"),
            RankEnd(End.DEVICE, "Cuda failure 719 'unspecified launch failure'", reusable=False),
        ),
        *(
            (AcceleratorError(text), RankEnd(End.DEVICE, text, reusable=False))
            for text in (
                "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
                "CUDA error: operation not supported on global/shared address space",
                "CUDA error: tensor memory not completely freed",
                "CUDA error: the MPS client has been terminated by the server",
                "CUDA error: an async error has occured in external entity outside of CUDA",
                "CUDA error: context is destroyed",
                "CUDA error: unknown error",
                "Cuda failure 999 'unknown error'",
                "Triton Error [CUDA]: unknown error",
            )
        ),
        (RuntimeError("S3: unknown error"), RankEnd(End.FAILED, "RuntimeError: S3: unknown error")),
        (
            AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
            RankEnd(End.FAILED, "AcceleratorError: CUDA error: operation not permitted when stream is capturing"),
        ),
    ],
)
def test_an_error_says_whether_it_would_come_again(error: Exception, end: RankEnd) -> None:
    assert end_of(error) == end
