"""Verify, then write, and undo if writing fails: live weights are exactly old or exactly new.

``stage_install`` proves everything and changes nothing. ``write_install`` writes only elements
that differ, so that the pause does not grow with the model. ``prove_live`` reads back.

Memory beside the payload: the expanded steps of a delta, less than twice its size, and a few
chunks. Steps are taken back by walking them backwards, XOR by applying it again; only tensors
that are replaced by full words are copied while they are written. Weights that lie in files
survive a crash too, if ``write_install`` is given a journal (``refit.journal``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from paceline.refit.delta.codec import REFERENCE, Tools, Update, decode_tensor
from paceline.refit.delta.order import WordKind, Words, as_words, chunks, kind_of
from paceline.refit.delta.steps import Steps
from paceline.refit.digest import content_digest, root_digest
from paceline.refit.errors import ApplyError, VerifyError
from paceline.refit.journal import Journal
from paceline.refit.manifest.fit import check_layout, dense_part, refuse_names
from paceline.refit.manifest.payload import check_header, verify_object
from paceline.refit.manifest.v1 import Lora, Manifest, Scheme, Segment
from paceline.refit.model import TensorBuffer, TensorEntry, WeightPayloadFormat
from paceline.refit.writing import Scatter, TensorWrite, Written, jobs, keep_all, undo

_KEPT_BYTES = 32 * 2**20
"""Room for new words that the proof has computed: what is kept is not computed again while the
engine waits. Beyond it, steps alone are held."""
_FEW = 8
"""Up to one changed element in this many, full words are written as steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """How a version is proven before it is written.

    Always: hashes of the payload, its format, the known base, and for every change by steps the
    additive digest over the words that it meets. ``whole`` adds the content digest of every
    changed tensor before and after, which reads all of it.
    """

    whole: bool = True
    payload: bool = True
    """False where the payload's hashes were checked while it was fetched into memory that nobody
    else writes: they are not computed twice."""
    base: bool = True
    """False where ``prove_base`` was called, beside the fetch: live memory is not read twice."""
    tools: Tools = REFERENCE
    lora: Lora | None = None
    """What the live tensors are a LoRA of; None: they are a model's own."""


FULL = Checks()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedInstall:
    """A proven version, ready to be written; live memory was not touched."""

    root_digest: str
    entries: tuple[TensorEntry, ...]
    """What live memory is after the writes."""
    writes: tuple[TensorWrite, ...]
    changed_elements: int
    total_elements: int
    scatters: tuple[Scatter, ...] = ()
    has_parts: bool = False
    """Entries of one name may come several times: the version is made of several shards."""

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
    checks: Checks = FULL,
) -> StagedInstall:
    """Prove a fetched version against its manifest and against what is live; write nothing.

    The objects must stay as they are until the writes are done: full tensors are not copied.

    Args:
        manifest: parsed, hence consistent in itself.
        objects: every object of the manifest, whole, by id.
        live: the live tensors by canonical name, writable.
        aliases: further name -> canonical name of the live tensors.
        base: what the live tensors are known to be; only a full payload goes without.
        checks: how much of live memory is read, and what the work is done with.

    Raises:
        VerifyError: anything does not agree; the message names it. ParseError is one.
    """
    check_layout(manifest, live, aliases, lora=checks.lora)
    entries = {entry.name: entry for entry in manifest.tensors}
    if manifest.payload_format is WeightPayloadFormat.XOR_DELTA:
        known = _known_base(manifest, base)
        if checks.whole and checks.base:
            _check_base(manifest, live, known, checks.tools)
    _check_objects(manifest, objects, checks)
    writes = []
    room = _KEPT_BYTES
    for segment in manifest.segments:
        data = objects[segment.object_id][segment.offset : segment.offset + segment.num_bytes]
        here = live[segment.tensor]
        write = _stage_tensor(segment, entries[segment.tensor], here, data, checks, room)
        room -= write.kept_bytes
        if write.changed_elements:
            writes.append(write)
    if checks.whole:
        _check_after(writes, checks.tools)
    return StagedInstall(
        root_digest=manifest.root_digest,
        entries=manifest.tensors,
        writes=tuple(writes),
        changed_elements=sum(write.changed_elements for write in writes),
        total_elements=sum(_num_elements(buffer) for buffer in live.values()),
    )


