"""Every loop of the guides trains here with a real control service, and an engine follows.

One process, real gRPC and HTTP on loopback; the engine is bytes without a model.
"""

import importlib.util
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from accelerate.state import AcceleratorState

from paceline.refit import compose
from paceline.refit.compose.data import DataPlane, open_reader
from paceline.refit.control.auth import read_private_json, write_private_json
from paceline.refit.model import TensorBuffer
from paceline.refit.receiver.loop import Receiver, ReceiverConfig
from paceline.refit.staging.torch_bytes import byte_view
from paceline.system import system_clock
from paceline.testing.fakes.generator import FakeGenerator

FOLDER = Path(__file__).parents[2] / "examples" / "loops"
DATA_TOKEN = "of-this-test"  # noqa: S105 - not a secret
STEPS = 2


@pytest.fixture(autouse=True)
def _examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let examples import what lies beside them, as Python does when it runs them."""
    monkeypatch.syspath_prepend(FOLDER)
    yield
    sys.modules.pop("tiny", None)
    AcceleratorState._reset_state(reset_partial_state=True)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loops_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Engine:
    """Follows the run in a thread of its own, and remembers the step of every version it saw."""

    def __init__(self, address: str, token: str) -> None:
        zeros: Mapping[str, torch.Tensor] = {
            name: torch.zeros_like(each)
            for name, each in load("tiny").network().state_dict().items()
        }
        buffers: list[TensorBuffer] = [byte_view(name, each) for name, each in zeros.items()]
        self.bytes = FakeGenerator(buffers)
        self._control = compose.connect_control(address, token=token)
        self._reader = open_reader(DataPlane(), token=lambda: DATA_TOKEN, name="engine")
        self.receiver = Receiver(
            ReceiverConfig(worker_id="engine", model_name="m", run_id="r", endpoint="http://h"),
            control=self._control,
            engine=self.bytes,
            reader=self._reader,
            clock=system_clock(),
            chance=lambda: 0.0,
        )
        self.receiver.register()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stopped.wait(0.01):
            self.receiver.step()

    def tensor(self, name: str) -> torch.Tensor:
        """Return the live bytes as the floats that they are."""
        return torch.frombuffer(bytearray(self.bytes.live_bytes()[name]), dtype=torch.float32)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(30)
        self._reader.close()
        self._control.close()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A run as the guide makes it by hand: control service, credentials, environment, an engine."""
    tokens = tmp_path / "tokens.json"
    compose.create_token_file(tokens)
    service = compose.start_control_server(token_file=tokens)
    control_token = read_private_json(tokens)
    credentials = tmp_path / "trainer.json"
    write_private_json(
        credentials,
        {"role": "trainer", "control_token": control_token["trainer"], "data_token": DATA_TOKEN},
    )
    for name, value in {
        "RUN_ID": "r",
        "MODEL": "m",
        "CONTROL": service.address,
        "CREDENTIALS": str(credentials),
        "OUT": str(tmp_path),
    }.items():
        monkeypatch.setenv(f"PACELINE_{name}", value)
    engine = Engine(service.address, control_token["generator"])
    yield engine
    engine.close()
    service.stop()


def trained(steps: int) -> dict[str, torch.Tensor]:
    """Return what the network is after so many steps, without anything published."""
    tiny = load("tiny")
    model = tiny.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        tiny.loss_of(model, step).backward()
        optimizer.step()
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


@pytest.mark.parametrize("name", ["plain", "verl_style", "accelerate_loop"])
def test_the_engine_has_what_training_without_it_gives(engine: Engine, name: str) -> None:
    """Publishing changes no bit of training, and the engine ends with the last step's bits."""
    load(name).main(STEPS)
    for tensor, wanted in trained(STEPS).items():
        assert torch.equal(engine.tensor(tensor), wanted.view(-1)), tensor
    assert engine.receiver.figures()["refusals"] == 0


def test_torchrun_loop_as_its_only_process(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 over one process; what several do is in tests of sharded trainers."""
    for name, value in {
        "WORLD_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    load("torchrun_loop").main(STEPS)
    for tensor, wanted in trained(STEPS).items():
        assert torch.equal(engine.tensor(tensor), wanted.view(-1)), tensor


def test_prime_rl_style_marks_every_step(engine: Engine, tmp_path: Path) -> None:
    """The orchestrator's mark comes when a step can be fetched, for each of them."""
    module = load("prime_rl_style")
    module.main(STEPS, tmp_path / "out")
    assert module.newest_step(tmp_path / "out") == STEPS
    assert engine.receiver.health().installed is not None


def test_lora_loop_publishes_whole_weights(engine: Engine) -> None:
    """Merged, a LoRA reaches an engine that knows nothing of it, and moves only what it is on."""
    load("lora_loop").main(STEPS)
    start = trained(0)
    assert torch.equal(engine.tensor("0.bias"), start["0.bias"])
    assert not torch.equal(engine.tensor("0.weight"), start["0.weight"].view(-1))
