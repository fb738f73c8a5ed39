"""Addresses with colons: parsed, rendered, dialled and forwarded like any other."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.address import join_address, split_address, told_as
from paceline.rental.backends.runpod import mapping as runpod
from paceline.rental.backends.vast import mapping as vast
from paceline.rental.errors import SshUnreachableError
from paceline.rental.model import InstanceHandle, InstanceStatus
from paceline.rental.remote.protocol import SshTarget
from paceline.rental.remote.reach import ssh_target
from paceline.rental.remote.ssh import SshChannel
from paceline.rental.remote.tunnel import Tunnel, TunnelPlan
from paceline.system import system_clock
from paceline.testing.fakes.machine import FakeMachine, has_sshd, make_key_pair

V6 = "2001:db8::7"
HANDLE = InstanceHandle("vast", "7", "paceline-r-t-0-ab", 0.0)


def target_of(endpoint: str) -> SshTarget:
    status = InstanceStatus("running", "", 0, None, endpoint, {})
    return ssh_target(HANDLE, status, identity=None, known_hosts=Path("k"))


@given(st.ip_addresses().map(str) | st.just("host.example"), st.integers(1, 65_535))
def test_what_is_joined_is_split(host: str, port: int) -> None:
    """For every address, as host:port and as the endpoint of a machine."""
    assert split_address(join_address(host, port)) == (host, port)
    found = target_of(f"ssh://root@{join_address(host, port)}")
    assert (found.host, found.port) == (host, port)


@pytest.mark.parametrize("endpoint", [f"ssh://root@{V6}:22", "ssh://root@[::1:22", "ssh://a@[x]:1"])
def test_an_address_that_could_be_two_is_refused(endpoint: str) -> None:
    """Without brackets nobody knows where the port begins."""
    with pytest.raises(SshUnreachableError):
        target_of(endpoint)


def test_providers_may_give_such_addresses() -> None:
    """The endpoint and each mapped port."""
    row = {
        "id": 7,
        "actual_status": "running",
        "public_ipaddr": f"{V6} ",
        "ports": {"22/tcp": [{"HostPort": "41022"}], "20001/tcp": [{"HostPort": "41023"}]},
    }
    found = vast.status_of(row, now_s=0.0)
    assert found.public_endpoint == f"ssh://root@[{V6}]:41022"
    assert dict(found.ports) == {20_001: f"[{V6}]:41023"}
    ports = [{"private": 20_001, "public": 41_023, "type": "tcp", "ip": V6}]
    pod = {
        "id": "abcd1",
        "status": "RUNNING",
        "ssh": {"direct": {"host": V6, "port": 41_022}},
        "runtime": {"ports": ports},
    }
    told = runpod.status_of(pod, InstanceHandle("runpod", "abcd1", "l", 0.0), now_s=0.0)
    assert told.public_endpoint == f"ssh://root@[{V6}]:41022"
    assert dict(told.ports) == {20_001: f"[{V6}]:41023"}


@pytest.mark.parametrize(
    "ports",
    [
        None,
        [],
        "x",
        {"20001/udp": [{"HostPort": "1"}]},
        {"x/tcp": [{"HostPort": "1"}]},
        {"20001/tcp": []},
        {"20001/tcp": [{"HostPort": "70000"}]},
        {"22/tcp": [{"HostPort": "9"}]},
    ],
)
def test_what_is_no_map_of_ports_is_none(ports: object) -> None:
    """Whatever a provider says, nothing is made up and nothing breaks."""
    assert vast.ports_of({"public_ipaddr": "192.0.2.1", "ports": ports}) == {}


def test_a_server_on_every_address_tells_loopback() -> None:
    """Every address is none to dial."""
    assert [told_as(host) for host in ("0.0.0.0", "::", "::1", "h")] == [  # noqa: S104
        "127.0.0.1",
        "127.0.0.1",
        "::1",
        "h",
    ]


def has_v6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.fixture
def target(tmp_path: Path) -> Iterator[SshTarget]:
    public = make_key_pair(tmp_path / "key")
    machine = FakeMachine(tmp_path / "m", authorized_keys=[public], host="::1")
    machine.start()
    yield SshTarget(
        name="m",
        host=machine.host,
        port=machine.port,
        user=machine.user,
        known_hosts=tmp_path / "known",
        identity=tmp_path / "key",
    )
    machine.stop()


@pytest.mark.enable_socket
@pytest.mark.skipif(not has_sshd(), reason="needs sshd: apt-get install openssh-server")
@pytest.mark.skipif(not has_v6(), reason="this computer has no IPv6 on loopback")
def test_a_tunnel_over_such_an_address_leads_to_one(target: SshTarget) -> None:
    """Ssh to ::1, and a port of the machine that leads to a server on ::1 here."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = int(server.getsockname()[1])
        plan = TunnelPlan(name="six", to_here=((port, "::1"),))
        tunnel = Tunnel(SshChannel(target, control_dir=None), plan, clock=system_clock())
        tunnel.open(timeout_s=30)

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"here")

        threading.Thread(target=answer, daemon=True).start()
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            assert connection.recv(4) == b"here"
        tunnel.close()
