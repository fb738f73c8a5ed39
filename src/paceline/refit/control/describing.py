"""What is recorded about a version beside the public protocol: at once, or slot by slot.

No process of a sharded trainer knows the root digest of all weights, and none needs to: each says
its own slot's, and what they make together is computed here when the last one has spoken.
"""

from collections.abc import Mapping
from dataclasses import replace

from paceline.refit.control import chains, records
from paceline.refit.control.lookup import put_version, require_version
from paceline.refit.control.transaction import Transaction
from paceline.refit.digest import version_root
from paceline.refit.errors import AlreadyExistsError, InvalidRequestError, PreconditionError
from paceline.refit.model import VersionDescription, WeightPayloadFormat, WeightVersion


def describe(tx: Transaction, uid: str, description: VersionDescription) -> WeightVersion:
    """Attach a description of all of a version, once."""
    record = require_version(tx, uid)
    if record.version.description == description:
        return record.version
    if record.version.description is not None:
        raise AlreadyExistsError(
            f"version {uid!r} is described already, differently; publish a new version"
        )
    chains.follow_run(tx, record.version, description)
    version = replace(record.version, description=description)
    put_version(tx, replace(record, version=version))
    return version


def describe_slot(
    tx: Transaction, uid: str, slot: str, description: VersionDescription
) -> WeightVersion:
    """Take one slot's part; with the last one the version is described."""
    version = require_version(tx, uid).version
    expected = version.expected_source_slots
    if slot not in expected:
        raise InvalidRequestError(f"version {uid!r} expects no slot {slot!r}")
    if len(expected) == 1:
        return describe(tx, uid, description)
    key = records.part_key(uid, slot)
    known = tx.get(key)
    if known is not None:
        if records.decode_description(known) != description:
            raise AlreadyExistsError(
                f"slot {slot!r} of version {uid!r} is described already, differently; "
                "publish a new version"
            )
        return version
    parts = {slot: description}
    for each in expected:
        found = tx.get(records.part_key(uid, each))
        if found is not None:
            parts[each] = records.decode_description(found)
    is_delta = version.payload_format is WeightPayloadFormat.XOR_DELTA
    _check_one_state(uid, parts, is_delta=is_delta)
    tx.put(key, records.encode(description))
    return describe(tx, uid, combine(parts)) if len(parts) == len(expected) else version


def combine(parts: Mapping[str, VersionDescription]) -> VersionDescription:
    """Return the description of a version from those of all its slots.

    It has a parent if every slot has one: a process that began anew has none.
    """
    some = next(iter(parts.values()))
    parents = {slot: each.parent_root for slot, each in parts.items() if each.parent_root}
    has_parent = len(parents) == len(parts)
    return replace(
        some,
        root_digest=version_root({slot: each.root_digest for slot, each in parts.items()}),
        parent_root=version_root(parents) if has_parent else None,
        payload_bytes=sum(each.payload_bytes for each in parts.values()),
        full_bytes=sum(each.full_bytes for each in parts.values()),
        changed_elements=sum(each.changed_elements for each in parts.values()),
        total_elements=sum(each.total_elements for each in parts.values()),
    )


def _check_one_state(uid: str, parts: Mapping[str, VersionDescription], *, is_delta: bool) -> None:
    states = {(each.run_id, each.sequence, each.step) for each in parts.values()}
    lacks_base = is_delta and any(each.parent_root is None for each in parts.values())
    if len(states) > 1 or lacks_base:
        raise PreconditionError(
            f"the slots of version {uid!r} do not describe one state of one run: "
            f"{sorted(states)}; publish the same step in every process"
        )
