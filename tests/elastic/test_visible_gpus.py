"""What Ray shows workers of GPUs, and what the ranks of a tensor parallel group see of each other's."""

import os
from collections.abc import Iterator

import pytest
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from service.gang.assignment import WorkerPlace, ordered, visible_gpus
from tests.elastic.ray_cluster import local_ray

pytestmark = pytest.mark.nightly


@pytest.fixture
def four_gpus() -> Iterator[None]:
    """GPUs in Ray's books alone."""
    with local_ray(num_cpus=4, num_gpus=4):
        yield


@ray.remote(num_cpus=1, num_gpus=1)
class Seen:
    def place(self) -> tuple[WorkerPlace, str]:
        runtime = ray.get_runtime_context()
        gpus = tuple(map(str, runtime.get_accelerator_ids()["GPU"]))
        place = WorkerPlace(runtime.get_node_id(), "", gpus, os.getpid(), "", "")
        return place, os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.usefixtures("four_gpus")
def test_ray_shows_each_its_own_and_groups_are_of_different_gpus() -> None:
    group = placement_group([{"CPU": 2, "GPU": 2}] * 2)
    ray.get(group.ready(), timeout=60)
    actors = [
        Seen.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index // 2)).remote()
        for index in range(4)
    ]
    found = ray.get([actor.place.remote() for actor in actors], timeout=60)
    places = [place for place, _ in found]
    assert [mask for _, mask in found] == [",".join(place.accelerators) for place in places]
    by_rank = [places[number] for number in ordered(places, 2)]
    first, again, second, last = visible_gpus([by_rank[:2], by_rank[2:]])
    assert first == again and second == last
    assert {*first, *second} == {"0", "1", "2", "3"}
    # The number of a rank's own GPU among those that it sees is its rank in its group.
    numbers = [
        seen.index(*place.accelerators) for seen, place in zip((first, again, second, last), by_rank, strict=True)
    ]
    assert numbers == [0, 1, 0, 1]
    replaced = Seen.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0))
    ray.kill(actors[0])
    place, _ = ray.get(replaced.remote().place.remote(), timeout=60)
    assert place.accelerators == places[0].accelerators  # so that the others of its group need see no other
