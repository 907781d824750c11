"""The progress of a job's trackers."""

from http import HTTPStatus

from fastapi import APIRouter

from service.api.deps import ContextDep, JobDep
from service.api.errors import problem_responses
from service.jobs.trackers import TrackerStore
from service.models.trackers import TrackerList, TrackerState
from service.trackers.opening import place_of

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.get("/{job_id}/trackers", responses=problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY))
def trackers(job: JobDep, context: ContextDep) -> TrackerList:
    """Show a job's trackers, how many events each is behind, and why."""
    found = TrackerStore(context.store.engine).of_job(job.id)
    return TrackerList(
        trackers=[
            TrackerState.model_validate(
                {
                    "kind": tracked.kind,
                    "place": tracked.kept.get("url") or place_of(tracked.kind, job),
                    "behind": behind,
                    "failures": tracked.failures,
                    "failing_since": tracked.failing_since,
                    "problem": tracked.problem,
                }
            )
            for tracked, behind in found
        ]
    )
