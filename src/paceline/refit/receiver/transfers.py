"""What all transfers of one install amount to, for metrics and the report. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from paceline.refit.transports.protocol import TransferRecord

TOLD_MAX = 16
"""Lines of an event: it passes through the control service."""


def joined(before: TransferRecord, after: TransferRecord) -> TransferRecord:
    """Return one record for two runs from one source; the last problem stands."""
    stages = {**before.stages}
    for name, seconds in after.stages.items():
        stages[name] = stages.get(name, 0.0) + seconds
    return replace(
        before,
        num_bytes=before.num_bytes + after.num_bytes,
        seconds=before.seconds + after.seconds,
        retries=before.retries + after.retries,
        stages=stages,
        problem=after.problem or before.problem,
    )


def by_source(records: Iterable[TransferRecord]) -> Sequence[TransferRecord]:
    """Return one record for each transport and source, in the order that they were first used."""
    found: dict[tuple[str, str], TransferRecord] = {}
    for record in records:
        key = (record.transport, record.source)
        found[key] = joined(found[key], record) if key in found else record
    return list(found.values())


def fields_of(records: Iterable[TransferRecord]) -> dict[str, object]:
    """Return the fields that the event ``version.installed`` has beside its own."""
    found = list(records)
    sources = by_source(found)
    seconds = sum(record.seconds for record in found)
    moved = sum(record.num_bytes for record in found)
    return {
        "fetched_over": ", ".join(sorted({record.transport for record in found})),
        "fetch_sources": len({record.source for record in found}),
        "fetch_ms": seconds * 1000,
        "fetch_bytes_per_s": moved / seconds if seconds > 0 else 0.0,
        "fetch_retries": sum(record.retries for record in found),
        "fetch_problems": [record.problem[:200] for record in found if record.problem][:5],
        "transfers": [_told(record) for record in sources[:TOLD_MAX]],
    }


def _told(record: TransferRecord) -> dict[str, object]:
    return {
        "over": record.transport,
        "source": record.source[:200],
        "bytes": record.num_bytes,
        "ms": record.seconds * 1000,
        "stages_ms": {name: seconds * 1000 for name, seconds in record.stages.items()},
        "retries": record.retries,
        "problem": record.problem[:200],
    }
