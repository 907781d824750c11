"""Checks of a job on submission that go beyond the legality of its spec."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Connection

from boost_core.checkpoint.folder import CheckpointFolder, located, refuse_unfit_origin
from boost_core.config import JobSpec
from boost_core.config.base import UnfitField
from boost_core.config.data_files import check_data, list_files, refuse_damaged, refuse_misread, tokenizer_vocabulary
from boost_core.config.job import door_problems, uneven_layouts
from boost_core.config.storage import giving_up_soon
from boost_core.config.training import BYTES, SourceConfig
from boost_core.plan.machine import Basis, Machine, lacks_precision
from boost_core.plan.report import Plan, nothing_fits, plan
from boost_core.plan.resolve import ChosenLayouts
from boost_core.plan.run_cost import CONDITIONS, RunConditions
from service.accounts.tenants_and_queues import QueueNotFound
from service.api.deps import Context
from service.api.errors import InvalidDataset, InvalidJob, at_fault
from service.jobs.datasets import DatasetNotFound
from service.jobs.model import JobRecord, Owner
from service.jobs.outlook import size_of_a_node
from service.jobs.queries import JobNotFound
from service.models.cluster import StoredProfile, basis_of
from service.models.datasets import Dataset, DatasetRequest, DatasetState
from service.models.jobs import unused_replicas
from service.models.problems import FieldError
from service.security.access import named_places, refused_places
from service.security.redaction import redact
from service.security.secrets import SecretUnusable
from service.trackers.opening import kinds_of, tracker_errors

_MOST_NAMED = 3
_UNREACHABLE = "cannot be looked up: {}; check the URL and that the service has credentials for it"

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Completed:
    """A job as it will be recorded.

    Attributes:
        spec: The spec, with its datasets' shards and the layouts chosen for it.
        chosen: Why it has these layouts; ``None`` if the user gave them.
        profile: Profile that predicts its seconds; ``None``: data sheets.
        basis: The basis of its predictions: that, its correction by earlier jobs, and the nodes that suit it.
    """

    spec: JobSpec
    chosen: ChosenLayouts | None
    profile: StoredProfile | None
    basis: Basis


async def admitted(
    spec: JobSpec, context: Context, tenant: str, then: Callable[[Completed], T], original: JobSpec | None = None,
    pins: bool = True,
) -> T:  # fmt: skip
    """Complete a job, check that it could run (paths, memory, queue, data, checkpoint), and return what ``then`` makes.

    Completing a job may take seconds.

    Args:
        spec: The job.
        context: The service's parts.
        tenant: The job's tenant.
        then: Called with the completed job; may block, but not on stores.
        original: The job that it is a clone of, whose shards it keeps, whatever its datasets' names mean by now.
        pins: Whether to pin the checkpoint that it starts from if the retention of another job could remove it.

    Raises:
        InvalidJob: The job could not run; names the fields at fault.
        RateLimited: It leaves its layouts to the service, and another search is under way.
        StoreUnavailable: The store of its data, or of the checkpoint that it starts from, does not respond.
    """

    def completed_or_done() -> tuple[Completed, T | None]:
        full = with_datasets(spec, context, tenant, original)
        stored = context.profiles.for_job(full)
        profile = stored.for_record if stored else None
        nodes = size_of_a_node(full, context.store, autoscaling=context.settings.autoscaling)
        fitted = context.observations.for_job(full, profile.profile if profile else None, nodes.gpus, tenant)
        basis = basis_of(profile, fitted, *nodes)
        chosen = context.searches.layouts(full, tenant, basis) if full.leaves_layouts else None
        full = full.with_layouts(chosen.sizes) if chosen is not None else full
        job = Completed(full, chosen, profile, basis)

        # Stores, users' files and secrets may be slow; without them, the checks read only the service's own files.
        trackers = [each for each in (full.trackers.mlflow, full.trackers.wandb) if each is not None]
        names_secret = any(name is not None for name in (full.credentials, *(each.credentials for each in trackers)))
        if names_secret or any(named_places(full)):
            return job, None
        _refuse_unfit(job, context, tenant)
        return job, then(job)

    job, done = await run_in_threadpool(completed_or_done)  # one thread for everything: a switch costs as much again
    if done is not None:
        return done

    data = job.spec.data  # named without the credentials, which may be the secret itself
    sources = [*(source for source, _ in data.sources), *data.validation]
    paths = [path for source in sources for path in source.paths]
    if data.tokenizer not in (None, BYTES):
        paths.append(data.tokenizer)
    named = ", ".join(map(repr, paths[:_MOST_NAMED])) + (" and others" if len(paths) > _MOST_NAMED else "")
    what = f"data: {named or 'the standard library'}"
    await context.stores.run(tenant, what, partial(_refuse_unfit, job, context, tenant))

    await check_origin(job.spec, context, tenant, pins)
    return await run_in_threadpool(then, job)


async def check_origin(spec: JobSpec, context: Context, tenant: str, pins: bool) -> None:
    """Check the checkpoint that a job is to start from, if it names one; the arguments are those of ``admitted``.

    Raises:
        InvalidJob: The job could not start from it; names the field at fault.
        StoreUnavailable: Its store does not respond.
    """
    if spec.checkpoint.origin is None:
        return
    field, url = f"checkpoint.{spec.checkpoint.origin[0]}", spec.checkpoint.origin[1]

    def refuse_checkpoint() -> None:
        with _refusals(field):
            options = context.settings.access(tenant, spec.credentials).storage_options()
            deadline = time.monotonic() + context.settings.store_seconds
            refuse_unfit_origin(spec, giving_up_soon(options), deadline)
            if not pins:
                return
            # Pin it if it is a single checkpoint: the gang may start long after ``keep_last`` would remove that. Only
            # that of a job of the same tenant is pinned; the newest of a folder is never removed.
            there, step = located(url)
            with suppress(JobNotFound):
                job = context.store.get(there.url.rpartition("/")[2])
                if step is None or job.tenant != tenant or job.spec.checkpoint.keep_last is None:
                    return
                # A job may start from what cannot be pinned: where the store refuses it, or the credentials of the
                # other job are gone.
                try:
                    others = context.settings.access(tenant, job.spec.credentials).storage_options()
                    folder = CheckpointFolder(job.checkpoint_url, giving_up_soon(others))
                    if folder.url.removeprefix("file://") == there.url.removeprefix("file://"):
                        folder.pin(step)
                except FileNotFoundError:  # it has just been removed
                    raise
                except Exception as error:  # stores raise types of their own
                    logger.warning("the checkpoint %s, from which a job is to start, cannot be pinned: %s", url, error)

    await context.stores.run(tenant, f"{field} {url!r}", refuse_checkpoint)


def record_job(
    job: Completed, context: Context, owner: Owner, alongside: Callable[[Connection], object] = lambda _: None,
    **more: Any,
) -> JobRecord:  # fmt: skip
    """Store an admitted job, with what its predictions are based on.

    Args:
        job: The job.
        context: The service's parts.
        owner: Its owner.
        alongside: As of ``JobStore.create``.
        **more: Further arguments of ``JobStore.create``.

    Raises:
        InvalidJob: Its queue has been deleted since it was admitted.
    """

    def in_queue(connection: Connection) -> None:
        with at_fault("queue", QueueNotFound, value=job.spec.queue):
            context.quotas.keep_queue(connection, job.spec.queue)
        alongside(connection)

    root, trackers = context.settings.checkpoint_root, kinds_of(job.spec, context.settings)
    more |= dict(job.basis, profile=job.profile, chosen=job.chosen, trackers=trackers, alongside=in_queue)
    return context.store.create(job.spec, root, owner, **more)


def conditions_of(job: JobSpec, context: Context, tenant: str, requested: RunConditions = CONDITIONS) -> RunConditions:
    """Return what a job's price, checkpoints and failures are planned with.

    Args:
        job: The job.
        context: The service's parts.
        tenant: The job's tenant.
        requested: What the request says; the rest is the operator's price, and what is measured of the job's store.
    """
    known = dict[str, float | None]()
    if requested.gpu_hour_price is None:
        known["gpu_hour_price"] = context.settings.gpu_hour_price
    if requested.store_gigabytes_per_second is None:
        folder = job.checkpoint.url or context.settings.checkpoint_root
        if (measured := context.store.checkpoint_bandwidth(tenant, folder)) is not None:
            known["store_gigabytes_per_second"] = measured / 1e9
    return requested.model_copy(update=known)


async def planned(
    job: JobSpec, machine: Machine, context: Context, tenant: str, conditions: RunConditions | None = None
) -> Plan:
    """Plan a job, by default with its own conditions, and note how often it reads the datasets that it names.

    Raises:
        InvalidJob: It has no plan: a layout has more ranks than any known network, or other stages than are listed.
        RateLimited: Too many plans of the tenant wait to be made.
    """
    if conditions is None:
        conditions = await run_in_threadpool(conditions_of, job, context, tenant)
    with at_fault("parallelism", ValueError):
        made = await context.plans.run(tenant, partial(plan, job, machine, conditions))
    shares = [(job.data.dataset, 1.0), *((each.dataset, each.weight) for each in job.data.mixture)]
    known = await run_in_threadpool(context.datasets.some, {name for name, _ in shares if name is not None}, tenant)
    whole = sum(weight for _, weight in job.data.sources)
    notes = [*made.notes, *filter(None, [unused_replicas(job)])]
    for name, weight in shares:
        counts = known[name].counts if name in known else None
        if counts and (tokens := counts["tokens"] - counts.get("validation_tokens", 0)):
            epochs = job.training.total_tokens * weight / whole / tokens
            if epochs > 1:
                notes.append(f"the {tokens:,} training tokens of the dataset {name!r} are read {epochs:,.1f} times")
    return made.model_copy(update={"notes": tuple(notes)})


def refuse_small_vocabulary(spec: JobSpec, datasets: Iterable[Dataset]) -> None:
    """Refuse a model that has fewer tokens than the tokenizers of its datasets; those not READY have none yet.

    Raises:
        InvalidJob: The model's vocabulary is too small.
    """
    for dataset in datasets:
        if (size := (dataset.counts or {}).get("vocabulary", 0)) > spec.model.vocab_size:
            problem = f"the dataset {dataset.name!r} has {size} tokens and model.vocab_size is {spec.model.vocab_size}"
            raise InvalidJob([FieldError(field="model.vocab_size", message=f"{problem}; raise it to {size} or more")])


async def if_dataset_fits(request: DatasetRequest, context: Context, tenant: str) -> None:
    """Check a dataset before it is built: its paths, files, tokenizer and secret.

    Raises:
        InvalidDataset: It could not be built; names the fields at fault.
        StoreUnavailable: The store of its data does not respond.
    """

    def refuse_unfit() -> None:
        places = [(f"source.paths[{number}]", path) for number, path in enumerate(request.source.paths)]
        places += [("tokenizer", request.tokenizer)] if request.tokenizer != BYTES else []
        places += [("url", request.url)] if request.url is not None else []
        if errors := refused_places(places, context.settings.prefixes(), tenant):
            raise InvalidDataset(errors)
        field = "credentials"
        try:
            options = giving_up_soon(context.settings.access(tenant, request.credentials).storage_options())
            field = "source.paths"
            files = list_files(request.source, options)
            refuse_misread(request.source, files)
            if request.on_error == "fail":
                refuse_damaged(request.source, files, options)
            field = "tokenizer"
            tokenizer_vocabulary(request.tokenizer, options)
        except ValueError as error:
            raise InvalidDataset([FieldError(field=field, message=redact(str(error)))]) from error
        except Exception as error:  # the clients of object stores raise types of their own
            raise InvalidDataset([FieldError(field=field, message=redact(_UNREACHABLE.format(error)))]) from error

    named = ", ".join(map(repr, request.source.paths[:_MOST_NAMED])) or "the standard library"
    await context.stores.run(tenant, f"data: {named}", refuse_unfit)


def with_datasets(spec: JobSpec, context: Context, tenant: str, original: JobSpec | None = None) -> JobSpec:
    """Return the job with its datasets' shards written into it, or unchanged if it names no dataset.

    Args:
        spec: The job.
        context: The service's parts.
        tenant: The job's tenant.
        original: The job that it is a clone of, whose shards it keeps, whatever its datasets' names mean by now.

    Raises:
        InvalidJob: There is no such dataset, it is not ready, its vocabulary is larger than the model's, or the job
            names other shards as well.
    """
    if not spec.data.datasets:
        return spec
    pinned = {(name, source.paths) for _, name, source in original.data.datasets if source} if original else set()
    known = context.datasets.some({name for _, name, _ in spec.data.datasets}, tenant)
    shards, errors = dict[str, dict[str, Any]](), list[FieldError]()  # the kind and paths of a dataset, by its field
    for field, name, written in spec.data.datasets:
        dataset, paths = known.get(name), written.paths if written else ()
        if (name, paths) in pinned:
            shards[field] = {"kind": "tokenized", "paths": paths}
            continue
        if dataset is None:
            errors.append(FieldError(field=field, message=str(DatasetNotFound(name)), value=name))
            continue
        shards[field] = {"kind": "tokenized", "paths": (dataset.url,)}
        if dataset.state is not DatasetState.READY:
            message = f"the dataset {name!r} is {dataset.state} ({dataset.message}); wait until it is READY"
            errors.append(FieldError(field=field, message=message, value=name))
        elif paths not in ((), (dataset.url,)):
            message = f"names other shards than those of the dataset {name!r}; leave it out"
            where = "data.source" if field == "data.dataset" else f"{field.removesuffix('dataset')}paths"
            errors.append(FieldError(field=where, message=message))
    if errors:
        raise InvalidJob(errors)
    if original is None:
        refuse_small_vocabulary(spec, known.values())
    data = spec.data
    source = data.source if data.dataset is None else SourceConfig(**shards["data.dataset"])
    update: dict[str, object] = {"source": source}
    for part, sources in (("mixture", data.mixture), ("validation", data.validation)):
        found = [shards.get(f"data.{part}[{number}].dataset") for number in range(len(sources))]
        update[part] = tuple(each.model_copy(update=its) for each, its in zip(sources, found, strict=True))
    return spec.model_copy(update={"data": data.model_copy(update=update)})


def _refuse_unfit(job: Completed, context: Context, tenant: str) -> None:
    spec = job.spec
    errors = refused_places(named_places(spec), context.settings.prefixes(), tenant)
    errors += map(FieldError.of, (*door_problems(spec.training), *uneven_layouts(spec)))
    if errors:
        raise InvalidJob(errors)
    if problem := lacks_precision(spec):
        raise InvalidJob([FieldError(field="training.precision", message=problem)])
    if problem := nothing_fits(spec, job.basis.machine(spec)):
        raise InvalidJob([FieldError(field="elasticity" if spec.elasticity else "parallelism", message=problem)])
    with at_fault("queue", QueueNotFound, value=spec.queue), context.store.engine.connect() as connection:
        context.quotas.keep_queue(connection, spec.queue)
    with at_fault("credentials", SecretUnusable):
        options = context.settings.access(tenant, spec.credentials).storage_options()
    if errors := tracker_errors(spec, context.settings, tenant):
        raise InvalidJob(errors)
    with _refusals("data"):
        check_data(spec.data, spec.model.vocab_size, spec.training.sequence_length, giving_up_soon(options))


@contextmanager
def _refusals(field: str) -> Iterator[None]:
    """Raise what a look at a store says as ``InvalidJob``; ``field``: at fault if the store cannot be reached."""
    try:
        yield
    except UnfitField as error:
        raise InvalidJob([FieldError(field=error.field, message=redact(error.message))]) from error
    except Exception as error:  # the clients of object stores raise types of their own
        raise InvalidJob([FieldError(field=field, message=redact(_UNREACHABLE.format(error)))]) from error
