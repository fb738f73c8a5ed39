"""Who may call what: tokens by role, kept in private files, and one table of rights."""

import hmac
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

from paceline.core.errors import PreflightError
from paceline.refit.errors import AccessRefusedError, ControlUnavailableError
from paceline.refit.model import WorkerRole
from paceline.refit.wire.rpc import CONTROL_RPCS

TOKEN_CHARS_MIN: Final = 16
FILE_BYTES_MAX: Final = 64 * 1024

CREDENTIALS_VARIABLE: Final = "PACELINE_CREDENTIALS"
"""Environment variable that names a role process's credentials file."""


class TokenRole(StrEnum):
    """What a token's bearer is to the control service."""

    OPERATOR = "operator"
    """The run itself: everything."""
    TRAINER = "trainer"
    GENERATOR = "generator"
    READER = "reader"
    """Dashboards and people who look."""


class UnauthenticatedError(AccessRefusedError):
    """No token, or one that the service does not know."""


_READS = frozenset(
    {
        "GetWeightVersion",
        "ListWeightVersionShards",
        "GetVersion",
        "ListVersions",
        "ListLeases",
        "ListWorkers",
        "ListInstalled",
        "ListEvents",
        "WatchVersions",
        "WatchWorkers",
        "WatchLeases",
        "GetChain",
        "ListDeltas",
        "GetRetention",
        "ListTombstones",
        "ListPins",
        "ListReplicas",
    }
)

RIGHTS: Final[Mapping[TokenRole, frozenset[str]]] = {
    TokenRole.OPERATOR: frozenset(rpc.name for rpc in CONTROL_RPCS),
    TokenRole.TRAINER: _READS
    | {
        "RegisterWorker",
        "CreateWeightVersion",
        "UpdateWeightVersionState",
        "DeleteWeightVersion",
        "CreateWeightVersionShard",
        "DeleteWeightVersionShard",
        "DescribeVersion",
        "RecordDelta",
        "SetRetention",
        "RecordEvent",
    },
    TokenRole.GENERATOR: _READS
    | {
        "RegisterWorker",
        "RegisterVersionLease",
        "DeleteVersionLease",
        "ReportInstalled",
        "AnnounceReplica",
        "WithdrawReplica",
        "RecordEvent",
    },
    TokenRole.READER: _READS,
}
"""Role -> names of the calls it may make; names are unique over both services."""

_REGISTERS_AS: Final[Mapping[TokenRole, frozenset[WorkerRole]]] = {
    TokenRole.OPERATOR: frozenset(WorkerRole),
    TokenRole.TRAINER: frozenset({WorkerRole.TRAINER}),
    TokenRole.GENERATOR: frozenset({WorkerRole.GENERATOR}),
    TokenRole.READER: frozenset(),
}


class Tokens(Protocol):
    """Where the service learns whose token it was given."""

    def role_of(self, token: str) -> TokenRole | None:
        """Return the bearer's role, or None. Raises PreflightError if the tokens are unreadable."""
        ...


class FixedTokens:
    """Tokens that do not change while the service runs."""

    def __init__(self, tokens: Mapping[TokenRole, str]) -> None:
        self._tokens = _check_tokens(tokens)

    def role_of(self, token: str) -> TokenRole | None:
        """Return the bearer's role, or None; takes as long whether or not a token fits."""
        given = token.encode()
        found = None
        for role, known in self._tokens.items():
            if hmac.compare_digest(known.encode(), given):
                found = role
        return found


