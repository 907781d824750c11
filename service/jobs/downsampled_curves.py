"""Curves of many jobs, downsampled so that spikes stay visible.

A job's steps are in the record as one event each, and 200 jobs of 10,000 steps take seconds to read. So each curve that
was requested stays in memory, in buckets of consecutive steps with the lowest, the highest and the mean value. A later
request reads only the events since, and nothing if the job's version is the same. When a curve has got too many
buckets, each two of them become one.

NumPy is imported where it is used: processes that draw no curves start without it.
"""

import math
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, Select, select

from service.jobs.database import read_rows
from service.jobs.model import JobRecord
from service.jobs.queries import MEANS
from service.jobs.tables import RESULTS, EventRow
from service.models.jobs import Axis, Curve

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

VALIDATION = "validation_loss"  # and after a slash, the name of one of its sets
METRICS = f"^({'|'.join(MEANS)}|{VALIDATION}(/.+)?)$"
MOST_BUCKETS = 4096  # of a curve in memory, with 40 bytes each
_MOST_READ = 20_000  # events at once, which bounds the memory, and the time of a statement, whatever a job's length
_TIME = "time"
_DIGITS = 7  # that are significant in an answer
_STEP, _LOW, _HIGH, _SUM, _COUNT = range(5)


@dataclass(frozen=True)
class _Buckets:
    """A curve so far. Bucket k has the steps from k·width up to (k + 1)·width, those done again both times.

    Attributes:
        version: The job's version when they were last read.
        newest: Id of the newest event in them.
        width: Steps in a bucket, a power of two.
        table: ``[5, k]``: the last step, lowest, highest and sum of the finite values, and their number. A bucket
            without events has the step -1.
    """

    version: int
    newest: int
    width: int
    table: "Array"


def _empty(count: int) -> "Array":
    """Empty buckets, ``[5, count]``."""
    import numpy as np

    return np.repeat(np.array([[-1.0], [math.inf], [-math.inf], [0.0], [0.0]]), count, axis=1)


def _combined(table: "Array", count: int) -> "Array":
    """Buckets, ``[5, k]``, of which each ``count`` become one, ``[5, ceil(k / count)]``."""
    import numpy as np

    starts = np.arange(0, table.shape[1], count)
    ways = (np.maximum, np.minimum, np.maximum, np.add, np.add)
    return np.stack([way.reduceat(row, starts) for way, row in zip(ways, table, strict=True)])


