"""Verify, then write, and undo if writing fails: live weights are exactly old or exactly new.

``stage_install`` proves everything and changes nothing. ``write_install`` writes only elements
that differ, so that the pause does not grow with the model. ``prove_live`` reads back.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from paceline.refit.delta.change import (
    BLOCK_BYTES,
    Buffer,
    Change,
    Words,
    as_words,
    blocks,
    diff,
)
from paceline.refit.delta.codec import decode_tensor
from paceline.refit.delta.order import kind_of
from paceline.refit.digest import content_digest, root_digest
from paceline.refit.errors import ApplyError, UncertainStateError, VerifyError
from paceline.refit.manifest.payload import check_header, verify_object
from paceline.refit.manifest.v1 import Manifest, Segment
from paceline.refit.model import TensorBuffer, TensorEntry, WeightPayloadFormat

_FEW = 8
"""Up to one changed element in this many a full tensor is written as a change."""
_WRITE_ELEMENTS = 2**20
_NAMES_SHOWN = 5

_Where: TypeAlias = slice | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorWrite:
    """What is going to be written into one live tensor."""

    name: str
    live: Words
    """The live memory itself, as words."""
    new: Change | Words
    """Elements to flip if they are few, else all the new words."""
    changed_elements: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedInstall:
    """A proven version, ready to be written; live memory was not touched."""

    root_digest: str
    entries: tuple[TensorEntry, ...]
    """What live memory is after the writes."""
    writes: tuple[TensorWrite, ...]
    changed_elements: int
    total_elements: int

    @property
    def changed_names(self) -> tuple[str, ...]:
        """Names of the tensors that are written to."""
        return tuple(write.name for write in self.writes)


def stage_install(
    manifest: Manifest,
    objects: Mapping[str, memoryview],
    *,
    live: Mapping[str, TensorBuffer],
    aliases: Mapping[str, str],
    base: Mapping[str, TensorEntry] | None,
) -> StagedInstall:
    """Prove a fetched version against its manifest and against what is live; write nothing.

    The objects must stay as they are until the writes are done: full tensors are not copied.

    Args:
        manifest: parsed, hence consistent in itself.
        objects: every object of the manifest, whole, by id.
        live: the live tensors by canonical name, writable.
        aliases: further name -> canonical name of the live tensors.
        base: what the live tensors are known to be; only a full payload goes without.

    Raises:
        VerifyError: anything does not agree; the message names it. ParseError is one.
    """
    check_layout(manifest, live, aliases)
    entries = {entry.name: entry for entry in manifest.tensors}
    if manifest.payload_format is WeightPayloadFormat.XOR_DELTA:
        _check_base(manifest, live, base)
    for item in manifest.objects:
        data = objects.get(item.object_id)
        if data is None:
            raise VerifyError(f"object {item.object_id} of the manifest was not fetched")
        verify_object(item, data)
        check_header(data, manifest.payload_format)
    writes = []
    for segment in manifest.segments:
        data = objects[segment.object_id][segment.offset : segment.offset + segment.num_bytes]
        write = _stage_tensor(segment, entries[segment.tensor], live[segment.tensor], data)
        if write.changed_elements:
            writes.append(write)
    return StagedInstall(
        root_digest=manifest.root_digest,
        entries=manifest.tensors,
        writes=tuple(writes),
        changed_elements=sum(write.changed_elements for write in writes),
        total_elements=sum(_num_elements(buffer) for buffer in live.values()),
    )


def write_install(staged: StagedInstall) -> None:
    """Write a staged version into live memory, or leave it exactly as it was.

    Old values of what is overwritten are kept until the end: a few bytes per changed element,
    or a copy of each tensor that is replaced whole.

    Raises:
        ApplyError: a write failed and all of them were taken back.
        UncertainStateError: taking them back failed too; do not serve before a full install.
    """
    journal: list[tuple[Words, _Where, Words]] = []
    try:
        for write in staged.writes:
            _write_tensor(write, journal)
    except BaseException as exc:  # also when interrupted: live memory must not stay half written
        _undo(journal, exc)
        if not isinstance(exc, Exception):
            raise
        raise ApplyError(
            f"writing version {staged.root_digest[:12]} failed and was undone ({exc}); "
            "the version before is live, the install can be tried again"
        ) from exc


def prove_live(
    live: Mapping[str, TensorBuffer],
    entries: Iterable[TensorEntry],
    *,
    only: Iterable[str] | None = None,
) -> str:
    """Hash live memory and return the root digest that it proves.

    Args:
        live: the live tensors by canonical name.
        entries: what they should be, all of them.
        only: hash these names and trust the entries for the others; all by default.

    Raises:
        VerifyError: a tensor is missing or its bytes are not what its entry says.
    """
    expected = {entry.name: entry for entry in entries}
    _refuse(sorted(expected.keys() ^ live.keys()), "names differ from the live tensors")
    names = expected.keys() if only is None else only
    wrong = [name for name in names if content_digest(live[name].data) != expected[name].digest]
    _refuse(wrong, "live bytes do not have the digest of this version")
    return root_digest(expected.values())


def check_layout(
    manifest: Manifest, live: Mapping[str, TensorBuffer], aliases: Mapping[str, str]
) -> None:
    """Refuse a version whose tensors are not the live ones: names, dtypes, shapes, ties.

    Raises:
        VerifyError: naming what differs.
    """
    entries = {entry.name: entry for entry in manifest.tensors}
    _refuse(sorted(entries.keys() - live.keys()), "in the version, not in the engine")
    _refuse(sorted(live.keys() - entries.keys()), "in the engine, not in the version")
    for name, entry in entries.items():
        here = live[name]
        if (here.dtype, here.shape) != (entry.dtype, entry.shape):
            raise VerifyError(
                f"tensor {name!r} is {entry.dtype}{list(entry.shape)} in the version and "
                f"{here.dtype}{list(here.shape)} in the engine; nothing is cast or reshaped"
            )
        if len(here.data) != entry.num_bytes:
            raise VerifyError(f"tensor {name!r}: {len(here.data)} live, {entry.num_bytes} bytes")
    tied = {pair for pair in manifest.aliases if aliases.get(pair[0]) != pair[1]}
    tied |= set(aliases.items()) - set(manifest.aliases)
    _refuse(sorted(f"{name} = {canonical}" for name, canonical in tied), "tied on one side only")


def _check_base(
    manifest: Manifest, live: Mapping[str, TensorBuffer], base: Mapping[str, TensorEntry] | None
) -> None:
    """Prove that the delta applies here: same base root, same bytes where it changes them."""
    if base is None:
        raise VerifyError("a delta needs a known base; install a full version first")
    here = root_digest(base.values())
    if here != manifest.base_root:
        raise VerifyError(
            f"the delta applies to {manifest.base_root}, the engine holds {here}; "
            "install the versions between, or a full one"
        )
    names = {entry.name for entry in manifest.tensors}
    _refuse(sorted(names ^ base.keys()), "in the version or in its base only")
    changed = {segment.tensor for segment in manifest.segments}
    hole = [
        entry.name
        for entry in manifest.tensors
        if entry.name not in changed and entry.digest != base[entry.name].digest
    ]
    _refuse(hole, "said to change, but the delta has no bytes for it")
    moved = [
        name for name in sorted(changed) if content_digest(live[name].data) != base[name].digest
    ]
    _refuse(moved, "live bytes are not the base any more; install a full version")


def _stage_tensor(
    segment: Segment, entry: TensorEntry, here: TensorBuffer, data: memoryview
) -> TensorWrite:
    width = kind_of(entry.dtype).width
    live = as_words(here.data, width)
    if not live.flags.writeable and len(live):
        raise VerifyError(f"tensor {entry.name!r}: the live buffer is read-only")
    found = decode_tensor(data, scheme=segment.scheme, base=here.data, dtype=entry.dtype)
    digest = _digest_after(live, found) if isinstance(found, Change) else content_digest(found)
    if digest != entry.digest:
        raise VerifyError(
            f"tensor {entry.name!r}: digest {digest} instead of {entry.digest} after the change"
        )
    if isinstance(found, Change):
        num_changed, new = len(found), _few_or_all(live, found)
        if num_changed != segment.changed_elements:
            raise VerifyError(
                f"tensor {entry.name!r}: {num_changed} elements change, "
                f"the manifest says {segment.changed_elements}"
            )
    else:
        num_changed, new = _compared(here.data, found, width)
    return TensorWrite(name=entry.name, live=live, new=new, changed_elements=num_changed)


def _digest_after(live: Words, change: Change) -> str:
    """Return the content digest that the change would give, block by block on a copy."""
    hasher = xxhash.xxh3_128()
    for part in blocks(len(live), change.width):
        scratch = live[part].copy()
        start, stop = np.searchsorted(change.positions, (part.start, part.stop))
        scratch[change.positions[start:stop] - part.start] ^= change.xor[start:stop]
        hasher.update(scratch.data)
    return hasher.hexdigest()


def _few_or_all(live: Words, change: Change) -> Change | Words:
    """Return a change as new words once its positions would take more room than those."""
    if len(change) * _FEW <= len(live):
        return change
    words = live.copy()
    words[change.positions] ^= change.xor
    return words


def _compared(old: Buffer, new: memoryview, width: int) -> tuple[int, Change | Words]:
    """Count what differs; return it as a change if it is little, else all the new words."""
    before, after = as_words(old, width), as_words(new, width)
    num_changed = sum(
        int(np.count_nonzero(before[part] != after[part])) for part in blocks(len(after), width)
    )
    few = num_changed * _FEW <= len(after)
    return num_changed, diff(old, new, width=width) if few else after


def _write_tensor(write: TensorWrite, journal: list[tuple[Words, _Where, Words]]) -> None:
    """Write block by block; what is overwritten goes into the journal first."""
    live, new = write.live, write.new
    if isinstance(new, Change):
        for start in range(0, len(new), _WRITE_ELEMENTS):
            at = new.positions[start : start + _WRITE_ELEMENTS]
            old = live[at]
            journal.append((live, at, old))
            live[at] = old ^ new.xor[start : start + _WRITE_ELEMENTS]
        return
    step = BLOCK_BYTES // new.itemsize
    for start in range(0, len(new), step):
        part = slice(start, start + step)
        journal.append((live, part, live[part].copy()))
        live[part] = new[part]


def _undo(journal: Sequence[tuple[Words, _Where, Words]], cause: BaseException) -> None:
    try:
        for live, where, old in reversed(journal):
            live[where] = old
    except BaseException as exc:  # whatever it was, the state is unknown and must be said so
        raise UncertainStateError(
            f"writing failed ({cause}) and so did taking it back ({exc}); "
            "install a full version before serving again"
        ) from exc


def _num_elements(buffer: TensorBuffer) -> int:
    return len(buffer.data) // kind_of(buffer.dtype).width


def _refuse(names: Sequence[str], why: str) -> None:
    if not names:
        return
    more = len(names) - _NAMES_SHOWN
    shown = ", ".join(repr(name) for name in names[:_NAMES_SHOWN])
    raise VerifyError(f"{shown}{f' and {more} more' if more > 0 else ''}: {why}")
