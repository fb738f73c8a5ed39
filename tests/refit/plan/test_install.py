"""Install plans against brute force, and the sentences that explain them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.model import (
    VersionDescription,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
)
from paceline.refit.plan import Costs, Holding, PlanKind, newest_sequence, plan_install
from paceline.refit.plan.install import STEPS_MAX

FULL, DELTA = WeightPayloadFormat.FULL_TENSOR, WeightPayloadFormat.XOR_DELTA


def version(
    uid: str, sequence: int, root: str, parent: str | None = None, num_bytes: int = 10
) -> WeightVersion:
    return WeightVersion(
        uid=uid,
        model_name="m",
        idempotency_key=uid,
        payload_format=FULL if parent is None else DELTA,
        base_version_id=None,
        expected_source_slots=("s",),
        layout_signature="",
        state=VersionState.READY,
        created_at_unix_ms=0,
        description=VersionDescription(
            run_id="r",
            sequence=sequence,
            step=sequence,
            root_digest=root,
            parent_root=parent,
            payload_bytes=num_bytes,
            full_bytes=100,
            changed_elements=1,
            total_elements=1,
        ),
    )


ROOTS = st.sampled_from("abcd")


@st.composite
def worlds(draw: st.DrawFn) -> list[WeightVersion]:
    """A few versions with few roots, so that chains, forks, cycles and equal roots happen."""
    return [
        replace(
            version(
                f"v{at}",
                draw(st.integers(0, 4)),
                draw(ROOTS),
                draw(st.none() | ROOTS),
                draw(st.integers(1, 5)),
            ),
            state=draw(st.sampled_from([VersionState.READY] * 4 + list(VersionState))),
        )
        for at in range(draw(st.integers(0, 5)))
    ]


def is_walkable(path: Sequence[WeightVersion], held: Holding | None) -> bool:
    """Walk a path step by step, by the rules as written for people."""
    root, sequence = (None, -1) if held is None else (held.root_digest, held.sequence)
    for step in path:
        said = step.description
        assert said is not None
        if step.state is not VersionState.READY or said.sequence <= sequence:
            return False
        if step.payload_format is DELTA and said.parent_root != root:
            return False
        root, sequence = said.root_digest, said.sequence
    return True


def worth(path: Sequence[WeightVersion]) -> tuple[int, int]:
    """Smaller is better: newer, then cheaper."""
    said = [step.description for step in path if step.description is not None]
    return (-said[-1].sequence if said else 1, sum(each.payload_bytes for each in said))


@given(
    versions=worlds(),
    held=st.none() | st.builds(Holding, sequence=st.integers(0, 4), root_digest=ROOTS),
    avoid=st.frozensets(st.sampled_from(["v0", "v1", "v2"]), max_size=1),
    target=st.none() | st.integers(0, 4),
)
def test_equals_brute_force(
    versions: list[WeightVersion], held: Holding | None, avoid: frozenset[str], target: int | None
) -> None:
    """The plan can be walked, and no other walk reaches newer weights or moves fewer bytes."""
    plan = plan_install(versions, held=held, avoid=avoid, target=target)
    usable = [
        each
        for each in versions
        if each.uid not in avoid
        and each.description is not None
        and (target is None or each.description.sequence <= target)
    ]
    walks = [
        walk
        for size in range(len(usable) + 1)
        for walk in permutations(usable, size)
        if is_walkable(walk, held)
    ]
    assert is_walkable(plan.path, held)
    assert all(step in usable for step in plan.path)
    assert worth(plan.path) == min(map(worth, walks))
    assert plan.payload_bytes == worth(plan.path)[1]
    assert plan.reason


CHAIN = [
    version("v0", 0, "a", num_bytes=100),
    version("v1", 1, "b", "a"),
    version("v2", 2, "c", "b"),
    version("v2-full", 2, "c", num_bytes=100),
    version("v3", 3, "d", "c"),
]


def uids(versions: Sequence[WeightVersion]) -> list[str]:
    return [each.uid for each in versions]


class TestChoices:
    def test_late_joiner(self) -> None:
        """From nothing, the newest anchor and the chain after it cost least."""
        plan = plan_install(CHAIN, held=None)
        assert uids(plan.path) == ["v2-full", "v3"]
        assert plan.reason == (
            "nothing is installed; full version v2-full and 1 delta to sequence 3 (110 bytes)"
        )

    def test_follower(self) -> None:
        """From the version before, deltas cost less, and the sentence says so."""
        plan = plan_install(CHAIN, held=Holding(sequence=0, root_digest="a"))
        assert uids(plan.path) == ["v1", "v2", "v3"]
        assert plan.reason == (
            "sequence 0 is installed; 3 deltas to sequence 3 (30 bytes); "
            "full version v2-full and 1 delta to sequence 3 (110 bytes) would cost more"
        )

    def test_anchor_is_a_base(self) -> None:
        """A delta applies to what an anchor of its parent's sequence left behind."""
        assert uids(plan_install(CHAIN, held=Holding(sequence=2, root_digest="c")).path) == ["v3"]

    def test_refused_delta(self) -> None:
        """When a delta was refused, the anchor leads around it."""
        held = Holding(sequence=1, root_digest="b")
        plan = plan_install(CHAIN, held=held, avoid=frozenset({"v2"}))
        assert uids(plan.path) == ["v2-full", "v3"]

    def test_broken_chain(self) -> None:
        """A chain with a hole stops before it, and the sentence names what is missing."""
        broken = [each for each in CHAIN if not each.uid.startswith("v2")]
        plan = plan_install(broken, held=Holding(sequence=0, root_digest="a"))
        assert uids(plan.path) == ["v1"]
        assert "sequence 3 (v3) cannot be reached" in plan.reason
        assert "its parent c" in plan.reason

    def test_refused_anchor(self) -> None:
        """A refused full version is named as such."""
        plan = plan_install(CHAIN[:1], held=None, avoid=frozenset({"v0"}))
        assert plan.path == ()
        assert "was refused here" in plan.reason

    def test_never_back(self) -> None:
        """Older versions are no plan, whatever else is missing."""
        plan = plan_install(CHAIN, held=Holding(sequence=9, root_digest="z"))
        assert plan.path == ()
        assert plan.reason == "sequence 9 is installed and nothing newer is READY"

    def test_same_weights_again(self) -> None:
        """A step that changed nothing is installed for its label, even round in a circle."""
        again = [*CHAIN, version("v4", 4, "d", "d", num_bytes=1)]
        plan = plan_install(again, held=Holding(sequence=3, root_digest="d"))
        assert uids(plan.path) == ["v4"]

    def test_newest(self) -> None:
        """Only READY versions count as newest."""
        staging = replace(CHAIN[-1], state=VersionState.STAGING)
        assert newest_sequence([*CHAIN[:-1], staging]) == 2
        assert newest_sequence([]) == -1


