"""What became of machines by the host they were on: remembered, weighed, forgotten. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

from paceline.rental.errors import BackendError
from paceline.rental.failover import Block, FailureKind, Scope
from paceline.rental.model import Offer

_SCHEMA = 1
NUM_OUTCOMES_MAX: Final = 20
"""Of one host; the oldest go first."""
REMEMBERED_S: Final = 30 * 86_400.0
"""What is older says nothing any more: hosts are repaired, sold, moved."""
_PRIOR_TRIES: Final = 20
"""A host that nobody knows counts as one failure in so many tries."""
_PRIOR_BOOT_S: Final = 120.0
_REASON_CHARS_MAX: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one machine on a host."""

    at_s: float
    failure: FailureKind | None
    """None: it was accepted and used."""
    boot_s: float | None = None
    """From the create call until it could be used."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord:
    """What is known of one host."""

    backend: str
    host: str
    outcomes: tuple[Outcome, ...] = ()
    """Oldest first."""

    def with_outcome(self, outcome: Outcome) -> "HostRecord":
        """Return the record with one more, and without what is too old."""
        short = replace(outcome, reason=outcome.reason[:_REASON_CHARS_MAX])
        kept = [one for one in self.outcomes if outcome.at_s - one.at_s < REMEMBERED_S]
        return replace(self, outcomes=(*kept, short)[-NUM_OUTCOMES_MAX:])

    def recent(self, now_s: float) -> tuple[Outcome, ...]:
        """Return what still counts."""
        return tuple(one for one in self.outcomes if now_s - one.at_s < REMEMBERED_S)

    def boot_s(self, now_s: float) -> float | None:
        """Return how long a machine there takes to become usable; None where none ever did."""
        known = [one.boot_s for one in self.recent(now_s) if one.boot_s is not None]
        return median(known) if known else None


def host_name(offer: Offer) -> str:
    """Return by what the host of an offer is remembered: the box, else the offer itself."""
    return offer.host or f"offer {offer.id}"


def first_hour_usd(
    offer: Offer, hosts: Mapping[tuple[str, str], HostRecord], now_s: float
) -> float:
    """Return what an hour of use is likely to cost: the price, waiting and failures included.

    Offers of hosts that nobody knows keep their order by price.
    """
    record = hosts.get((offer.backend, host_name(offer)))
    outcomes = () if record is None else record.recent(now_s)
    boot_s = None if record is None else record.boot_s(now_s)
    num_failed = sum(one.failure is not None for one in outcomes)
    share = (num_failed + 1) / (len(outcomes) + _PRIOR_TRIES)
    waiting = (_PRIOR_BOOT_S if boot_s is None else boot_s) / 3600
    return offer.dph * (1 + waiting) * (1 + share)


def render_host(record: HostRecord) -> bytes:
    """Return the record as JSON."""
    outcomes = [
        {"at_s": one.at_s, "failure": one.failure, "boot_s": one.boot_s, "reason": one.reason}
        for one in record.outcomes
    ]
    return json.dumps(
        {
            "schema": _SCHEMA,
            "backend": record.backend,
            "host": record.host,
            "outcomes": outcomes,
        }
    ).encode()


def parse_host(content: bytes) -> HostRecord:
    """Return the record in ``content``. Raises BackendError for anything else."""
    try:
        found = _document(content)
        outcomes = tuple(
            Outcome(
                at_s=one["at_s"],
                failure=None if one["failure"] is None else FailureKind(one["failure"]),
                boot_s=one["boot_s"],
                reason=one["reason"],
            )
            for one in found["outcomes"]
        )
        return HostRecord(backend=found["backend"], host=found["host"], outcomes=outcomes)
    except (ValueError, TypeError, KeyError) as exc:
        raise _unreadable(content, exc) from exc


def render_block(block: Block) -> bytes:
    """Return the block as JSON."""
    return json.dumps(
        {
            "schema": _SCHEMA,
            "scope": block.scope,
            "backend": block.backend,
            "name": block.name,
            "place": block.place,
            "kind": block.kind,
            "reason": block.reason[:_REASON_CHARS_MAX],
            "until_s": block.until_s,
        }
    ).encode()


def parse_block(content: bytes) -> Block:
    """Return the block in ``content``. Raises BackendError for anything else."""
    try:
        found = _document(content)
        return Block(
            scope=Scope(found["scope"]),
            backend=found["backend"],
            name=found["name"],
            place=found["place"],
            kind=FailureKind(found["kind"]),
            reason=found["reason"],
            until_s=float(found["until_s"]),
        )
    except (ValueError, TypeError, KeyError) as exc:
        raise _unreadable(content, exc) from exc


def _document(content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(content)
    if found["schema"] != _SCHEMA:
        raise ValueError(f"schema {found['schema']!r}, this Paceline reads {_SCHEMA}")
    return found


def _unreadable(content: bytes, why: Exception) -> BackendError:
    return BackendError(
        f"what is remembered of a host cannot be read ({why}): {content[:100]!r}; "
        "`paceline hosts forget --all` forgets everything"
    )
