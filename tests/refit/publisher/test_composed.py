"""Late joiners get an anchor and one delta: what a publisher composes, signs and retires."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from paceline.refit.control.ledger import ControlLedger
from paceline.refit.manifest.signature import sign_manifest
from paceline.refit.model import TensorBuffer, VersionState, WeightVersion
from paceline.refit.plan import plan_install
from paceline.refit.publisher import Publisher, PublisherOptions
from paceline.refit.publisher.values import sequence_of
from paceline.refit.receiver.install import Supply
from paceline.refit.receiver.loop import Receiver, ReceiverConfig
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.refit.transports.memory import MemoryObjectReader, MemoryObjectServer
from paceline.store.memory import MemoryStore
from paceline.testing.clock import FakeClock
from paceline.testing.fakes.generator import FakeGenerator

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


class Run:
    """A trainer and its control service."""

    def __init__(self, **options: Any) -> None:
        self.clock = FakeClock()
        self.ledger = ControlLedger(MemoryStore(clock=self.clock), nonce=lambda: "n")
        self.source = MemoryObjectServer()
        self.weights = {"w": torch.zeros(4000, dtype=torch.bfloat16), "b": torch.ones(50)}
        trainer = TorchModuleTrainer(clock=self.clock, arenas=6, transport="memory")
        trainer.bind_tensors(self.weights)
        self.publisher = Publisher(
            control=self.ledger,
            trainer=trainer,
            source=self.source,
            clock=self.clock,
            options=PublisherOptions(
                model_name="m",
                run_id="run",
                worker_id="t0",
                heartbeat_wait=lambda seconds: True,
                **options,
            ),
        )
        self.publisher.start()
        self.steps = 0

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            self.weights["w"][self.steps :: 97] += 1
            self.weights["b"][self.steps % 50] += 0.5
            self.publisher.publish(step=self.steps).result()
            self.steps += 1
        assert self.publisher.flush(timeout_s=20)  # composing follows

    def ready(self) -> Mapping[str, WeightVersion]:
        found = self.ledger.list_versions("m")
        return {each.uid: each for each in found if each.state is VersionState.READY}

    def join(self, supply: Supply | None = None) -> tuple[FakeGenerator, Receiver]:
        engine = FakeGenerator(
            [
                TensorBuffer(
                    name=name,
                    dtype="BF16" if tensor.dtype is torch.bfloat16 else "F32",
                    shape=tuple(tensor.shape),
                    data=memoryview(bytearray(tensor.nbytes)),
                )
                for name, tensor in self.weights.items()
            ]
        )
        receiver = Receiver(
            ReceiverConfig(worker_id="g0", model_name="m", run_id="run", endpoint=""),
            control=self.ledger,
            engine=engine,
            reader=MemoryObjectReader(),
            clock=self.clock,
            chance=lambda: 0.0,
            supply=supply,
        )
        return engine, receiver

    def live(self) -> dict[str, bytes]:
        return {
            name: tensor.view(torch.uint8).numpy().tobytes()
            for name, tensor in self.weights.items()
        }


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run(anchor_every=8)
    yield made
    made.publisher.close()


def test_a_late_joiner_installs_two_versions(run: Run) -> None:
    """After seven steps it is the full version and one delta, to the very bits."""
    run.publish(7)
    engine, receiver = run.join()
    for _ in range(3):
        receiver.step()
    installed = engine.installed()
    assert installed is not None
    assert (installed.version_id, installed.sequence) == ("run-000006-from-000000", 6)
    assert engine.live_bytes() == run.live()
    assert receiver.figures()["installs"] == 2


def test_the_composed_delta_is_smaller_than_the_chain(run: Run) -> None:
    """Elements that change twice are sent once, and the plan says which way costs less."""
    run.publish(7)
    ready = run.ready()
    said = ready["run-000006-from-000000"].description
    assert said is not None
    chain = 0
    for at in range(1, 7):
        each = ready[f"run-{at:06d}"].description
        assert each is not None
        chain += each.payload_bytes
    assert said.payload_bytes < chain
    plan = plan_install(ready.values(), held=None)
    assert [version.uid for version in plan.path] == ["run-000000", "run-000006-from-000000"]


def test_only_the_newest_composed_delta_stays(run: Run) -> None:
    """Older ones lead nowhere that it does not, and a new full version ends them all."""
    run.publish(5)
    composed = [uid for uid in run.ready() if "-from-" in uid]
    assert composed == ["run-000004-from-000000"]
    run.publish(5)
    assert "run-000008-full" in run.ready()
    assert [uid for uid in run.ready() if "-from-" in uid] == []
    run.publish(1)
    assert [uid for uid in run.ready() if "-from-" in uid] == ["run-000010-from-000008"]


def test_heavy_deltas_are_not_composed() -> None:
    """When composing costs much and saves little, late joiners take the chain."""
    run = Run(anchor_every=8)
    for _ in range(4):
        run.weights["w"] += torch.randn(4000, dtype=torch.bfloat16)
        run.publish()
    assert [uid for uid in run.ready() if "-from-" in uid] == []
    run.publisher.close()


def test_a_composed_delta_is_signed_by_the_trainer() -> None:
    """A late joiner that believes only the run's key gets through."""
    run = Run(sign=lambda data, statement: sign_manifest(data, statement, key=KEY))
    run.publish(4)
    engine, receiver = run.join(Supply(verify_key=KEY.public_key()))
    for _ in range(3):
        receiver.step()
    assert engine.live_bytes() == run.live()
    run.publisher.close()


def sign_with(key: Ed25519PrivateKey, **lies: Any) -> Any:
    """Return a publisher's way to sign, which may say something else than it should."""
    return lambda data, statement: sign_manifest(data, replace(statement, **lies), key=key)


OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))


@pytest.mark.parametrize(
    ("sign", "why"),
    [
        (None, "is not signed"),
        (sign_with(OTHER), "not of this run's key"),
        (sign_with(KEY, version_id="run-000009"), "version_id run-000009 was signed"),
        (sign_with(KEY, sequence=9), "sequence 9 was signed"),
        (sign_with(KEY, run_id="other"), "run_id other was signed"),
        (sign_with(KEY, root_digest="0" * 64), "root_digest"),
        (sign_with(KEY, parent_root="0" * 64), "parent_root"),
    ],
)
def test_what_the_trainer_did_not_sign_is_refused(sign: Any, why: str) -> None:
    """Unsigned, of another key, or signed about something else: nothing of it is installed."""
    run = Run(sign=sign, compose=False)
    run.publish(1)
    engine, receiver = run.join(Supply(verify_key=KEY.public_key()))
    before = engine.live_bytes()
    receiver.step()
    assert engine.installed() is None
    assert engine.live_bytes() == before
    refused = [each for each in run.ledger.list_events() if each.name == "version.refused"]
    assert why in str(refused[0].fields["reason"])
    run.publisher.close()


def test_without_a_key_the_advertised_digest_is_believed() -> None:
    """Where there are no keys, as by hand, the control service is believed."""
    run = Run(sign=sign_with(OTHER), compose=False)
    run.publish(1)
    engine, receiver = run.join(Supply())
    receiver.step()
    assert engine.live_bytes() == run.live()
    run.publisher.close()


def test_uids_of_composed_deltas_are_the_runs() -> None:
    """Who serves a composed delta is counted as being of this run."""
    assert sequence_of("run-000012-from-000008", "run") == 12
