"""Whether a version on record can be installed from nothing: what does not fit, in words."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

from paceline.refit.errors import FetchError, VerifyError
from paceline.refit.model import Shard, VersionState, WeightPayloadFormat, WeightVersion

ReadManifest = Callable[[str], bytes]
"""Endpoint -> the bytes there. Raises FetchError."""
CheckManifest = Callable[[bytes], None]
"""Refuses bytes that are not signed as they must be. Raises VerifyError."""


def check_chain(
    chain: Sequence[WeightVersion], shards: Mapping[str, Sequence[Shard]]
) -> Sequence[str]:
    """Return what is wrong with a chain and with what is offered of it; nothing is right.

    Args:
        chain: a full version first, then each on the one before.
        shards: uid -> what is advertised.
    """
    problems: list[str] = []
    for base, version in zip((None, *chain), chain, strict=False):
        problems += [f"{version.uid}: {problem}" for problem in _check_one(base, version)]
        offered = {shard.source_slot_id for shard in shards.get(version.uid, ())}
        missing = [slot for slot in version.expected_source_slots if slot not in offered]
        problems += [f"{version.uid}: nobody offers slot {slot}" for slot in missing]
    return problems


def _check_one(base: WeightVersion | None, version: WeightVersion) -> Sequence[str]:
    problems = []
    if version.state is not VersionState.READY:
        problems.append(f"it is {version.state}, not READY")
    if base is None and version.payload_format is WeightPayloadFormat.XOR_DELTA:
        problems.append("the chain starts with a delta")
    if version.description is None:
        return [*problems, "it is not described, so its bytes cannot be proven"]
    if base is not None and base.description is not None:
        wanted, found = base.description, version.description
        if found.parent_root != wanted.root_digest:
            problems.append(f"it stands on root {found.parent_root}, {base.uid} is another")
        if (found.run_id, found.sequence) <= (wanted.run_id, wanted.sequence):
            problems.append(f"it does not come after {base.uid} in its run")
    return problems


def _believe(data: bytes) -> None:
    """Take the advertised digest for enough."""


def check_manifests(
    shards: Sequence[Shard], read: ReadManifest, *, check: CheckManifest = _believe
) -> Sequence[str]:
    """Return which shards' manifests are not there, or not what was advertised or signed."""
    problems = []
    for shard in shards:
        place = f"{shard.version_id}: slot {shard.source_slot_id} of {shard.worker_id}"
        try:
            data = read(shard.manifest_endpoint)
            check(data)
        except (FetchError, VerifyError) as exc:
            problems.append(f"{place}: {exc}")
            continue
        found = sha256(data).hexdigest()
        if found != shard.manifest_digest:
            problems.append(f"{place}: its manifest has SHA-256 {found}, not the advertised one")
    return problems
