"""Installing a version: everything is proven first; afterwards live is exactly old or new."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.apply import (
    FULL,
    Checks,
    StagedInstall,
    prove_base,
    prove_live,
    stage_install,
    write_install,
)
from paceline.refit.delta.codec import Tools
from paceline.refit.delta.loops import NumpyLoops
from paceline.refit.delta.order import WordKind, Words, as_words, kind_of
from paceline.refit.delta.steps import Steps, positions_of
from paceline.refit.errors import ApplyError, UncertainStateError, VerifyError
from paceline.refit.kernels.registry import load_loops, process_tools
from paceline.refit.manifest.payload import describe_object
from paceline.refit.manifest.v1 import Manifest, Scheme
from paceline.refit.model import TensorBuffer, TensorEntry
from paceline.testing.corpus import corpus
from paceline.testing.payloads import delta_payload, full_payload, tensor_entry

Tensors = dict[str, TensorBuffer]
TOOLS = Tools(loops=load_loops())


def tensors_of(which: str) -> Tensors:
    """The whole corpus as one model, before or after."""
    return {
        case.name: TensorBuffer(
            name=case.name,
            dtype=case.dtype,
            shape=case.shape,
            data=memoryview(bytearray(getattr(case, which))),
        )
        for case in corpus()
    }


def content(tensors: Mapping[str, TensorBuffer]) -> dict[str, bytes]:
    return {name: bytes(item.data) for name, item in tensors.items()}


def entries_of(tensors: Mapping[str, TensorBuffer]) -> dict[str, TensorEntry]:
    return {name: tensor_entry(item) for name, item in tensors.items()}


def staged(
    payload: tuple[Manifest, bytes],
    live: Tensors,
    *,
    base: dict[str, TensorEntry] | None = None,
    aliases: Mapping[str, str] | None = None,
    checks: Checks = FULL,
) -> StagedInstall:
    manifest, data = payload
    objects = {item.object_id: memoryview(data) for item in manifest.objects}
    return stage_install(
        manifest, objects, live=live, aliases=aliases or {}, base=base, checks=checks
    )


def _words(item: TensorBuffer) -> list[int]:
    return as_words(item.data, kind_of(item.dtype).width).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_corpus_installs_bit_for_bit(kind: str) -> None:
    """The whole corpus arrives in live memory exactly, and only tensors that differ are written."""
    live, new = tensors_of("base"), tensors_of("new")
    before = content(live)
    payload = full_payload(new.values()) if kind == "full" else delta_payload(live, new)
    install = staged(payload, live, base=entries_of(live))
    assert content(live) == before
    differing = sum(
        sum(a != b for a, b in zip(_words(live[name]), _words(new[name]), strict=True))
        for name in live
    )
    assert install.changed_elements == differing
    write_install(install)
    assert content(live) == content(new)
    assert prove_live(live, install.entries) == payload[0].root_digest == install.root_digest
    assert set(install.changed_names) == {
        n for n, data in before.items() if data != content(new)[n]
    }
    assert prove_live(live, install.entries, only=install.changed_names) == install.root_digest


def test_full_over_similar_weights_is_written_as_changes() -> None:
    """A full payload writes single elements where few differ, so the pause stays short."""
    live = {"a": TensorBuffer(name="a", dtype="U8", shape=(99,), data=memoryview(bytearray(99)))}
    new = {"a": replace(live["a"], data=memoryview(bytes(98) + b"\1"))}
    (write,) = staged(full_payload(new.values()), live).writes
    assert write.steps is not None
    (update,) = write.steps
    assert isinstance(update.new, Steps)
    assert positions_of(update.new.gaps).tolist() == [98]


class BreakingLoops(NumpyLoops):
    """Loops whose n-th write fails: before it, after it, or in its middle and for good."""

    def __init__(self, nth: int, *, when: str = "before", failure: Any = OSError) -> None:
        self.left = nth
        self.when = when
        self.failure = failure

    def add(
        self, steps: Steps, words: Words, kind: WordKind, *, sign: int = 1, seen: Any = None
    ) -> None:
        self.left -= sign > 0
        fails = self.left == 0 and sign > 0
        if not fails or self.when != "before":
            super().add(steps, words, kind, sign=sign, seen=seen)
        if fails and self.when == "torn":
            words[positions_of(steps.gaps)[0]] ^= 1
        if fails:
            raise self.failure("no power")


def small(seed: int) -> tuple[Tensors, Tensors]:
    """Four tensors before and after: two sparse changes, one dense, one that stays."""
    random = np.random.default_rng(seed)
    base: Tensors = {}
    new: Tensors = {}
    for name, share in (("a", 0.05), ("b", 1.0), ("c", 0.05), ("d", 0.0)):
        words = random.integers(0, 2**16, 200, dtype=np.uint16)
        after = np.where(random.random(200) < share, words ^ np.uint16(5), words).astype("<u2")
        for found, data in ((base, words), (new, after)):
            found[name] = TensorBuffer(
                name=name, dtype="BF16", shape=(200,), data=memoryview(bytearray(data.tobytes()))
            )
    return base, new


@given(
    st.integers(0, 1000),
    st.integers(1, 3),
    st.sampled_from(["full", "delta"]),
    st.sampled_from(["before", "after"]),
)
def test_exactly_old_or_exactly_new(seed: int, nth: int, kind: str, when: str) -> None:
    """Whichever write fails, done or not, live memory is the old version, and a retry works."""
    live, new = small(seed)
    before = content(live)
    payload = full_payload(new.values()) if kind == "full" else delta_payload(live, new)
    install = staged(payload, live, base=entries_of(live))
    by_steps = [write for write in install.writes if write.steps is not None]
    if nth <= len(by_steps):
        with pytest.raises(ApplyError, match="no power"):
            write_install(install, tools=Tools(loops=BreakingLoops(nth, when=when)))
        assert content(live) == before
    write_install(install, tools=TOOLS)
    assert content(live) == content(new)


@pytest.mark.parametrize("scheme", [Scheme.RAW, Scheme.DENSE, Scheme.XOR])
def test_whole_tensors_go_back(scheme: Scheme) -> None:
    """Tensors replaced by full words before the failure are the old ones again."""
    live, new = small(11)
    before = content(live)
    payload = delta_payload(live, new, scheme_of={"b": scheme})
    install = staged(payload, live, base=entries_of(live))
    assert [write.steps is None for write in install.writes] == [False, True, False]
    with pytest.raises(ApplyError, match="no power"):
        write_install(install, tools=Tools(loops=BreakingLoops(2)))
    assert content(live) == before
    write_install(install)
    assert content(live) == content(new)


@pytest.mark.parametrize("nth", range(1, 9))
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("prove", [False, True])
def test_threads_that_write_at_once_are_all_taken_back(nth: int, when: str, prove: bool) -> None:
    """Whichever of many writes fails, what other threads wrote or were writing is undone too."""
    live, new = {}, {}
    for seed in range(8):
        base, after = small(seed)
        for name in "abcd":
            live[f"{seed}{name}"] = replace(base[name], name=f"{seed}{name}")
            new[f"{seed}{name}"] = replace(after[name], name=f"{seed}{name}")
    before = content(live)
    install = staged(delta_payload(live, new), live, base=entries_of(live))
    run = process_tools(3).run
    with pytest.raises(ApplyError, match="no power"):
        write_install(
            install, tools=Tools(loops=BreakingLoops(nth, when=when), run=run), prove=prove
        )
    assert content(live) == before
    write_install(install, tools=Tools(run=run), prove=prove)
    assert content(live) == content(new)


def test_failed_undo_is_said() -> None:
    """If taking back fails too, the state is uncertain and the error says what to do."""
    live, new = small(1)
    install = staged(delta_payload(live, new), live, base=entries_of(live))
    with pytest.raises(UncertainStateError, match="full version"):
        write_install(install, tools=Tools(loops=BreakingLoops(2, when="torn")))


def test_interrupt_undoes_and_passes() -> None:
    """Ctrl-C in the middle leaves the old version and is still a Ctrl-C."""
    live, new = small(2)
    before = content(live)
    install = staged(delta_payload(live, new), live, base=entries_of(live))
    with pytest.raises(KeyboardInterrupt):
        write_install(install, tools=Tools(loops=BreakingLoops(2, failure=KeyboardInterrupt)))
    assert content(live) == before


@pytest.mark.parametrize("scheme", [None, Scheme.RAW, Scheme.DENSE])
@pytest.mark.parametrize("tools", [Tools(), TOOLS], ids=["numpy", "fast"])
def test_proof_behind_the_writes(scheme: Scheme | None, tools: Tools) -> None:
    """What is written can be proven at once; what does not come out is taken back."""
    live, new = small(13)
    before = content(live)
    payload = delta_payload(live, new, scheme_of={"b": scheme} if scheme else None)
    install = staged(payload, live, base=entries_of(live), checks=Checks(tools=tools))
    lying = replace(install, writes=(*install.writes[:-1], replace(install.writes[-1], digest="")))
    with pytest.raises(ApplyError, match="does not have its digest"):
        write_install(lying, tools=tools, prove=True)
    assert content(live) == before
    write_install(install, tools=tools, prove=True)
    assert content(live) == content(new)


def test_kept_words_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the room for new words steps alone are held, and write the same."""
    live, new = small(14)
    payload = delta_payload(live, new)
    room = staged(payload, live, base=entries_of(live)).writes[0].kept_bytes
    assert room > 0
    monkeypatch.setattr("paceline.refit.apply._KEPT_BYTES", room)
    install = staged(payload, live, base=entries_of(live))
    assert [write.kept_bytes for write in install.writes] == [room, 0, 0]
    write_install(install)
    assert content(live) == content(new)


