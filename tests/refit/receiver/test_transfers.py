"""What all transfers of an install amount to."""

from paceline.refit.receiver.transfers import TOLD_MAX, fields_of
from paceline.refit.transports.protocol import TransferRecord


def record(source: str, *, problem: str = "", transport: str = "http") -> TransferRecord:
    return TransferRecord(
        transport=transport,
        source=source,
        num_bytes=0 if problem else 1000,
        seconds=0.5,
        retries=1,
        stages={"move": 0.25, "prove": 0.125},
        problem=problem,
    )


def test_each_source_has_one_line() -> None:
    """Windows from one source over one transport are one transfer; what failed stays in it."""
    found = fields_of(
        [record("a"), record("b"), record("a", problem="cut"), record("a", transport="nixl")]
    )
    assert found["fetch_sources"] == 2
    assert found["fetch_retries"] == 4
    assert found["fetch_bytes_per_s"] == 1500.0
    lines = found["transfers"]
    assert isinstance(lines, list)
    assert [(line["over"], line["source"]) for line in lines] == [
        ("http", "a"),
        ("http", "b"),
        ("nixl", "a"),
    ]
    assert lines[0] == {
        "over": "http",
        "source": "a",
        "bytes": 1000,
        "ms": 1000.0,
        "stages_ms": {"move": 500.0, "prove": 250.0},
        "retries": 2,
        "problem": "cut",
    }


def test_an_event_stays_small() -> None:
    """However many sources gave something, and however long their words are."""
    lines = fields_of(record("s" * 999 + str(n), problem="p" * 999) for n in range(99))["transfers"]
    assert isinstance(lines, list)
    assert len(lines) == TOLD_MAX
    assert all(len(line["source"]) == len(line["problem"]) == 200 for line in lines)


def test_nothing_came() -> None:
    """An install without a transfer has no rate and no line."""
    found = fields_of([])
    assert found["fetch_bytes_per_s"] == 0.0
    assert found["transfers"] == []
