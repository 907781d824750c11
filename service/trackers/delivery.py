"""Sends one tracker what it has not been told of one job."""

from dataclasses import replace

from service.jobs.queries import EventFilter
from service.jobs.store import JobStore
from service.jobs.trackers import SENT_KINDS, Tracked, TrackerStore
from service.trackers.curves import Batch, NotYet, Tracker, entry_of

BATCH = 500  # events
_MOST_BATCHES = 20  # then others have their turn

_WANTED = EventFilter(kinds=SENT_KINDS)


def deliver(store: JobStore, progress: TrackerStore, tracked: Tracked, tracker: Tracker) -> None:
    """Send what there is, batch by batch, and note after each how far that is.

    A process that dies in between has sent a batch that is not noted; the next one sends it again, and it is the
    tracker's part to know it.

    Args:
        store: The record.
        progress: Where it is noted.
        tracked: The job, as far as the tracker has it.
        tracker: The tracker.

    Raises:
        Exception: Of the tracker.
    """
    for _ in range(_MOST_BATCHES):
        job = store.get(tracked.job_id)  # before its events: those that come in between are for the next time
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