class TokenFile:
    """Tokens in a private JSON file, read again whenever it is replaced."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises PreflightError."""
        self._path = path
        self._seen = _identity(path)
        self._tokens = FixedTokens(read_tokens(path))

    def role_of(self, token: str) -> TokenRole | None:
        """Return the bearer's role, or None. Raises PreflightError: then nobody gets in."""
        seen = _identity(self._path)
        if seen != self._seen:
            self._tokens = FixedTokens(read_tokens(self._path))
            self._seen = seen
        return self._tokens.role_of(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a role's process was given to prove itself with."""

    role: str
    control_token: str = field(repr=False)
    data_token: str = field(repr=False)
    verify_key: str = ""
    """The run's public key: only manifests that it signed are believed. Empty: none is needed."""
    signing_key: str = field(default="", repr=False)
    """The private one; only the trainer has it."""
    data_certificate: str = ""
    """PEM that this process serves bytes with and believes others by; empty: no TLS."""
    data_key: str = field(default="", repr=False)


def authorize(
    name: str, metadata: Iterable[tuple[str, str | bytes]], *, tokens: Tokens
) -> TokenRole:
    """Return the role of whoever calls ``name``.

    Raises:
        UnauthenticatedError: no token, or an unknown one.
        AccessRefusedError: the role may not.
        ControlUnavailableError: the service cannot read its tokens.
    """
    try:
        role = tokens.role_of(_bearer(metadata))
    except PreflightError as exc:
        raise ControlUnavailableError("the control service cannot read its token file") from exc
    if role is None:
        raise UnauthenticatedError(
            "the token is missing or unknown; send the one that this run's control service was "
            "started with"
        )
    if name not in RIGHTS[role]:
        raise AccessRefusedError(f"a {role} token may not call {name}")
    return role


def require_may_register(token_role: TokenRole, worker_role: WorkerRole) -> None:
    """Raise AccessRefusedError if the bearer may not register in that role."""
    if worker_role not in _REGISTERS_AS[token_role]:
        raise AccessRefusedError(f"a {token_role} token may not register a {worker_role}")


def new_tokens(nonce: Callable[[], str]) -> dict[TokenRole, str]:
    """Return a fresh token for every role; ``nonce`` returns text that nobody can guess."""
    return {role: nonce() for role in TokenRole}


def read_tokens(path: Path) -> Mapping[TokenRole, str]:
    """Return the tokens in a token file. Raises PreflightError."""
    fields = read_private_json(path)
    unknown = sorted(fields.keys() - set(TokenRole))
    if unknown:
        raise PreflightError(
            f"{path}: {', '.join(unknown)}: no such role; known: {', '.join(TokenRole)}"
        )
    tokens = {TokenRole(role): token for role, token in fields.items()}
    try:
        return _check_tokens(tokens)
    except PreflightError as exc:
        raise PreflightError(f"{path}: {exc}") from exc


def load_credentials(path: Path) -> Credentials:
    """Return what a credentials file holds. Raises PreflightError."""
    fields = read_private_json(path)
    needed = {"role", "control_token", "data_token"}
    further = {"verify_key", "signing_key", "data_certificate", "data_key"}
    wrong = (needed - fields.keys()) | (fields.keys() - needed - further)
    if wrong:
        raise PreflightError(
            f"{path} must hold role, control_token and data_token, may hold "
            f"{', '.join(sorted(further))}, and nothing else; look at: {', '.join(sorted(wrong))}"
        )
    return Credentials(**fields)


def read_private_json(path: Path) -> dict[str, str]:
    """Return a JSON object of texts from a file that only its owner can read.

    Raises:
        PreflightError: missing, readable by others, too large, or something else; the message
            never shows what is in it.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise PreflightError(
                    f"{path} has mode {mode:04o}, so others can reach the secrets in it; "
                    f"run: chmod 600 {path}"
                )
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise PreflightError(f"cannot read {path}: {exc.strerror or exc}") from exc
    if len(data) > FILE_BYTES_MAX:
        raise PreflightError(f"{path} is larger than {FILE_BYTES_MAX} bytes; is it the right file?")
    return _parse_texts(data, path=path)


def write_private_json(path: Path, fields: Mapping[str, str]) -> None:
    """Put a JSON object into a file of mode 0600, in one step. Raises PreflightError."""
    write_private(path, json.dumps(fields).encode())


def write_private(path: Path, data: bytes) -> None:
    """Put bytes into a file of mode 0600, in one step. Raises PreflightError."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        part.replace(path)
    except OSError as exc:
        raise PreflightError(f"cannot write {path}: {exc.strerror or exc}") from exc


def _parse_texts(data: bytes, *, path: Path) -> dict[str, str]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as exc:
        # Without the parser's own words: they may quote the secret.
        raise PreflightError(f"{path} is not JSON ({type(exc).__name__})") from None
    if not isinstance(fields, dict) or not all(isinstance(v, str) for v in fields.values()):
        raise PreflightError(f"{path} must hold one JSON object of texts")
    return fields


def _check_tokens(tokens: Mapping[TokenRole, str]) -> Mapping[TokenRole, str]:
    """Return the tokens if they are fit for use. Raises PreflightError."""
    if not tokens:
        raise PreflightError("no tokens: nobody could call the control service")
    for role, token in tokens.items():
        if len(token) < TOKEN_CHARS_MIN or not token.isascii() or not token.isprintable():
            raise PreflightError(
                f"the {role} token must be at least {TOKEN_CHARS_MIN} printable ASCII characters"
            )
    if len(set(tokens.values())) != len(tokens):
        raise PreflightError("two roles have the same token, so the lesser one has all rights")
    return dict(tokens)


def _identity(path: Path) -> tuple[int, int, int]:
    """Return what changes when a file is written or replaced."""
    try:
        seen = path.stat()
    except OSError as exc:
        raise PreflightError(f"cannot read {path}: {exc.strerror or exc}") from exc
    return seen.st_mtime_ns, seen.st_ino, seen.st_size


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the token after ``authorization: Bearer``, or an empty text."""
    for key, value in metadata:
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            if scheme.lower() == "bearer":
                return token.strip()
    return ""
