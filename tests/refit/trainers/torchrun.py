"""A control service, a torchrun job beside it, and engines that follow what the job publishes."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.errors import DeadlineExceededError
from paceline.core.waiting import wait_until
from paceline.refit.control.auth import TokenRole
from paceline.refit.generators.protocol import GeneratorEngineAdapter
from paceline.refit.manifest.signature import trust_in, verify_key
from paceline.refit.model import VersionState, WeightVersion
from paceline.refit.plan.resharding import Want
from paceline.refit.receiver.fetch import Fetcher, FetchParts
from paceline.refit.receiver.install import Supply
from paceline.refit.receiver.loop import Receiver, ReceiverConfig
from paceline.refit.receiver.resharded import Resharded, SlotSource, read_wants
from paceline.refit.receiver.shards import check_manifests_are_of, sources_by_slot
from paceline.refit.staging.torch_bytes import DTYPE_WORDS
from paceline.refit.transports.http.reader import HttpObjectReader
from paceline.store.memory import MemoryStore
from paceline.system import chance, system_clock
from paceline.testing.fakes.control import LoopbackControl
from paceline.testing.ranks import DATA_TOKEN, run_environment, verify_key_of

JOB = Path(__file__).with_name("rank_job.py")
DEADLINE_S = 120.0
LOOK_S = 0.05


@dataclass
class Job:
    """A running job and what is around it."""

    folder: Path
    control: LoopbackControl
    process: subprocess.Popen[bytes]
    verify_key: str

    def log(self) -> str:
        """Return what the ranks have said."""
        return (self.folder / "log").read_text(errors="replace")[-6000:]

    def wait(self, is_there: Callable[[], bool], what: str) -> None:
        """Wait for a state, while the job runs."""

        def look() -> bool:
            assert self.process.poll() in (None, 0), self.log()
            return is_there()

        try:
            wait_until(
                look, what=what, clock=system_clock(), timeout_s=DEADLINE_S, interval_s=LOOK_S
            )
        except DeadlineExceededError as exc:
            raise AssertionError(f"{exc}: {self.log()}") from exc

    def follow(
        self, engine: GeneratorEngineAdapter, layout: str, *, until: int
    ) -> dict[int, dict[str, bytes]]:
        """Install whatever comes until a sequence is there; return the live bytes by sequence."""
        clock = system_clock()
        reader = HttpObjectReader(token=lambda: DATA_TOKEN, clock=clock, chance=chance)
        control = self.control.client(TokenRole.GENERATOR)
        receiver = Receiver(
            ReceiverConfig(worker_id=f"g-{layout}", model_name=layout, run_id=layout, endpoint="x"),
            control=control,
            engine=engine,
            reader=reader,
            clock=clock,
            chance=lambda: 0.0,
            supply=Supply(verify_key=verify_key(self.verify_key)),
        )
        found: dict[int, dict[str, bytes]] = {}
        receiver.register()

        def is_there() -> bool:
            receiver.step()
            installed = engine.installed()
            if installed is not None and installed.sequence not in found:
                live = engine.live_tensors()
                found[installed.sequence] = {name: bytes(b.data) for name, b in live.items()}
                (self.folder / f"{layout}-{installed.sequence}.seen").touch()
            return until in found

        self.wait(is_there, f"sequence {until} of {layout}")
        reader.close()
        control.close()
        return found

    def ready(self, uid: str) -> WeightVersion:
        """Return a version once it is READY."""
        ledger, model_name = self.control.ledger, uid.partition("-0")[0]

        def is_ready() -> bool:
            found = {each.uid: each.state for each in ledger.list_versions(model_name)}
            return found.get(uid) is VersionState.READY

        self.wait(is_ready, uid)
        return ledger.get_version(uid)

    def read(self, layout: str, uid: str, wants: Mapping[str, Want]) -> Resharded:
        """Read parts of a version as a worker of another layout does."""
        clock = system_clock()
        reader = HttpObjectReader(token=lambda: DATA_TOKEN, clock=clock, chance=chance)
        version = self.control.ledger.get_version(uid)
        trust = trust_in(version, verify_key(self.verify_key))
        slots = []
        for sources in sources_by_slot(version, self.control.ledger.list_shards(uid)).values():
            fetcher = Fetcher(reader, FetchParts(clock=clock, trust=trust))
            manifest = fetcher.fetch_manifest(sources)
            slots.append(SlotSource(manifest=manifest, shards=sources, fetcher=fetcher))
        check_manifests_are_of({s.manifest.source_slot_id: s.manifest for s in slots}, version)
        found = read_wants(wants, slots, bytes_max=2**24)
        reader.close()
        return found

    def expected(self, layout: str, step: int) -> dict[str, bytes]:
        """Return what the job's weights were, gathered by the job for this."""
        path = self.folder / f"{layout}-{step}.pt"
        self.wait(path.exists, path.name)
        state = torch.load(path)
        return {name: tensor_bytes(value) for name, value in state.items()}

    def shapes(self, layout: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype word and shape by name."""
        self.expected(layout, 0)
        state = torch.load(self.folder / f"{layout}-0.pt")
        return {name: (DTYPE_WORDS[v.dtype], tuple(v.shape)) for name, v in state.items()}

    def go_on(self, layout: str) -> None:
        """Let the ranks stop serving a layout's versions."""
        (self.folder / f"{layout}.seen").touch()

    def end(self) -> None:
        """Return when the job is over. Fails if it did not go well."""
        assert self.process.wait(DEADLINE_S) == 0, self.log()


def tensor_bytes(value: torch.Tensor) -> bytes:
    """Return a tensor's row-major bytes."""
    return bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)


@contextmanager
def torchrun(folder: Path, layouts: Sequence[str], *, ranks: int) -> Iterator[Job]:
    """Start a job of so many ranks; it is ended afterwards, whatever became of it."""
    control = LoopbackControl(MemoryStore(clock=system_clock()))
    environment = run_environment(folder, control)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    argv += [f"--nproc-per-node={ranks}", str(JOB), str(folder), ",".join(layouts)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)
    try:
        yield Job(folder=folder, control=control, process=process, verify_key=verify_key_of(folder))
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
        control.stop()