def test_quick_checks_still_find_another_base() -> None:
    """Without reading whole tensors, steps that meet other words are refused all the same."""
    live, new = small(12)
    payload, base = delta_payload(live, new), entries_of(live)
    install = staged(payload, live, base=base, checks=Checks(whole=False))
    (first, *_) = [write for write in install.writes if write.steps]
    at = int(positions_of(first.steps[0].new.gaps)[0])  # type: ignore[index, union-attr]
    live[first.name].data[2 * at] ^= 1
    refused("another base", payload, live, base=base, checks=Checks(whole=False))
    live[first.name].data[2 * at] ^= 1
    write_install(staged(payload, live, base=base, checks=Checks(whole=False)), tools=TOOLS)
    assert content(live) == content(new)


def refused(message: str, payload: tuple[Manifest, bytes], live: Tensors, **more: Any) -> None:
    """Staging is refused with this message and changes nothing."""
    before = content(live)
    with pytest.raises(VerifyError, match=message):
        staged(payload, live, **more)
    assert content(live) == before


def test_layouts_must_agree() -> None:
    """Missing, extra, renamed, recast, reshaped and differently tied tensors are named."""
    live, new = small(3)
    payload = full_payload(new.values())
    fewer = {name: item for name, item in live.items() if name != "a"}
    refused("'a': in the version, not in the engine", payload, fewer)
    refused("'z': in the engine", payload, {**live, "z": replace(live["a"], name="z")})
    refused("F16", payload, {**live, "a": replace(live["a"], dtype="F16")})
    refused(r"\[100, 2\]", payload, {**live, "a": replace(live["a"], shape=(100, 2))})
    refused("tied", payload, live, aliases={"head": "a"})
    refused("tied", full_payload(new.values(), aliases=[("head", "a")]), live)
    refused("bytes", payload, {**live, "a": replace(live["a"], data=live["a"].data[:-2])})