def prove_base(
    manifest: Manifest,
    *,
    live: Mapping[str, TensorBuffer],
    aliases: Mapping[str, str],
    base: Mapping[str, TensorEntry] | None,
    checks: Checks = FULL,
) -> None:
    """Do the part of ``stage_install`` that needs no payload: prove that a delta applies here.

    It reads all of every tensor that changes, and can do so while the payload is on its way.

    Raises:
        VerifyError: it does not apply.
    """
    check_layout(manifest, live, aliases, lora=checks.lora)
    _check_base(manifest, live, _known_base(manifest, base), checks.tools)


def write_install(
    staged: StagedInstall,
    *,
    tools: Tools = REFERENCE,
    journal: Journal | None = None,
    prove: bool = False,
) -> None:
    """Write a staged version into live memory, or leave it exactly as it was.

    Args:
        staged: proven against the live memory as it still is.
        tools: what the work is done with.
        journal: for live memory that outlives the process.
        prove: hash every tensor that is written, right behind the writes, where ``prove_live``
            would fetch all of it from memory once more. For weights that nobody waits for: an
            engine that stands still meanwhile is better proven later.

    Raises:
        ApplyError: a write failed and all of them were taken back.
        UncertainStateError: taking them back failed too; do not serve before a full install.
    """
    done: list[Written] = []
    scattered: list[Scatter] = []
    try:
        if journal is not None:
            keep_all(staged.writes, staged.scatters, journal, tools)
            journal.seal()
        for _ in tools.run(lambda job: job(), jobs(staged.writes, done, tools, prove=prove)):
            pass
        for scatter in staged.scatters:
            scattered.append(scatter)
            scatter.write()
        if journal is not None:
            journal.finish()
    except BaseException as exc:  # also when interrupted: live memory must not stay half written
        undo(done, scattered, exc, tools)
        if journal is not None:
            journal.finish()
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
    tools: Tools = REFERENCE,
) -> str:
    """Hash live memory and return the root digest that it proves.

    Args:
        live: the live tensors by canonical name.
        entries: what they should be, all of them.
        only: hash these names and trust the entries for the others; all by default.
        tools: what the work is done with.

    Raises:
        VerifyError: a tensor is missing or its bytes are not what its entry says.
    """
    expected = list(entries)
    check_live(live, expected, only=only, tools=tools)
    return root_digest(expected)


def check_live(
    live: Mapping[str, TensorBuffer],
    entries: Iterable[TensorEntry],
    *,
    only: Iterable[str] | None = None,
    tools: Tools = REFERENCE,
) -> None:
    """Hash live memory, which may come in parts; see ``prove_live``.

    Raises:
        VerifyError: a tensor is missing or its bytes are not what an entry says.
    """
    expected = list(entries)
    names = {entry.name for entry in expected}
    refuse_names(sorted(names ^ live.keys()), "names differ from the live tensors")
    wanted = names if only is None else set(only)
    wrong = _others(live, [entry for entry in expected if entry.name in wanted], tools)
    refuse_names(wrong, "live bytes do not have the digest of this version")


def _others(
    live: Mapping[str, TensorBuffer], expected: Sequence[TensorEntry], tools: Tools
) -> Sequence[str]:
    """Return which live tensors are others than expected."""
    found = tools.run(
        lambda entry: content_digest(dense_part(live[entry.name], entry).data), expected
    )
    return [
        entry.key for entry, digest in zip(expected, found, strict=True) if digest != entry.digest
    ]


def _check_objects(manifest: Manifest, objects: Mapping[str, memoryview], checks: Checks) -> None:
    for item in manifest.objects:
        data = objects.get(item.object_id)
        if data is None:
            raise VerifyError(f"object {item.object_id} of the manifest was not fetched")
        if checks.payload:
            verify_object(item, data)
        elif data.nbytes != item.num_bytes:
            raise VerifyError(f"object {item.object_id} has {data.nbytes} bytes")
        check_header(data, manifest.payload_format)


def _known_base(
    manifest: Manifest, base: Mapping[str, TensorEntry] | None
) -> Mapping[str, TensorEntry]:
    """Prove that the delta is one from what live memory is said to be."""
    if base is None:
        raise VerifyError("a delta needs a known base; install a full version first")
    here = root_digest(base.values())
    if here != manifest.base_root:
        raise VerifyError(
            f"the delta applies to {manifest.base_root}, the engine holds {here}; "
            "install the versions between, or a full one"
        )
    names = {entry.name for entry in manifest.tensors}
    refuse_names(sorted(names ^ base.keys()), "in the version or in its base only")
    changed = {segment.tensor for segment in manifest.segments}
    hole = [
        entry.name
        for entry in manifest.tensors
        if entry.name not in changed and entry.digest != base[entry.name].digest
    ]
    refuse_names(hole, "said to change, but the delta has no bytes for it")
    return base


