"""The command line: a table of verbs that are imported when used, and one place for errors.

Nothing heavy is imported here: ``paceline --help`` reads the table alone.
"""

import json
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from types import FrameType

import click

from paceline import __version__
from paceline.cli.streams import ReaderGoneError, guard_streams
from paceline.core.errors import ExitStatus, PacelineError
from paceline.core.text import printable

VERBS: dict[str, tuple[str, str]] = {
    "up": ("paceline.cli.up:up", "Run a job file: rent, train, roll out, report, tear down."),
    "attach": ("paceline.cli.up:attach", "Take up a run whose driver is gone."),
    "run": ("paceline.cli.up:run", "Run one command on one rented machine."),
    "ls": ("paceline.cli.runs:ls", "List machines that are on record and not proven gone."),
    "status": ("paceline.cli.runs:status", "Show one run."),
    "events": ("paceline.cli.events:events", "Show what happened to a run; -f follows it."),
    "checkpoints": ("paceline.cli.checkpoints:checkpoints", "Checkpoints of a run."),
    "logs": ("paceline.cli.machines:logs", "Show the log of a role, live."),
    "ssh": ("paceline.cli.machines:ssh", "Open a shell on a machine of a run."),
    "exec": ("paceline.cli.machines:exec_", "Run a command on a machine of a run."),
    "sync": ("paceline.cli.machines:sync", "Copy between this computer and a machine."),
    "ssh-config": ("paceline.cli.machines:ssh_config", "Names for plain ssh, rsync and editors."),
    "down": ("paceline.cli.runs:down", "End a run and all its machines."),
    "gc": ("paceline.cli.runs:gc", "Find machines that nobody drives; with --yes end them."),
    "cost": ("paceline.cli.runs:cost", "Show what a run has cost."),
    "why": ("paceline.cli.hosts:why", "Show why a run got the machines that it got."),
    "hosts": ("paceline.cli.hosts:hosts", "What is remembered of hosts, and what is passed over."),
    "offers": ("paceline.cli.market:offers", "Show what there is to rent, cheapest first."),
    "check": ("paceline.cli.market:check", "Show which backends let you in, and what to do."),
    "backends": ("paceline.cli.backends:backends", "Who rents machines."),
    "control": ("paceline.cli.control:control", "Serve the control service on its own."),
    "versions": ("paceline.cli.versions:versions", "Look at published weight versions."),
    "serve": ("paceline.cli.serve:serve", "Serve a rollout engine that keeps its weights current."),
    "completion": ("paceline.cli.completion:completion", "Print a shell's completion script."),
}
"""Name -> (module:attribute, the line that ``--help`` shows)."""


class VerbGroup(click.Group):
    """A group whose commands are imported when they are called, not when they are listed."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Say what may have been meant when there is no such verb."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            near = get_close_matches(args[0], VERBS, n=1)
            if not near:
                raise
            said = f"{exc.message.rstrip('.')}; did you mean {near[0]!r}?"
            raise click.UsageError(said, ctx) from exc

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None when there is no such verb."""
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        found = getattr(import_module(module), attribute)
        if not isinstance(found, click.Command):
            raise TypeError(f"{module}:{attribute} is not a command")
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of verbs without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in VERBS.items()])


@click.group(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="paceline")
def cli() -> None:
    """RL post-training on rented GPUs: rent anywhere, train here, roll out there."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with its exit status."""
    guard_streams()
    _stop_on_signals()
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit status; what goes wrong is told on stderr."""
    as_json = "--json" in argv[: argv.index("--")] if "--" in argv else "--json" in argv
    try:
        status = cli.main(args=list(argv), prog_name="paceline", standalone_mode=False)
    except ReaderGoneError:
        return ExitStatus.OK  # whoever read our output has seen enough
    except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001 - the last place that can tell
        message, kind = explain(exc)
        details = exc.details if isinstance(exc, PacelineError) else {}
        return _tell(message, kind, details if as_json else None)
    return int(status) if isinstance(status, int) else ExitStatus.OK


def _stop_on_signals() -> None:
    """Let SIGTERM and SIGHUP unwind as Ctrl-C does, until a verb that lasts takes them over.

    One that is ignored stays so: that is what nohup is for. SIGINT is at its default only where
    ``paceline.__main__`` has put it there.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def explain(exc: BaseException) -> tuple[str, ExitStatus]:
    """Return what to say about an error; a bug's traceback is printed."""
    if isinstance(exc, PacelineError):
        return str(exc), exc.exit_status
    if isinstance(exc, click.exceptions.NoArgsIsHelpError):
        return exc.format_message(), ExitStatus.USAGE
    if isinstance(exc, click.ClickException):
        context = exc.ctx if isinstance(exc, click.UsageError) else None
        where = "paceline" if context is None else context.command_path
        return f"{exc.format_message().rstrip('.')}; see {where} --help", ExitStatus.USAGE
    if isinstance(exc, KeyboardInterrupt | click.Abort):
        return "stopped", ExitStatus.INTERRUPTED
    traceback.print_exception(exc)
    what = f"{type(exc).__name__}: {exc}"
    return f"{what}; this is a bug in paceline, please report the above", ExitStatus.FAILED


def _tell(message: str, status: ExitStatus, details: Mapping[str, object] | None) -> int:
    """Print an error; with ``details`` also as one JSON object that has them."""
    if details is not None:
        error = {"message": message, "exit_status": int(status), "kind": status.name}
        with suppress(ReaderGoneError):  # the status still says it
            click.echo(json.dumps({"error": {**error, **details}}))
    click.echo(printable(f"paceline: {message}"), err=True)
    return int(status)
