"""A machine is what was offered, or is sent back: the report, its meaning, and real sshds."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.clouds import built, key_pair
from paceline.rental.acceptance import (
    Demand,
    Gpu,
    Report,
    demand_of,
    objections,
    parse,
    script,
)
from paceline.rental.backends.defaults import default_parts
from paceline.rental.drivers.accepting import GpuAcceptance
from paceline.rental.errors import (
    AttemptsFailedError,
    CommandTimeoutError,
    ConnectionLostError,
    NeverReadyError,
    NotAcceptedError,
    SshUnreachableError,
)
from paceline.rental.model import ExitCode, InstanceHandle, Offer
from paceline.rental.orchestrator import Orchestrator, RentRequest
from paceline.store.memory import MemoryStore
from paceline.system import system_clock
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.backend import FakeBackend
from paceline.testing.fakes.cloud import FakeCloud
from paceline.testing.fakes.gpus import can_fake_gpus
from paceline.testing.fakes.machine import has_sshd
from paceline.testing.fakes.machines import SshMachines
from paceline.testing.fakes.parts import fake_parts
from paceline.testing.fakes.registry import FAKES, serve_fake

__all__ = ["key_pair"]  # a fixture

OFFER = Offer("vast", "1", "h100-sxm", 2, 160, 1.0, 0.99, 1000.0, 500.0, "", {})
GOOD = """\
paceline=1
gpu=0, NVIDIA H100 80GB HBM3, 81559, 570.86.15
gpu=1, NVIDIA H100 80GB HBM3, 81559, 570.86.15
cuda_memory=85000000000
cuda=works on 2
disk_kb=100000000
net_bytes_s=62500000
end=1
"""


def demand(**changes: object) -> Demand:
    found = demand_of("h100-2x", OFFER, disk_gb=100)
    assert found is not None
    return replace(found, **changes)  # type: ignore[arg-type]


def test_what_was_offered_is_accepted() -> None:
    """Two GPUs of an H100's memory that CUDA works on, disk and net."""
    report = parse(GOOD)
    assert (
        report.gpus
        == (Gpu(name="NVIDIA H100 80GB HBM3", memory_mb=81559.0, driver="570.86.15"),) * 2
    )
    assert objections(report, demand()) == []
    assert demand_of("cpu-1x", OFFER, disk_gb=1) is None


@pytest.mark.parametrize(
    ("old", "new", "objection"),
    [
        ("end=1\n", "", "did not come to an end"),
        ("gpu=1, NVIDIA H100 80GB HBM3, 81559, 570.86.15\n", "", "has 1 GPUs that answer"),
        (
            "gpu=1, NVIDIA H100 80GB HBM3, 81559,",
            "gpu=1, NVIDIA H100 80GB HBM3, 40960,",
            "40960 MiB",
        ),
        (
            "gpu=1, NVIDIA H100 80GB HBM3, 81559,",
            "gpu=1, NVIDIA H100 80GB HBM3, [N/A],",
            "nvidia-smi: 1",
        ),
        (
            "gpu=1, NVIDIA",
            "gpu=Unable to determine the device handle, NVIDIA",
            "nvidia-smi: Unable",
        ),
        ("cuda=works on 2", "cuda=failed: cuInit returned 999", "cuInit returned 999"),
        ("cuda=works on 2", "cuda=works on 1", "CUDA works on 1"),
        ("cuda=works on 2", "cuda=absent: libcuda.so.1", "CUDA absent"),
        ("cuda=works on 2\n", "", "CUDA did not answer"),
        ("disk_kb=100000000", "disk_kb=10000000", "has 10 GB of disk free, 60 GB"),
        ("disk_kb=100000000", "disk_kb=", "unknown amount"),
        ("net_bytes_s=62500000", "net_bytes_s=1250000", "downloads at 10 Mbit/s, 100"),
        ("net_bytes_s=62500000", "net_bytes_s=0", "downloads at 0 Mbit/s"),
    ],
)
def test_what_is_wrong_is_said(old: str, new: str, objection: str) -> None:
    """One thing at a time, each with what it should have been."""
    assert old in GOOD
    assert objection in "; ".join(objections(parse(GOOD.replace(old, new)), demand()))


