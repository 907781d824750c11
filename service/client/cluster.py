"""Operations on queues, tenants, profiles and nodes."""

from collections.abc import Mapping
from types import NoneType
from typing import Any

from boost_core.plan.machine import MeasuredProfile
from service.client.calls import Call, get, operation, path_of, plain
from service.models.nodes import NodeList
from service.models.profiles import ProfileList, StoredProfile
from service.models.queues import Queue, QueueList
from service.models.requests import QueueSettings, TenantSettings
from service.models.tenants import Tenant, TenantList


class ClusterCalls:
    """Operations on what jobs share."""

    @operation
    def queues(self) -> Call[QueueList]:
        """Return all queues."""
        return get(path_of("queues"), QueueList)

    @operation
    def queue(self, name: str) -> Call[Queue]:
        """Return one queue."""
        return get(path_of("queues", name), Queue)

    @operation
    def put_queue(self, name: str, settings: QueueSettings | Mapping[str, Any]) -> Call[Queue]:
        """Create a queue or set an existing one's limits; for operators."""
        return Call("PUT", path_of("queues", name), Queue, body=plain(settings), repeatable=True)

    @operation
    def delete_queue(self, name: str) -> Call[None]:
        """Delete a queue that has no unfinished jobs; for operators."""
        return Call("DELETE", path_of("queues", name), NoneType, repeatable=True)

    @operation
    def tenants(self) -> Call[TenantList]:
        """Return all tenants; for operators."""
        return get(path_of("tenants"), TenantList)

    @operation
    def put_tenant(self, name: str, settings: TenantSettings | Mapping[str, Any]) -> Call[Tenant]:
        """Create a tenant or set an existing one's quota; for operators."""
        return Call("PUT", path_of("tenants", name), Tenant, body=plain(settings), repeatable=True)

    @operation
    def nodes(self) -> Call[NodeList]:
        """Return the cluster's nodes, as the scheduler last saw them."""
        return get(path_of("nodes"), NodeList)

    @operation
    def profiles(self) -> Call[ProfileList]:
        """Return the measured profiles of all kinds of GPU."""
        return get(path_of("profiles"), ProfileList)

    @operation
    def stored_profile(self, kind: str, precision: str | None = None) -> Call[StoredProfile]:
        """Return the measured profile of a kind of GPU; by default at bf16, or else at another precision."""
        return get(path_of("profiles", kind), StoredProfile, precision=precision)

    @operation
    def put_profile(self, kind: str, profile: MeasuredProfile | Mapping[str, Any]) -> Call[StoredProfile]:
        """Store the measured profile of a kind of GPU at the profile's precision; for operators."""
        return Call("PUT", path_of("profiles", kind), StoredProfile, body=plain(profile), repeatable=True)

    @operation
    def delete_profile(self, kind: str, precision: str | None = None) -> Call[None]:
        """Delete the measured profiles of a kind of GPU, or only one precision's; for operators."""
        params = {"precision": precision}
        return Call("DELETE", path_of("profiles", kind), NoneType, params=params, repeatable=True)
