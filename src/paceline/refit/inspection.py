"""Weight versions as files, for people: what differs, in which form, and whether it is whole.

A checkpoint is a .safetensors file or a folder of them. A version folder holds ``manifest.json``
and, under ``objects``, the payload objects by their ids: what a worker serves, on disk.
"""

import fcntl
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from paceline.refit.apply import Checks, StagedInstall, stage_install, write_install
from paceline.refit.delta.canonical import (
    decode_canonical,
    delta_shard_name,
    encode_canonical,
    has_checksums,
    parse_delta_index,
    parse_delta_shard,
    parse_full_shard,
    render_delta_index,
    render_delta_shard,
    shard_names,
    versions_of,
)
from paceline.refit.delta.codec import (
    Tools,
    compose_tensors,
    decode_tensor,
    encode_as,
    encode_tensor,
)
from paceline.refit.delta.order import kind_of
from paceline.refit.delta.steps import Steps, differences_of
from paceline.refit.digest import content_digest, root_digest
from paceline.refit.errors import VerifyError
from paceline.refit.journal import FileJournal, recover
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.manifest.payload import (
    check_header,
    describe_object,
    render_header,
    verify_object,
)
from paceline.refit.manifest.render import render_manifest
from paceline.refit.manifest.v1 import Lora, Manifest, Scheme, Segment
from paceline.refit.model import DTYPE_BITS, TensorBuffer, TensorEntry, WeightPayloadFormat

Tensors = Mapping[str, TensorBuffer]
Version = tuple[Manifest, Mapping[str, memoryview]]
"""A manifest and its objects by id."""