@dataclass
class CurveCache:
    """Curves of the record's jobs. Threads may share it: what it keeps of a curve is replaced, never changed.

    Attributes:
        engine: Engine of the record's database.
        most: Maximum number of curves kept, those requested last.
    """

    engine: Engine
    most: int = 1000
    _kept: dict[tuple[str, str], _Buckets] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def curve(self, job: JobRecord, metric: str, axis: Axis, points: int, low: float, high: float) -> Curve:
        """One value of a job over its course.

        Args:
            job: The job.
            metric: What of it: one that ``METRICS`` matches.
            axis: What x is.
            points: Maximum number of points; buckets are combined to get there.
            low: The least x. One point before it is included, so that a line through the points begins at the edge.
            high: The greatest x; likewise.
        """
        import numpy as np

        table = self._read(job, metric).table
        table = table[:, table[_STEP] >= 0]
        # Where the buckets are on the axis; never less than for the one before.
        x, newest = table[_STEP], job.progress
        if axis is Axis.SECONDS and newest is not None and x.size:
            times = self._read(job, _TIME).table
            times = times[:, times[_COUNT] > 0]
            since = job.started_at.timestamp() if job.started_at else times[_LOW, 0]
            x = np.interp(x, times[_STEP], np.maximum.accumulate(times[_HIGH]) - since)
        elif axis is not Axis.STEP and newest is not None and x.size:
            # From the newest step back, because a job may go on from another's checkpoint, with other batches.
            training, warmup = job.spec.training, job.spec.training.batch_size_warmup
            edges = sorted({0, *(stage.until_step for stage in warmup), newest.step, int(x[-1])})
            samples = np.interp(x, edges, [training.samples(edge) for edge in edges])
            x = newest.tokens + (samples - training.samples(newest.step)) * training.sequence_length
            if axis is not Axis.TOKENS:
                x = x * (newest.model_flops_per_second / newest.tokens_per_second)
        begin, end = np.searchsorted(x, low), np.searchsorted(x, high, side="right")
        within = slice(max(0, begin - 1), end + 1)
        table, x = table[:, within], x[within]
        if not x.size:
            return Curve(id=job.id, x=[], mean=[], min=[], max=[])
        count = math.ceil(x.size / points)
        table, x = _combined(table, count), np.append(x[count - 1 : -1 : count], x[-1])
        known = table[_COUNT] > 0
        mean = table[_SUM] / np.where(known, table[_COUNT], 1)
        values = np.where(known, np.stack([mean, table[_LOW], table[_HIGH]]), math.nan)
        with np.errstate(divide="ignore", invalid="ignore"):  # a value of zero has no digits
            scale = 10.0 ** (_DIGITS - 1 - np.floor(np.log10(np.abs(values))))
            rounded = np.where(np.isfinite(scale) & (scale > 0), np.rint(values * scale) / scale, values)
        mean, least, most = ([None if math.isnan(each) else each for each in row] for row in rounded.tolist())
        return Curve(id=job.id, x=x.tolist(), mean=mean, min=least, max=most)

    def _read(self, job: JobRecord, metric: str) -> _Buckets:
        key = job.id, metric
        with self._lock:
            buckets = self._kept.get(key) or _Buckets(-1, 0, 1, _empty(0))
        while True:
            if buckets.version != job.version:
                buckets = self._with_more(buckets, job, metric)
            with self._lock:  # each part at once: if the next one fails, another request goes on from here
                self._kept.pop(key, None)  # so that it comes last
                self._kept[key] = buckets
                while len(self._kept) > self.most:
                    del self._kept[next(iter(self._kept))]
            if buckets.version == job.version:
                return buckets

    def _with_more(self, buckets: _Buckets, job: JobRecord, metric: str) -> _Buckets:
        """Read the next events; once there are no more, it has the job's version."""
        import numpy as np

        where = EventRow.job_id == job.id, EventRow.id > buckets.newest
        step, loss, of_set = EventRow.data["step"].as_integer(), EventRow.data["loss"].as_string(), None
        query: Select[int, int, Any]
        if metric.startswith(VALIDATION):
            of_set = metric.removeprefix(VALIDATION).removeprefix("/")
            value = EventRow.data["sets"] if of_set else loss
            query = select(EventRow.id, step, value).where(*where, RESULTS, EventRow.kind == "evaluation")
        else:
            value = EventRow.time if metric == _TIME else EventRow.data[metric].as_string()
            query = select(EventRow.id, step, value).where(*where, EventRow.kind == "progress")
        rows = read_rows(self.engine, query.order_by(EventRow.id).limit(_MOST_READ))
        if len(rows) < _MOST_READ:
            buckets = replace(buckets, version=job.version)
        if not rows:
            return buckets
        ids, steps_read, values_read = (list[Any](column) for column in zip(*rows, strict=True))
        if of_set:
            losses = (next((one["loss"] for one in sets or () if one["name"] == of_set), None) for sets in values_read)
            values_read = list(losses)
        elif metric == _TIME:
            values_read = [time.timestamp() for time in values_read]
        # They come as numbers or as text, and numpy reads both, "NaN" and "Infinity" included.
        steps, values = np.array(steps_read, np.float64), np.array(values_read, np.float64)
        width, table = buckets.width, buckets.table
        while steps.max() // width >= MOST_BUCKETS:
            table, width = _combined(table, 2), 2 * width
        places = (steps // width).astype(np.int64)
        table = np.concatenate([table, _empty(max(0, places.max() + 1 - table.shape[1]))], axis=1)
        np.maximum.at(table[_STEP], places, steps)
        finite = np.isfinite(values)
        places, values = places[finite], values[finite]
        np.minimum.at(table[_LOW], places, values)
        np.maximum.at(table[_HIGH], places, values)
        np.add.at(table[_SUM], places, values)
        np.add.at(table[_COUNT], places, 1)
        return replace(buckets, newest=ids[-1], width=width, table=table)
