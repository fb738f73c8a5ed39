"""A commit record: which versions a prefix of a bucket holds from now on. Pure.

``docs/formats/bucket-v1.md`` is the specification. A record is complete in itself: whoever has the
newest one knows everything, whatever it missed before.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

from paceline.refit.errors import FetchError
from paceline.refit.model import (
    Shard,
    VersionDescription,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
)

SCHEMA: Final = "paceline.commit.v1"
COMMIT_BYTES_MAX: Final = 16 * 2**20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A version that can be read, and where its manifests are."""

    version: WeightVersion
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What there is, oldest first."""

    number: int
    versions: tuple[Committed, ...] = ()


def render_commit(commit: Commit) -> bytes:
    """Return canonical JSON; equal commits give equal bytes."""
    document = {
        "schema": SCHEMA,
        "number": commit.number,
        "versions": [
            {"version": asdict(item.version), "shards": [asdict(shard) for shard in item.shards]}
            for item in commit.versions
        ],
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")


def parse_commit(data: bytes, *, number: int) -> Commit:
    """Return what a record says. Raises FetchError for anything but record ``number``."""
    try:
        found = json.loads(data)
        if found["schema"] != SCHEMA or found["number"] != number:
            raise FetchError(f"commit {number} is a {found['schema']!r} of {found['number']!r}")
        versions = tuple(
            Committed(
                version=_version(item["version"]),
                shards=tuple(_build(Shard, shard) for shard in item["shards"]),
            )
            for item in found["versions"]
        )
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise FetchError(f"commit {number} cannot be read: {exc}") from exc
    return Commit(number=number, versions=versions)


def _version(fields: Mapping[str, Any]) -> WeightVersion:
    said = fields["description"]
    return _build(
        WeightVersion,
        {
            **fields,
            "payload_format": WeightPayloadFormat(fields["payload_format"]),
            "state": VersionState(fields["state"]),
            "expected_source_slots": tuple(fields["expected_source_slots"]),
            "object_storage": None,
            "description": None if said is None else _build(VersionDescription, said),
        },
    )


def _build(make: Callable[..., _T], fields: Mapping[str, Any]) -> _T:
    """Make a value of fields of the right types; numbers are whole and texts are text."""
    hints = make.__annotations__
    for name, value in fields.items():
        expected = hints.get(name)
        if expected in {int, str} and type(value) is not expected:
            raise TypeError(f"{name} is {value!r}")
    return make(**fields)
