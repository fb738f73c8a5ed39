"""What generators say they serve, and the events of runs: bounded, newest kept."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.refit.control import records, rules
from paceline.refit.control.lookup import read_worker
from paceline.refit.control.records import EventsHead
from paceline.refit.control.rules import Limits
from paceline.refit.control.transaction import Transaction
from paceline.refit.model import Event, InstalledReport
from paceline.refit.wire.fields import parse_fields, render_fields


def put_report(tx: Transaction, report: InstalledReport) -> None:
    """Write a generator's report over the one before."""
    tx.put(records.report_key(report.model_name, report.worker_id), records.encode(report))


def list_reports(tx: Transaction, model_name: str, *, live_only: bool) -> Sequence[InstalledReport]:
    """Return the latest report of each generator, by worker id."""
    found = [records.decode_report(r.value) for r in tx.list(records.reports_prefix(model_name))]
    return [
        report
        for report in sorted(found, key=lambda report: report.worker_id)
        if not live_only or rules.is_alive(read_worker(tx, report.worker_id), tx.now_ms)
    ]


def canonical(event: Event) -> Event:
    """Return the event as it comes back from JSON. Raises InvalidRequestError if it cannot."""
    return replace(event, fields=parse_fields(render_fields(event.fields)), index=0)


def append_event(tx: Transaction, event: Event, *, limits: Limits) -> None:
    """Write a canonical event at the next index and drop the oldest one too many.

    A client that got no reply sends the same event again, so an event that equals a kept one,
    time included, is taken for that one.
    """
    twin = records.event_twin_key(event)
    if tx.get(twin) is not None:
        return
    head = _read_head(tx)
    index = head.last + 1
    key = records.event_key(index)
    tx.put(key, records.encode_event(event, index=index))
    tx.put(twin, records.encode_text(key))
    first = head.first
    if index - first + 1 > limits.events_kept:
        _drop_event(tx, first)
        first += 1
    tx.put(records.EVENTS_HEAD, records.encode(EventsHead(first=first, last=index)))


def _drop_event(tx: Transaction, index: int) -> None:
    key = records.event_key(index)
    value = tx.get(key)
    if value is not None:
        tx.delete(records.event_twin_key(records.decode_event(value)))
        tx.delete(key)


def list_events(tx: Transaction, *, after: int, limit: int, limits: Limits) -> Sequence[Event]:
    """Return kept events past ``after`` in order, at most ``limit`` and one reply's worth."""
    head = _read_head(tx)
    index = max(after + 1, head.first)
    found: list[Event] = []
    chars = 0
    while index <= head.last:
        for record in tx.list(records.event_block(index)):
            event = records.decode_event(record.value)
            if event.index < index:
                continue
            chars += len(record.value)
            if len(found) == limit or (found and chars > limits.events_reply_chars_max):
                return found
            found.append(event)
        index = (index // records.EVENTS_PER_BLOCK + 1) * records.EVENTS_PER_BLOCK
    return found


def _read_head(tx: Transaction) -> EventsHead:
    value = tx.get(records.EVENTS_HEAD)
    return EventsHead() if value is None else records.decode_events_head(value)
