"""What all transfers of one install amount to, for metrics and the report. Pure."""

from collections.abc import Iterable

from paceline.refit.transports.protocol import TransferRecord


def fields_of(records: Iterable[TransferRecord]) -> dict[str, object]:
    """Return the fields that the event ``version.installed`` has beside its own."""
    found = list(records)
    seconds = sum(record.seconds for record in found)
    moved = sum(record.num_bytes for record in found)
    return {
        "fetched_over": ", ".join(sorted({record.transport for record in found})),
        "fetch_sources": len({record.source for record in found}),
        "fetch_ms": seconds * 1000,
        "fetch_bytes_per_s": moved / seconds if seconds > 0 else 0.0,
        "fetch_retries": sum(record.retries for record in found),
        "fetch_problems": [record.problem[:200] for record in found if record.problem][:5],
    }
