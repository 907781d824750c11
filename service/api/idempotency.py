"""Requests that carry an Idempotency-Key."""

import hashlib
from typing import Annotated

from fastapi import Depends, Header
from fastapi import Request as HttpRequest

from service.accounts.principal import Principal
from service.jobs.requests import Request

_Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]{1,255}$",
        description="Makes it safe to retry the request: the same key with the same body takes effect once.",
    ),
]


async def _idempotent(http: HttpRequest, key: _Key = None) -> Request | None:
    if key is None:
        return None
    who: Principal = http.state.principal  # admitted by the route
    content = hashlib.sha256(f"{http.method} {http.url.path}\n".encode() + await http.body())
    return Request(who.tenant, key, content.hexdigest())


IdempotentDep = Annotated[Request | None, Depends(_idempotent)]