CANONICAL_INDEX = "model.safetensors.index.json"
_JOURNAL = ".{}.paceline-undo"
HISTOGRAM_ULPS = (1, 2, 4, 8, 16, 127)
"""Upper ends of the classes of step sizes; a last class takes what is above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """How one tensor differs between two checkpoints."""

    name: str
    num_elements: int
    num_bytes: int
    changed_elements: int
    ulps: tuple[int, ...]
    """Changed elements by the size of their step, in the classes of HISTOGRAM_ULPS."""
    bytes_by_scheme: Mapping[str, int] = field(default_factory=dict)


def read_checkpoint(path: Path) -> dict[str, TensorBuffer]:
    """Map the tensors of a checkpoint; nothing is read before it is used.

    Raises:
        VerifyError: there are none, a name comes twice, a file is no safetensors, or a write has
            not ended.
    """
    _refuse_half_written(_journal_of(path))
    return _tensors_in(path, {file: _mapped(file) for file in _files(path)})


def apply_version(
    read: Callable[[Tensors], Version], path: Path, *, tools: Tools, dry_run: bool = False
) -> StagedInstall:
    """Write a version into the files of a checkpoint; they are old or new, also after a crash.

    What a crash has left is taken back first. The journal lies beside the weights.

    One process at a time; the files are locked meanwhile, which a crash ends.

    Args:
        read: returns the version, given the tensors that it is to be applied to.
        path: the checkpoint.
        tools: what the work is done with.
        dry_run: prove everything and write nothing.

    Raises:
        VerifyError: the version does not apply to these files, or another process is at them;
            nothing was written.
        ApplyError: writing failed and was taken back.
        UncertainStateError: taking it back failed too, or the journal is of other files.
    """
    with _held(_files(path)) as files:
        maps = {file: mmap.mmap(handle.fileno(), 0) for file, handle in files.items()}
        return _apply(read, path, maps, tools=tools, dry_run=dry_run)


def _apply(
    read: Callable[[Tensors], Version],
    path: Path,
    maps: Mapping[Path, mmap.mmap],
    *,
    tools: Tools,
    dry_run: bool,
) -> StagedInstall:
    journal = _journal_of(path)
    live = _tensors_in(path, maps)
    for file, data in maps.items():
        if has_checksums(memoryview(data)):
            raise VerifyError(f"{file} carries checksums of its tensors: apply to a plain copy")

    def flush() -> None:
        for data in maps.values():
            data.flush()

    if dry_run:
        _refuse_half_written(journal)
    recover(journal, live, flush=flush)
    manifest, objects = read(live)
    staged = stage_install(
        manifest,
        objects,
        live=live,
        aliases=dict(manifest.aliases),
        base={name: entry_of(item) for name, item in live.items()},
        checks=Checks(whole=False, tools=tools),  # what was hashed just now is the base
    )
    if not dry_run and staged.writes:
        kept = FileJournal(journal, live=live, flush=flush)
        write_install(staged, tools=tools, journal=kept, prove=True)
    return staged


def _journal_of(path: Path) -> Path:
    return (path if path.is_dir() else path.parent) / _JOURNAL.format(path.stem)


def _refuse_half_written(journal: Path) -> None:
    if journal.exists():
        raise VerifyError(
            f"{journal} is of a write that is going on or crashed: apply a version to take it back"
        )


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as handle:
        return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)


@contextmanager
def _held(files: Sequence[Path]) -> Iterator[Mapping[Path, BinaryIO]]:
    """Open weights to write, each for nobody else of us: a journal is of one writer alone."""
    with ExitStack() as stack:
        found = {}
        for file in files:
            found[file] = stack.enter_context(file.open("r+b"))
            stack.callback(fcntl.flock, found[file], fcntl.LOCK_UN)  # maps would hold it on
            try:
                fcntl.flock(found[file], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise VerifyError(
                    f"another process is writing {file}; wait until it has ended"
                ) from exc
        yield found


def _tensors_in(path: Path, maps: Mapping[Path, mmap.mmap]) -> dict[str, TensorBuffer]:
    found: dict[str, TensorBuffer] = {}
    for mapped in maps.values():
        data = memoryview(mapped)
        for name, item in parse_full_shard(data, shard_names(data)).items():
            if name in found:
                raise VerifyError(f"{path}: tensor {name!r} is in two files")
            found[name] = TensorBuffer(
                name=name, dtype=item.dtype, shape=item.shape, data=memoryview(item.data)
            )
    if not found:
        raise VerifyError(f"{path}: no .safetensors file with tensors in it")
    return found


def diff_checkpoints(base: Tensors, new: Tensors, *, tools: Tools) -> Iterator[TensorDiff]:
    """Yield how each tensor differs, by name; of those that do, its size in every scheme.

    Raises:
        VerifyError: names, dtypes or shapes differ; a delta has no word for that.
    """
    _check_same_layout(base, new)
    for name in sorted(new):
        old, now = base[name], new[name]
        kind = kind_of(now.dtype)
        sizes: dict[str, int] = {}
        counts = np.zeros(len(HISTOGRAM_ULPS) + 1, dtype=np.int64)
        if old.data != now.data:
            forms = {
                scheme: encode_as(scheme, old.data, now.data, dtype=now.dtype, tools=tools)
                for scheme in Scheme
                if scheme is not Scheme.CLASSED or kind.exponent_bits
            }
            sizes = {scheme.value: len(data) for scheme, data in forms.items()}
            for steps in _steps(memoryview(forms[Scheme.GAP]), old, tools):
                counts += _histogram(steps)
        yield TensorDiff(
            name=name,
            num_elements=len(now.data) // kind.width,
            num_bytes=len(now.data),
            changed_elements=int(counts.sum()),
            ulps=tuple(counts.tolist()),
            bytes_by_scheme=sizes,
        )


def make_delta(base: Tensors, new: Tensors, *, slot_id: str, tools: Tools) -> Version:
    """Return the delta between two checkpoints, in GAP where it is not smaller otherwise."""
    _check_same_layout(base, new)
    entries = {name: entry_of(item) for name, item in new.items()}
    parts: list[tuple[str, Scheme, bytes, int]] = []
    for name in sorted(new):
        found = encode_tensor(base[name].data, new[name].data, dtype=new[name].dtype, tools=tools)
        if found is not None:
            parts.append((name, found.scheme, bytes(found.data), found.changed_elements))
    root = root_digest(entry_of(item) for item in base.values())
    return _version(entries, (), slot_id=slot_id, base_root=root, parts=parts)


def compose_versions(first: Version, second: Version) -> Version:
    """Return the delta that equals two after each other; no weights are needed.

    Raises:
        VerifyError: they are not consecutive deltas of one slot, or a tensor that both change is
            not in GAP in both.
    """
    (one, one_objects), (two, two_objects) = first, second
    if two.base_root != one.root_digest or one.base_root is None:
        raise VerifyError(
            f"the second delta applies to {two.base_root}, the first leads to {one.root_digest}"
        )
    if (one.source_slot_id, one.aliases, one.lora) != (two.source_slot_id, two.aliases, two.lora):
        raise VerifyError("the two deltas are of different slots")
    entries = {entry.name: entry for entry in two.tensors}
    before = {segment.tensor: segment for segment in one.segments}
    after = {segment.tensor: segment for segment in two.segments}
    parts = []
    for name in sorted(before.keys() | after.keys()):
        found = [
            (segments[name], bytes(_segment_data(segments[name], objects)))
            for segments, objects in ((before, one_objects), (after, two_objects))
            if name in segments
        ]
        if len(found) == 1:
            segment, data = found[0]
            parts.append((name, segment.scheme, data, segment.changed_elements))
        else:
            parts += _composed(name, entries[name], found)
    return _version(
        entries,
        one.aliases,
        slot_id=one.source_slot_id,
        base_root=one.base_root,
        parts=parts,
        lora=one.lora,
    )


def verify_version(version: Version, *, base: Tensors | None, tools: Tools) -> str:
    """Prove a version as far as can be seen, and return its root digest.

    Without ``base``: the manifest in itself, every object against its hashes. With the
    checkpoint that it applies to: everything that a receiver proves before it writes.

    Raises:
        VerifyError: anything does not agree; the message names it.
    """
    manifest, objects = version
    if base is None or manifest.base_root is None:
        for item in manifest.objects:
            verify_object(item, objects[item.object_id])
            check_header(objects[item.object_id], manifest.payload_format)
    if base is not None:
        live = {
            name: replace(item, data=memoryview(bytearray(item.data)))
            for name, item in base.items()
        }
        stage_install(
            manifest,
            objects,
            live=live,
            aliases=dict(manifest.aliases),
            base={name: entry_of(item) for name, item in base.items()},
            checks=Checks(tools=tools),
        )
    return manifest.root_digest


def write_version(folder: Path, version: Version) -> None:
    """Write a version folder; the manifest comes last. Raises FileExistsError."""
    manifest, objects = version
    (folder / "objects").mkdir(parents=True)
    for object_id, data in objects.items():
        (folder / "objects" / object_id).write_bytes(data)
    (folder / "manifest.json").write_bytes(render_manifest(manifest))


def read_version(folder: Path) -> Version:
    """Read a version folder. Raises VerifyError if an object is missing, or ParseError."""
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    objects = {}
    for item in manifest.objects:
        path = folder / "objects" / item.object_id
        if not path.exists():
            raise VerifyError(f"{folder}: object {item.object_id} is missing")
        objects[item.object_id] = memoryview(path.read_bytes())
    return manifest, objects


def write_canonical(
    folder: Path, base: Tensors, new: Tensors, *, version: str, base_version: str
) -> None:
    """Write a delta as stock receivers read it from object storage; the index comes last.

    Raises:
        VerifyError: names, dtypes or shapes differ.
        FileExistsError: the folder is there.
    """
    _check_same_layout(base, new)
    pairs = ((name, encode_canonical(base[name].data, new[name].data)) for name in sorted(new))
    tensors = {name: item for name, item in pairs if item is not None}
    shard = delta_shard_name(0, 1)
    folder.mkdir(parents=True)
    if tensors:
        (folder / shard).write_bytes(render_delta_shard(tensors))
    weight_map = dict.fromkeys(tensors, shard)
    index = render_delta_index(weight_map, version=version, base_version=base_version)
    (folder / CANONICAL_INDEX).write_bytes(index)


def read_canonical(folder: Path, base: Tensors, *, tools: Tools) -> Version:
    """Read a delta in the canonical format as one of ours; only ``base`` says what it is made of.

    Raises:
        VerifyError: it is damaged, or does not apply to ``base``. ParseError is one.
    """
    index = (folder / CANONICAL_INDEX).read_bytes()
    version, base_version = versions_of(index)
    weight_map = parse_delta_index(index, version=version, base_version=base_version)
    _refuse_unknown(weight_map, base)
    new = dict(base)
    for shard in sorted(set(weight_map.values())):
        names = [name for name, where in weight_map.items() if where == shard]
        path = folder / shard
        if not path.is_file():
            raise VerifyError(f"{folder}: shard {shard} is missing")
        found = parse_delta_shard(memoryview(_mapped(path)), names)
        for name, item in found.items():
            after = bytearray(base[name].data)
            for update in decode_canonical(item, base[name].data):
                assert not isinstance(update.new, Steps)  # noqa: S101 - XOR gives whole words
                after[update.part] = update.new.tobytes()
            new[name] = replace(base[name], data=memoryview(after))
    return make_delta(base, new, slot_id="canonical", tools=tools)


def _refuse_unknown(weight_map: Mapping[str, str], base: Tensors) -> None:
    unknown = sorted(weight_map.keys() - base.keys())
    if unknown:
        raise VerifyError(f"not in the checkpoint: {', '.join(unknown[:5])}")


def entry_of(item: TensorBuffer) -> TensorEntry:
    """Describe a tensor as manifests do."""
    return TensorEntry(
        name=item.name,
        dtype=item.dtype,
        shape=item.shape,
        digest=content_digest(item.data),
        num_bytes=len(item.data),
    )


def _check_same_layout(base: Tensors, new: Tensors) -> None:
    differing = sorted(
        name
        for name in base.keys() | new.keys()
        if name not in base
        or name not in new
        or (base[name].dtype, base[name].shape) != (new[name].dtype, new[name].shape)
    )
    if differing:
        raise VerifyError(f"not the same tensors in both: {', '.join(differing[:5])}")


def _steps(data: memoryview, base: TensorBuffer, tools: Tools) -> Iterator[Steps]:
    updates = decode_tensor(data, scheme=Scheme.GAP, base=base.data, dtype=base.dtype, tools=tools)
    for update in updates:
        if isinstance(update.new, Steps):
            yield update.new


def _histogram(steps: Steps) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    differences = differences_of(steps)
    sizes = np.minimum(differences, np.negative(differences))
    classes = np.searchsorted(np.array(HISTOGRAM_ULPS, dtype=sizes.dtype), sizes)
    return np.bincount(classes, minlength=len(HISTOGRAM_ULPS) + 1)


def _segment_data(segment: Segment, objects: Mapping[str, memoryview]) -> memoryview:
    return objects[segment.object_id][segment.offset : segment.offset + segment.num_bytes]


def _composed(
    name: str, entry: TensorEntry, found: Sequence[tuple[Segment, bytes]]
) -> list[tuple[str, Scheme, bytes, int]]:
    (one, first), (two, second) = found
    if two.scheme is Scheme.RAW:
        return [(name, Scheme.RAW, second, two.changed_elements)]
    if {one.scheme, two.scheme} != {Scheme.GAP}:
        raise VerifyError(
            f"tensor {name!r} is {one.scheme.value} and then {two.scheme.value}; only gap "
            "composes without weights"
        )
    both = compose_tensors(
        memoryview(first),
        memoryview(second),
        dtype=entry.dtype,
        num_elements=entry.num_bytes * 8 // DTYPE_BITS[entry.dtype],
    )
    if both is None:
        return []
    return [(name, both.scheme, bytes(both.data), both.changed_elements)]


def _version(
    entries: Mapping[str, TensorEntry],
    aliases: tuple[tuple[str, str], ...],
    *,
    slot_id: str,
    base_root: str,
    parts: Sequence[tuple[str, Scheme, bytes, int]],
    lora: Lora | None = None,
) -> Version:
    data = bytearray(render_header(WeightPayloadFormat.XOR_DELTA))
    places = []
    for _, _, payload, _ in parts:
        places.append(len(data))
        data += payload
    item = describe_object([memoryview(data)])
    ordered = tuple(entries[name] for name in sorted(entries))
    segments = tuple(
        Segment(
            tensor=name,
            scheme=scheme,
            object_id=item.object_id,
            offset=offset,
            num_bytes=len(payload),
            changed_elements=changed,
        )
        for offset, (name, scheme, payload, changed) in zip(places, parts, strict=True)
    )
    manifest = Manifest(
        payload_format=WeightPayloadFormat.XOR_DELTA,
        source_slot_id=slot_id,
        base_root=base_root,
        root_digest=root_digest(ordered),
        tensors=ordered,
        aliases=aliases,
        objects=(item,),
        segments=segments,
        lora=lora,
    )
    return manifest, {item.object_id: memoryview(data)}
