"""The composition root: stores by URL, a service and its client by address and token."""

from pathlib import Path

import pytest

from paceline.core.errors import PreflightError, UsageError
from paceline.refit import compose
from paceline.refit.control.auth import read_private_json, write_private_json
from paceline.refit.errors import AccessRefusedError, ControlUnavailableError
from paceline.refit.model import WorkerRegistration, WorkerRole
from paceline.store.protocol import StoreError
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.control import FULL, MODEL


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    compose.create_token_file(path)
    return path


@pytest.mark.parametrize("url", ["", "memory:x", "sqlite", "sqlite:", "http://secret@x"])
def test_a_url_that_names_no_store_is_a_usage_error(url: str) -> None:
    """The message shows what there is."""
    with pytest.raises(UsageError, match="memory, sqlite:PATH or redis://") as caught:
        compose.open_store(url, clock=FakeClock())
    assert "secret" not in str(caught.value)


def test_both_stores_open(tmp_path: Path) -> None:
    """Both memory and sqlite:PATH give stores that keep what is written."""
    for url in ("memory", f"sqlite:{tmp_path / 'x.db'}"):
        store = compose.open_store(url, clock=FakeClock())
        store.commit(expect={}, writes={"a": b"1"})
        assert [record.value for record in store.list("a")] == [b"1"]
        store.close()


def test_a_service_with_a_file_outlives_its_restart(tmp_path: Path, token_file: Path) -> None:
    """What was created before the restart is there after it, on another port."""
    url = f"sqlite:{tmp_path / 'control.db'}"
    uids = []
    for _ in range(2):
        service = compose.start_control_server(token_file=token_file, store=url)
        plane = compose.connect_control(service.address, token_file=token_file)
        uids.append(plane.create_version(FULL).uid)
        plane.close()
        service.stop()
        service.stop()
    assert uids[0] == uids[1]


def test_a_failed_start_leaves_the_store_usable(tmp_path: Path, token_file: Path) -> None:
    """A taken port is told, and the store is closed again."""
    url = f"sqlite:{tmp_path / 'control.db'}"
    service = compose.start_control_server(token_file=token_file)
    with pytest.raises(PreflightError, match="is taken"):
        compose.start_control_server(token_file=token_file, store=url, listen=service.address)
    compose.open_store(url, clock=FakeClock()).close()
    service.stop()


def test_unfit_parts_stop_the_start(tmp_path: Path, token_file: Path) -> None:
    """Missing tokens and a store that cannot be opened are said before anything listens."""
    with pytest.raises(PreflightError, match="cannot read"):
        compose.start_control_server(token_file=tmp_path / "absent")
    with pytest.raises(StoreError):
        compose.start_control_server(token_file=token_file, store=f"sqlite:{token_file}")


def test_clients_are_who_their_token_says(token_file: Path) -> None:
    """A role's token has that role's rights; one source of the token is required."""
    service = compose.start_control_server(token_file=token_file)
    tokens = read_private_json(token_file)
    plane = compose.connect_control(service.address, token=tokens["reader"])
    assert plane.list_versions(MODEL) == []
    with pytest.raises(AccessRefusedError):
        plane.create_version(FULL)
    plane.close()
    service.stop()
    for wrong in ({}, {"token": "x", "token_file": token_file}):
        with pytest.raises(UsageError, match="wants a token"):
            compose.connect_control(service.address, **wrong)  # type: ignore[arg-type]


def test_a_token_does_not_leave_this_computer_in_plain_text() -> None:
    """Another machine's address is refused unless it is allowed explicitly."""
    with pytest.raises(PreflightError, match="plain text"):
        compose.connect_control("10.0.0.1:8001", token="t" * 16)
    compose.connect_control("10.0.0.1:8001", token="t" * 16, allow_plaintext=True).close()


def test_a_token_file_without_operator_is_no_operators(tmp_path: Path) -> None:
    """The message says which file to use instead."""
    path = tmp_path / "tokens.json"
    write_private_json(path, {"reader": "a-token-of-readers"})
    plane = compose.connect_control("127.0.0.1:1", token_file=path)
    with pytest.raises(PreflightError, match="no operator token"):
        plane.list_versions(MODEL)
    plane.close()


def test_credentials_come_from_the_environment_or_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PACELINE_CREDENTIALS names the file; without it the message says what to set."""
    path = tmp_path / "credentials.json"
    write_private_json(path, {"role": "trainer", "control_token": "c", "data_token": "d"})
    monkeypatch.delenv("PACELINE_CREDENTIALS", raising=False)
    with pytest.raises(PreflightError, match="set PACELINE_CREDENTIALS"):
        compose.load_credentials()
    assert compose.load_credentials(path).role == "trainer"
    monkeypatch.setenv("PACELINE_CREDENTIALS", str(path))
    assert compose.load_credentials() == compose.load_credentials(path)


def test_a_registration_that_was_taken_keeps_the_machine(
    tmp_path: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each one puts another word into the lease of the dead-man switch; a refused one does not.

    A lease that cannot be written costs a line in the log, not the registration.
    """
    lease = tmp_path / "deadman" / "lease"
    monkeypatch.setenv("PACELINE_LEASE", str(lease))
    service = compose.start_control_server(token_file=token_file)
    plane = compose.connect_control(service.address, token_file=token_file)
    worker = WorkerRegistration(worker_id="w", role=WorkerRole.TRAINER, model_name=MODEL)
    plane.register_worker(worker, ttl_seconds=30)
    lease.parent.mkdir()
    words = set()
    for _ in range(3):
        plane.register_worker(worker, ttl_seconds=30)
        words.add(lease.read_text())
    assert len(words) == 3
    service.stop()
    before = lease.read_text()
    slow = compose.connect_control(service.address, token_file=token_file, timeout_s=0.3)
    with pytest.raises(ControlUnavailableError):
        slow.register_worker(worker, ttl_seconds=30)
    assert lease.read_text() == before
    for each in (plane, slow):
        each.close()
