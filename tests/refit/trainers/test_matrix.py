"""Every adapter, staging mode, payload format and transport, as the table of the guide says."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.refit.compose.data import DataPlane, open_reader, open_source
from paceline.refit.control.ledger import ControlLedger
from paceline.refit.kernels.registry import load_device_loops
from paceline.refit.model import TrainerStagingMode, WeightPayloadFormat
from paceline.refit.publisher import Publisher, PublisherOptions
from paceline.refit.receiver.loop import Receiver, ReceiverConfig
from paceline.refit.staging.torch_bytes import byte_view
from paceline.refit.trainers.torch_module import TorchModuleTrainer
from paceline.refit.transports.protocol import ObjectReader
from paceline.refit.transports.several import Source
from paceline.store.memory import MemoryStore
from paceline.system import system_clock
from paceline.testing.fakes.generator import FakeGenerator

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "staging.md"
TOKEN = "of-this-test"  # noqa: S105 - not a secret
TRANSPORTS = ("http", "objectstore", "nixl")
DELTA, CHECKPOINT = WeightPayloadFormat.XOR_DELTA, WeightPayloadFormat.FULL_HF_CHECKPOINT


def table() -> Mapping[tuple[TrainerStagingMode, WeightPayloadFormat], bool]:
    """Read the first table of the guide."""
    lines = GUIDE.read_text(encoding="utf8").splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("| staging |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    head, _, *body = ([cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows)
    return {
        (TrainerStagingMode(mode), WeightPayloadFormat(payload)): cell == "yes"
        for mode, *cells in body
        for payload, cell in zip(head[1:], cells, strict=True)
    }


class Module(torch.nn.Module):
    """Two dtypes, and a weight that is no dense block."""

    def __init__(self, *, is_dense: bool = True) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(60, 30, dtype=torch.bfloat16)
        self.outer = torch.nn.Parameter(
            torch.randn(8, 30).T if not is_dense else torch.randn(30, 8)
        )
        self.requires_grad_(False)


ADAPTERS: Mapping[str, Callable[..., TorchModuleTrainer]] = {
    "module": TorchModuleTrainer,
    "compared as on a device": lambda **options: TorchModuleTrainer(
        device_loops=lambda kind: load_device_loops("torch"), **options
    ),
}


@pytest.fixture(scope="module")
def ways(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Source, ObjectReader]]:
    """A source that also has a store of files, and a reader over one transport."""
    way = request.param
    bucket = f"file://{tmp_path_factory.mktemp('bucket')}/r"
    served = (way,) if way == "objectstore" else (way, "objectstore")
    source = open_source(
        DataPlane(transports=served, bucket=bucket), token=lambda: TOKEN, name=f"s-{way}"
    )
    reader = open_reader(
        DataPlane(transports=(way,), bucket=bucket), token=lambda: TOKEN, name=f"g-{way}"
    )
    yield way, source, reader
    reader.close()
    source.close()


def test_the_table_is_whole() -> None:
    """Twelve cells, one of which is empty."""
    cells = table()
    modes = set(TrainerStagingMode) - {TrainerStagingMode.UNSPECIFIED}
    payloads = set(WeightPayloadFormat) - {WeightPayloadFormat.UNSPECIFIED}
    assert cells.keys() == set(itertools.product(modes, payloads))
    assert [cell for cell, there in cells.items() if not there] == [
        (TrainerStagingMode.IN_PLACE, DELTA)
    ]


def beside(transport: str) -> list[Any]:
    """Return the adapters to try over a transport; devices over one of them, all at night."""
    return [
        pytest.param(
            transport,
            adapter,
            marks=pytest.mark.slow if adapter != "module" and transport != "http" else (),
        )
        for adapter in ADAPTERS
    ]


@pytest.mark.parametrize(
    ("ways", "adapter"), [case for way in TRANSPORTS for case in beside(way)], indirect=["ways"]
)
@pytest.mark.parametrize(("cell", "is_there"), table().items(), ids=str)
def test_a_cell_is_as_the_table_says(
    ways: tuple[str, Source, ObjectReader],
    adapter: str,
    cell: tuple[TrainerStagingMode, WeightPayloadFormat],
    is_there: bool,
) -> None:
    """Three versions arrive bit for bit, or the adapter refuses."""
    way, source, reader = ways
    mode, payload = cell
    torch.manual_seed(7)
    module = Module(is_dense=mode is TrainerStagingMode.IN_PLACE)
    trainer = ADAPTERS[adapter](clock=system_clock(), storage=source)
    trainer.bind_tensors(module)
    if not is_there:
        with pytest.raises(ValueError, match="COPY_TO_HOST"):
            trainer.stage_shard(tensors=None, staging_mode=mode, payload_format=payload)
        return
    names = (f"n{number}" for number in itertools.count())
    ledger = ControlLedger(MemoryStore(clock=system_clock()), nonce=lambda: next(names))
    run_id = f"{way}-{adapter[:3]}-{mode.value}-{payload.value}".lower().replace("_", "-")
    options = PublisherOptions(
        model_name="m",
        run_id=run_id,
        worker_id="t",
        staging_mode=mode,
        payload_format=payload,
        compose=False,
        close_wait_s=0,
    )
    publisher = Publisher(
        control=ledger, trainer=trainer, source=source, clock=system_clock(), options=options
    )
    with publisher:
        engine = engine_of(module)
        receiver = receiver_of(engine, ledger, reader, run_id)
        for number in range(3):
            publisher.before_step()
            module.inner.weight.view(-1)[number::7] += 1
            module.outer[number] *= 2
            found = publisher.publish(step=number).result()
            wanted = WeightPayloadFormat.FULL_TENSOR if payload is DELTA and not number else payload
            assert found.payload_format is wanted
            for _ in range(3):
                receiver.step()
            assert engine.live_bytes() == bytes_of(module)


def bytes_of(module: torch.nn.Module) -> Mapping[str, bytes]:
    state = module.state_dict()
    return {name: bytes(byte_view(name, item.contiguous()).data) for name, item in state.items()}


def engine_of(module: torch.nn.Module) -> FakeGenerator:
    zeros = {
        name: torch.zeros_like(item).contiguous() for name, item in module.state_dict().items()
    }
    return FakeGenerator([byte_view(name, item) for name, item in zeros.items()])


def receiver_of(engine: FakeGenerator, control: Any, reader: ObjectReader, run_id: str) -> Receiver:
    receiver = Receiver(
        ReceiverConfig(worker_id="g", model_name="m", run_id=run_id, endpoint="http://h"),
        control=control,
        engine=engine,
        reader=reader,
        clock=system_clock(),
        chance=lambda: 0.0,
    )
    receiver.register()
    return receiver
