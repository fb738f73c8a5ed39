"""Who says so: a manifest followed by its trainer's signature, and the chain that follows from it.

A relay is nobody that one must trust. What a version is was said by the trainer alone: its
statement names the run, the version, what it leads to and from which weights, and the digest of
the manifest, which proves every byte of the payload. ``docs/formats/manifest-v1.md`` is the
specification.
"""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from paceline.refit.errors import ParseError, ParseReason, VerifyError
from paceline.refit.manifest.parse import MANIFEST_BYTES_MAX, load_object, parse_manifest
from paceline.refit.manifest.v1 import Manifest, text_problem
from paceline.refit.model import WeightVersion

SCHEMA: Final = "paceline.signature.v1"
TRAILER_BYTES_MAX: Final = 16 * 1024
SEQUENCE_MAX: Final = 2**53 - 1

_KEY = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_FIELDS = "manifest_sha256 parent_root root_digest run_id schema sequence signature version_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a trainer says about one manifest."""

    run_id: str
    version_id: str
    sequence: int
    root_digest: str
    """Of the version."""
    parent_root: str | None
    """Of the weights that it came after: what joins one signature to the one before."""
    manifest_sha256: str = ""
    """Of the manifest's own bytes; set when it is signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedManifest:
    """What was read at a manifest's address; nothing of it is believed yet."""

    manifest: Manifest
    statement: Statement | None
    """None: nobody signed it."""
    signature: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """What must have been signed about a version, and with which key."""

    key: Ed25519PublicKey
    expected: Statement
    is_part: bool = False
    """The manifest is of one of several slots: its signature says the slot's own roots, and
    whoever has all of them compares what they make with the version's."""

    def check(self, signed: SignedManifest) -> None:
        """Refuse anything else. Raises VerifyError."""
        expected = self.expected
        if self.is_part and signed.statement is not None:
            base = signed.manifest.base_root
            parent = signed.statement.parent_root if base is None else base
            expected = replace(
                expected, root_digest=signed.manifest.root_digest, parent_root=parent
            )
        verify_signed(signed, expected=expected, key=self.key)


def statement_of(version: WeightVersion) -> Statement:
    """Return what the trainer must have signed about a version. Raises VerifyError."""
    said = version.description
    if said is None:
        raise VerifyError(f"version {version.uid} has no description; nothing can be signed of it")
    return Statement(
        run_id=said.run_id,
        version_id=version.uid,
        sequence=said.sequence,
        root_digest=said.root_digest,
        parent_root=said.parent_root,
    )


def trust_in(version: WeightVersion, key: Ed25519PublicKey) -> Trust:
    """Return what must have been signed about each manifest of a version. Raises VerifyError."""
    is_part = len(version.expected_source_slots) > 1
    return Trust(key=key, expected=statement_of(version), is_part=is_part)


def signing_key(text: str) -> Ed25519PrivateKey:
    """Read a trainer's private key, 64 hex digits. Raises ValueError without showing it."""
    if not _KEY.fullmatch(text):
        raise ValueError("a signing key is 64 lower-case hex digits")
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text))


def verify_key(text: str) -> Ed25519PublicKey:
    """Read the public key of a run, 64 hex digits. Raises ValueError."""
    if not _KEY.fullmatch(text):
        raise ValueError("a verify key is 64 lower-case hex digits")
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))


def sign_manifest(data: bytes, statement: Statement, *, key: Ed25519PrivateKey) -> bytes:
    """Return the manifest with its signature behind it: what is served, and advertised by digest.

    Raises:
        ValueError: it is signed already.
    """
    if b"\n" in data:
        raise ValueError("the manifest carries a signature already")
    said = replace(statement, manifest_sha256=hashlib.sha256(data).hexdigest())
    trailer = {**_document(said), "signature": key.sign(_signed_bytes(said)).hex()}
    return data + b"\n" + _canonical(trailer)


