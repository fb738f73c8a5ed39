"""Keys of a run: who may sign, who is believed, and whose servers are talked to."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import PreflightError, UsageError
from paceline.refit import compose
from paceline.refit.compose.data import DataPlane, open_reader, open_source
from paceline.refit.compose.keys import RunKeys
from paceline.refit.compose.supply import (
    may_serve_on,
    open_supply,
    relay_port,
    signer,
    with_run_tls,
)
from paceline.refit.control.auth import Credentials
from paceline.refit.errors import FetchError
from paceline.refit.manifest.render import render_manifest
from paceline.refit.manifest.signature import Statement, Trust, parse_signed, verify_key
from paceline.refit.model import TensorBuffer, WeightVersionShardManifest
from paceline.testing.payloads import full_payload

TOKEN = "data-token"  # noqa: S105 - of a test
SAID = Statement(run_id="r", version_id="v", sequence=0, root_digest="0" * 64, parent_root=None)


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return compose.create_run_keys(tmp_path / "keys.json")


@pytest.fixture
def parts() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def credentials_of(keys: RunKeys, role: str) -> Credentials:
    return Credentials(
        role=role, control_token=TOKEN, data_token=TOKEN, **keys.credentials_of(role)
    )


def manifest() -> bytes:
    tensor = TensorBuffer(name="w", dtype="U8", shape=(4,), data=memoryview(b"abcd"))
    return render_manifest(full_payload([tensor])[0])


def serve(credentials: Credentials, parts: ExitStack) -> str:
    """Serve one manifest and return its address."""
    plane = with_run_tls(DataPlane(), credentials, parts)
    server = open_source(plane, token=lambda: TOKEN, name="t")
    parts.callback(server.close)
    data = manifest()
    shown = WeightVersionShardManifest(data=data, tensor_count=1, total_bytes=4, transport="http")
    return server.publish_manifest(version_id="v", source_slot_id="s", manifest=shown)


def read(address: str, credentials: Credentials, parts: ExitStack) -> bytes:
    plane = with_run_tls(DataPlane(), credentials, parts)
    reader = open_reader(plane, token=lambda: TOKEN, name="g")
    parts.callback(reader.close)
    return reader.read_manifest(address, size_max=10_000, timeout_s=5)


def test_roles_get_what_they_need(keys: RunKeys, tmp_path: Path) -> None:
    """Only the trainer may sign, everybody may check, and a file gives the same keys again."""
    assert keys.credentials_of("trainer")["signing_key"] == keys.signing_key
    assert "signing_key" not in keys.credentials_of("generator")
    assert keys.credentials_of("reader") == {"verify_key": keys.verify_key}
    assert compose.read_run_keys(tmp_path / "keys.json") == keys
    assert (tmp_path / "keys.json").stat().st_mode & 0o077 == 0
    assert keys.signing_key not in repr(keys)
    assert keys.data_key not in repr(keys)


def test_a_file_that_holds_other_keys_is_refused(tmp_path: Path) -> None:
    """What is no set of keys says what to do."""
    path = tmp_path / "keys.json"
    path.write_text('{"verify_key": "x"}')
    path.chmod(0o600)
    with pytest.raises(PreflightError, match="start the run anew"):
        compose.read_run_keys(path)


def test_what_the_trainer_signs_others_believe(keys: RunKeys) -> None:
    """The two halves of the key fit, and a role without a key signs nothing."""
    sign = signer(credentials_of(keys, "trainer"))
    assert sign is not None
    signed = parse_signed(sign(manifest(), SAID))
    Trust(key=verify_key(keys.verify_key), expected=SAID).check(signed)
    assert signer(credentials_of(keys, "generator")) is None


def test_bytes_travel_in_tls_of_the_run(keys: RunKeys, tmp_path: Path, parts: ExitStack) -> None:
    """Members of a run read each other; another run's certificate is not believed."""
    address = serve(credentials_of(keys, "trainer"), parts)
    assert address.startswith("https://")
    assert read(address, credentials_of(keys, "generator"), parts) == manifest()
    others = compose.create_run_keys(tmp_path / "other.json")
    with pytest.raises(FetchError, match="certificate is not trusted"):
        read(address, credentials_of(others, "generator"), parts)


def test_without_a_certificate_it_is_plain(parts: ExitStack) -> None:
    """Credentials of a service that was started by hand may have no keys at all."""
    bare = Credentials(role="trainer", control_token=TOKEN, data_token=TOKEN)
    address = serve(bare, parts)
    assert address.startswith("http://")
    assert read(address, bare, parts) == manifest()


def test_unfit_keys_are_said_before_anything_starts(parts: ExitStack) -> None:
    """A damaged credentials file names the field and does not repeat the key."""
    damaged = replace(
        Credentials(role="trainer", control_token=TOKEN, data_token=TOKEN),
        verify_key="zz",
        signing_key="secret",
    )
    with pytest.raises(PreflightError, match="unfit signing_key") as caught:
        signer(damaged)
    assert "secret" not in str(caught.value)
    board: Any = None
    with pytest.raises(PreflightError, match="unfit verify_key"):
        open_supply(damaged, DataPlane(), board=board, worker_id="g", parts=parts)


def test_the_port_to_serve_on_may_be_said() -> None:
    """Machines that open few ports name one; anything else is refused with what to write."""
    assert relay_port({}) == 0
    assert relay_port({"PACELINE_RELAY_PORT": "20001"}) == 20001
    for wrong in ("x", "-1", "70000", ""):
        with pytest.raises(UsageError, match="write a port"):
            relay_port({"PACELINE_RELAY_PORT": wrong})


def test_loopback_serves_one_computer(keys: RunKeys) -> None:
    """An engine that nobody else can reach does not make others wait for it."""
    here, there = DataPlane(), DataPlane(host="10.0.0.7")
    assert may_serve_on(here, "")
    assert may_serve_on(here, "local")
    assert not may_serve_on(here, "vast")
    assert may_serve_on(there, "vast")
    assert not may_serve_on(DataPlane(transports=("nixl", "http"), host="10.0.0.7"), "vast")
