"""Tokens, the files they are in, and who may do what."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import PreflightError
from paceline.refit.control import auth
from paceline.refit.control.auth import (
    RIGHTS,
    FixedTokens,
    TokenFile,
    TokenRole,
    UnauthenticatedError,
    authorize,
    load_credentials,
    read_private_json,
    write_private_json,
)
from paceline.refit.errors import AccessRefusedError, ControlUnavailableError
from paceline.refit.wire.rpc import CONTROL_RPCS

SECRETS = {role: f"secret-of-the-{role}-{'x' * 8}" for role in TokenRole}
TEXTS = {role.value: token for role, token in SECRETS.items()}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    write_private_json(path, TEXTS)
    return path


def test_every_call_has_a_right_and_every_right_a_call() -> None:
    """The table names calls that exist; all but two are open to somebody beside the operator."""
    names = {rpc.name for rpc in CONTROL_RPCS}
    assert RIGHTS[TokenRole.OPERATOR] == names
    lesser = [RIGHTS[role] for role in TokenRole if role is not TokenRole.OPERATOR]
    assert names - set().union(*lesser) == {"DrainWorker", "SetPin"}
    assert all(
        not name.startswith(("List", "Get", "Watch")) or all(name in r for r in lesser)
        for name in names
    )


def test_readers_change_nothing() -> None:
    """A reader's rights are calls that read."""
    assert all(name.startswith(("List", "Get", "Watch")) for name in RIGHTS[TokenRole.READER])


def test_generators_cannot_publish_and_trainers_cannot_lease() -> None:
    """Each role lacks what makes the other."""
    assert not RIGHTS[TokenRole.GENERATOR] & {
        "CreateWeightVersion",
        "CreateWeightVersionShard",
        "DeleteWeightVersion",
        "DeleteWeightVersionShard",
        "UpdateWeightVersionState",
        "DescribeVersion",
    }
    assert not RIGHTS[TokenRole.TRAINER] & {"RegisterVersionLease", "ReportInstalled"}


@given(st.text(max_size=60))
def test_any_other_text_is_nobodys_token(text: str) -> None:
    """Only the four tokens have roles."""
    expected = next((role for role, token in SECRETS.items() if token == text), None)
    assert FixedTokens(SECRETS).role_of(text.encode("utf8", "replace").decode()) is expected


@pytest.mark.parametrize("role", TokenRole)
def test_the_bearer_scheme_is_read_as_http_reads_it(role: TokenRole) -> None:
    """The scheme's case and spaces around the token do not matter."""
    for header in (f"Bearer {SECRETS[role]}", f"bearer  {SECRETS[role]} "):
        metadata: list[tuple[str, str | bytes]] = [("other", b"\x00"), ("authorization", header)]
        assert authorize("GetVersion", metadata, tokens=FixedTokens(SECRETS)) is role


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Basic eDp5", SECRETS[TokenRole.READER]]
)
def test_anything_else_is_unauthenticated(header: str) -> None:
    """Without the scheme or the token there is no role."""
    with pytest.raises(UnauthenticatedError):
        authorize("GetVersion", [("authorization", header)], tokens=FixedTokens(SECRETS))
    with pytest.raises(AccessRefusedError, match="may not call"):
        authorize(
            "RecordEvent",
            [("authorization", f"Bearer {SECRETS[TokenRole.READER]}")],
            tokens=FixedTokens(SECRETS),
        )


def test_a_replaced_token_file_is_read_again(token_file: Path) -> None:
    """Old tokens stop and new ones start working without a restart."""
    tokens = TokenFile(token_file)
    assert tokens.role_of(TEXTS["reader"]) is TokenRole.READER
    write_private_json(token_file, {"reader": "an-entirely-new-token"})
    assert tokens.role_of(TEXTS["reader"]) is None
    assert tokens.role_of("an-entirely-new-token") is TokenRole.READER


