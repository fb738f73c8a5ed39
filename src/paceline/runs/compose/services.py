"""What every verb works with: store, clock and backends, picked by name."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from paceline import system
from paceline.core.clock import Clock
from paceline.core.errors import PacelineError, PreflightError, UsageError
from paceline.rental import BackendAdapter, SupportsAccess, load_backend
from paceline.rental.compose import tail_of
from paceline.rental.drivers.accepting import GpuAcceptance
from paceline.rental.orchestrator import Orchestrator
from paceline.rental.records import Machine
from paceline.rental.remote.protocol import Access
from paceline.rental.remote.tail import Sink, Tail
from paceline.runs.bootstrap import Guest
from paceline.runs.journal import Journal, delay_text
from paceline.runs.ledger import RunLedger
from paceline.runs.sshconfig import SshConfig
from paceline.store.protocol import Store
from paceline.store.sqlite import SqliteStore

NET_URL = "PACELINE_NET_PROBE_URL"
"""What a fresh machine downloads from to show its speed; without it speed is not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What every verb works with; give it back with ``close``."""

    clock: Clock
    state_dir: Path
    store: Store
    ledger: RunLedger
    rental: Orchestrator
    backend: Callable[[str], BackendAdapter]

    def backend_of(self, name: str) -> BackendAdapter:
        """Return a backend by name, one object per process."""
        return self.backend(name)

    @property
    def ssh_pubkey_path(self) -> Path:
        """Where the operator's public key for rented machines is."""
        return self.state_dir / "ssh" / "id_ed25519.pub"

    def run_dir(self, run_id: str) -> Path:
        """Return where a run keeps its lock, its secrets and its control service's records."""
        return self.state_dir / "runs" / run_id


@contextmanager
def open_services() -> Iterator[Services]:
    """Open the operator's state. Raises PreflightError when it cannot be used."""
    state_dir = system.state_dir()
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as exc:
        raise PreflightError(
            f"cannot use state directory {state_dir}: {exc.strerror}; "
            "name another one with PACELINE_STATE_DIR"
        ) from exc
    clock = system.system_clock()
    store = SqliteStore(state_dir / "paceline.sqlite", clock=clock)
    backend = cache(lambda name: load_backend(name)())
    try:
        rental = orchestrator_of(store, backend, clock, partial(forget_name, state_dir))
        yield Services(
            clock=clock,
            state_dir=state_dir,
            store=store,
            ledger=RunLedger(store),
            rental=rental,
            backend=backend,
        )
    finally:
        store.close()


def ssh_config(services: Services) -> SshConfig:
    """Return the names by which plain ssh finds machines."""
    return _names_in(services.state_dir)


def _names_in(state_dir: Path) -> SshConfig:
    user_file = Path(system.environ().get("HOME") or Path.home()) / ".ssh" / "config"
    return SshConfig(state_dir.resolve() / "ssh" / "hosts", user_file=user_file)


def give_name(services: Services, note: Callable[[str], None], machine: Machine) -> None:
    """Let plain ssh find a machine; a run does not depend on that."""
    backend = services.backend_of(machine.backend)
    if isinstance(backend, SupportsAccess):
        try:
            ssh_config(services).add(machine, backend.access(machine.handle))
        except PacelineError as exc:
            note(f"{machine.label} has no name for plain ssh: {exc}")


def forget_name(state_dir: Path, name: str, fields: Mapping[str, object]) -> None:
    """Take a machine's name out of ssh's configuration once the machine is gone."""
    if name == "machine.destroyed":
        with suppress(OSError):  # the next `paceline ssh-config` drops what is left
            _names_in(state_dir).drop(str(fields["label"]))


def now_s() -> float:
    """Return Unix seconds."""
    return system.system_clock().time()


def log_of(
    services: Services, machine: Machine, guest: Guest, *, sink: Sink, follow: bool = True
) -> Tail:
    """Return a reader of a role's log that ends with the role, or at the log's present end.

    Raises:
        UsageError: the backend does not say how its machines are reached.
    """
    return tail_of(
        access_of(services, machine),
        guest.log,
        until=guest.path("state", str(guest.slot), "ended") if follow else None,
        sink=sink,
    )


def access_of(services: Services, machine: Machine) -> Access:
    """Return how a machine is reached. Raises UsageError where its backend does not say."""
    backend = services.backend_of(machine.backend)
    if not isinstance(backend, SupportsAccess):
        raise UsageError(
            f"backend {machine.backend} does not say how its machines are reached; "
            "its adapter has to sign SupportsAccess"
        )
    return backend.access(machine.handle)


def with_notices(
    services: Services,
    journal: Journal,
    *,
    heard: Callable[[str], None],
    note: Callable[[str], None],
) -> Orchestrator:
    """Return the rental half as one run has it: what it tells goes into the run's journal.

    ``heard`` is given the name of each event, ``note`` what somebody who waits wants to know.
    """

    def notify(name: str, fields: Mapping[str, object]) -> None:
        journal.record(name, fields)
        heard(name)
        if (said := delay_text(name, fields)) is not None:
            note(said)
        forget_name(services.state_dir, name, fields)

    return services.rental.telling(notify)


def orchestrator_of(
    store: Store,
    backend: Callable[[str], BackendAdapter],
    clock: Clock,
    notify: Callable[[str, dict[str, object]], None],
) -> Orchestrator:
    """Return one that looks at every machine with GPUs before it is used."""
    try:
        accept = GpuAcceptance(clock=clock, net_url=system.environ().get(NET_URL, ""))
    except ValueError as exc:
        raise UsageError(f"{NET_URL}: {exc}; give an http address of some megabytes") from exc
    return Orchestrator(
        store=store,
        backend=backend,
        clock=clock,
        nonce=system.new_nonce,
        notify=notify,
        accept=accept,
    )
