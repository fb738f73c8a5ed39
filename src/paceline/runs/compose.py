"""The composition root of a run: picks store, clock, control service and backends, by name."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from threading import Lock

from paceline import system
from paceline.core.clock import Clock
from paceline.core.errors import ExitStatus, PacelineError, PreflightError, UsageError
from paceline.rental import BackendAdapter, SupportsAccess, backend_names, load_backend
from paceline.rental.compose import open_tunnel, tail_of
from paceline.rental.drivers.accepting import GpuAcceptance
from paceline.rental.orchestrator import Orchestrator
from paceline.rental.records import Machine, is_name
from paceline.rental.remote.job import pass_through
from paceline.rental.remote.keys import ensure_key_pair
from paceline.rental.remote.protocol import Access
from paceline.rental.remote.tail import Sink, Tail
from paceline.runs.adopt import (
    JobSource,
    ending_of,
    forget_driven,
    load_order,
    save_order,
    take_over,
)
from paceline.runs.beacon import Beacon
from paceline.runs.bootstrap import Guest, role_env
from paceline.runs.care import JOURNAL, care_for
from paceline.runs.deadman import Heart
from paceline.runs.fleet import Fleet, FleetParts, no_link
from paceline.runs.hosting import Control, control_for
from paceline.runs.journal import Journal
from paceline.runs.ledger import RunLedger, RunRecord
from paceline.runs.links import LinkParts, Links
from paceline.runs.live import LIVE_NAME
from paceline.runs.model import JobSpec, Slot, slots_of
from paceline.runs.outcome import RunResult
from paceline.runs.owner import OwnerLock
from paceline.runs.parts import RunParts, Watcher
from paceline.runs.passing import LogPasser, no_passing
from paceline.runs.plan import Finish
from paceline.runs.reach import exposed
from paceline.runs.run import RunDriver
from paceline.runs.shortcuts import Shortcuts
from paceline.runs.sshconfig import SshConfig
from paceline.runs.wheel import WHEEL_DIR, build_wheel
from paceline.store.protocol import Store, StoreError
from paceline.store.sqlite import SqliteStore

KEYLESS_BACKENDS = frozenset({"local", "local-docker", "ssh"})
"""Whose machines let us in without the operator's key for rented ones."""
NET_URL = "PACELINE_NET_PROBE_URL"
"""What a fresh machine downloads from to show its speed; without it speed is not looked at."""
TUNNEL_TIMEOUT_S = 60.0


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
        rental = _orchestrator(store, backend, clock, partial(_forget_name, state_dir))
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


def _give_name(services: Services, note: Callable[[str], None], machine: Machine) -> None:
    """Let plain ssh find a machine; a run does not depend on that."""
    backend = services.backend_of(machine.backend)
    if isinstance(backend, SupportsAccess):
        try:
            ssh_config(services).add(machine, backend.access(machine.handle))
        except PacelineError as exc:
            note(f"{machine.label} has no name for plain ssh: {exc}")


def _forget_name(state_dir: Path, name: str, fields: Mapping[str, object]) -> None:
    """Take a machine's name out of ssh's configuration once the machine is gone."""
    if name == "machine.destroyed":
        with suppress(OSError):  # the next `paceline ssh-config` drops what is left
            _names_in(state_dir).drop(str(fields["label"]))


def read_job(path: Path) -> tuple[JobSpec, JobSource]:
    """Read and check a job file against the backends that there are; return it as written too."""
    from paceline.runs.spec import read_text

    text = read_text(path)
    source = JobSource(name=str(path), base=path.resolve().parent, text=text)
    return source.parse(backends=backend_names()), source


def job_of_command(
    role: Mapping[str, object], *, budget_usd: float | None
) -> tuple[JobSpec, JobSource]:
    """Return the job of one machine and one command. Raises SpecError, as for a job file."""
    from paceline.runs.spec import text_of_command

    text = text_of_command(role, budget_usd=budget_usd)
    source = JobSource(name="command line", base=Path.cwd(), text=text)
    return source.parse(backends=backend_names()), source


def now_s() -> float:
    """Return Unix seconds."""
    return system.system_clock().time()


def new_run_id(name: str) -> str:
    """Return an id that no run has."""
    return f"{name}-{system.new_nonce()}"


