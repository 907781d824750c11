"""All operations of the API."""

from service.client.accounts import AccountCalls
from service.client.checkpoints import CheckpointCalls
from service.client.cluster import ClusterCalls
from service.client.datasets import DatasetCalls
from service.client.jobs import JobCalls
from service.client.planning import PlanningCalls


class Api(JobCalls, CheckpointCalls, DatasetCalls, ClusterCalls, PlanningCalls, AccountCalls):
    """The methods of both clients."""