COMPOSED = version("v3-from-0", 3, "d", "a", num_bytes=18)


class TestCosts:
    @given(
        versions=worlds(),
        held=st.none() | st.builds(Holding, sequence=st.integers(0, 4), root_digest=ROOTS),
        rates=st.dictionaries(st.sampled_from(["v0", "v1", "v2"]), st.floats(0.1, 100.0)),
        bytes_per_s=st.floats(0.1, 100.0),
        step_s=st.floats(0.0, 10.0),
    )
    def test_no_walk_is_quicker(
        self,
        versions: list[WeightVersion],
        held: Holding | None,
        rates: dict[str, float],
        bytes_per_s: float,
        step_s: float,
    ) -> None:
        """With rates and a price of each step, no other walk to as new weights takes less time."""
        costs = Costs(bytes_per_s=bytes_per_s, rates=rates, step_s=step_s)
        plan = plan_install(versions, held=held, costs=costs)

        def seconds(walk: Sequence[WeightVersion]) -> tuple[int, float]:
            found = [(step, step.description) for step in walk]
            total = sum(
                said.payload_bytes / rates.get(step.uid, bytes_per_s) + step_s
                for step, said in found
                if said is not None
            )
            last = found[-1][1] if found else None
            return (1 if last is None else -last.sequence, total)

        described = [each for each in versions if each.description is not None]
        walks = [
            walk
            for size in range(len(described) + 1)
            for walk in permutations(described, size)
            if is_walkable(walk, held)
        ]
        newest, quickest = min(map(seconds, walks))
        assert seconds(plan.path)[0] == newest
        assert seconds(plan.path)[1] <= quickest * (1 + 1e-9)
        if plan.path:
            assert plan.options[0].seconds == pytest.approx(quickest)

    def test_what_a_plan_amounts_to(self) -> None:
        """Full, delta, chain, composed delta, snapshot or nothing: each has its word."""
        held = Holding(sequence=0, root_digest="a")
        cases = [
            (CHAIN[:1], None, PlanKind.FULL),
            (CHAIN[:2], held, PlanKind.DELTA),
            (CHAIN, held, PlanKind.CHAIN),
            ([*CHAIN, COMPOSED], held, PlanKind.COMPOSED),
            ([CHAIN[0], COMPOSED], None, PlanKind.SNAPSHOT),
            ([], held, PlanKind.NOTHING),
        ]
        for versions, base, kind in cases:
            assert plan_install(versions, held=base).kind is kind

    def test_the_composed_delta_is_named(self) -> None:
        """The sentence says that one delta stands for several."""
        plan = plan_install([CHAIN[0], COMPOSED], held=None)
        assert "full version v0 and 1 composed delta to sequence 3" in plan.reason

    def test_a_near_full_version_beats_far_deltas(self) -> None:
        """What counts is time: many bytes from a neighbour before few through a narrow link."""
        held = Holding(sequence=0, root_digest="a")
        near = {each.uid: 1000.0 for each in CHAIN if each.uid.endswith("-full")}
        plan = plan_install(CHAIN, held=held, costs=Costs(bytes_per_s=1.0, rates=near))
        assert uids(plan.path) == ["v2-full", "v3"]
        assert [option.kind for option in plan.options] == [
            PlanKind.SNAPSHOT,
            PlanKind.CHAIN,
            PlanKind.FULL,
        ]
        assert plan.options[0].seconds is not None
        assert plan_install(CHAIN, held=held).options[0].seconds is None

    def test_no_plan_is_longer_than_the_bound(self) -> None:
        """However cheap the deltas are, an endless chain is no plan while a full one leads on."""
        count = STEPS_MAX + 40
        chain = [version("f0", 0, "r0")] + [
            version(f"d{at}", at, f"r{at}", f"r{at - 1}", num_bytes=1) for at in range(1, count)
        ]
        held = Holding(sequence=0, root_digest="r0")
        assert len(plan_install(chain, held=held).path) == STEPS_MAX
        anchor = version("full", count - 1, f"r{count - 1}", num_bytes=10**6)
        assert uids(plan_install([*chain, anchor], held=held).path) == ["full"]
