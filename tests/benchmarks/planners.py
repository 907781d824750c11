"""Other ways to choose a plan, on the same costs and the same memory as ours: what ours are compared with.

All of them give plans that the trainer can run, with its cut into stages, and that fit with the same 4 % to spare.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import ceil, exp, inf, prod
from random import Random

from boost_core.config import JobSpec, Layout
from boost_core.config.job import layout_problems
from boost_core.plan.machine import SPARE, Cluster, Factors, Machine
from boost_core.plan.memory import rank_memory
from boost_core.plan.search import search
from boost_core.plan.throughput import Step

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble")
RECOMPUTED = ("none", "latent", "full")
PIPELINES = (1, 2, 4, 8, 16, 32)
_COOLING = 0.05  # of a step's seconds, for which a chain takes a worse plan at times

Way = tuple[int, int, int, str, str, int]  # tp, pp, micro-batch, schedule, recompute, ZeRO's stage


class Question:
    """What is to be planned.

    Args:
        job: The job.
        gpus: How many there are.
        machine: What they are.
        device_bytes: Memory of each.
        chains: Of MCMC.
        steps: Of each chain.
    """

    def __init__(self, job: JobSpec, gpus: int, machine: Machine, device_bytes: float, chains: int, steps: int) -> None:
        self.job, self.gpus, self.machine, self.device_bytes = job, gpus, machine, device_bytes
        self._chains, self._steps = chains, steps
        self._jobs: dict[Way, JobSpec | None] = {}
        self._costs: dict[Way, float] = {}
        self._fitting: dict[Way, bool] = {}

    def manual(self) -> JobSpec | None:
        """Tensor parallel ranks fill a node, and there are as few pipeline ranks as fit; then recomputation."""
        for recompute, pipeline in product(RECOMPUTED, PIPELINES):
            if job := self._that_fits((self._node, pipeline, 1, "1f1b", recompute, 1)):
                return job
        return None

    def flat(self) -> JobSpec | None:
        """Our search on a network that has one bandwidth, the geometric mean of its levels'."""
        rates = [level.link.bytes_per_second for level in self.machine.cluster.levels]
        return self._on_one_bandwidth(prod(rates) ** (1 / len(rates)))

    def flat_as_a_node(self) -> JobSpec | None:
        """Our search on a network that has the bandwidth of a node everywhere."""
        return self._on_one_bandwidth(self.machine.cluster.levels[0].link.bytes_per_second)

    def memory_last(self) -> JobSpec | None:
        """Our search without a limit; then twice the tensor and then the pipeline parallel ranks until it fits."""
        return self._grown(self._unlimited.training.micro_batch_size)

    def memory_last_of_one(self) -> JobSpec | None:
        """The same with micro-batches of one sequence."""
        return self._grown(1)

    @cached_property
    def _unlimited(self) -> JobSpec:
        return search(self.job, self.gpus, self.machine, inf, 1).choices[0].job

    def _grown(self, micro_batch: int) -> JobSpec | None:
        sizes = self._unlimited.parallelism
        for recompute in RECOMPUTED:
            tensor, pipeline = sizes.tensor_parallel_size, sizes.pipeline_parallel_size
            while tensor * pipeline <= self.gpus and pipeline <= PIPELINES[-1]:
                for schedule in dict.fromkeys((sizes.pipeline_schedule, "1f1b")):
                    if job := self._that_fits((tensor, pipeline, micro_batch, schedule, recompute, 1)):
                        return job
                if tensor < self._node:
                    tensor *= 2
                else:
                    pipeline *= 2
        return None

    def _on_one_bandwidth(self, rate: float) -> JobSpec | None:
        levels = self.machine.cluster.levels
        link = replace(levels[0].link, bytes_per_second=rate)
        cluster = Cluster(tuple(replace(level, link=link) for level in levels))
        found = search(self.job, self.gpus, Machine(self.machine.profile, cluster), self.device_bytes, 1)
        return found.choices[0].job if found.choices else None

    def mcmc(self) -> JobSpec | None:
        """The best that some chains come by, each of so many steps, by the formula of ``throughput.Step.parts``."""
        random = Random(0)
        for _ in range(self._chains):
            here = self._random_way(random)
            for _ in range(self._steps):
                there = list(here)
                place = random.randrange(len(there))
                there[place] = self._random_way(random)[place]
                other: Way = tuple(there)  # type: ignore[assignment]
                ahead, behind = self._cost(other), self._cost(here)
                if ahead <= behind or (ahead < inf and random.random() < exp((1 - ahead / behind) / _COOLING)):
                    here = other
        way = min(self._costs, key=lambda way: self._costs[way])
        return self._that_fits(way) if self._costs[way] < inf else None

    def nest(self) -> JobSpec | None:
        """1f1b with stages on the first free devices in order, by NEST's formula (arXiv 2603.06798).

        The slowest stage with its transfers, which count twice above a node, (m + pp − 1) times, and the first stage's
        reduction. Recomputation is all or nothing.
        """
        best: tuple[float, JobSpec | None] = (inf, None)
        for tensor, pipeline, micro_batch, recompute in product(
            self._tensors, range(1, PIPELINES[-1] + 1), MICRO_BATCHES, ("none", "full")
        ):
            way = tensor, pipeline, micro_batch, "1f1b", recompute, 1
            job = self._job(way)
            if job is None:
                continue
            step = Step(job, Layout.of(job.parallelism), self.machine)
            rounds = job.training.micro_batches(job.parallelism.data_parallel_size) + pipeline - 1
            above = [1 if link == self.machine.cluster.levels[0].link else 2 for link in step._links]
            loads, stages = [], step._stage_seconds(Factors())
            for rank, (stage,) in enumerate(stages):
                sent = stage.send * above[rank] + (stages[rank - 1][0].send * above[rank - 1] if rank else 0)
                loads.append(stage.forward + (stage.backward + stage.weights) + sent)
            cost = max(loads) * rounds + step._reduction(*step._reduced[0])
            if cost < best[0] and self._fits(way):
                best = cost, job
        return best[1]

    @property
    def _node(self) -> int:
        return self.machine.cluster.levels[0].fan_out

    @cached_property
    def _tensors(self) -> list[int]:
        return [size for size in (1, 2, 4, 8) if size <= self._node]

    def _random_way(self, random: Random) -> Way:
        return (
            random.choice(self._tensors), random.choice(PIPELINES), random.choice(MICRO_BATCHES),
            random.choice(SCHEDULES), random.choice(RECOMPUTED), random.choice((1, 2)),
        )  # fmt: skip

    def _cost(self, way: Way) -> float:
        if way not in self._costs:
            job = self._that_fits(way)
            self._costs[way] = inf if job is None else Step(job, Layout.of(job.parallelism), self.machine).parts().total
        return self._costs[way]

    def _that_fits(self, way: Way) -> JobSpec | None:
        job = self._job(way)
        return job if job is not None and self._fits(way) else None

    def _fits(self, way: Way) -> bool:
        if way not in self._fitting:
            job = self._job(way)
            assert job is not None
            needed = rank_memory(job, Layout.of(job.parallelism)).total
            self._fitting[way] = needed <= self.device_bytes * (1 - SPARE)
        return self._fitting[way]

    def _job(self, way: Way) -> JobSpec | None:
        """The job so, with as many replicas as there may be; ``None`` if that is not legal."""
        if way not in self._jobs:
            self._jobs[way] = self._made(way)
        return self._jobs[way]

    def _made(self, way: Way) -> JobSpec | None:
        tensor, pipeline, micro_batch, schedule, recompute, zero = way
        portions = self.job.training.global_batch_size // micro_batch
        most = self.gpus // (tensor * pipeline)
        if not most:
            return None
        replicas = portions // next(each for each in range(ceil(portions / most), portions + 1) if not portions % each)
        layout = Layout(tensor, pipeline, replicas)
        changes = {**layout.sizes, "pipeline_schedule": schedule, "recompute": recompute, "zero_stage": zero}
        parallelism = self.job.parallelism.model_copy(update=changes)
        training = self.job.training.model_copy(update={"micro_batch_size": micro_batch})
        if layout_problems(self.job.model, parallelism, training, self.job.optimizer, 1):
            return None
        return self.job.model_copy(update={"parallelism": parallelism, "training": training})


PLANNERS: Mapping[str, Callable[[Question], JobSpec | None]] = {
    "manual": Question.manual, "flat network": Question.flat, "flat, as in a node": Question.flat_as_a_node,
    "memory last": Question.memory_last, "memory last, of one": Question.memory_last_of_one, "MCMC": Question.mcmc,
    "NEST": Question.nest,
}  # fmt: skip
