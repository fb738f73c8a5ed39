"""One run from its record to its report: what it is driven with, and amid what."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Lock

from paceline import system
from paceline.core.errors import ExitStatus, PacelineError, PreflightError, UsageError
from paceline.rental import backend_names
from paceline.rental.compose import open_tunnel
from paceline.rental.orchestrator import Orchestrator
from paceline.rental.records import Machine, is_name
from paceline.rental.remote.job import pass_through
from paceline.rental.remote.keys import ensure_key_pair
from paceline.runs.adopt import (
    JobSource,
    ending_of,
    forget_driven,
    load_order,
    save_order,
    take_over,
)
from paceline.runs.beacon import Beacon
from paceline.runs.bootstrap import role_env
from paceline.runs.care import JOURNAL, Care, care_for
from paceline.runs.compose.services import Services, give_name, log_of, with_notices
from paceline.runs.deadman import Heart
from paceline.runs.fleet import Fleet, FleetParts, no_link
from paceline.runs.hosting import Control, control_for
from paceline.runs.ledger import RunRecord
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
from paceline.runs.wheel import WHEEL_DIR, build_wheel
from paceline.store.protocol import StoreError

KEYLESS_BACKENDS = frozenset({"local", "local-docker", "ssh"})
"""Whose machines let us in without the operator's key for rented ones."""
TUNNEL_TIMEOUT_S = 60.0


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
    heard: Callable[[str], None] = lambda event: None
    """Is given the name of each event that renting tells of, from any thread."""


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
            note=watcher.note,
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
    control, job, run_id = around.control, order.job, order.run_id
    with care_for(
        job,
        run_id,
        out=around.out,
        clock=services.clock,
        redact=control.redact,
        environ=system.environ(),
        is_adopted=bool(around.part.adopted),
    ) as care:
        rental = with_notices(services, care.journal, heard=order.heard, note=around.watcher.note)
        fleet = Fleet(_fleet_parts(services, order, around, care=care, rental=rental))
        care.puller.use(fleet)
        after_s = job.dead_man.after_s
        heart = Heart(fleet, clock=services.clock, word=system.new_nonce, after_s=after_s)
        started = datetime.fromtimestamp(services.clock.time(), tz=UTC)
        return RunDriver(
            RunParts(
                job=job,
                run_id=run_id,
                out=around.out,
                clock=services.clock,
                rental=rental,
                fleet=fleet,
                control=control.plane,
                watcher=around.watcher,
                journal=care.journal,
                started_at=started.isoformat(timespec="seconds").replace("+00:00", "Z"),
                redact=control.redact,
                ending=around.part.ending,
                chance=system.chance,
                puller=care.puller,
                beats=heart,
                ticking=rental,
                live=services.run_dir(run_id) / LIVE_NAME,
            )
        ).execute()


def _fleet_parts(
    services: Services, order: Order, around: _Around, *, care: Care, rental: Orchestrator
) -> FleetParts:
    control, links, note = around.control, around.links, around.watcher.note
    passer = LogPasser(tail_of=partial(log_of, services, sink=partial(pass_through, 1)), note=note)
    return FleetParts(
        job=order.job,
        run_id=order.run_id,
        rental=rental,
        backend=services.backend,
        env_of=_env_maker(order, around),
        secrets_of=control.secrets_of,
        ssh_pubkey_path=services.ssh_pubkey_path,
        scratch=services.run_dir(order.run_id),
        clock=services.clock,
        nonce=system.new_nonce,
        wheel_for=_wheel_maker(services, order),
        rented=partial(give_name, services, note),
        link=no_link if links is None else links.join,
        adopted=around.part.adopted,
        passing=passer.passing if order.stream else no_passing,
        arm=care.arm,
        prepare=care.puller.prepare,
        retry_for_s=order.retry_for_s,
        ports=_exposed(order.job, control),
    )


def _env_maker(order: Order, around: _Around) -> Callable[[Slot, str], Mapping[str, str]]:
    roles, links = slots_of(order.job), around.links
    address = None if around.control.address is None else str(around.control.address)

    def env_of(slot: Slot, backend: str) -> Mapping[str, str]:
        ours = role_env(order.job, roles[slot], slot, run_id=order.run_id, control=address)
        # Machines of one provider are near each other, until somebody knows better.
        ours = {"PACELINE_REGION": backend, **ours}
        return ours if links is None else ours | links.env(slot)

    return env_of


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
