"""Operations on datasets."""

from collections.abc import Mapping
from types import NoneType
from typing import Any

from service.client.calls import Call, get, operation, path_of, plain
from service.models.datasets import Dataset, DatasetDetail, DatasetList, DatasetRequest


class DatasetCalls:
    """Operations on datasets."""

    @operation
    def create_dataset(self, request: DatasetRequest | Mapping[str, Any]) -> Call[Dataset]:
        """Build a dataset. One that failed or was cancelled continues with the remaining files."""
        return Call("POST", path_of("datasets"), Dataset, body=plain(request))

    @operation
    def datasets(self) -> Call[DatasetList]:
        """Return the tenant's datasets."""
        return get(path_of("datasets"), DatasetList)

    @operation
    def dataset(self, name: str) -> Call[DatasetDetail]:
        """Return one dataset, with its lineage."""
        return get(path_of("datasets", name), DatasetDetail)

    @operation
    def cancel_dataset(self, name: str) -> Call[Dataset]:
        """Stop building a dataset."""
        return Call("POST", path_of("datasets", name, "cancel"), Dataset, repeatable=True)

    @operation
    def delete_dataset(self, name: str) -> Call[None]:
        """Forget a dataset that no active job names; its files stay."""
        return Call("DELETE", path_of("datasets", name), NoneType, repeatable=True)
