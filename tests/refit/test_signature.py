"""Signed manifests: the vectors, and that nothing else is believed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from paceline.refit.errors import ParseError, VerifyError
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.manifest.signature import (
    Statement,
    Trust,
    parse_signed,
    sign_manifest,
    signing_key,
    statement_of,
    verify_key,
)
from paceline.refit.model import VersionState, WeightPayloadFormat, WeightVersion

CASES = json.loads(
    (Path(__file__).parents[1] / "vectors" / "signature" / "cases.json").read_text("utf8")
)
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
SIGNED = CASES[0]["document"].encode()
EXPECTED = Statement(**CASES[0]["expected"])


def believes(case: dict[str, Any]) -> bool:
    """Whether a reader takes the document for what the record says."""
    signed = parse_signed(case["document"].encode())
    trust = Trust(key=verify_key(case["verify_key"]), expected=Statement(**case["expected"]))
    try:
        trust.check(signed)
    except VerifyError:
        return False
    return True


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_vectors(case: dict[str, Any]) -> None:
    """Each case is refused for its reason, or believed or not as it says."""
    if "error" in case:
        with pytest.raises(ParseError) as caught:
            parse_signed(case["document"].encode())
        assert caught.value.reason == case["error"]
    else:
        assert believes(case) is case["accepted"]


def test_signing_is_deterministic() -> None:
    """The same manifest, statement and key give the same bytes, so relays serve one digest."""
    body = SIGNED.partition(b"\n")[0]
    again = sign_manifest(body, EXPECTED, key=KEY)
    assert again == SIGNED
    with pytest.raises(ValueError, match="already"):
        sign_manifest(again, EXPECTED, key=KEY)


@given(st.integers(0, len(SIGNED) - 1), st.integers(1, 255))
def test_no_altered_byte_is_believed(at: int, flip: int) -> None:
    """Whatever byte a relay changes, in manifest or signature, the document is refused."""
    data = bytearray(SIGNED)
    data[at] ^= flip
    with pytest.raises(VerifyError):
        Trust(key=KEY.public_key(), expected=EXPECTED).check(parse_signed(bytes(data)))


@given(st.sampled_from(EXPECTED.__slots__[:5]))
def test_every_field_counts(name: str) -> None:
    """A signature is for one run, version, sequence, root and parent, and for no other."""
    other: Any = 99 if name == "sequence" else "other"
    trust = Trust(key=KEY.public_key(), expected=replace(EXPECTED, **{name: other}))
    with pytest.raises(VerifyError, match=name):
        trust.check(parse_signed(SIGNED))


def test_keys_are_read_strictly_and_never_shown() -> None:
    """Keys are 64 hex digits; a wrong one is not repeated in the message."""
    assert signing_key(bytes(range(32)).hex()).public_key() == KEY.public_key()
    for wrong in ("", "ab", "Z" * 64, "A" * 64):
        with pytest.raises(ValueError, match="64 lower-case hex digits") as caught:
            signing_key(wrong)
        assert not wrong or wrong not in str(caught.value)
        with pytest.raises(ValueError, match="64 lower-case hex digits"):
            verify_key(wrong)


def test_sizes_are_bounded_before_anything_is_read() -> None:
    """A document or a trailer that is too large is refused as such."""
    with pytest.raises(ParseError) as caught:
        parse_signed(SIGNED, size_max=100)
    assert caught.value.reason == "too_large"
    with pytest.raises(ParseError) as caught:
        parse_signed(SIGNED.partition(b"\n")[0] + b"\n" + bytes(17_000))
    assert caught.value.reason == "too_large"


def test_what_is_not_described_cannot_be_signed() -> None:
    """Without a description there is nothing that a signature could be compared with."""
    bare = WeightVersion(
        uid="v",
        model_name="m",
        idempotency_key="k",
        payload_format=WeightPayloadFormat.FULL_TENSOR,
        base_version_id=None,
        expected_source_slots=("s",),
        layout_signature="",
        state=VersionState.READY,
        created_at_unix_ms=0,
    )
    with pytest.raises(VerifyError, match="no description"):
        statement_of(bare)


def test_a_slot_of_several_signs_its_own_roots() -> None:
    """Name, run and sequence are the version's; the roots are the manifest's and must be signed."""
    body = SIGNED.partition(b"\n")[0]
    manifest = parse_manifest(body)
    said = replace(EXPECTED, root_digest=manifest.root_digest, parent_root="cd" * 32)
    trust = Trust(key=KEY.public_key(), expected=replace(EXPECTED, root_digest="00"), is_part=True)
    trust.check(parse_signed(sign_manifest(body, said, key=KEY)))
    for name, other in (("sequence", 4), ("version_id", "v9"), ("root_digest", "ab" * 32)):
        change: dict[str, Any] = {name: other}
        lied = replace(said, **change)
        with pytest.raises(VerifyError, match=name):
            trust.check(parse_signed(sign_manifest(body, lied, key=KEY)))