def test_deltas_need_their_base() -> None:
    """A delta applies to one base only: known, equal by root, and equal in live bytes."""
    live, new = small(4)
    payload = delta_payload(live, new)
    base = entries_of(live)
    refused("known base", payload, live)
    refused("applies to", payload, live, base=entries_of(new))
    live["a"].data[0] ^= 1
    refused("'a': live bytes are not the base", payload, live, base=base)


def test_a_base_is_proven_without_the_payload() -> None:
    """Once, before: staging then reads the words that change alone, and still ends exactly."""
    live, new = small(4)
    payload, base = delta_payload(live, new), entries_of(live)

    def prove(known: dict[str, TensorEntry] | None, **more: Any) -> None:
        prove_base(payload[0], live={**live, **more}, aliases={}, base=known)

    prove(base)
    later = replace(FULL, base=False)
    write_install(staged(payload, live, base=base, checks=later))
    assert content(live) == content(new)
    for known, why in (
        (None, "known base"),
        (entries_of(new), "applies to"),
        (base, "not the base"),
    ):
        with pytest.raises(VerifyError, match=why):
            prove(known)
    with pytest.raises(VerifyError, match="in the engine"):
        prove(base, z=replace(live["a"], name="z"))
    live["a"].data[0] ^= 1
    refused("another base|instead of", payload, live, base=base, checks=later)


