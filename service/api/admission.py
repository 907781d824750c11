"""What a job spec is checked for at the door beyond its own legality."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fastapi.concurrency import run_in_threadpool

from boost_core.config import JobSpec
from boost_core.config.data import BYTES
from boost_core.config.parsing.urls import StorageOptions, giving_up_soon
from boost_core.config.sources.files import UnfitData, check_data
from boost_core.plan.devices import nothing_fits
from service.accounts.quotas import QueueNotFound
from service.api.deps import Context
from service.api.errors import InvalidJob
from service.models.problems import FieldError
from service.security.redaction import redact
from service.security.secrets import SecretReference, SecretUnusable, load
from service.security.storage_policy import named_places, prefix_errors

_MOST_NAMED = 3

T = TypeVar("T")


async def if_fit(spec: JobSpec, context: Context, tenant: str, then: Callable[[], T]) -> T:
    """What a function returns that is called if a job could run: by its paths, its memory, its queue and its data.

    Args:
        spec: The job.
        context: The service's parts.
        tenant: Whose it is.
        then: The function; it may wait, but not for stores.

    Raises:
        InvalidJob: The job could not run; names the fields at fault.
        StoreUnavailable: Its data is where nothing answers.
    """
    check = partial(_refuse_unfit, spec, context, tenant)
    if spec.credentials is not None or any(named_places(spec)):
        await context.stores.run(tenant, _data_of(spec), check)
        return await run_in_threadpool(then)

    def check_and_go_on() -> T:
        check()  # looks at no store, and at no file but the service's own
        return then()

    return await run_in_threadpool(check_and_go_on)


def _data_of(spec: JobSpec) -> str:
    """What is looked up, for messages."""
    paths = [path for source, _ in spec.data.sources for path in source.paths]
    if spec.data.tokenizer not in (None, BYTES):
        paths.append(spec.data.tokenizer)
    named = ", ".join(map(repr, paths[:_MOST_NAMED])) + (" and others" if len(paths) > _MOST_NAMED else "")
    return f"data: {named or 'the standard library'}"  # without the credentials, which may be the secret itself


def _refuse_unfit(spec: JobSpec, context: Context, tenant: str) -> None:
    errors = prefix_errors(spec, context.settings.prefixes(), tenant)
    if errors:
        raise InvalidJob(errors)
    if problem := nothing_fits(spec):
        raise InvalidJob([FieldError(field="elasticity" if spec.elasticity else "parallelism", message=problem)])
    try:
        context.quotas.refuse_unknown_queue(spec.queue)
    except QueueNotFound as error:
        raise InvalidJob([FieldError(field="queue", message=str(error), value=spec.queue)]) from error
    try:
        options = storage_options(spec, context, tenant)
    except SecretUnusable as error:
        raise InvalidJob([FieldError(field="credentials", message=str(error))]) from error
    _refuse_absent_data(spec, options)


def storage_options(spec: JobSpec, context: Context, tenant: str) -> StorageOptions | None:
    """What a job's object store is reached with; ``None`` for the service's own means.

    Raises:
        SecretUnusable: The secret that the job names is not there, or not as it should be.
    """
    if spec.credentials is None:
        return None
    return load(SecretReference(str(context.settings.secrets_dir), tenant, spec.credentials)).storage_options()


def _refuse_absent_data(spec: JobSpec, options: StorageOptions | None) -> None:
    try:
        check_data(spec.data, spec.model.vocab_size, spec.training.sequence_length, giving_up_soon(options))
    except UnfitData as error:
        raise InvalidJob([FieldError(field=error.field, message=redact(str(error)))]) from error
    except Exception as error:  # the clients of object stores raise types of their own
        problem = f"cannot be looked up: {error}; check the URL and that the service has credentials for it"
        raise InvalidJob([FieldError(field="data", message=redact(problem))]) from error
