"""What a service could answer, for tests that need none."""

from datetime import UTC, datetime, timedelta
from typing import Any

from service.jobs.model import JobRecord
from service.jobs.states import JobState, Reason
from tests.service.records import a_shape, a_spec, a_step


def a_record(state: JobState = JobState.QUEUED, **changes: Any) -> JobRecord:
    now = datetime.now(UTC) - timedelta(seconds=30)
    facts = {
        "id": "job-1", "tenant": "acme", "submitted_by": "ci", "queue": "default", "name": "tiny", "spec": a_spec(),
        "state": state, "reason": Reason.SUBMITTED, "message": "waits for its turn", "attempt": 0,
        "cancel_requested": False, "checkpoint_url": "/checkpoints/job-1", "submitted_at": now, "queued_at": now,
        "started_at": None, "finished_at": None, "progress": None, "evaluation": None, "checkpoint": None, "version": 1,
    }  # fmt: skip
    return JobRecord.model_validate(facts | changes)


def a_job(state: JobState = JobState.QUEUED, **changes: Any) -> dict[str, Any]:
    return a_record(state, **changes).model_dump(mode="json")


def a_running_job(step: int = 5, **changes: Any) -> dict[str, Any]:
    return a_job(
        JobState.RUNNING,
        **{"reason": Reason.GANG_STARTED, "message": "2 workers train", "progress": a_step(step), "shape": a_shape()}
        | changes,
    )


A_KEY = {
    "id": "abcdefgh", "name": "ci", "tenant": "acme", "scopes": ["submit"], "key": "boost_abcdefgh_secret",
    "created_at": "2026-01-01T00:00:00Z", "expires_at": None,
}  # fmt: skip

GIB = 2**30


def a_planned_shape(data: int, total: int, fits: bool | None) -> dict[str, Any]:
    return {
        "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": data, "world_size": 2 * data,
        "recompute": "none",
        "memory": {
            "weights": 8 * GIB, "gradients": 8 * GIB, "optimizer": 16 * GIB, "activations": 4 * GIB, "logits": 2**20,
            "total": total,
        },
        "device_memory_bytes": None if fits is None else 80 * GIB, "fits_device": fits, "step_seconds": 0.25,
        "step_seconds_range": [0.2, 0.3],
        "step_parts": {
            "arithmetic": 0.2, "exchange": 0.04, "sends": 0.0, "idle": 0.0, "reduction": 0.009, "update": 0.001,
        },
        "tokens_per_second": 1_000_000 * data, "total_seconds": 7200 / data,
        "communication": {"all_reduces": 4, "elements_per_token": 7},
    }  # fmt: skip


A_PLAN = {
    "parameters": 1_234_567, "trainable_bytes_per_parameter": 18, "flops_per_token": 7_500_000,
    "tokens_per_step": 2048, "fastest": 1, "provenance": "assumed",
    "shapes": [a_planned_shape(1, 100 * GIB, False), a_planned_shape(2, 36 * GIB, True)],
    "notes": ["times are of an H100"],
}  # fmt: skip

A_CHECKPOINT = {
    "step": 100, "url": "s3://runs/job-1/step-00000100", "bytes": 3 * 2**20, "saved_at": "2026-01-01T00:00:00Z",
    "pinned": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 4, "samples": 6400,
}  # fmt: skip

A_QUEUE = {
    "name": "night", "description": "when nobody looks", "gpus": 8.0, "cpus": None, "used_gpus": 2.0, "used_cpus": 16.5,
    "jobs": {"RUNNING": 1, "QUEUED": 3, "PAUSED": 0},
}  # fmt: skip

A_TENANT = {
    "name": "acme", "gpus": 16.0, "cpus": None, "used_gpus": 4.0, "used_cpus": 8.0, "jobs": {"RUNNING": 2},
}  # fmt: skip

NODES = {
    "seen_at": "2026-01-01T00:00:00Z",
    "nodes": [
        {
            "node_id": "node-a", "labels": {"pool": "training"}, "total": {"GPU": 8, "CPU": 64},
            "free": {"GPU": 6, "CPU": 63.5}, "draining": False, "unusable": None,
            "jobs": [{"id": "job-1", "name": "tiny", "ranks": 2}], "other_ranks": 1,
            "dataset": None,
        },
        {
            "node_id": "node-b", "labels": {}, "total": {"CPU": 4}, "free": {}, "draining": True, "unusable": None,
            "jobs": [], "other_ranks": 0, "dataset": {"name": "corpus-v1", "cpus": 2.0},
        },
        {
            "node_id": "node-c", "labels": {}, "total": {"CPU": 4}, "free": {"CPU": 4}, "draining": False,
            "unusable": "has no torch, which Ray's head has", "jobs": [], "other_ranks": 0, "dataset": None,
        },
    ],
}  # fmt: skip

AUDIT = {
    "entries": [
        {
            "id": 7, "time": "2026-01-01T00:00:00Z", "tenant": "acme", "key_id": "abcdefgh", "key_name": "ci",
            "action": "jobs.cancel", "resource": "job-1", "status": 202, "address": "10.0.0.9", "request_id": "r1",
        },
        {
            "id": 8, "time": "2026-01-01T00:00:01Z", "tenant": None, "key_id": None, "key_name": None,
            "action": "jobs.submit", "resource": "/v1/jobs", "status": 401, "address": None, "request_id": "r2",
        },
    ],
    "next_after": 8,
}  # fmt: skip


def metrics(*losses: float) -> dict[str, Any]:
    samples = [
        {
            "step": step, "time": "2026-01-01T00:00:00Z", "loss": loss, "loss_min": loss, "loss_max": loss,
            "learning_rate": 1e-3, "gradient_norm": 1.0, "tokens_per_second": 100.0 * step, "step_seconds": 0.5,
            "exposed_communication_seconds": 0.1, "model_flops_per_second": 1e9,
        }
        for step, loss in enumerate(losses, 1)
    ]  # fmt: skip
    return {
        "job_id": "job-1", "from_step": 1, "to_step": len(losses), "bucket_steps": 1, "samples": samples,
        "evaluations": [], "ranks": [],
    }  # fmt: skip