def _check_base(
    manifest: Manifest,
    live: Mapping[str, TensorBuffer],
    base: Mapping[str, TensorEntry],
    tools: Tools,
) -> None:
    """Prove that live memory is the base where the delta changes it."""
    changed = {segment.tensor for segment in manifest.segments}
    # ``live`` is what the base's entries are of, dense
    there = [replace(base[name], region=None) for name in sorted(changed)]
    moved = _others(live, there, tools)
    refuse_names(moved, "live bytes are not the base any more; install a full version")


def _stage_tensor(
    segment: Segment,
    entry: TensorEntry,
    here: TensorBuffer,
    data: memoryview,
    checks: Checks,
    room: int,
) -> TensorWrite:
    kind = kind_of(entry.dtype)
    live = as_words(here.data, kind.width)
    if not live.flags.writeable and len(live):
        raise VerifyError(f"tensor {entry.name!r}: the live buffer is read-only")
    by_steps = segment.scheme in {Scheme.GAP, Scheme.CLASSED}
    found = decode_tensor(
        data,
        scheme=segment.scheme,
        base=here.data,
        dtype=entry.dtype,
        tools=checks.tools,
        keep_bytes=room,
    )
    if by_steps:
        updates = tuple(found)
        changed = sum(len(update.new) for update in updates)
        digest = entry.digest  # of all such tensors side by side, when all are known
        steps: tuple[Update, ...] | None = updates
    else:
        digest, changed, steps = _compared(live, found, kind, checks.tools)
    _expect(entry.name, digest, entry.digest)
    if by_steps and changed != segment.changed_elements:
        raise VerifyError(
            f"tensor {entry.name!r}: {changed} elements change, "
            f"the manifest says {segment.changed_elements}"
        )
    return TensorWrite(
        name=entry.name,
        live=live,
        dtype=entry.dtype,
        steps=steps,
        payload=data,
        scheme=segment.scheme,
        changed_elements=changed,
        digest=entry.digest,
    )


def _check_after(writes: Sequence[TensorWrite], tools: Tools) -> None:
    """Prove what steps lead to, tensor beside tensor; nothing is written."""
    known = [write for write in writes if write.scheme in {Scheme.GAP, Scheme.CLASSED}]
    digests = tools.run(lambda write: _digest_after(write, tools), known)
    for write, digest in zip(known, digests, strict=True):
        _expect(write.name, digest, write.digest)


def _expect(name: str, found: str, said: str) -> None:
    if found != said:
        raise VerifyError(f"tensor {name!r}: digest {found} instead of {said} after the change")


def _digest_after(write: TensorWrite, tools: Tools) -> str:
    """Return the content digest that the steps would give, chunk by chunk on a copy.

    All chunks are copied to one place: memory that is taken anew comes page by page.
    """
    hasher, kind = xxhash.xxh3_128(), kind_of(write.dtype)
    found = {update.part.start: update.new for update in write.steps or ()}
    room = np.empty(min(len(write.live), kind.chunk_elements), dtype=write.live.dtype)
    for part in chunks(len(write.live), kind):
        steps = found.get(part.start)
        after = write.live[part]
        if isinstance(steps, Steps):
            copy = room[: len(after)]
            np.copyto(copy, after)
            tools.loops.add(steps, copy, kind)
            after = copy
        hasher.update(after.data)
    return hasher.hexdigest()


def _compared(
    live: Words, found: Iterable[Update], kind: WordKind, tools: Tools
) -> tuple[str, int, tuple[Update, ...] | None]:
    """Return digest of new words, how many differ, and those as steps if they are few."""
    hasher, changed = xxhash.xxh3_128(), 0
    few: list[Update] | None = []
    for update in found:
        before, after = live[update.part], update.new
        assert not isinstance(after, Steps)  # noqa: S101 - schemes of full words have no steps
        hasher.update(after.data)
        changed += int(np.count_nonzero(before != after))
        if few is not None:
            most = len(before) // _FEW
            steps = tools.loops.diff(before, after, kind, first=update.part.start, most=most)
            if steps is None:
                few = None
            elif len(steps):
                few.append(Update(part=update.part, new=steps))
    return hasher.hexdigest(), changed, None if few is None else tuple(few)


def _num_elements(buffer: TensorBuffer) -> int:
    return len(buffer.data) // kind_of(buffer.dtype).width