def default_out(run_id: str) -> Path:
    """Return where a run's logs, artifacts and report go when nothing else is said."""
    return Path("runs") / run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One run that is to be made."""

    job: JobSpec
    run_id: str
    out: Path
    source: JobSource
    """The job as it was written, for whoever takes the run up when its driver is gone."""
    stream: bool = False
    retry_for_s: float | None = None
    """Where no machine can be had, look again for so long."""


def execute(services: Services, order: Order, *, watcher: Watcher) -> RunResult:
    """Run a job from record to report.

    Raises UsageError, PreflightError when nothing was started; what happens later is in the
    result, and on record.
    """
    _refuse_odd_id(order.run_id)
    out = _made(order.out).resolve()
    with _owned(services, order.run_id) as run_dir:
        record = RunRecord(
            run_id=order.run_id,
            name=order.job.name,
            created_at_ms=services.ledger.now_ms(),
            pid=os.getpid(),
            out=str(out),
        )
        # Before the record: whoever finds that finds what it takes to go on.
        services.ledger.refuse_taken(order.run_id)
        save_order(run_dir, order.source, out=out, stream=order.stream)
        services.ledger.create(record)
        try:
            result = _hosted(services, order, run_dir, out=out, watcher=watcher)
        except PacelineError as exc:
            _abandon(services, record, exc)
            raise
        except KeyboardInterrupt:
            services.ledger.abandon(record, reason="stopped before anything was rented")
            raise
        return _finished(services, record, result, out=out)


def resume(services: Services, run_id: str, *, watcher: Watcher) -> RunResult:
    """Take up a run whose driver is gone, and drive it to its end.

    Raises:
        UsageError: no such run, it is over, or what it was asked to be was not kept.
        PreflightError: somebody drives it.
        BackendError: nobody says which of its machines run; it stays as it is.
    """
    record = services.ledger.get(run_id)
    if record.outcome is not None:
        raise UsageError(f"run {run_id} is over: {record.outcome.value}; start another")
    with _owned(services, run_id) as run_dir:
        saved = load_order(run_dir)
        order = Order(
            job=saved.source.parse(backends=backend_names()),
            run_id=run_id,
            out=saved.out,
            source=saved.source,
            stream=saved.stream,
        )
        out = _made(saved.out).resolve()
        adopted = take_over(
            services.rental,
            run_id,
            slots_of(order.job),
            backend=services.backend,
            note=watcher.note,
        )
        part = _Part(adopted=adopted, ending=ending_of(out / JOURNAL))
        result = _hosted(services, order, run_dir, out=out, watcher=watcher, part=part)
        return _finished(services, record, result, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What an earlier driver has done of a run."""

    adopted: Mapping[Slot, Machine] = field(default_factory=dict)
    ending: Finish | None = None


@contextmanager
def _owned(services: Services, run_id: str) -> Iterator[Path]:
    """Drive a run while entered, alone; yield its directory."""
    run_dir = services.run_dir(run_id)
    with OwnerLock(run_dir, clock=services.clock, token=system.new_nonce()):
        yield run_dir


def _hosted(
    services: Services,
    order: Order,
    run_dir: Path,
    *,
    out: Path,
    watcher: Watcher,
    part: _Part | None = None,
) -> RunResult:
    """Drive the run beside its control service, with what it needs to be reached."""
    if {name for role in order.job.roles for name in role.backends} - KEYLESS_BACKENDS:
        ensure_key_pair(services.ssh_pubkey_path)
    with ExitStack() as parts:
        control = parts.enter_context(
            control_for(order.job, run_dir, nonce=system.new_nonce, chance=system.chance)
        )
        links = parts.enter_context(_links_for(services, order, control, watcher))
        around = _Around(
            out=out, control=control, links=links, watcher=watcher, part=part or _Part()
        )
        return _drive(services, order, around)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """What a run is driven amid."""

    out: Path
    control: Control
    links: Links | None
    watcher: Watcher
    part: _Part


@contextmanager
def _links_for(
    services: Services, order: Order, control: Control, watcher: Watcher
) -> Iterator[Links | None]:
    """Keep the parts of a run in reach of each other while entered; None without refit."""
    if control.address is None:
        yield None
        return
    refit = order.job.refit
    has_http = refit is not None and "http" in refit.transports
    with Beacon(system.new_nonce()) as beacon:
        shortcuts = Shortcuts(
            run_id=order.run_id,
            ports=control.ports,
            backend=services.backend,
            word=beacon.word,
            has_http=has_http,
        )
        links = Links(
            LinkParts(
                run_id=order.run_id,
                roles=slots_of(order.job),
                control=control.address,
                ports=control.ports,
                backend=services.backend,
                open_tunnel=partial(open_tunnel, timeout_s=TUNNEL_TIMEOUT_S),
                beacon=beacon,
                shortcuts=shortcuts,
                exposed=_exposed(order.job, control),
                run_dir=services.run_dir(order.run_id),
                note=watcher.note,
                has_store=refit is not None and "objectstore" in refit.transports,
            )
        )
        try:
            yield links
        finally:
            links.close()


def _exposed(job: JobSpec, control: Control) -> dict[Slot, tuple[int, ...]]:
    has_http = job.refit is not None and "http" in job.refit.transports
    return exposed(slots_of(job), control.ports, has_http=has_http)


def _finished(services: Services, record: RunRecord, result: RunResult, *, out: Path) -> RunResult:
    """Put the end on record, and forget what only a driver needs."""
    ended = replace(
        record,
        outcome=result.outcome,
        reason=result.message.partition("\n")[0],
        wall_s=_float(result.summary["wall_s"]),
        cost_usd=_float(result.summary["cost_usd"]),
        report=str(out / "report.json"),
    )
    result = _recorded(services, ended, result)
    forget_driven(services.run_dir(record.run_id))
    return result


