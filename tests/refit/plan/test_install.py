"""Install plans against brute force, and the sentences that explain them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.model import (
    VersionDescription,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
)
from paceline.refit.plan import Holding, newest_sequence, plan_install

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