def parse_signed(data: bytes, *, size_max: int = MANIFEST_BYTES_MAX) -> SignedManifest:
    """Return a manifest and the statement behind it, if there is one.

    Raises:
        ParseError: either breaks its format.
    """
    if len(data) > size_max:
        raise ParseError(ParseReason.TOO_LARGE, "manifest", f"{len(data)} > {size_max} bytes")
    body, newline, trailer = data.partition(b"\n")
    manifest = parse_manifest(body)
    if not newline:
        return SignedManifest(manifest=manifest, statement=None)
    if len(trailer) > TRAILER_BYTES_MAX:
        raise ParseError(ParseReason.TOO_LARGE, "signature", f"{len(trailer)} bytes")
    statement, signature = _parse_trailer(trailer)
    if statement.manifest_sha256 != hashlib.sha256(body).hexdigest():
        raise ParseError(ParseReason.DIGEST_MISMATCH, "signature.manifest_sha256")
    return SignedManifest(manifest=manifest, statement=statement, signature=signature)


def verify_signed(
    signed: SignedManifest, *, expected: Statement, key: Ed25519PublicKey
) -> Manifest:
    """Return the manifest if the run's trainer said exactly what is expected about it.

    Args:
        signed: as read.
        expected: what the version's record says; its ``manifest_sha256`` does not matter.
        key: the run's, from this process's own credentials.

    Raises:
        VerifyError: unsigned, signed with another key, or about something else.
    """
    said = signed.statement
    if said is None:
        raise VerifyError(
            f"version {expected.version_id}: the manifest is not signed, and this run's are; "
            "its source is not the trainer's"
        )
    try:
        key.verify(signed.signature, _signed_bytes(said))
    except InvalidSignature as exc:
        raise VerifyError(
            f"version {expected.version_id}: the manifest's signature is not of this run's key"
        ) from exc
    for name in ("run_id", "version_id", "sequence", "root_digest", "parent_root"):
        found, wanted = getattr(said, name), getattr(expected, name)
        if found != wanted:
            raise VerifyError(
                f"version {expected.version_id}: {name} {found} was signed, {wanted} is on record"
            )
    return signed.manifest


def _document(statement: Statement) -> dict[str, object]:
    return {"schema": SCHEMA, **{name: getattr(statement, name) for name in statement.__slots__}}


def _signed_bytes(statement: Statement) -> bytes:
    # The schema in front keeps a signature from meaning anything in another format.
    return SCHEMA.encode() + b"\n" + _canonical(_document(statement))


def _canonical(document: dict[str, object]) -> bytes:
    text = json.dumps(document, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return text.encode("ascii")


def _parse_trailer(data: bytes) -> tuple[Statement, bytes]:
    fields = load_object(data, where="signature", keys=_FIELDS)
    if fields["schema"] != SCHEMA:
        raise ParseError(
            ParseReason.UNKNOWN_SCHEMA, "signature.schema", repr(fields["schema"])[:80]
        )
    texts = {}
    for name in ("run_id", "version_id", "root_digest", "manifest_sha256"):
        texts[name] = _text(fields[name], name)
    parent = fields["parent_root"]
    sequence = fields["sequence"]
    if type(sequence) is not int:
        raise ParseError(ParseReason.WRONG_TYPE, "signature.sequence", "not an integer")
    if not 0 <= sequence <= SEQUENCE_MAX:
        raise ParseError(ParseReason.OUT_OF_RANGE, "signature.sequence")
    signature = _text(fields["signature"], "signature")
    if not _SIGNATURE.fullmatch(signature):
        raise ParseError(ParseReason.OUT_OF_RANGE, "signature.signature", "not 128 hex digits")
    statement = Statement(
        **texts,
        sequence=sequence,
        parent_root=None if parent is None else _text(parent, "parent_root"),
    )
    if _canonical({**_document(statement), "signature": signature}) != data:
        raise ParseError(ParseReason.NOT_CANONICAL, "signature")
    return statement, bytes.fromhex(signature)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ParseError(ParseReason.WRONG_TYPE, f"signature.{name}", "not a string")
    if problem := text_problem(value):
        raise ParseError(ParseReason.OUT_OF_RANGE, f"signature.{name}", problem)
    return value
