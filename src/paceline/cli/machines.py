"""The verbs that reach into a run's machines: logs, ssh, exec, sync, ssh-config."""

import errno
import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import click

from paceline.cli.completion import run_ids
from paceline.cli.lines import JsonLines
from paceline.cli.streams import ReaderGoneError, output_to_stderr
from paceline.core.errors import ExitStatus, MissingExtraError, PreflightError, UsageError
from paceline.rental import (
    BackendError,
    InstanceNotFoundError,
    InstanceState,
    SupportsAccess,
)
from paceline.rental.compose import terminal_of
from paceline.rental.records import Machine
from paceline.rental.remote.job import pass_through
from paceline.rental.remote.rules import Copy
from paceline.rental.remote.tail import Sink
from paceline.rental.remote.tree import states_of
from paceline.runs import compose
from paceline.runs.bootstrap import Guest
from paceline.runs.charts import bytes_text
from paceline.runs.compose import Services
from paceline.runs.deadman import LOG_PREFIX
from paceline.runs.ledger import RunRecord
from paceline.runs.model import Slot
from paceline.runs.sshconfig import SshConfig

_PIECE_BYTES = 1 << 16
AGAIN_S = 1.0
"""How soon a role that ended is looked at again while its log is followed."""

_Command = TypeVar("_Command", bound=Callable[..., object])


def _which_machine(command: _Command) -> _Command:
    """Add the words that name one machine of a run."""
    for add in (
        click.option("--index", default=0, show_default=True, help="Which of the role's machines."),
        click.option("--role", help="Which role; may be left away when there is one."),
        click.argument("run_id", metavar="RUN", shell_complete=run_ids),
    ):
        command = add(command)
    return command


