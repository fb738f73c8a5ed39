"""What is wrong with a version on record, in words; and nothing where nothing is."""

from dataclasses import replace
from hashlib import sha256

import pytest

from paceline.refit.control.verify import check_chain, check_manifests
from paceline.refit.errors import FetchError, VerifyError
from paceline.refit.model import VersionState, WeightPayloadFormat, WeightVersion
from paceline.testing.contracts.control import DESCRIPTION, FULL, MODEL, shard_of

FIRST = WeightVersion(
    uid="v0",
    model_name=MODEL,
    idempotency_key="k",
    payload_format=WeightPayloadFormat.FULL_TENSOR,
    base_version_id=None,
    expected_source_slots=FULL.expected_source_slots,
    layout_signature="",
    state=VersionState.READY,
    created_at_unix_ms=1,
    description=replace(DESCRIPTION, sequence=0, root_digest="r0", parent_root=None),
)
SECOND = replace(
    FIRST,
    uid="v1",
    base_version_id="v0",
    payload_format=WeightPayloadFormat.XOR_DELTA,
    description=replace(DESCRIPTION, sequence=1, root_digest="r1", parent_root="r0"),
)
SHARDS = {
    v.uid: [shard_of(v.uid, slot) for slot in v.expected_source_slots] for v in (FIRST, SECOND)
}


def test_a_whole_chain_has_no_problem() -> None:
    """READY, described, each on the root before it, every slot offered."""
    assert check_chain([FIRST, SECOND], SHARDS) == []


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (replace(FIRST, state=VersionState.RELEASING), SECOND, "v0: it is RELEASING"),
        (FIRST, replace(SECOND, description=None), "v1: it is not described"),
        (replace(FIRST, payload_format=SECOND.payload_format), SECOND, "starts with a delta"),
        (
            FIRST,
            replace(SECOND, description=replace(DESCRIPTION, sequence=1, parent_root="x")),
            "v1: it stands on root x",
        ),
        (
            FIRST,
            replace(SECOND, description=replace(DESCRIPTION, sequence=0, parent_root="r0")),
            "does not come after v0",
        ),
        (
            FIRST,
            replace(SECOND, expected_source_slots=("rank-0", "rank-1", "rank-2")),
            "v1: nobody offers slot rank-2",
        ),
    ],
    ids=["state", "description", "start", "root", "order", "slot"],
)
def test_each_flaw_is_named(first: WeightVersion, second: WeightVersion, says: str) -> None:
    """One flaw, one sentence with the version in it."""
    problems = check_chain([first, second], SHARDS)
    assert len(problems) == 1
    assert says in problems[0]


def test_manifests_are_compared_with_what_was_advertised() -> None:
    """A wrong one and an absent one are both named, and the right one is not."""
    good = replace(shard_of("v0"), manifest_digest=sha256(b"m").hexdigest())

    def read(endpoint: str) -> bytes:
        if endpoint == "nowhere":
            raise FetchError("no answer")
        return b"m"

    wrong = replace(good, source_slot_id="rank-1", manifest_digest="d")
    absent = replace(good, source_slot_id="rank-2", manifest_endpoint="nowhere")

    def refuse(data: bytes) -> None:
        raise VerifyError("not signed")

    (unsigned,) = check_manifests([good], read, check=refuse)
    assert "not signed" in unsigned
    problems = check_manifests([good, wrong, absent], read)
    assert len(problems) == 2
    assert "rank-1" in problems[0]
    assert "no answer" in problems[1]
