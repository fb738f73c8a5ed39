"""What is read after an end: the state, the listing, and what a machine may have left."""

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.rental.backends.protocol import BackendAdapter, SupportsResidue
from paceline.rental.backends.registry import load_backend
from paceline.rental.orchestrator import Orchestrator, RentRequest
from paceline.store.memory import MemoryStore
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.nebius import TENANT_ID, FakeNebius, FakeWire
from paceline.testing.fakes.parts import fake_parts


@pytest.mark.parametrize("stays", [False, True])
def test_a_disk_that_outlives_its_machine_is_named(tmp_path: Path, *, stays: bool) -> None:
    """Nebius deletes a boot disk with its machine; one that is there all the same is told of."""
    clock = FakeClock()
    fake = FakeNebius(clock=clock, boot_s=1.0)
    parts = fake_parts(
        clock=clock,
        state_dir=tmp_path,
        environ={"NEBIUS_IAM_TOKEN": fake.key, "NEBIUS_TENANT_ID": TENANT_ID},
    )
    make: Callable[..., BackendAdapter] = load_backend("nebius")
    backend = make(parts=parts, wire=FakeWire(fake))
    assert isinstance(backend, SupportsResidue)
    (tmp_path / "key.pub").write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0 test\n")
    rental = Orchestrator(
        store=MemoryStore(clock=clock),
        backend=lambda _name: backend,
        clock=clock,
        nonce=lambda: "ab",
        notify=lambda _name, _fields: None,
    )
    machine = rental.rent(
        RentRequest(
            run_id="r",
            role="trainer",
            index=0,
            gpu="h100-1x",
            backends=("nebius",),
            min_disk_gb=100,
            max_dph=None,
            image="",
            ssh_pubkey_path=tmp_path / "key.pub",
        )
    )
    assert backend.residue(machine.handle) != []
    if stays:
        fake.faults.arm("disk-stays")
    proof = rental.destroy(machine, is_thorough=True)
    assert proof is not None
    [disk_id] = fake.disks or [""]
    left = f"left and may bill: disk {disk_id}" if stays else "no disk of it is left"
    assert proof.reads == ("its state reads destroyed", "not listed", left)
    assert str(proof).startswith(f"{machine.label} (nebius ")
