"""Sends one tracker a job's events that it has not received yet."""

from dataclasses import replace

from service.jobs.queries import EventFilter
from service.jobs.store import JobStore
from service.jobs.trackers import SENT_KINDS, Tracked, TrackerStore
from service.trackers.curves import Batch, NotYet, Tracker, entry_of

BATCH = 500  # events
_MOST_BATCHES = 20  # then other deliveries have their turn

_WANTED = EventFilter(kinds=SENT_KINDS)


def deliver(store: JobStore, progress: TrackerStore, tracked: Tracked, tracker: Tracker) -> None:
    """Send all pending events, batch by batch, and record the progress after each.

    A process that dies in between has sent a batch that is not recorded; the next one sends it again, and the
    tracker must recognise it.

    Args:
        store: The record.
        progress: Where progress is recorded.
        tracked: The tracker's progress with the job.
        tracker: The tracker.

    Raises:
        Exception: The tracker failed.
    """
    for _ in range(_MOST_BATCHES):
        job = store.get(tracked.job_id)  # read before its events: later events are left for next time
        events = store.events(tracked.job_id, tracked.event_id, BATCH, _WANTED)
        whole = len(events) < BATCH
        after = replace(tracked, version=job.version) if whole else tracked
        if events:
            marks = dict(tracked.marks)
            entries = [entry_of(event, marks) for event in events]
            try:
                kept = tracker.send(Batch(job, entries), tracked.kept)
            except NotYet:
                progress.sent(tracked, replace(tracked, version=job.version), open_=True)
                return
            after = replace(after, event_id=events[-1].id, marks=marks, kept=kept)
        if not progress.sent(tracked, after, open_=not (whole and job.finished)) or whole:
            return
        tracked = after