def test_unchanged_tensors_are_proven_too() -> None:
    """A version that claims a change without bytes for it is refused: no hole."""
    live, new = small(5)
    manifest, data = delta_payload(live, new)
    thin = replace(manifest, segments=manifest.segments[1:])
    refused("no bytes for it", (thin, data), live, base=entries_of(live))


def test_altered_objects_are_refused() -> None:
    """Wrong bytes, wrong length and a missing object are refused before anything is decoded."""
    live, new = small(6)
    manifest, data = delta_payload(live, new)
    base = entries_of(live)
    bad = bytearray(data)
    bad[-1] ^= 1
    refused("does not have its hash", (manifest, bytes(bad)), live, base=base)
    refused("bytes instead of", (manifest, data[:-1]), live, base=base)
    with pytest.raises(VerifyError, match="not fetched"):
        stage_install(manifest, {}, live=live, aliases={}, base=base)


def test_every_flip_and_cut_of_a_delta_is_refused_before_a_byte_changes() -> None:
    """Also where the hashes of the object are right: what decodes to the version is the version."""
    words = np.arange(0x3C00, 0x3C60, dtype="<u2")
    base = {"w": TensorBuffer(name="w", dtype="BF16", shape=(96,), data=_writable(words))}
    words[[3, 20, 90]] += np.array([1, 2, 999], dtype="<u2")
    new = {"w": replace(base["w"], data=_writable(words))}
    manifest, data = delta_payload(base, new, scheme_of={"w": Scheme.GAP})
    (segment,) = manifest.segments
    damaged = [data[:size] for size in range(segment.offset, len(data))]
    for bit in range(8 * segment.offset, 8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    before, known = content(base), entries_of(base)
    for payload in damaged:
        with pytest.raises(VerifyError):
            staged((manifest, payload), base, base=known)
        described = describe_object([memoryview(payload)], chunk_bytes=1000)
        forged = replace(
            manifest,
            objects=(described,),
            segments=(
                replace(
                    segment,
                    object_id=described.object_id,
                    num_bytes=len(payload) - segment.offset,
                ),
            ),
        )
        try:
            install = staged((forged, payload), base, base=known)
        except VerifyError:
            assert content(base) == before
            continue
        write_install(install)
        assert content(base) == content(new)
        base["w"].data[:] = before["w"]


def _writable(words: Words) -> memoryview:
    return memoryview(bytearray(words.tobytes()))


def test_wrong_result_is_refused() -> None:
    """A payload that decodes to something else than the manifest promised is refused."""
    live, new = small(7)
    other = {
        name: replace(item, data=memoryview(bytearray(item.data))) for name, item in new.items()
    }
    other["a"].data[0] ^= 1
    manifest, data = full_payload(new.values())
    lying, _ = full_payload(other.values())
    forged = replace(lying, objects=manifest.objects, segments=manifest.segments)
    refused("instead of", (forged, data), live)


def test_read_only_live_is_refused_early() -> None:
    """Live memory that cannot be written is found out before the pause."""
    live, new = small(8)
    locked = {name: replace(item, data=item.data.toreadonly()) for name, item in live.items()}
    refused("read-only", full_payload(new.values()), locked)


def test_proof_names_what_moved() -> None:
    """Reading back finds a flipped bit anywhere and names the tensor."""
    live, _ = small(9)
    entries = entries_of(live)
    live["c"].data[7] ^= 0x80
    with pytest.raises(VerifyError, match="'c'"):
        prove_live(live, entries.values())
    with pytest.raises(VerifyError, match="names differ"):
        prove_live({"c": live["c"]}, entries.values())


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_what_happens_to_proven_bytes_in_memory_is_found(kind: str) -> None:
    """Payload hashes are not computed twice; contents are, so no other weights get in."""
    live, new = tensors_of("base"), tensors_of("new")
    manifest, data = full_payload(new.values()) if kind == "full" else delta_payload(live, new)
    before, proven = content(live), replace(FULL, payload=False)
    base = entries_of(live)
    with pytest.raises(VerifyError, match=f"has {len(data) - 1} bytes"):
        staged((manifest, data[:-1]), live, base=base, checks=proven)
    for segment in manifest.segments:
        if segment.num_bytes:
            altered = bytearray(data)
            altered[segment.offset + segment.num_bytes // 2] ^= 1
            with pytest.raises(VerifyError):
                staged((manifest, bytes(altered)), live, base=base, checks=proven)
    assert content(live) == before
