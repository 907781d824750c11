"""Evaluations of a job's checkpoints on tasks: record, list."""

from http import HTTPStatus

from fastapi import APIRouter
from sqlalchemy.orm import Session

from boost_core.messages import Scores
from service.api.auth import Submitter
from service.api.deps import ContextDep, JobDep
from service.api.errors import InvalidJob, problem_responses
from service.api.idempotency import IdempotentDep
from service.api.requests import StrictRoute
from service.jobs import queries
from service.jobs.model import JobRecord
from service.models.evaluations import EvaluationList, JobEvaluation
from service.models.problems import FieldError

router = APIRouter(prefix="/v1/jobs/{job_id}/evaluations", tags=["jobs"], route_class=StrictRoute)

_MOST = 50
_MOST_SCORES = 500
_MOST_BYTES = 2**18
_REFUSED = problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    responses=_REFUSED | problem_responses(HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
)
def record_evaluation(
    job: JobDep, scores: Scores, _who: Submitter, context: ContextDep, request: IdempotentDep
) -> JobRecord:
    """Record the scores of one of a job's checkpoints on some tasks; this also adds an event of kind `scores`."""
    if len(scores.scores) > _MOST_SCORES or len(scores.model_dump_json().encode()) > _MOST_BYTES:
        limits = f"an evaluation has at most {_MOST_SCORES} scores and {_MOST_BYTES // 1024} KiB"
        raise InvalidJob([FieldError(field="scores", message=f"{limits}; record the tasks in several evaluations")])
    return context.store.add_scores(job.id, scores, request)


@router.get("", responses=_REFUSED)
def list_evaluations(job: JobDep, context: ContextDep) -> EvaluationList:
    """List the evaluations of a job's checkpoints on tasks, newest first."""
    with Session(context.store.engine) as session:
        found = queries.newest_events(session, job.id, "scores", _MOST)
    return EvaluationList(evaluations=[JobEvaluation(time=event.time, **event.data) for event in found])
