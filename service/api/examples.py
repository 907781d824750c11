"""Example requests and responses for the OpenAPI document. A test validates each with its model."""

from datetime import UTC, datetime
from typing import Any

from boost_core.config import JobSpec
from boost_core.config.training import NearDedup, QualityFilter, SourceConfig
from boost_core.messages import CheckpointReport, Drill, Profile, Score, Scores, ShapeReport, StepReport
from boost_core.plan.machine import MeasuredLink, MeasuredProfile
from boost_core.plan.report import plan
from boost_core.plan.search import PlanSearch
from service.api.routes.access import SessionRequest
from service.jobs.model import Cancellation, CancelRequest, JobPage, JobRecord
from service.jobs.patch import JobPatch
from service.jobs.states import JobState, Reason
from service.models import cluster, datasets, jobs, sweeps
from service.models.access import Identity, NewKey, Scope, Tenant, TenantList
from service.models.problems import FieldError, Problem

_TIME = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
_JOB_ID = "job-1k0skwwex4yq1zy2"
_FOLDER = f"s3://checkpoints/lab/{_JOB_ID}"

SPEC: dict[str, Any] = {
    "name": "cola-350m",
    "model": {"preset": "350m", "family": "cola"},
    "parallelism": {"tensor_parallel_size": 4, "data_parallel_size": 2},
    "training": {"steps": 10_000, "sequence_length": 1024, "global_batch_size": 512, "micro_batch_size": 16},
    "data": {"source": {"kind": "standard_library"}},
    "resources": {"gpus_per_worker": 1, "accelerator_type": "H100"},
    "elasticity": {"data_parallel_size": {"min": 1, "max": 4}},
    "queue": "research",
    "group": "learning-rates",
    "tags": ["baseline"],
    "notes": "With the authors' learning rate.",
}


