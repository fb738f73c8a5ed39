"""Retention: late joiners and followers always find their way."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.publisher.values import anchor_uid, sequence_of, version_uid
from paceline.refit.retention import KeptVersion, plan_retention


@st.composite
def runs(draw: st.DrawFn) -> list[KeptVersion]:
    """What a publisher may have kept: deltas, and full versions at some sequences."""
    kept = []
    for sequence in range(draw(st.integers(0, 12))):
        is_full = draw(st.booleans())
        kept.append(KeptVersion(uid=f"r-{sequence}", sequence=sequence, is_full=is_full))
        if not is_full and draw(st.booleans()):
            kept.append(KeptVersion(uid=f"r-{sequence}-full", sequence=sequence, is_full=True))
    return draw(st.permutations(kept))


@given(runs(), st.integers(0, 4))
def test_newest_full_and_all_after_it_stay(kept: list[KeptVersion], keep_old: int) -> None:
    """What a late joiner needs stays; of what is older exactly the newest few."""
    going = plan_retention(kept, keep_old=keep_old)
    newest = max((item.sequence for item in kept if item.is_full), default=0)
    staying = [item for item in kept if item.uid not in going]
    assert {item.uid for item in kept if item.sequence >= newest} <= {item.uid for item in staying}
    old = [item.sequence for item in kept if item.sequence < newest]
    left = sorted(item.sequence for item in staying if item.sequence < newest)
    assert left == sorted(old)[max(0, len(old) - keep_old) :]
    assert plan_retention(staying, keep_old=keep_old) == ()


@given(st.integers(0, 10**7), st.sampled_from(["r", "r-1", "a-000001"]))
def test_uids_tell_their_sequence(sequence: int, run_id: str) -> None:
    """A uid leads back to its sequence in its own run, and to none in others."""
    uid = version_uid(run_id, sequence)
    assert sequence_of(uid, run_id) == sequence_of(anchor_uid(uid), run_id) == sequence
    assert sequence_of(uid, "other") == -1
    assert sequence_of(f"{run_id}-x", run_id) == -1