@click.command()
@_which_machine
@click.option("-f", "--follow", is_flag=True, help="Go on until the run is over.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def logs(*, run_id: str, role: str | None, index: int, follow: bool, as_json: bool) -> int:
    """Show the log of a role, from its machine or, after the run, from what was pulled.

    From the machine it is read live, also when whoever started the run is gone. With --json each
    line has its role, index and text, and the byte at which it begins.
    """
    with compose.open_services() as services:
        record = services.ledger.get(run_id)
        machines = services.rental.machines(run_id)
        names = sorted({m.role for m in machines} | _pulled_roles(record))
        slot = Slot(role=role or _only(names, run_id), index=index)
        machine = _machine_of(machines, slot)
        if machine is not None and _is_running(services, machine):
            guest = Guest(run_id=run_id, slot=slot)
            with _shown(slot, as_json=as_json) as sink:
                _show_live(services, machine, guest, follow=follow, sink=sink)
            return ExitStatus.OK
    path = Path(record.out) / "logs" / f"{slot}.log"
    if not path.is_file():
        raise UsageError(f"no log of {slot} in {path.parent}; roles: {', '.join(names) or 'none'}")
    with path.open("rb") as file, _shown(slot, as_json=as_json) as sink:
        while content := file.read(_PIECE_BYTES):
            sink(content)
    return ExitStatus.OK


@contextmanager
def _shown(slot: Slot, *, as_json: bool) -> Iterator[Sink]:
    """Yield what takes the bytes of a log and shows them."""
    if not as_json:
        yield _to_stdout
        return
    lines = JsonLines(slot, lambda text: _to_stdout(text.encode()))
    try:
        yield lines.take
    finally:
        lines.close()


@click.command()
@_which_machine
def ssh(*, run_id: str, role: str | None, index: int) -> int:
    """Open a shell on a machine of RUN, in its role's working directory."""
    with compose.open_services() as services:
        machine, guest = _find(services, run_id, role, index)
        terminal = terminal_of(compose.access_of(services, machine), guest.path("work"))
    program = terminal.argv[0]
    if terminal.cwd is not None:
        os.chdir(terminal.cwd)
    try:
        os.execvpe(program, list(terminal.argv), dict(terminal.environ))  # noqa: S606 - words
    except FileNotFoundError as exc:
        raise PreflightError(
            f"there is no {program} on this computer; install it to reach machines"
        ) from exc


@click.command("exec", context_settings={"ignore_unknown_options": True})
@_which_machine
@click.option("--timeout", "timeout_s", type=click.IntRange(min=1), help="Seconds; then it ends.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; output to stderr.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(
    *,
    run_id: str,
    role: str | None,
    index: int,
    timeout_s: int | None,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND on a machine of RUN; its output and exit status are passed on.

    It begins in the role's working directory. One argument is a line for the shell there, several
    are a program and its arguments. With --json all that it says goes to stderr, and stdout has
    its exit status and where it ran.
    """
    line = command[0] if len(command) == 1 else shlex.join(command)
    with compose.open_services() as services:
        machine, guest = _find(services, run_id, role, index)
        backend = services.backend_of(machine.backend)
        there = f"cd {shlex.quote(guest.path('work'))} || exit 126\n{line}"
        with output_to_stderr() if as_json else nullcontext():
            ended = backend.run_remote(machine.handle, there, stream=True, timeout_s=timeout_s)
    if as_json:
        found = {"exit_code": ended.code, "duration_s": ended.duration_s}
        click.echo(json.dumps(found | _where(machine)))
    return ended.code


def _where(machine: Machine) -> dict[str, object]:
    return {
        "run_id": machine.run_id,
        "role": machine.role,
        "index": machine.index,
        "backend": machine.backend,
        "label": machine.label,
    }


@click.command()
@_which_machine
@click.argument("src")
@click.argument("dst")
@click.option("--exclude", "excludes", multiple=True, help="A pattern of rsync; may be repeated.")
@click.option("--include", "includes", multiple=True, help="Wins over --exclude.")
@click.option("--delete", is_flag=True, help="Remove there what is not in SRC; towards a machine.")
@click.option("--dry-run", is_flag=True, help="Say what would be copied where, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def sync(  # noqa: PLR0913 - one parameter per option
    *,
    run_id: str,
    role: str | None,
    index: int,
    src: str,
    dst: str,
    excludes: tuple[str, ...],
    includes: tuple[str, ...],
    delete: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Copy between this computer and a machine of RUN, as rsync does.

    The side on the machine begins with a colon: `sync RUN src/ :src`, `sync RUN :out/ here/`.
    Relative to there is the role's working directory. Counted are the files that SRC has here,
    patterns applied, and towards here those that are new or changed.
    """
    if src.startswith(":") == dst.startswith(":"):
        raise UsageError("one of SRC and DST begins with a colon: that side is on the machine")
    if src.startswith(":") and delete:
        raise UsageError("--delete only works towards a machine; nothing is deleted here")
    is_to = dst.startswith(":")
    here, copy = Path(src if is_to else dst), Copy(includes=includes, excludes=excludes)
    with compose.open_services() as services:
        machine, guest = _find(services, run_id, role, index)
        backend = services.backend_of(machine.backend)
        there = _there(guest, (dst if is_to else src)[1:])
        begun_s = services.clock.monotonic()
        before = {} if is_to else states_of(here, copy)
        if dry_run:
            click.echo(
                f"{src} -> {dst}: {there} on {machine.label} ({machine.backend})", err=as_json
            )
        elif is_to:
            backend.sync_to(
                machine.handle, here, there, includes=includes, excludes=excludes, delete=delete
            )
        else:
            backend.sync_from(machine.handle, there, here, includes=includes, excludes=excludes)
        wall_s = services.clock.monotonic() - begun_s
    after = states_of(here, copy)
    sizes = [state.num_bytes for path, state in after.items() if before.get(path) != state]
    if as_json:
        found = {"src": src, "dst": dst, "there": there, "copied": not dry_run}
        counted = {"num_files": len(sizes), "num_bytes": sum(sizes), "wall_s": round(wall_s, 3)}
        click.echo(json.dumps(found | counted | _where(machine)))
    elif not dry_run:
        click.echo(f"{len(sizes)} files, {bytes_text(sum(sizes))}", err=True)


@click.command("ssh-config")
@click.argument("what", type=click.Choice(["show", "install", "remove"]), default="show")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ssh_config(*, what: str, as_json: bool) -> None:
    """Let plain `ssh paceline-RUN-ROLE`, rsync and editors find the machines of all runs.

    `install` adds one Include line to ~/.ssh/config, `remove` takes it out; the names themselves
    come and go with the machines. `show` prints them.
    """
    with compose.open_services() as services:
        config = compose.ssh_config(services)
        if what == "install":
            config.install()
        elif what == "remove":
            config.remove()
        problems = _refresh(services, config)
        names = config.names()
    if as_json:
        found = {"installed": config.is_installed(), "names": names, "problems": problems}
        click.echo(json.dumps(found))
        return
    state = "installed" if config.is_installed() else "not installed: paceline ssh-config install"
    click.echo(f"{config.user_file}: {state}", err=True)
    for problem in problems:
        click.echo(problem, err=True)
    for name in names:
        click.echo(name)


def _refresh(services: Services, config: SshConfig) -> list[str]:
    """Write the names of all machines on record again, and drop those of others."""
    machines = services.rental.machines()
    config.keep({machine.label for machine in machines})
    problems = []
    for machine in machines:
        if machine.instance is None:
            continue
        try:
            backend = services.backend_of(machine.backend)
            if isinstance(backend, SupportsAccess):
                config.add(machine, backend.access(machine.instance))
        except (BackendError, MissingExtraError) as exc:
            problems.append(f"{machine.label}: {exc}")
    return problems


def _show_live(
    services: Services, machine: Machine, guest: Guest, *, follow: bool, sink: Sink
) -> None:
    """Print the log from its machine; with ``follow`` over restarts, until the run is over."""
    reads = isinstance(services.backend_of(machine.backend), SupportsAccess)
    if not reads and sink is _to_stdout:
        command = f"exec tail -n +1 {'-F' if follow else ''} {shlex.quote(guest.log)}"
        services.backend_of(machine.backend).run_remote(machine.handle, command, stream=True)
        return
    tail = compose.log_of(services, machine, guest, sink=sink, follow=follow)
    gaps = 0
    while True:
        try:
            tail.run()
        except InstanceNotFoundError:
            return  # with the machine the log ends; what was pulled has it whole
        if tail.num_gaps > gaps:
            gaps = tail.num_gaps
            click.echo("paceline: a part of the log was removed before it was read", err=True)
        if not follow or not _goes_on(services, machine):
            return
        services.clock.sleep(AGAIN_S)


def _goes_on(services: Services, machine: Machine) -> bool:
    """Return whether this machine is still the run's."""
    on_record = {one.label for one in services.rental.machines(machine.run_id)}
    return services.ledger.get(machine.run_id).outcome is None and machine.label in on_record


def _to_stdout(content: bytes) -> None:
    try:
        pass_through(1, content)
    except OSError as exc:
        if exc.errno == errno.EPIPE:
            raise ReaderGoneError("nobody reads standard output any more") from exc
        raise PreflightError(
            f"cannot write to standard output: {exc.strerror}; send it where there is room"
        ) from exc


def _find(services: Services, run_id: str, role: str | None, index: int) -> tuple[Machine, Guest]:
    """Return one machine that has an id. Raises UsageError, naming those there are."""
    services.ledger.get(run_id)
    machines = services.rental.machines(run_id)
    slot = Slot(role=role or _only(sorted({m.role for m in machines}), run_id), index=index)
    machine = _machine_of(machines, slot)
    if machine is None:
        known = ", ".join(f"{m.role}-{m.index}" for m in machines) or "none"
        raise UsageError(f"run {run_id} has no machine {slot} now; those there are: {known}")
    return machine, Guest(run_id=run_id, slot=slot)


def _machine_of(machines: tuple[Machine, ...], slot: Slot) -> Machine | None:
    """Return the newest machine of a slot that has an id."""
    found = [m for m in machines if (m.role, m.index) == (slot.role, slot.index) and m.instance]
    return found[-1] if found else None


def _there(guest: Guest, path: str) -> str:
    """Return a path on the machine as a remote takes it; relative to the working directory."""
    return path if path.startswith(("/", "~/")) else guest.path("work", path)


def _pulled_roles(record: RunRecord) -> set[str]:
    """Return the roles that left a log; what their machines' switches wrote lies beside it."""
    found = (Path(record.out) / "logs").glob("*-*.log")
    names = {path.stem.rpartition("-")[0] for path in found}
    return {name for name in names if not name.startswith(LOG_PREFIX)}


def _only(names: list[str], run_id: str) -> str:
    if not names:
        raise UsageError(f"run {run_id} has no machine now; paceline status {run_id} says why")
    if len(names) != 1:
        raise UsageError(f"run {run_id} has the roles {', '.join(names)}; name one: --role")
    return names[0]


def _is_running(services: Services, machine: Machine) -> bool:
    if machine.instance is None:
        return False
    try:
        state = services.backend_of(machine.backend).status(machine.instance).state
    except InstanceNotFoundError:
        return False
    return state == InstanceState.RUNNING
