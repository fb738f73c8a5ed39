"""What the control service tells of a run, read page by page and folded into one view."""

from collections.abc import Callable, Sequence

from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import ControlError
from paceline.refit.model import Event, InstalledReport, WeightVersion
from paceline.runs.queries import RunView, view_of

EVENTS_PAGE = 1000
PAGES_MAX = 100


class Happenings:
    """Everything told so far; a service that is down is told of once and asked again."""

    def __init__(
        self, control: ControlPlane | None, *, model_name: str | None, note: Callable[[str], None]
    ) -> None:
        self._control = control
        self._model_name = model_name
        self._note = note
        self._events: list[Event] = []
        self._num_seen = 0
        self._looked_up: set[str] = set()
        self._is_down = False
        self.view: RunView = view_of(())
        self.installed: Sequence[InstalledReport] = ()

    def poll(self) -> None:
        """Read what is new."""
        if self._control is None:
            return
        try:
            fresh = self._fresh(self._control)
            if fresh:
                self._events += fresh
                self._num_seen = fresh[-1].index
                self.view = view_of(self._events)
                self._look_up_untold(self._control)
        except ControlError as exc:
            if not self._is_down:
                self._note(f"control service: {exc}")
            self._is_down = True
            return
        self._is_down = False

    def is_caught_up(self) -> bool:
        """Say whether every live engine serves the last version."""
        self.poll()
        last = self.view.states[-1].version.root_digest if self.view.states else None
        return last is None or all(one.root_digest == last for one in self.installed)

    def _fresh(self, control: ControlPlane) -> list[Event]:
        fresh: list[Event] = []
        for _ in range(PAGES_MAX):
            after = fresh[-1].index if fresh else self._num_seen
            page = control.list_events(after=after, limit=EVENTS_PAGE)
            fresh += page
            if len(page) < EVENTS_PAGE:
                break
        if self._model_name is not None:
            self.installed = control.list_installed(self._model_name)
        return fresh

    def _look_up_untold(self, control: ControlPlane) -> None:
        """Ask for versions that engines installed and no trainer told of.

        A trainer that is killed between making a version READY and telling of it has published
        it all the same: its description says what an engine must have.
        """
        untold = {one.version_id for one in self.view.unknown} - self._looked_up
        if not untold or self._model_name is None:
            return
        known = {version.uid: version for version in control.list_versions(self._model_name)}
        self._looked_up |= untold
        found = [told for uid in sorted(untold) if (told := _told_of(known.get(uid))) is not None]
        if found:
            self._events = [*found, *self._events]
            self.view = view_of(self._events)


def _told_of(version: WeightVersion | None) -> Event | None:
    """Return the event that a trainer would have told; None for what nobody described."""
    if version is None or version.description is None:
        return None
    described = version.description
    fields: dict[str, object] = {
        "version_id": version.uid,
        "sequence": described.sequence,
        "step": described.step,
        "root_digest": described.root_digest,
        "payload_format": version.payload_format.value,
        "payload_bytes": described.payload_bytes,
        "full_bytes": described.full_bytes,
        "changed_elements": described.changed_elements,
        "total_elements": described.total_elements,
        "publish_ms": 0.0,
    }
    return Event(
        worker_id="",
        name="version.published",
        at_unix_ms=version.created_at_unix_ms,
        fields=fields,
    )
