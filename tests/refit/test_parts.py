"""A version of several shards goes in as one: all of it, or none."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.refit.apply import Checks, check_live, write_install
from paceline.refit.delta.codec import REFERENCE
from paceline.refit.digest import version_root
from paceline.refit.errors import ApplyError, VerifyError
from paceline.refit.generators.vllm.mirror import MemoryJournal, changes_of
from paceline.refit.manifest.v1 import Lora, LoraModule, Scheme
from paceline.refit.model import Region, TensorBuffer
from paceline.refit.parts import FetchedShard, stage_shards
from paceline.testing.payloads import delta_payload, full_payload, slot_of

SHAPE = (6, 8)
CUTS: Mapping[str, Sequence[Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]]] = {
    "rows": [{"w": ((0, 0), (4, 8))}, {"w": ((4, 0), (2, 8)), "b": ((0,), (5,))}],
    "columns": [{"w": ((0, 0), (6, 3)), "b": ((0,), (5,))}, {"w": ((0, 3), (6, 5))}],
    "flat": [{"w": ((0,), (19,))}, {"w": ((19,), (29,)), "b": ((0,), (5,))}],
    "grid": [
        {"w": ((0, 0), (3, 4))},
        {"w": ((0, 4), (3, 4)), "b": ((0,), (2,))},
        {"w": ((3, 0), (3, 4)), "b": ((2,), (3,))},
        {"w": ((3, 4), (3, 4))},
    ],
}
SHAPES = {"w": SHAPE, "b": (5,)}
State = dict[str, np.ndarray]


def state(seed: int, *, share: float = 1.0, base: State | None = None) -> State:
    """Weights, or a base with a share of them changed."""
    random = np.random.default_rng(seed)
    found = {}
    for name, shape in SHAPES.items():
        new = random.integers(0, 2**16, shape, dtype=np.uint16)
        is_new = random.random(shape) < share
        found[name] = new if base is None else np.where(is_new, new, base[name])
    return found


def buffers(weights: State) -> dict[str, TensorBuffer]:
    """Live memory that holds these weights."""
    return {
        name: TensorBuffer(
            name=name, dtype="U16", shape=each.shape, data=memoryview(bytearray(each.tobytes()))
        )
        for name, each in weights.items()
    }


def part(weights: State, name: str, cut: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorBuffer:
    """What a slot holds of a tensor."""
    offsets, shape = cut
    whole = weights[name]
    if len(offsets) == len(whole.shape):
        data = whole[tuple(slice(a, a + n) for a, n in zip(offsets, shape, strict=True))]
    else:
        data = whole.ravel()[offsets[0] : offsets[0] + shape[0]]
    raw = memoryview(bytearray(data.tobytes()))
    return TensorBuffer(name=name, dtype="U16", shape=shape, data=raw)


def shards(
    new: State, cuts: str, *, base: State | None = None, scheme: Scheme | None = None
) -> list[FetchedShard]:
    """A version as its slots publish it; a delta if there is a base."""
    found = []
    for index, own in enumerate(CUTS[cuts]):
        parts = {name: part(new, name, cut) for name, cut in own.items()}
        before = {} if base is None else {n: part(base, n, cut) for n, cut in own.items()}
        schemes = {} if scheme is None else dict.fromkeys(parts, scheme)
        made = full_payload(parts.values())
        if base is not None:
            made = delta_payload(before, parts, scheme_of=schemes)
        manifest = slot_of(made[0], slot=f"s{index}", regions=regions_of(own), base=before.values())
        objects = {manifest.objects[0].object_id: memoryview(made[1])}
        found.append(FetchedShard(manifest=manifest, objects=objects))
    return found


def regions_of(own: Mapping[str, Any]) -> Mapping[str, Region]:
    """Say of each tensor which part this is; nothing of whole ones."""
    return {
        name: Region(global_shape=SHAPES[name], offsets=offsets)
        for name, (offsets, shape) in own.items()
        if shape != SHAPES[name]
    }


def is_live(live: Mapping[str, TensorBuffer], weights: State) -> bool:
    return all(bytes(live[name].data) == each.tobytes() for name, each in weights.items())


@pytest.mark.parametrize("cuts", sorted(CUTS))
def test_full_and_then_a_delta(cuts: str) -> None:
    first = state(1)
    second = state(2, share=0.2, base=first)
    live = buffers(state(0))

    staged = stage_shards(shards(first, cuts), live=live, aliases={}, base=None)
    assert is_live(live, state(0))
    write_install(staged)

    assert is_live(live, first)
    check_live(live, staged.entries)
    base = {entry.key: entry for entry in staged.entries}
    delta = shards(second, cuts, base=first)
    staged = stage_shards(delta, live=live, aliases={}, base=base)
    write_install(staged)
    assert is_live(live, second)
    check_live(live, staged.entries)
    roots = {each.manifest.source_slot_id: each.manifest.root_digest for each in delta}
    assert staged.root_digest == version_root(roots)


@pytest.mark.parametrize("cuts", sorted(CUTS))
@pytest.mark.parametrize("scheme", [None, Scheme.XOR, Scheme.DENSE])
@pytest.mark.parametrize("journaled", [False, True])
def test_a_failure_in_the_middle_leaves_the_old_weights(
    cuts: str, scheme: Scheme | None, journaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last store fails, after all the others: nothing of the version is left."""
    first = state(1)
    second = state(2, share=0.2, base=first)
    live = buffers(state(0))
    staged = stage_shards(shards(first, cuts), live=live, aliases={}, base=None)
    write_install(staged)
    base = {entry.key: entry for entry in staged.entries}
    delta = shards(second, cuts, base=first, scheme=scheme)
    staged = stage_shards(delta, live=live, aliases={}, base=base)
    journal = MemoryJournal() if journaled else None
    broken = RuntimeError("the memory is gone")
    tools = REFERENCE
    if staged.scatters:
        last = staged.scatters[-1]
        monkeypatch.setattr(type(last), "write", once_failing(type(last).write, last, broken))
    else:
        tools = replace(REFERENCE, run=failing_after_all(broken))
    with pytest.raises(ApplyError, match="the memory is gone"):
        write_install(staged, journal=journal, tools=tools)
    assert is_live(live, first)
    if journal is not None:
        journal.restore(live)
        assert is_live(live, first)


