"""An engine whose weights are in worker processes: what a worker needs, and how it is driven."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from paceline.core.clock import Clock
from paceline.refit.apply import StagedInstall
from paceline.refit.errors import UncertainStateError
from paceline.refit.generators.protocol import InstalledVersion
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import TensorBuffer, TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """How a worker reaches its run; its fields are the ``init_info`` of the backend."""

    control: str
    """Address of the control service, ``host:port``."""
    model_name: str
    run_id: str
    worker_id: str
    """Of the engine; each worker appends its rank."""
    credentials: str = ""
    """A file; empty: where PACELINE_CREDENTIALS points."""
    allow_plaintext: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """A version that is proven and in memory; the engine still serves the one before."""

    version: InstalledVersion
    install: StagedInstall
    fetched_bytes: int


class Mirror(Protocol):
    """A worker's copy of the checkpoint that it serves: what versions are staged against."""

    @property
    def base(self) -> Mapping[str, TensorEntry] | None:
        """What it is now; None while that is not known."""
        ...

    def bind(self, manifest: Manifest) -> None:
        """Get ready for the first version that comes. Raises VerifyError if it does not fit."""
        ...

    def live_tensors(self) -> Mapping[str, TensorBuffer]:
        """Return every distinct tensor by name."""
        ...

    def tensor_aliases(self) -> Mapping[str, str]:
        """Return further names of a tensor -> its name in ``live_tensors``."""
        ...

    def at_safe_point(
        self, write: Callable[[], None], *, installed: InstalledVersion | None, timeout_s: float
    ) -> float:
        """Not for a link: only vLLM's own calls write. Raises RefitError."""
        ...

    def installed(self) -> InstalledVersion | None:
        """Not for a link: None."""
        ...


class Link(Protocol):
    """One worker's way to its run, for the time between init and shutdown."""

    def stage(
        self,
        uid: str,
        *,
        mirror: "Mirror",
        between_reads: Callable[[], None],
        known: frozenset[str] | None = None,
    ) -> Staged:
        """Fetch and prove a version under a lease; nothing live is touched.

        Args:
            uid: of the version.
            mirror: what it applies to.
            between_reads: called often; what it raises ends the staging.
            known: versions that may still be wanted; None asks the control service.

        Raises:
            RefitError: it cannot be had, or is not what it says.
        """
        ...

    def close(self) -> None:
        """Give everything back; idempotent."""
        ...


class EngineDriver(Protocol):
    """The calls that lead all workers of one engine through an update, in this order.

    Whoever drives is never inside a worker, so every call can fail on its way.
    """

    def init(self, config: LinkConfig) -> None:
        """Let every worker connect to the run."""
        ...

    def stage(self, version_id: str, *, known: frozenset[str] | None = None) -> None:
        """Let every worker begin to fetch a version; returns at once. ``known`` as for a Link."""
        ...

    def status(self) -> Sequence["WorkerStatus"]:
        """Return what every worker says."""
        ...

    def pause(self) -> None:
        """Return when no forward pass runs and none will; forget cached prefixes."""
        ...

    def apply(self, version_id: str) -> Sequence["WorkerStatus"]:
        """Let every worker write the version, and return what each of them says then.

        Raises what the first of them raised.
        """
        ...

    def finish(self, version_id: str) -> None:
        """Settle the update in every worker, and label tokens with the version from now on."""
        ...

    def undo(self) -> None:
        """Let every worker that has the version take it back."""
        ...

    def resume(self) -> None:
        """Go on with forward passes."""
        ...

    def prove(self) -> Sequence[str]:
        """Return the root digest that every worker finds by hashing all that it has."""
        ...


Connect = Callable[[LinkConfig], Link]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What one worker says; crosses process borders as plain data."""

    installed: dict[str, Any] | None = None
    """Fields of InstalledVersion."""
    staging: str = ""
    """The version that is being fetched."""
    staged: str = ""
    """The version that can be applied."""
    fetched_bytes: int = 0
    """Of the staged version."""
    error: str = ""
    """Why staging ended without a version."""
    error_kind: str = ""
    """Name of the error's class."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


VERSIONS_KNOWN_MAX = 1000
"""Of which tokens may still be on their way."""


class WorkersEngine:
    """Signs GeneratorEngineAdapter for an engine whose weights are in its workers."""

    proof = "mirror-bytes"
    """A root digest was computed from what every worker's live parameters were written from;
    those that the engine leaves as written are read back, those that it packs cannot."""

    def __init__(self, driver: EngineDriver, *, clock: Clock) -> None:
        """Take the driver; nothing is installed yet."""
        self._driver = driver
        self._clock = clock
        self._installed: InstalledVersion | None = None
        self._known: dict[str, InstalledVersion] = {}
        self._epoch = 0

    def live_tensors(self) -> Mapping[str, TensorBuffer]:
        """Return nothing: the live tensors are in the workers."""
        return {}

    def tensor_aliases(self) -> Mapping[str, str]:
        """Return nothing, see ``live_tensors``."""
        return {}

    def at_safe_point(
        self, write: Callable[[], None], *, installed: InstalledVersion | None, timeout_s: float
    ) -> float:
        """Run ``write`` while the workers are paused; without a version they stay paused."""
        del timeout_s  # the driver has deadlines of its own
        began = self._clock.monotonic()
        self._epoch += 1
        try:
            self._driver.pause()
            write()
            self.label(installed)
        except UncertainStateError:
            self.label(None)
            raise
        finally:
            self._epoch += 1
            if self._installed is not None:
                self._driver.resume()
        return self._clock.monotonic() - began

    @property
    def epoch(self) -> int:
        """Counts beginnings and ends of updates: odd while one goes on."""
        return self._epoch

    def is_still(self, epoch: int) -> bool:
        """Say whether no update went on at ``epoch``, and none has begun since."""
        return epoch % 2 == 0 and epoch == self._epoch

    def installed(self) -> InstalledVersion | None:
        """Return what every worker serves."""
        return self._installed

    def label(self, installed: InstalledVersion | None) -> None:
        """Say what every worker serves from now on; None: nothing certain."""
        self._installed = installed
        if installed is not None:
            self._known[installed.version_id] = installed
            while len(self._known) > VERSIONS_KNOWN_MAX:
                del self._known[next(iter(self._known))]

    def version(self, version_id: str) -> InstalledVersion | None:
        """Return what was called so once; None if it never was, or long ago."""
        return self._known.get(version_id)
