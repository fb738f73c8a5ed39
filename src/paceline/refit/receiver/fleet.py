"""Installing one version into all workers of an engine, which are other processes."""

from collections.abc import Callable, Mapping

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError, PacelineError
from paceline.refit.errors import RefitError, UncertainStateError, VerifyError
from paceline.refit.generators.protocol import GeneratorEngineAdapter, InstalledVersion
from paceline.refit.generators.workers import EngineDriver, WorkerStatus
from paceline.refit.model import TensorEntry, WeightVersion
from paceline.refit.plan import Costs
from paceline.refit.receiver.install import Installed, label_of

LOOK_S = 0.02
"""How often the workers are asked whether they have staged."""


class WorkersInstaller:
    """Signs Installs: stage everywhere, pause, write everywhere, go on."""

    def __init__(
        self,
        driver: EngineDriver,
        *,
        engine: GeneratorEngineAdapter,
        clock: Clock,
        stage_timeout_s: float,
    ) -> None:
        """Take the driver of the engine.

        Args:
            driver: leads the workers.
            engine: the WorkersEngine of the same driver, or what stands in front of it.
            clock: for waiting.
            stage_timeout_s: for all workers to have fetched and proven a version.
        """
        self._driver = driver
        self._engine = engine
        self._clock = clock
        self._stage_timeout_s = stage_timeout_s
        self._known: frozenset[str] | None = None

    def install(
        self,
        version: WeightVersion,
        *,
        base: Mapping[str, TensorEntry] | None,
        between_reads: Callable[[], None],
    ) -> Installed:
        """Install ``version`` in every worker, or leave every worker as it was.

        Raises:
            RefitError, DeadlineExceededError: nothing has changed.
            UncertainStateError: the workers' weights are no version, or not the same one; the
                engine stays paused until a full version is in.
        """
        label = label_of(version)
        statuses = self._stage(version.uid, between_reads)
        pause_s = self._engine.at_safe_point(
            lambda: self._apply(label), installed=label, timeout_s=self._stage_timeout_s
        )
        return Installed(
            version=label,
            entries={},
            fetched_bytes=sum(status.fetched_bytes for status in statuses),
            pause_s=pause_s,
        )

    def check_live(self, entries: Mapping[str, TensorEntry]) -> None:
        """Let every worker hash what it has. Raises VerifyError if that is not the label."""
        wanted = self._engine.installed()
        found = set(self._driver.prove())
        if wanted is None or found != {wanted.root_digest}:
            raise VerifyError(f"the workers have {', '.join(sorted(found))}")

    def costs(self) -> Costs:
        """Return nothing measured: what fetches is in the workers."""
        return Costs()

    def keep_only(self, uids: frozenset[str]) -> None:
        """Tell the workers when they stage next: it is they who serve versions on."""
        self._known = uids

    def _stage(self, uid: str, between_reads: Callable[[], None]) -> list[WorkerStatus]:
        """Return once all workers can apply the version; the engine generates meanwhile."""
        deadline = self._clock.monotonic() + self._stage_timeout_s
        self._driver.stage(uid, known=self._known)
        while True:
            statuses = list(self._driver.status())
            failed = [status for status in statuses if status.error]
            if failed:
                raise _error_of(failed[0])
            if all(status.staged == uid for status in statuses):
                return statuses
            if self._clock.monotonic() >= deadline:
                raise DeadlineExceededError(
                    f"version {uid} is not staged by every worker "
                    f"within {self._stage_timeout_s:g} s"
                )
            between_reads()
            self._clock.sleep(LOOK_S)

    def _apply(self, label: InstalledVersion) -> None:
        """Write everywhere while nothing runs; the engine takes the label when this returns."""
        try:
            statuses = self._driver.apply(label.version_id)
        except UncertainStateError:
            raise
        except PacelineError as exc:
            self._take_back(exc)
            raise
        roots = {(status.installed or {}).get("root_digest") for status in statuses}
        if roots != {label.root_digest}:
            raise UncertainStateError(f"the workers do not all have {label.root_digest}: {roots}")
        try:
            self._driver.finish(label.version_id)
        except PacelineError as exc:  # tokens of the new weights would carry the old label
            raise UncertainStateError(f"{label.version_id} is in and not named: {exc}") from exc

    def _take_back(self, cause: PacelineError) -> None:
        """Undo where it had been written already: workers never serve different versions."""
        try:
            self._driver.undo()
            held = {(status.installed or {}).get("version_id") for status in self._driver.status()}
        except PacelineError as exc:
            raise UncertainStateError(f"{cause}; and taking it back failed: {exc}") from exc
        label = self._engine.installed()
        wanted = None if label is None else label.version_id
        if held != {wanted}:
            raise UncertainStateError(f"{cause}; the workers now have {held}, not {wanted}")


def _error_of(status: WorkerStatus) -> PacelineError:
    if status.error_kind == VerifyError.__name__:
        return VerifyError(status.error)
    return RefitError(status.error)
