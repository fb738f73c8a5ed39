"""What an engine may say of itself: the gravest cause wins, and delays stay bounded."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.retry import RetryPolicy
from paceline.refit.generators.protocol import EngineState, InstalledVersion
from paceline.refit.receiver.standing import (
    Observation,
    Refusals,
    StalenessBound,
    backoff_s,
    judge,
)

V5 = InstalledVersion(version_id="v5", sequence=5, root_digest="aa")
SEEN = st.builds(
    Observation,
    installed=st.sampled_from([None, V5]),
    newest=st.integers(-1, 9),
    silent_s=st.floats(0, 100),
    is_draining=st.booleans(),
    uncertain=st.sampled_from(["", "half written"]),
    crash=st.sampled_from(["", "bug"]),
    updating=st.sampled_from(["", "v6 is going in"]),
    astray=st.sampled_from(["", "pinned to v1"]),
    is_pinned=st.booleans(),
)


@given(seen=SEEN, versions=st.none() | st.integers(0, 3))
def test_ready_means_ready(seen: Observation, versions: int | None) -> None:
    """READY is said exactly when nothing speaks against it; every other state gives a reason."""
    health = judge(seen, StalenessBound(versions=versions, silence_s=50))
    against = (
        seen.installed is None
        or seen.is_draining
        or seen.uncertain
        or seen.crash
        or seen.updating
        or seen.astray
        or seen.silent_s > 50
        or (versions is not None and seen.newest - 5 > versions and not seen.is_pinned)
    )
    assert (health.state is EngineState.READY) == (not against)
    assert (health.reason == "") == (health.state is EngineState.READY)
    assert health.installed is seen.installed


@given(tries=st.integers(1, 10**6), chance=st.floats(0, 1, exclude_max=True))
def test_backoff_is_bounded(tries: int, chance: float) -> None:
    """However often something failed, it is tried again after a bounded time."""
    policy = RetryPolicy(attempts=2, first_delay_s=1, delay_s_max=8, jitter=0.5)
    assert 1 <= backoff_s(policy, tries, chance=chance) <= 12


def test_refusals_grow_and_are_forgotten() -> None:
    """Each failure keeps a version away for longer; one that is gone is forgotten."""
    refusals = Refusals(RetryPolicy(first_delay_s=1, delay_s_max=8, jitter=0))
    refusals.add("v1", now_s=0, chance=0)
    assert refusals.current(now_s=0.9) == {"v1"}
    assert refusals.current(now_s=1) == frozenset()
    refusals.add("v1", now_s=1, chance=0)
    assert refusals.current(now_s=2.9) == {"v1"}
    refusals.keep_only(frozenset())
    assert refusals.current(now_s=2.9) == frozenset()
    refusals.add("v1", now_s=3, chance=0)
    assert refusals.current(now_s=4) == frozenset()
