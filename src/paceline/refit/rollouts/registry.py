"""Who serves the run and what is newest: asked of the control service, or followed."""

import logging
import threading
from collections.abc import Callable

from paceline.refit.control.protocol import ControlPlane, SupportsVersionWatch
from paceline.refit.errors import ControlError, ControlUnavailableError
from paceline.refit.model import VersionChanges, WeightVersion
from paceline.refit.plan import newest_sequence
from paceline.refit.rollouts.model import Fleet

log = logging.getLogger(__name__)

RECONNECT_S = 0.5


def fleet_of(control: ControlPlane, *, model_name: str, run_id: str) -> Callable[[], Fleet]:
    """Return a function that asks the control service who serves the run and what is newest.

    Engines of other runs may serve the same model: whoever has installed something that is no
    version of this run is left out.
    """

    def ask() -> Fleet:
        versions = control.list_versions(model_name, run_id=run_id)
        return _fleet(control, model_name, {version.uid: version for version in versions})

    return ask


class FleetWatch:
    """The same by the service's stream of versions: asking costs one short list of reports.

    A list of versions grows with the run, and a client asks ten times a second.
    """

    def __init__(self, control: ControlPlane, *, model_name: str, run_id: str) -> None:
        """Take the parts; ``start`` begins to follow.

        Args:
            control: of the caller, who closes it after this.
            model_name: what the engines serve.
            run_id: whose versions count.
        """
        self._control = control
        self._model_name = model_name
        self._run_id = run_id
        self._lock = threading.Lock()
        self._versions: dict[str, WeightVersion] = {}
        self._revision = 0
        self._is_current = False
        self._closing = threading.Event()

    def start(self, watching: SupportsVersionWatch) -> None:
        """Follow the stream of ``watching`` in a thread that ends with ``close``."""
        thread = threading.Thread(
            target=self._follow, args=(watching,), name="fleet-watch", daemon=True
        )
        thread.start()

    def __call__(self) -> Fleet:
        """Return the fleet now; the versions from the stream, or asked for while it is broken."""
        with self._lock:
            versions = dict(self._versions) if self._is_current else None
        if versions is None:
            listed = self._control.list_versions(self._model_name, run_id=self._run_id)
            versions = {version.uid: version for version in listed}
        return _fleet(self._control, self._model_name, versions)

    def close(self) -> None:
        """Follow no more; the thread ends with the connection. Idempotent."""
        self._closing.set()

    def take(self, changes: VersionChanges) -> None:
        """Bring what is known up to date."""
        with self._lock:
            if changes.reset:
                self._versions.clear()
            for uid in changes.removed:
                self._versions.pop(uid, None)
            self._versions |= {version.uid: version for version in changes.versions}
            self._revision = changes.revision
            self._is_current = True

    def _follow(self, watching: SupportsVersionWatch) -> None:
        while not self._closing.is_set():
            try:
                self._take_all(watching)
            except ControlUnavailableError as exc:
                log.info("the stream of versions broke, it is opened again: %s", exc)
            except ControlError as exc:
                log.warning("versions are asked for instead of followed: %s", exc)
                return
            else:
                return  # the connection was closed
            finally:
                with self._lock:
                    self._is_current = False
            self._closing.wait(RECONNECT_S)

    def _take_all(self, watching: SupportsVersionWatch) -> None:
        stream = watching.watch_versions(
            self._model_name, run_id=self._run_id, after=self._revision
        )
        for changes in stream:
            self.take(changes)
            if self._closing.is_set():
                return


def _fleet(control: ControlPlane, model_name: str, versions: dict[str, WeightVersion]) -> Fleet:
    ours = {"", *versions}
    reports = control.list_installed(model_name)
    return Fleet(
        reports=tuple(report for report in reports if report.version_id in ours),
        newest=newest_sequence(versions.values()),
    )
