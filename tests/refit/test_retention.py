"""Which versions the service retires: nothing that somebody needs, everything else."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.model import (
    RetentionPolicy,
    VersionDescription,
    VersionState,
    WeightPayloadFormat,
    WeightVersion,
)
from paceline.refit.retention import plan_releases

STATES = st.sampled_from([VersionState.READY] * 6 + [VersionState.STAGING, VersionState.RELEASING])
POLICIES = st.builds(
    RetentionPolicy,
    keep_last=st.integers(0, 4),
    anchors_every=st.integers(0, 4),
    anchor_cost=st.sampled_from([0.0, 0.5, 2.0]),
)


def version(number: int, base: int | None, *, payload_bytes: int = 10) -> WeightVersion:
    """Return a READY version; without a base it is a full one of 100 bytes."""
    return WeightVersion(
        uid=f"v{number}",
        model_name="m",
        idempotency_key=f"k{number}",
        payload_format=WeightPayloadFormat.FULL_TENSOR
        if base is None
        else WeightPayloadFormat.XOR_DELTA,
        base_version_id=None if base is None else f"v{base}",
        expected_source_slots=("s",),
        layout_signature="",
        state=VersionState.READY,
        created_at_unix_ms=number,
        description=VersionDescription(
            run_id="r",
            sequence=number,
            step=number,
            root_digest=f"d{number}",
            parent_root=None,
            payload_bytes=100 if base is None else payload_bytes,
            full_bytes=100,
            changed_elements=0,
            total_elements=1,
        ),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[WeightVersion]:
    """Return versions that each stand alone or on any earlier one."""
    made: list[WeightVersion] = []
    for number in range(draw(st.integers(0, 10))):
        base = draw(st.none() | st.integers(0, number - 1)) if number else None
        made.append(replace(version(number, base), state=draw(STATES)))
    return made


@given(histories(), POLICIES, st.sets(st.integers(0, 9)))
def test_nothing_that_is_needed_goes(
    versions: list[WeightVersion], policy: RetentionPolicy, held: set[int]
) -> None:
    """The newest, the leased, and all that these and unfinished ones stand on are never named."""
    leased = {f"v{n}" for n in held}
    released = plan_releases(versions, policy=policy, leased=leased)
    by_uid = {v.uid: v for v in versions}
    ready = [v.uid for v in versions if v.state is VersionState.READY]
    assert set(released) <= set(ready)
    assert list(released) == [uid for uid in ready if uid in released]
    assert not set(released) & leased
    assert not set(released) & set(ready[-policy.keep_last :] if policy.keep_last else ready)
    for uid in (set(by_uid) - set(released)) & (
        set(ready) | {v.uid for v in versions if v.state is VersionState.STAGING}
    ):
        base = by_uid[uid].base_version_id
        while base is not None:
            assert base not in released, (uid, base)
            base = by_uid[base].base_version_id


def chain(length: int) -> list[WeightVersion]:
    """Return full versions at every fourth place, deltas between them."""
    return [version(n, None if n % 4 == 0 else n - 1) for n in range(length)]


def test_a_chain_is_kept_from_the_full_version_that_it_starts_from() -> None:
    """The newest two of a chain keep the two before them."""
    policy = RetentionPolicy(keep_last=2)
    assert plan_releases(chain(12), policy=policy, leased=()) == tuple(f"v{n}" for n in range(8))


def test_anchors_stay_by_sequence() -> None:
    """Every eighth sequence stays if it is full."""
    policy = RetentionPolicy(keep_last=1, anchors_every=8)
    kept = {v.uid for v in chain(20)} - set(plan_releases(chain(20), policy=policy, leased=()))
    assert kept == {"v0", "v8", "v16", "v17", "v18", "v19"}


def test_anchors_stay_by_cost() -> None:
    """A full version stays once the deltas since the last anchor weigh half of it."""
    policy = RetentionPolicy(keep_last=1, anchor_cost=0.5)
    kept = {v.uid for v in chain(20)} - set(plan_releases(chain(20), policy=policy, leased=()))
    assert kept == {"v0", "v8", "v16", "v17", "v18", "v19"}


def test_without_a_number_everything_stays() -> None:
    """The default retires nothing."""
    assert plan_releases(chain(20), policy=RetentionPolicy(), leased=()) == ()