def test_a_machine_without_python_is_judged_by_its_driver_alone() -> None:
    """Nothing can call CUDA there; nvidia-smi has to do."""
    assert objections(parse(GOOD.replace("works on 2", "untested")), demand()) == []
    absent = "paceline=1\nsmi=absent\ncuda=untested\ndisk_kb=999999999\nend=1\n"
    assert objections(parse(absent), demand(net_mbps_min=0.0)) == [
        "has no nvidia-smi, so no driver"
    ]


@given(st.text() | st.binary().map(lambda raw: raw.decode(errors="replace")))
def test_no_report_breaks_the_parser(text: str) -> None:
    """Whatever a machine prints, what is left is a report, and only a whole one can be good."""
    report = parse(text)
    assert isinstance(report, Report)
    assert objections(report, demand()) != [] or report.is_whole


def test_addresses_that_a_shell_could_read_otherwise_are_refused() -> None:
    """The address goes into a command line."""
    assert " http://127.0.0.1:80/x " in script("f", has_net=True, net_url="http://127.0.0.1:80/x")
    assert "pip" not in script("f")
    with pytest.raises(ValueError, match="no address"):
        GpuAcceptance(clock=system_clock(), net_url="http://x/'; rm -rf ~")


# real machines of a fake provider


class _Megabytes(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"x" * 4_000_000)

    def log_message(self, *_args: object) -> None:
        """Say nothing."""


@pytest.fixture
def net_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Megabytes)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/x"
    server.shutdown()
    server.server_close()
    thread.join()


Rent = Callable[..., Orchestrator]
Told = list[tuple[str, dict[str, object]]]


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def cloud(tmp_path: Path, key_pair: Path, told: Told) -> Iterator[tuple[FakeCloud, Rent]]:
    if not has_sshd():
        pytest.skip("needs sshd: apt-get install openssh-server")
    if not can_fake_gpus():
        pytest.skip("needs cc: apt-get install gcc")
    clock = FakeClock()
    fake: FakeCloud = FAKES["vast"]()(
        clock=clock, machines=SshMachines(tmp_path / "machines"), boot_s=20.0
    )
    (tmp_path / "state" / "ssh").mkdir(parents=True)
    (tmp_path / "state" / "ssh" / "id_ed25519").symlink_to(key_pair)
    with serve_fake(fake) as environ:
        parts = fake_parts(
            clock=clock,
            state_dir=tmp_path / "state",
            environ={"HOME": str(tmp_path), **environ},
            ssh_remote=default_parts().ssh_remote,
        )
        backend = built("vast", parts)
        store = MemoryStore(clock=clock)
        nonces = iter(range(100))

        def make(**options: str) -> Orchestrator:
            return Orchestrator(
                store=store,
                backend=lambda _name: backend,
                clock=clock,
                nonce=lambda: f"{next(nonces):04x}",
                notify=lambda name, fields: told.append((name, fields)),
                accept=GpuAcceptance(clock=clock, net_timeout_s=60, **options),
            )

        yield fake, make
    fake.close()


def request_for(
    key_pair: Path, gpu: str = "h100-1x", *, net_floor_mbps: float | None = 0.0
) -> RentRequest:
    return RentRequest(
        run_id="run-1",
        role="trainer",
        index=0,
        gpu=gpu,
        backends=("vast",),
        min_disk_gb=50,
        max_dph=None,
        image="",
        ssh_pubkey_path=key_pair.with_name("id_ed25519.pub"),
        boot_timeout_s=60,
        net_floor_mbps=net_floor_mbps,
    )