def failing_after_all(error: Exception) -> Any:
    """Do all jobs, one by one, and raise."""

    def run(work: Any, items: Any) -> Any:
        yield from map(work, items)
        raise error

    return run


def once_failing(write: Any, which: Any, error: Exception) -> Any:
    """Let one scatter write half of itself, and raise, the first time."""
    calls: list[Any] = []

    def fail(self: Any) -> None:
        if self is which and not calls:
            calls.append(self)
            half = len(self.copy) // 2
            self.live[:half] = self.copy[:half]
            raise error
        write(self)

    return fail


@pytest.mark.parametrize("cuts", sorted(CUTS))
def test_a_journal_takes_a_whole_install_back(cuts: str) -> None:
    first, second = state(1), state(2)
    live = buffers(first)
    staged = stage_shards(shards(second, cuts), live=live, aliases={}, base=None)
    journal = MemoryJournal()
    write_install(staged, journal=journal, tools=REFERENCE)
    assert is_live(live, second)
    journal.restore(live)
    assert is_live(live, first)


def test_shards_that_are_not_the_live_tensors_are_refused() -> None:
    live = buffers(state(0))
    rows, columns = shards(state(1), "rows"), shards(state(1), "columns")
    with pytest.raises(VerifyError, match="32 of 48 elements of tensor 'w'"):
        stage_shards([rows[0], replace_tensors(rows[1], "w")], live=live, aliases={}, base=None)
    renamed = replace(columns[1], manifest=replace(columns[1].manifest, source_slot_id="s9"))
    with pytest.raises(VerifyError, match="two slots"):
        stage_shards([*rows, renamed], live=live, aliases={}, base=None)
    with pytest.raises(VerifyError, match="slot comes twice"):
        stage_shards([*rows, rows[0]], live=live, aliases={}, base=None)
    with pytest.raises(VerifyError, match="tied on one side only"):
        stage_shards(rows, live=live, aliases={"c": "w"}, base=None)


def test_all_shards_are_of_the_same_lora_as_the_engine() -> None:
    live = buffers(state(0))
    lora = Lora(
        model_root="ab" * 32,
        is_rank_stabilised=False,
        modules=(LoraModule(name="m", rank=4, alpha="8"),),
    )
    first, second = shards(state(1), "rows")
    one, other = (with_lora(each, lora) for each in (first, second))
    checks = Checks(lora=lora)
    write_install(stage_shards([one, other], live=live, aliases={}, base=None, checks=checks))
    assert is_live(live, state(1))
    with pytest.raises(VerifyError, match="the version is a LoRA alone"):
        stage_shards([one, other], live=live, aliases={}, base=None)
    with pytest.raises(VerifyError, match="the version is a whole model"):
        stage_shards([one, second], live=live, aliases={}, base=None, checks=checks)
    elsewhere = with_lora(second, replace(lora, model_root="cd" * 32))
    with pytest.raises(VerifyError, match="for other weights"):
        stage_shards([one, elsewhere], live=live, aliases={}, base=None, checks=checks)


def with_lora(shard: FetchedShard, lora: Lora) -> FetchedShard:
    return replace(shard, manifest=replace(shard.manifest, lora=lora))


def replace_tensors(shard: FetchedShard, without: str) -> FetchedShard:
    """The same without one tensor."""
    entries = tuple(each for each in shard.manifest.tensors if each.name != without)
    return replace(shard, manifest=replace(shard.manifest, tensors=entries))


def test_a_delta_of_another_cut_is_refused() -> None:
    first = state(1)
    second = state(2, share=0.2, base=first)
    live = buffers(state(0))
    staged = stage_shards(shards(first, "rows"), live=live, aliases={}, base=None)
    write_install(staged)
    base = {entry.key: entry for entry in staged.entries}
    delta = shards(second, "flat", base=first)
    with pytest.raises(VerifyError, match="cut otherwise"):
        stage_shards(delta, live=live, aliases={}, base=base)
    assert is_live(live, first)


@pytest.mark.parametrize("cuts", sorted(CUTS))
def test_a_mirror_is_told_which_elements_of_the_whole_change(cuts: str) -> None:
    """Places are counted in the whole tensor; where a part is no stretch of it, all may change."""
    first = state(1)
    second = state(2, share=0.2, base=first)
    live = buffers(first)
    entries = stage_shards(shards(first, cuts), live=live, aliases={}, base=None).entries
    base = {entry.key: entry for entry in entries}
    delta = shards(second, cuts, base=first, scheme=Scheme.GAP)
    found = changes_of(stage_shards(delta, live=live, aliases={}, base=base))
    if cuts in {"rows", "flat"}:
        places = found["w"]
        assert places is not None
        changed = np.flatnonzero(first["w"].ravel() != second["w"].ravel())
        assert sorted(places.tolist()) == changed.tolist()
    else:
        assert found["w"] is None