def _abandon(services: Services, record: RunRecord, cause: PacelineError) -> None:
    try:
        services.ledger.abandon(record, reason=str(cause))
    except StoreError as exc:
        raise PreflightError(f"{cause}; and the record does not say so: {exc}") from cause


def _recorded(services: Services, ended: RunRecord, result: RunResult) -> RunResult:
    """Put the end on record; a record that cannot be written does not cost the result."""
    try:
        services.ledger.finish(ended)
    except PreflightError as exc:
        status = exc.exit_status if result.status is ExitStatus.OK else result.status
        message = f"{result.message}; the end of the run is not on record: {exc}"
        return replace(result, status=status, message=message)
    return result


def _drive(services: Services, order: Order, around: _Around) -> RunResult:
    control, links, watcher, out = around.control, around.links, around.watcher, around.out
    job, run_id = order.job, order.run_id
    roles = slots_of(job)

    def env_of(slot: Slot, backend: str) -> Mapping[str, str]:
        address = None if control.address is None else str(control.address)
        ours = role_env(job, roles[slot], slot, run_id=run_id, control=address)
        # Machines of one provider are near each other, until somebody knows better.
        ours = {"PACELINE_REGION": backend, **ours}
        return ours if links is None else ours | links.env(slot)

    with care_for(
        job,
        run_id,
        out=out,
        clock=services.clock,
        redact=control.redact,
        environ=system.environ(),
        is_adopted=bool(around.part.adopted),
    ) as care:
        journal, puller = care.journal, care.puller
        rental = _with_notices(services, journal)
        passer = LogPasser(
            tail_of=partial(log_of, services, sink=partial(pass_through, 1)), note=watcher.note
        )
        fleet = Fleet(
            FleetParts(
                job=job,
                run_id=run_id,
                rental=rental,
                backend=services.backend,
                env_of=env_of,
                secrets_of=control.secrets_of,
                ssh_pubkey_path=services.ssh_pubkey_path,
                scratch=services.run_dir(run_id),
                clock=services.clock,
                nonce=system.new_nonce,
                wheel_for=_wheel_maker(services, order),
                rented=partial(_give_name, services, watcher.note),
                link=no_link if links is None else links.join,
                adopted=around.part.adopted,
                passing=passer.passing if order.stream else no_passing,
                arm=care.arm,
                prepare=puller.prepare,
                retry_for_s=order.retry_for_s,
                ports=_exposed(job, control),
            )
        )
        puller.use(fleet)
        after_s = job.dead_man.after_s
        heart = Heart(fleet, clock=services.clock, word=system.new_nonce, after_s=after_s)
        started = datetime.fromtimestamp(services.clock.time(), tz=UTC)
        return RunDriver(
            RunParts(
                job=job,
                run_id=run_id,
                out=out,
                clock=services.clock,
                rental=rental,
                fleet=fleet,
                control=control.plane,
                watcher=watcher,
                journal=journal,
                started_at=started.isoformat(timespec="seconds").replace("+00:00", "Z"),
                redact=control.redact,
                ending=around.part.ending,
                chance=system.chance,
                puller=puller,
                beats=heart,
                ticking=rental,
                live=services.run_dir(run_id) / LIVE_NAME,
            )
        ).execute()


def _wheel_maker(services: Services, order: Order) -> Callable[[Slot, Machine], Path | None]:
    roles, lock = slots_of(order.job), Lock()

    def wheel_for(slot: Slot, machine: Machine) -> Path | None:
        # Only refit needs Paceline there, and this computer's own machines have it.
        wants = order.job.refit is not None and roles[slot].install_paceline
        if not wants or machine.backend == "local":
            return None
        with lock:
            return build_wheel(services.run_dir(order.run_id) / WHEEL_DIR)

    return wheel_for


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
        until=guest.path("state", str(guest.slot), "ended"),
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


def _with_notices(services: Services, journal: Journal) -> Orchestrator:
    def notify(name: str, fields: Mapping[str, object]) -> None:
        journal.record(name, fields)
        _forget_name(services.state_dir, name, fields)

    return services.rental.telling(notify)


def _orchestrator(
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


def _made(out: Path) -> Path:
    """Make the directory for what a run brings back, and find out now whether it can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / JOURNAL).open("a"):
            pass
    except OSError as exc:
        raise PreflightError(
            f"cannot write below {out}: {exc.strerror}; choose another directory with --out"
        ) from exc
    return out


def _refuse_odd_id(run_id: str) -> None:
    """Refuse an id that cannot be a label and a directory, before either is made of it."""
    if not is_name(run_id):
        raise UsageError(
            f"{run_id!r} cannot name a run; give --run-id up to 40 lower-case letters, digits and "
            "inner dashes, or leave it away"
        )


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