def test_a_dead_gpu_is_sent_back_and_the_next_machine_is_taken(
    cloud: tuple[FakeCloud, Rent], key_pair: Path, net_url: str, told: Told
) -> None:
    """Over ssh, with a driver that has a GPU on which no context can be made."""
    fake, make = cloud
    fake.create_faults = ["dead-gpu"]
    orchestrator = make(net_url=net_url)
    machine = orchestrator.rent(request_for(key_pair, net_floor_mbps=0.001))
    assert machine.net.endswith("Mbit/s")
    [running] = [fields for name, fields in told if name == "machine.running"]
    assert running["net"] == machine.net
    [rejected, used] = fake.rentals.values()
    assert rejected.ended_at is not None
    assert used.label == machine.label
    [failed] = [one for one in orchestrator.memory.hosts().values() if one.outcomes[0].failure]
    assert "cuDevicePrimaryCtxRetain returned 719" in failed.outcomes[0].reason
    assert orchestrator.memory.blocks(now_s=fake.clock.time()) != []
    orchestrator.destroy(machine)
    assert fake.billing() == []


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("missing-gpu", "1 GPUs that answer, 2 were offered"), ("less-memory", "MiB, at least")],
)
def test_less_than_was_offered_is_sent_back(
    cloud: tuple[FakeCloud, Rent], key_pair: Path, fault: str, reason: str
) -> None:
    """All machines are so: the error tells of each, and nothing bills afterwards."""
    fake, make = cloud
    fake.faults.set_chance(fault, 1.0)
    with pytest.raises(AttemptsFailedError, match=reason) as caught:
        make().rent(request_for(key_pair, "rtx4090-2x"))
    assert isinstance(caught.value, NeverReadyError)
    assert fake.billing() == []


def test_a_machine_below_the_floor_is_sent_back(
    cloud: tuple[FakeCloud, Rent], key_pair: Path, net_url: str
) -> None:
    """As for every other floor: destroyed, its host passed over, the next one tried."""
    fake, make = cloud
    orchestrator = make(net_url=net_url)
    with pytest.raises(NeverReadyError, match=r"downloads at \d+ Mbit/s, 1000000000 are needed"):
        orchestrator.rent(request_for(key_pair, net_floor_mbps=1e9))
    assert fake.billing() == []
    assert orchestrator.memory.blocks(now_s=fake.clock.time()) != []


def test_a_machine_that_cannot_measure_is_taken_and_says_so(
    cloud: tuple[FakeCloud, Rent], key_pair: Path, told: Told
) -> None:
    """Its pip has no index that answers; the record keeps that nobody knows."""
    _fake, make = cloud
    orchestrator = make()
    machine = orchestrator.rent(request_for(key_pair, net_floor_mbps=None))
    assert machine.net.startswith("network not measured: ")
    [kept] = orchestrator.machines("run-1")
    assert kept.net == machine.net
    [running] = [fields for name, fields in told if name == "machine.running"]
    assert running["net"] == machine.net
    orchestrator.destroy(machine)


class Shaky(FakeBackend):
    """A machine whose connection breaks, or whose commands fail, before it answers."""

    troubles: ClassVar[list[Exception]] = []

    def run_remote(self, h: InstanceHandle, command: str, **_options: object) -> ExitCode:
        if self.troubles:
            raise self.troubles.pop(0)
        return ExitCode(0, 0.0)

    def sync_from(self, h: InstanceHandle, src: str, dst: Path, **_options: object) -> None:
        dst.write_text(GOOD)


@pytest.mark.parametrize(
    ("troubles", "error"),
    [
        ([SshUnreachableError("refused"), ConnectionLostError("reset")], None),
        ([SshUnreachableError("refused")] * 3, SshUnreachableError),
        ([CommandTimeoutError("180 s")], NotAcceptedError),
    ],
)
def test_a_shaky_connection_is_made_again_and_a_failed_check_is_a_no(
    troubles: list[Exception], error: type[Exception] | None, key_pair: Path
) -> None:
    """Three tries to reach it; a check that cannot be made says no."""
    clock = FakeClock()
    backend = Shaky(clock=clock)
    Shaky.troubles[:] = troubles
    handle = InstanceHandle("fake", "i-1", "l", 0.0)
    check = GpuAcceptance(clock=clock)
    if error is None:
        check(backend, handle, OFFER, request_for(key_pair, "h100-2x"))
        return
    with pytest.raises(error):
        check(backend, handle, OFFER, request_for(key_pair, "h100-2x"))
