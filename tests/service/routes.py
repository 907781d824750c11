"""What the API has: its routes, and how each is called."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, iter_route_contexts

import boost_core
from service.api.auth import Requires
from service.models.access import Scope
from tests.service.records import GOOD, PROFILE, SCORES

UNSAFE = frozenset({"POST", "PUT", "PATCH", "DELETE"})
OPEN = {("GET", "/healthz"), ("GET", "/readyz"), ("POST", "/session"), ("DELETE", "/session"), ("GET", "/openapi.json")}

# What every tenant may read where keys are asked for, and a job that does.
READABLE = Path(boost_core.__path__[0])
GOOD_FOR_ALL = GOOD | {"data": {"source": {"kind": "text", "paths": [f"{READABLE}/**/*.py"]}}}

# A body that each route takes which takes one.
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/v1/jobs"): GOOD_FOR_ALL,
    ("POST", "/v1/jobs/dry-run"): GOOD_FOR_ALL,
    ("POST", "/v1/plans"): GOOD_FOR_ALL,
    ("POST", "/v1/jobs/cancel"): {"ids": ["job-0"]},
    ("PATCH", "/v1/jobs/{job_id}"): {"priority": 1},
    ("POST", "/v1/jobs/{job_id}/clone"): {},
    ("POST", "/v1/jobs/{job_id}/drills"): {"kind": "kill_rank"},
    ("POST", "/v1/jobs/{job_id}/profiles"): {},
    ("POST", "/v1/jobs/{job_id}/evaluations"): SCORES.model_dump(mode="json"),
    ("POST", "/v1/datasets"): {"name": "corpus", "source": GOOD_FOR_ALL["data"]["source"]},
    ("POST", "/v1/sweeps"): {
        "name": "rates",
        "job": GOOD_FOR_ALL,
        "space": {"optimizer.learning_rate": {"log_uniform": [1e-4, 1e-2]}},
        "budget": {"trials": 1},
    },
    ("PUT", "/v1/queues/{name}"): {},
    ("PUT", "/v1/tenants/{name}"): {},
    ("PUT", "/v1/profiles/{kind}"): PROFILE.model_dump(mode="json"),
    ("POST", "/v1/keys"): {"name": "k", "tenant": "lab", "scopes": ["read"]},
    ("POST", "/session"): {"key": "k"},
}


@dataclass(frozen=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    scope: Scope | None
    takes_body: bool
    handler: APIRoute | None

    def call(self, job_id: str = "job-0") -> dict[str, Any]:
        """How httpx calls it, with this job where it takes one."""
        places = {
            "job_id": job_id,
            "other_id": job_id,
            "step": "10",
            "name": "other",
            "kind": "H100",
            "key_id": "absent1",
            "path": "x",
        }
        url = self.path.format_map(places)
        body = {"json": BODIES[self.method, self.path]} if self.takes_body else {}
        return {"method": self.method, "url": url} | body


def routes_of(app: FastAPI) -> Iterator[Route]:
    """All routes but those of the web page, which anybody may see."""
    for context in iter_route_contexts(app.routes):
        handler = context.original_route if isinstance(context.original_route, APIRoute) else None
        if handler is not None and handler.endpoint.__module__ == "service.web.pages":
            continue
        scope = _scope_of(context.dependant) if handler else None
        for method in sorted((context.methods or set()) - {"HEAD"}):
            yield Route(method, str(context.path), scope, bool(handler and handler.body_field), handler)


def _scope_of(dependant: Dependant) -> Scope | None:
    """The highest scope that a route or what it depends on requires."""
    own = [dependant.call.scope] if isinstance(dependant.call, Requires) else []
    found = own + [scope for needed in map(_scope_of, dependant.dependencies) if (scope := needed)]
    return max(found, key=list(Scope).index, default=None)
