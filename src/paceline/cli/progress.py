"""How a run is shown while it lasts: a live table on a terminal, plain lines anywhere else."""

import sys
from collections.abc import Sequence

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.core.text import printable
from paceline.runs.charts import bytes_text
from paceline.runs.plan import Phase, SlotView
from paceline.runs.queries import (
    RoleProgress,
    RunView,
    TrainStep,
    WeightState,
    short_name,
    view_of,
)
from paceline.runs.run import Watcher

ROWS = 12
COLUMNS = ("step", "reward", "version", "staleness", "changed", "bytes", "refit ms per engine")


def watcher_for(run_id: str, *, is_plain: bool = False) -> "LiveWatcher | PlainWatcher":
    """Return what suits stderr: progress never goes to stdout, which belongs to results."""
    console = Console(stderr=True)
    is_live = console.is_terminal and not is_plain
    return LiveWatcher(run_id, console) if is_live else PlainWatcher(run_id)


class PlainWatcher(Watcher):
    """One line per step and per event."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._view = view_of(())
        self._last_step = -1
        self._told = 0

    def note(self, text: str) -> None:
        """Print it."""
        click.echo(printable(text), err=True)

    def progress(self, view: RunView, slots: Sequence[SlotView]) -> None:
        """Print the steps that are new and whose version every engine has, or skipped."""
        self._view = view
        for one in view.progress[self._told :]:
            click.echo(progress_text(one, self._run_id), err=True)
        self._told = len(view.progress)
        newest = view.steps[-1].step if view.steps else 0
        for step in view.steps:
            state = state_of(view, step)
            is_in = state is not None and len(state.installs) >= len(view.engines)
            if step.step > self._last_step and (is_in or step.step < newest):
                self._print(step)

    def close(self) -> None:
        """Print what was still waited for."""
        for step in self._view.steps:
            if step.step > self._last_step:
                self._print(step)

    def _print(self, step: TrainStep) -> None:
        self._last_step = step.step
        cells = zip(COLUMNS, row_of(self._view, step, self._run_id), strict=True)
        click.echo("  ".join(f"{name} {cell}" for name, cell in cells), err=True)


class LiveWatcher(Watcher):
    """A table of the latest steps, under the notes, drawn in place."""

    def __init__(self, run_id: str, console: Console) -> None:
        self._run_id = run_id
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._live.start()

    def note(self, text: str) -> None:
        """Print it above the table."""
        self._live.console.print(Text(printable(text), style="dim"))

    def progress(self, view: RunView, slots: Sequence[SlotView]) -> None:
        """Draw the present state."""
        table = Table(box=None, pad_edge=False)
        for name in COLUMNS:
            table.add_column(name, justify="left" if name.startswith("refit") else "right")
        for step in view.steps[-ROWS:]:
            table.add_row(*row_of(view, step, self._run_id))
        latest = {one.worker_id: one for one in view.progress}
        working = [Text(progress_text(one, self._run_id)) for one in latest.values()]
        shown = [table] if view.steps else working
        self._live.update(Group(*shown, _slots_line(slots), _totals_line(view)))

    def close(self) -> None:
        """Leave the last picture on the screen and give the terminal back."""
        self._live.stop()


def progress_text(one: RoleProgress, run_id: str) -> str:
    """Return a report of long work as one line."""
    # A worker's id ends in a nonce that only tells restarts apart.
    who = short_name(one.worker_id, run_id).rpartition("-")[0]
    of = f" of {one.total}" if one.total else ""
    return f"{who}: {one.phase} {one.done}{of}" + (f", {one.note}" if one.note else "")


def state_of(view: RunView, step: TrainStep) -> WeightState | None:
    """Return the weights that the step produced, None while they are not published."""
    return next((state for state in view.states if state.version.step == step.step), None)


def row_of(view: RunView, step: TrainStep, run_id: str) -> tuple[str, ...]:
    """Return the cells of one step, in the order of COLUMNS."""
    state = state_of(view, step)
    reward = "-" if step.reward is None else f"{step.reward:.3f}"
    staleness = "-" if step.staleness is None else f"{step.staleness:.2f}"
    if state is None:
        return (str(step.step), reward, "-", staleness, "-", "-", "-")
    version = state.version
    changed = version.changed_elements / version.total_elements if version.total_elements else 0.0
    engines = ", ".join(
        f"{short_name(name, run_id)} {state.installs[name].refit_ms:.0f}"
        for name in sorted(state.installs)
    )
    return (
        str(step.step),
        reward,
        str(version.sequence),
        staleness,
        f"{changed:.2%}",
        f"{bytes_text(version.payload_bytes)} of {bytes_text(version.full_bytes)}",
        engines or "-",
    )


def _slots_line(slots: Sequence[SlotView]) -> Text:
    line = Text()
    for view in slots:
        style = {Phase.RUNNING: "green", Phase.DONE: "dim"}.get(view.phase, "yellow")
        again = f" ({view.restarts} restarts)" if view.restarts else ""
        line.append(f"{view.slot} {view.phase.value}{again}   ", style=style)
    return line


def _totals_line(view: RunView) -> Text:
    style = "bold red" if view.mismatches else "dim"
    share = f" ({view.delta_bytes / view.full_bytes:.1%})" if view.full_bytes else ""
    return Text(
        f"{len(view.states)} versions, {view.mismatches} digest mismatches, deltas "
        f"{bytes_text(view.delta_bytes)} of {bytes_text(view.full_bytes)}{share}",
        style=style,
    )


def is_interactive() -> bool:
    """Say whether somebody can answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()
