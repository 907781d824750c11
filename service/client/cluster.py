"""Operations on queues, tenants, profiles and nodes."""

from collections.abc import Mapping
from types import NoneType
from typing import Any

from boost_core.plan.measured import MeasuredProfile
from service.client.calls import Call, get, operation, path_of, plain
from service.models.nodes import NodeList
from service.models.profiles import ProfileList, StoredProfile
from service.models.queues import Queue, QueueList
from service.models.requests import QueueSettings, TenantSettings
from service.models.tenants import Tenant, TenantList


class ClusterCalls:
    """What can be done with that which jobs share."""

    @operation
    def queues(self) -> Call[QueueList]:
        """All queues."""
        return get(path_of("queues"), QueueList)

    @operation
    def queue(self, name: str) -> Call[Queue]:
        """One queue."""
        return get(path_of("queues", name), Queue)

    @operation
    def put_queue(self, name: str, settings: QueueSettings | Mapping[str, Any]) -> Call[Queue]:
        """Create a queue, or set an existing one's limits; for operators."""
        return Call("PUT", path_of("queues", name), Queue, body=plain(settings), repeatable=True)

    @operation
    def delete_queue(self, name: str) -> Call[None]:
        """Delete a queue that has no unfinished jobs; for operators."""
        return Call("DELETE", path_of("queues", name), NoneType, repeatable=True)

    @operation
    def tenants(self) -> Call[TenantList]:
        """All tenants; for operators."""
        return get(path_of("tenants"), TenantList)

    @operation
    def put_tenant(self, name: str, settings: TenantSettings | Mapping[str, Any]) -> Call[Tenant]:
        """Create a tenant, or set an existing one's quota; for operators."""
        return Call("PUT", path_of("tenants", name), Tenant, body=plain(settings), repeatable=True)

    @operation
    def nodes(self) -> Call[NodeList]:
        """The cluster's nodes, as the scheduler last saw them."""
        return get(path_of("nodes"), NodeList)

    @operation
    def profiles(self) -> Call[ProfileList]:
        """What was measured of kinds of GPU."""
        return get(path_of("profiles"), ProfileList)

    @operation
    def stored_profile(self, kind: str, precision: str | None = None) -> Call[StoredProfile]:
        """What was measured of one kind of GPU; by default in bf16, or else at another precision."""
        return get(path_of("profiles", kind), StoredProfile, precision=precision)

    @operation
    def put_profile(self, kind: str, profile: MeasuredProfile | Mapping[str, Any]) -> Call[StoredProfile]:
        """Store what was measured of a kind of GPU at the profile's precision; for operators."""
        return Call("PUT", path_of("profiles", kind), StoredProfile, body=plain(profile), repeatable=True)

    @operation
    def delete_profile(self, kind: str, precision: str | None = None) -> Call[None]:
        """Delete what was measured of a kind of GPU, or only at one precision; for operators."""
        params = {"precision": precision}
        return Call("DELETE", path_of("profiles", kind), NoneType, params=params, repeatable=True)
