"""Deltas of tensors that live on a device: only changed elements cross to the host, or back."""

from collections.abc import Iterator

import torch

from paceline.refit.delta import gap
from paceline.refit.delta.codec import EncodedTensor, join_records, split_records
from paceline.refit.delta.loops import wrong_total
from paceline.refit.delta.mixing import digest_change
from paceline.refit.delta.order import WordKind, Words, chunks, kind_of, rank, unrank
from paceline.refit.delta.steps import Steps, differences_of, positions_of, steps_of
from paceline.refit.delta.stream import new_compressor
from paceline.refit.kernels.protocol import DeviceLoops
from paceline.refit.manifest.v1 import Scheme

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode_on_device(
    old: torch.Tensor, new: torch.Tensor, *, dtype: str, loops: DeviceLoops
) -> EncodedTensor | None:
    """Encode what turns ``old`` into ``new`` by GAP, or return None if they are equal.

    The bytes are those of the encoder on the host. A tensor in which most elements change is
    better copied and encoded there: it is for the caller to see that from the result.

    Raises:
        ValueError: shapes, devices or contiguity do not fit.
    """
    kind = kind_of(dtype)
    before, after = _words_of(old, kind), _words_of(new, kind)
    if len(before) != len(after) or before.device != after.device:
        raise ValueError("old and new differ in size or are on different devices")
    records, changed = [], 0
    for part in chunks(len(before), kind):
        found = loops.compact(before[part], after[part])
        at, was, now = (item.cpu().numpy() for item in (found.positions, found.old, found.new))
        was, now = was.view(f"<u{kind.width}"), now.view(f"<u{kind.width}")
        steps = steps_of(
            at,
            rank(now, kind) - rank(was, kind),
            total=digest_change(at + part.start, was, now),
        )
        changed += len(steps)
        records.append(gap.render(steps, new_compressor()))
    if not changed:
        return None
    return EncodedTensor(scheme=Scheme.GAP, data=join_records(records), changed_elements=changed)


def apply_on_device(
    data: memoryview, tensor: torch.Tensor, *, dtype: str, loops: DeviceLoops
) -> int:
    """Apply a GAP payload to a tensor where it is; return how many elements changed.

    Every chunk is proven against the words that it meets before the first is written.

    Raises:
        ParseError: the payload breaks its format or belongs to another base. Nothing is written.
    """
    kind = kind_of(dtype)
    words = _words_of(tensor, kind)
    proven = list(_proven(data, words, kind))
    for part, at, steps in proven:
        moves = torch.from_numpy(differences_of(steps).view(f"<i{kind.width}").copy())
        loops.move(words[part], at, moves.to(words.device), is_float=kind.is_sign_magnitude)
    return sum(len(steps) for _, _, steps in proven)


def _proven(
    data: memoryview, words: torch.Tensor, kind: WordKind
) -> Iterator[tuple[slice, torch.Tensor, Steps]]:
    parts = list(chunks(len(words), kind))
    for part, record in zip(parts, split_records(data, len(parts)), strict=True):
        if not len(record):
            continue
        steps = gap.parse_unchecked(record, part.stop - part.start, kind)
        places = positions_of(steps.gaps)
        at = torch.from_numpy(places).to(words.device)
        before: Words = words[part][at].cpu().numpy().view(f"<u{kind.width}")
        after = unrank(rank(before, kind) + differences_of(steps), kind)
        if digest_change(places + part.start, before, after) != steps.total:
            raise wrong_total()
        yield part, at, steps


def _words_of(tensor: torch.Tensor, kind: WordKind) -> torch.Tensor:
    if not tensor.is_contiguous() or tensor.element_size() != kind.width:
        raise ValueError(f"not {kind.width}-byte elements in one dense block: {tensor.dtype}")
    flat = tensor.detach().reshape(-1)
    return flat.view(_SIGNED[kind.width])
