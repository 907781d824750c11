"""What a scrape of the API finds."""

from collections.abc import Iterator

import httpx
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


class Scrape:
    """One answer of ``/metrics``."""

    def __init__(self, http: httpx.Client) -> None:
        answer = http.get("/metrics")
        assert answer.status_code == 200, answer.text
        self.text = answer.text

    @property
    def families(self) -> list[Metric]:
        return list(text_string_to_metric_families(self.text))

    def samples(self) -> Iterator[Sample]:
        return (sample for family in self.families for sample in family.samples)

    def find(self, name: str, **labels: str) -> list[Sample]:
        return [s for s in self.samples() if s.name == name and s.labels.items() >= labels.items()]

    def value(self, name: str, **labels: str) -> float:
        """The one value of a metric."""
        (sample,) = self.find(name, **labels)
        return sample.value

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The values of a metric by a label that tells them apart."""
        return {sample.labels[label]: sample.value for sample in self.find(name, **labels)}
