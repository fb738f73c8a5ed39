"""What makes shards one version: every slot is there, and their roots add up. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.refit.digest import version_root
from paceline.refit.errors import VerifyError
from paceline.refit.manifest.region import whole_of
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import DTYPE_BITS, Shard, VersionDescription, WeightVersion


def require_description(version: WeightVersion) -> VersionDescription:
    """Return what is recorded about a version. Raises VerifyError if nothing is."""
    if version.description is None:
        raise VerifyError(f"version {version.uid} has no description; it cannot be proven")
    return version.description


def sources_by_slot(
    version: WeightVersion, sources: Sequence[Shard]
) -> Mapping[str, Sequence[Shard]]:
    """Return who serves each slot, in the order of slots.

    Raises:
        VerifyError: a slot of the version has no source, or there is one that it has not.
    """
    found: dict[str, list[Shard]] = {slot: [] for slot in sorted(version.expected_source_slots)}
    for source in sources:
        found.setdefault(source.source_slot_id, []).append(source)
    wrong = [slot for slot, some in found.items() if not some]
    wrong += sorted(found.keys() - set(version.expected_source_slots))
    if wrong or not found:
        raise VerifyError(
            f"version {version.uid} expects {len(version.expected_source_slots)} source slots and "
            f"has sources for others: {', '.join(wrong[:3]) or 'none'}"
        )
    return found


def check_manifests_are_of(manifests: Mapping[str, Manifest], version: WeightVersion) -> None:
    """Refuse manifests, by slot, that are right in themselves and belong to something else.

    Raises:
        VerifyError: naming what differs from the version's record.
    """
    said = require_description(version)
    for slot, manifest in manifests.items():
        _compare(
            version,
            {
                "payload format": (manifest.payload_format, version.payload_format),
                "slot": (manifest.source_slot_id, slot),
            },
        )
    roots = {slot: manifest.root_digest for slot, manifest in manifests.items()}
    pairs = {"root digest": (version_root(roots), said.root_digest)}
    bases = {slot: each.base_root for slot, each in manifests.items() if each.base_root is not None}
    if bases:
        pairs["base root"] = (version_root(bases), said.parent_root or "")
    _compare(version, pairs)


def whole_manifest(manifests: Sequence[Manifest]) -> Manifest:
    """Return what a version is made of, with whole tensors: for who makes room for them.

    Of one manifest, itself. Of several, names, dtypes, shapes and ties; digests mean nothing.
    """
    if len(manifests) == 1:
        return manifests[0]
    entries = {}
    for manifest in manifests:
        for entry in manifest.tensors:
            shape = whole_of(entry)
            bits = DTYPE_BITS[entry.dtype]
            num_bytes = bits // 8
            for length in shape:
                num_bytes *= length
            entries[entry.name] = replace(entry, shape=shape, num_bytes=num_bytes, region=None)
    aliases = {pair for manifest in manifests for pair in manifest.aliases}
    return replace(
        manifests[0],
        tensors=tuple(entries[name] for name in sorted(entries)),
        aliases=tuple(sorted(aliases)),
        objects=(),
        segments=(),
    )


def _compare(version: WeightVersion, pairs: Mapping[str, tuple[str, str]]) -> None:
    for what, (found, recorded) in pairs.items():
        if found != recorded:
            raise VerifyError(
                f"version {version.uid}: {what} {found} in the manifest, {recorded} on record"
            )
