"""Operations on a job's checkpoints."""

from types import NoneType

from service.client.calls import Call, get, operation, path_of
from service.models.checkpoints import Checkpoint, CheckpointDetail, CheckpointList


class CheckpointCalls:
    """Operations on a job's checkpoints."""

    @operation
    def checkpoints(self, job_id: str) -> Call[CheckpointList]:
        """Return a job's committed checkpoints, newest first."""
        return get(path_of("jobs", job_id, "checkpoints"), CheckpointList)

    @operation
    def checkpoint(self, job_id: str, step: int) -> Call[CheckpointDetail]:
        """Return one checkpoint with its files."""
        return get(path_of("jobs", job_id, "checkpoints", step), CheckpointDetail)

    @operation
    def pin(self, job_id: str, step: int) -> Call[Checkpoint]:
        """Keep a checkpoint, regardless of retention."""
        return Call("PUT", path_of("jobs", job_id, "checkpoints", step, "pin"), Checkpoint, repeatable=True)

    @operation
    def unpin(self, job_id: str, step: int) -> Call[Checkpoint]:
        """Return a checkpoint to the job's retention."""
        return Call("DELETE", path_of("jobs", job_id, "checkpoints", step, "pin"), Checkpoint, repeatable=True)

    @operation
    def delete_checkpoint(self, job_id: str, step: int) -> Call[None]:
        """Delete a checkpoint that is neither pinned nor needed by its job."""
        return Call("DELETE", path_of("jobs", job_id, "checkpoints", step), NoneType, repeatable=True)