def test_an_unreadable_token_file_lets_nobody_in(token_file: Path) -> None:
    """When the file breaks while the service runs, calls are UNAVAILABLE, not open."""
    tokens = TokenFile(token_file)
    token_file.unlink()
    metadata = [("authorization", f"Bearer {TEXTS['operator']}")]
    with pytest.raises(ControlUnavailableError):
        authorize("GetVersion", metadata, tokens=tokens)
    write_private_json(token_file, TEXTS)
    assert authorize("GetVersion", metadata, tokens=tokens) is TokenRole.OPERATOR


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_can_reach_is_refused(token_file: Path, mode: int) -> None:
    """Any right of group or others makes the file unfit; the message holds the remedy."""
    token_file.chmod(mode)
    with pytest.raises(PreflightError, match=f"mode {mode:04o}.*chmod 600 {token_file}"):
        TokenFile(token_file)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "no tokens"),
        ({"operator": "short"}, "at least 16"),
        ({"operator": "with-a-newline-in-it\n"}, "printable"),
        ({"king": "long-enough-for-a-token"}, "king: no such role"),
        ({"operator": "long-enough-for-a-token", "reader": "long-enough-for-a-token"}, "two roles"),
    ],
    ids=["none", "short", "newline", "role", "same"],
)
def test_unfit_tokens_are_refused_without_showing_them(
    tmp_path: Path, fields: dict[str, str], says: str
) -> None:
    """What is wrong is said, the token is not."""
    path = tmp_path / "tokens.json"
    write_private_json(path, fields)
    with pytest.raises(PreflightError, match=says) as caught:
        TokenFile(path)
    assert not any(token in str(caught.value) for token in fields.values())


@pytest.mark.parametrize(
    "content",
    [b"", b"secret-secret", b'["secret"]', b'{"role": 1}', b"\xff", b"[" * 5000, b"x" * 70_000],
    ids=["empty", "text", "list", "number", "bytes", "deep", "large"],
)
def test_a_file_of_something_else_is_refused_without_showing_it(
    tmp_path: Path, content: bytes
) -> None:
    """Only a JSON object of texts is taken, and no content is ever quoted."""
    path = tmp_path / "file.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(PreflightError, match=str(path)) as caught:
        read_private_json(path)
    assert "secret" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The message holds the path and the reason."""
    with pytest.raises(PreflightError, match=r"absent\.json: No such file"):
        read_private_json(tmp_path / "absent.json")


def test_private_files_are_private_from_the_start(tmp_path: Path) -> None:
    """The file has mode 0600, replaces a looser one, and leaves nothing beside it."""
    path = tmp_path / "tokens.json"
    path.write_text("{}")
    path.chmod(0o644)
    write_private_json(path, TEXTS)
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == TEXTS
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(PreflightError, match="cannot write"):
        write_private_json(tmp_path / "no" / "such.json", TEXTS)


def test_credentials_are_read_and_never_shown(tmp_path: Path) -> None:
    """The fields arrive, those of keys if they are there, and the repr has no secret in it."""
    path = tmp_path / "credentials.json"
    fields = {"role": "trainer", "control_token": "secret-1", "data_token": "secret-2"}
    write_private_json(path, fields)
    credentials = load_credentials(path)
    assert (credentials.role, credentials.control_token, credentials.data_token) == (
        "trainer",
        "secret-1",
        "secret-2",
    )
    assert "secret" not in repr(credentials)
    write_private_json(path, {**fields, "verify_key": "public", "signing_key": "secret-3"})
    signing = load_credentials(path)
    assert (signing.verify_key, signing.signing_key) == ("public", "secret-3")
    assert "secret" not in repr(signing)
    for wrong in ({"role": "trainer"}, {**fields, "extra": "x"}):
        write_private_json(path, wrong)
        with pytest.raises(PreflightError, match="must hold role"):
            load_credentials(path)


def test_fresh_tokens_are_fit_and_differ() -> None:
    """new_tokens gives every role what a service accepts."""
    numbers = iter(range(10))
    tokens = auth.new_tokens(lambda: f"{next(numbers):032x}")
    assert FixedTokens(tokens).role_of(tokens[TokenRole.TRAINER]) is TokenRole.TRAINER
    assert tokens.keys() == set(TokenRole)