def examples_of_models() -> list[Any]:
    """One example of each model that has examples."""
    step = StepReport(
        step=412, steps=10_000, loss=3.412, learning_rate=0.003, gradient_norm=0.41, tokens=216_006_656,
        tokens_per_second=655_000, step_seconds=0.8, communication_seconds=0.21, exposed_communication_seconds=0.05,
        communication_bytes=176_000_000, model_flops_per_second=9.3e14, eta_seconds=7670, data_seconds=0.01,
        forward_seconds=0.24, backward_seconds=0.46, optimizer_seconds=0.03, model_flops_utilization=0.12,
        hardware_flops_utilization=0.12,
    )  # fmt: skip
    shape = ShapeReport(
        tensor_parallel_size=4, pipeline_parallel_size=1, data_parallel_size=2, nodes=["6f0c"] * 8,
        metrics_endpoints=[f"10.0.0.5:{9400 + rank}" for rank in range(8)],
    )  # fmt: skip
    saved = CheckpointReport(step=400, url=f"{_FOLDER}/step-00000400", bytes=4_316_000_000, seconds=0.3)
    job = JobRecord(
        id=_JOB_ID, tenant="lab", submitted_by="alice", queue="research", name="cola-350m",
        spec=JobSpec.model_validate(SPEC), state=JobState.RUNNING, reason=Reason.GANG_STARTED,
        message="tp 4 × pp 1 × dp 2: 8 workers are training", attempt=1, cancel_requested=False, checkpoint_url=_FOLDER,
        submitted_at=_TIME, queued_at=_TIME, started_at=_TIME, finished_at=None, progress=step, evaluation=None,
        checkpoint=saved, shape=shape, version=830,
    )  # fmt: skip
    checkpoint = jobs.Checkpoint(
        step=400, url=f"{_FOLDER}/step-00000400", bytes=4_316_000_000, saved_at=_TIME, pinned=False,
        tensor_parallel_size=4, pipeline_parallel_size=1, data_parallel_size=2, samples=204_800,
    )  # fmt: skip
    queue = cluster.Queue(
        name="research", description="Experiments.", gpus=64, cpus=None, used_gpus=8, used_cpus=8, jobs={"RUNNING": 1}
    )
    tenant = Tenant(name="lab", gpus=32, cpus=None, used_gpus=8, used_cpus=8, jobs={"RUNNING": 1})
    total, free = {"CPU": 96.0, "GPU": 8.0}, {"CPU": 88.0, "GPU": 0.0}
    on_node = [cluster.NodeJob(id=job.id, name=job.name, ranks=8)]
    node = cluster.Node(node_id="6f0c", labels={}, total=total, free=free, draining=False, jobs=on_node, other_ranks=0)
    labels = cluster.TargetLabels(
        job_id=job.id, job_name=job.name, tenant=job.tenant, rank="5", tensor_parallel_rank="1",
        pipeline_parallel_rank="0", data_parallel_rank="1", context_parallel_rank="0", node="6f0c",
    )  # fmt: skip
    tracker = jobs.TrackerState(
        kind="mlflow", place="https://mlflow.example.org/#/experiments/3/runs/8f2b", behind=0, failures=0,
        failing_since=None, problem=None,
    )  # fmt: skip
    example = jobs.JobExample(
        name="cola-tiny", description="A small CoLA model.", text="name: cola-tiny\nmodel:\n  preset: tiny\n"
    )
    score = Score(
        task="arc_easy", metric="acc,none", value=0.61, stderr=0.01, higher_is_better=True, samples=2376, version="1",
        task_hash="0123456789abcdef",
    )  # fmt: skip
    scores = Scores(step=400, evaluated_by="lm-eval 0.4.13", scores=(score,))
    spec = datasets.DatasetRequest(
        name="corpus-v3", source=SourceConfig(kind="parquet", paths=("s3://corpus/*.parquet",)),
        tokenizer="s3://corpus/tokenizer.json", filters=(QualityFilter(measure="words", min=50),), exact_dedup=True,
        near_dedup=NearDedup(),
    )  # fmt: skip
    dataset = datasets.DatasetDetail(
        name=spec.name, id="dataset-1k0skwwex4yq1zy2", tenant="lab", submitted_by="alice", spec=spec,
        state=datasets.DatasetState.BUILDING, message="is being built", created_at=_TIME, finished_at=None,
        url="s3://checkpoints/lab/datasets/dataset-1k0skwwex4yq1zy2", counts=None, fingerprint=None, lineage=None,
        progress=datasets.DatasetProgress(
            stage="files", done=12, of=64, documents=91_000, bytes=402_000_000, seconds=61.5
        ),
    )  # fmt: skip
    of_datasets = datasets.Dataset.model_validate(dataset.model_dump(exclude={"lineage"}))
    link = MeasuredLink(ranks=8, base_seconds=3.1e-5, bytes_per_second=3.6e11, overlap=0.8, symmetric_memory=None)
    between = MeasuredLink(ranks=4, base_seconds=5.2e-5, bytes_per_second=4.1e10, overlap=0.7, symmetric_memory=None)
    measured = MeasuredProfile(
        device="NVIDIA H100 80GB HBM3", commit="8f2b6f0c1d3e", torch_version="2.9.1", triton_version="3.5.1",
        measured_at=_TIME, precision="bf16", cores=16, cases=("dense, fullrank: 1.031 of its work's time",),
        product_flops=6.9e14, attention_flops=4.1e14, bandwidth=2.4e12, start_seconds=4e-6, block_seconds=4.2e-4,
        correction=1.06, spread=0.05, host_bandwidth=5.2e10, link=link, between_nodes=between,
    )  # fmt: skip
    profile = cluster.StoredProfile(kind="H100", stored_at=_TIME, stored_by="ops", profile=measured)
    difference = jobs.DifferingField(field="optimizer.learning_rate", values=[0.003, 0.001], submitted=True)
    compared = jobs.ComparedJob(
        id=job.id, name=job.name, state=job.state, final_loss=3.412, best_validation_loss=3.466, tokens=216_006_656,
        tokens_per_second=655_000, seconds=331.0, gpu_hours=0.74,
    )  # fmt: skip
    searched = sweeps.SweepRequest(
        name="learning-rates", job=JobSpec.model_validate(SPEC | {"queue": "default"}), parallel=4,
        budget=sweeps.Budget(trials=24), search="tpe",
        space={
            "optimizer.learning_rate": sweeps.Dimension(log_uniform=(1e-4, 1e-2)),
            "model.rank": sweeps.Dimension(choices=(256,)),
        },
        stop_early=sweeps.StopEarly(kind="successive_halving", first_step=400),
    )  # fmt: skip
    trial = sweeps.SweepTrial(
        number=3, state=sweeps.TrialState.PRUNED, parameters={"optimizer.learning_rate": 0.0061, "model.rank": 256},
        value=4.913, rungs={400: 4.913}, reason="its loss of 4.913 at step 400 is worse than others' there",
        job_id=job.id,
    )  # fmt: skip
    sweep = sweeps.SweepDetail(
        name=searched.name, id="sweep-1k0skwwex4yq1zy2", tenant="lab", submitted_by="alice", spec=searched,
        state=sweeps.SweepState.RUNNING, message="trials: 4 running, 1 pruned", best=None, importance=None,
        trials={sweeps.TrialState.RUNNING: 4, sweeps.TrialState.PRUNED: 1}, created_at=_TIME, finished_at=None,
    )  # fmt: skip
    of_list = sweeps.Sweep.model_validate(sweep.model_dump(exclude={"importance"}))
    curve = jobs.Curve(id=job.id, x=[8.0, 16.0], mean=[7.42, 6.31], min=[6.88, 6.02], max=[8.01, 6.75])
    fault = FieldError(field="queue", message="there is no queue 'nite'; there are: default, night", value="nite")
    return [
        job.spec, job, JobPage(jobs=[job], next_cursor=None),
        JobPatch.model_validate({"priority": 5, "data_parallel_size": {"max": 3}}),
        jobs.CloneRequest(changes={"training": {"steps": 20_000}}, from_checkpoint=True),
        CancelRequest(group="learning-rates", state=[JobState.QUEUED, JobState.RUNNING]),
        Cancellation(cancelled=1000, ended=0, not_found=[], remaining=True),
        Drill(kind="kill_rank", rank=1, at_step=50), Profile(steps=3, ranks=(0, 4)),
        plan(job.spec), jobs.PlanRequest(**dict(job.spec), search=PlanSearch(gpus=64)),
        jobs.PlanAnswer(**dict(plan(job.spec)), search=None),
        example, jobs.JobExampleList(examples=[example]),
        jobs.SpecDiff(jobs=[job.id, "job-1k0skx0a2b3c4d5e"], fields=[difference]),
        jobs.Comparison(jobs=[compared], fields=[difference.model_copy(update={"values": [0.003]})]),
        jobs.Curves(metric="loss", axis=jobs.Axis.STEP, curves=[curve]),
        checkpoint, jobs.CheckpointList(checkpoints=[checkpoint]), jobs.TrackerList(trackers=[tracker]), scores,
        dataset.spec, of_datasets, dataset, datasets.DatasetList(datasets=[of_datasets]),
        searched, of_list, sweep, sweeps.SweepList(sweeps=[of_list]), sweeps.SweepTrialList(trials=[trial]),
        queue, cluster.QueueList(queues=[queue]), jobs.QueueSettings(description="Experiments.", gpus=64),
        tenant, TenantList(tenants=[tenant]), jobs.TenantSettings(gpus=32),
        profile.profile, profile, cluster.ProfileList(profiles=[profile]),
        cluster.NodeList(seen_at=_TIME, nodes=[node]),
        cluster.TargetGroup(targets=["10.0.0.5:9401"], labels=labels),
        jobs.KeyRequest(name="alice", tenant="lab", scopes=[Scope.SUBMIT]),
        NewKey(
            id="k3x9q2ab", name="alice", tenant="lab", scopes=[Scope.SUBMIT], key="boost_k3x9q2ab_…", created_at=_TIME,
            expires_at=None,
        ),
        SessionRequest(key="boost_k3x9q2ab_…"), Identity(tenant="lab", name="alice", scopes=[Scope.SUBMIT]),
        Problem(
            type="urn:boost:problem:invalid-job", code="invalid-job", title="Invalid job", status=422,
            detail=f"{fault.field}: {fault.message}", instance="/v1/jobs", errors=[fault],
        ),
    ]  # fmt: skip
