"""The receiver: one thread that keeps an engine on the newest weights of its run.

A step asks the control service what there is, plans, installs the first version of the plan and
says what is live now. Whatever goes wrong in a step, the engine keeps the version it had, the
reason is told as an event, and the version is left alone for a while so that the next plan takes
another way. Only weights that are no version at all stop the engine, until a full one is in.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError, PacelineError
from paceline.core.retry import RetryPolicy
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import (
    ControlError,
    ControlUnavailableError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    RefitError,
    UncertainStateError,
    VerifyError,
)
from paceline.refit.generators.protocol import EngineHealth, GeneratorEngineAdapter, proof_of
from paceline.refit.model import (
    Event,
    InstalledReport,
    Pin,
    TensorEntry,
    VersionState,
    WeightVersion,
    WorkerRegistration,
    WorkerRole,
)
from paceline.refit.plan import Holding, InstallPlan, newest_sequence, plan_install
from paceline.refit.receiver.install import (
    Installed,
    Installer,
    InstallLimits,
    Installs,
    Supply,
)
from paceline.refit.receiver.pinning import pin_of, plan_pinned
from paceline.refit.receiver.shards import require_description
from paceline.refit.receiver.standing import (
    Observation,
    Refusals,
    StalenessBound,
    backoff_s,
    judge,
)
from paceline.refit.receiver.transfers import fields_of
from paceline.refit.receiver.updating import UpdateGate
from paceline.refit.transports.protocol import ObjectReader

log = logging.getLogger(__name__)

_FIGURES = (
    "installs",
    "refusals",
    "fetched_bytes",
    "fetch_seconds",
    "fetch_retries",
    "fetch_problems",
)

REASON_CHARS_MAX = 500

EVENTS_KEPT_MAX = 200
"""While the control service is away; older ones are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverConfig:
    """Whom a receiver works for and how patient it is."""

    worker_id: str
    """Names one lifetime of this process."""
    model_name: str
    run_id: str
    endpoint: str
    """Where the engine's rollout routes are, told to the run; empty for none."""
    poll_interval_s: float = 0.1
    pin_interval_s: float = 1.0
    """How often it is asked whether this engine is to serve another version than the newest."""
    registration_ttl_s: int = 15
    bound: StalenessBound = field(default_factory=StalenessBound)
    limits: InstallLimits = field(default_factory=InstallLimits)
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(delay_s_max=5.0))
    """Delays after a refused version or a silent service; tried for ever, so no attempts."""


class _StopError(Exception):
    """Ends an install between two reads because the receiver is to stop."""


class Receiver:
    """Follows one run for one engine. ``step`` is its whole work; ``start`` runs it in a thread."""

    def __init__(  # noqa: PLR0913 - parts of its own; what it is supplied from has a default
        self,
        config: ReceiverConfig,
        *,
        control: ControlPlane,
        engine: GeneratorEngineAdapter,
        reader: ObjectReader,
        clock: Clock,
        chance: Callable[[], float],
        supply: Supply | None = None,
        installer: Installs | None = None,
    ) -> None:
        """Take the parts; does nothing yet. ``chance`` places delays inside their jitter.

        ``installer`` is for engines whose weights are in other processes; by default they are here.
        """
        self._config = config
        self._control = control
        self._engine = engine
        self._gate = engine if isinstance(engine, UpdateGate) else None
        self._clock = clock
        self._chance = chance
        self._installer = installer or Installer(
            worker_id=config.worker_id,
            control=control,
            engine=engine,
            reader=reader,
            clock=clock,
            limits=config.limits,
            supply=supply,
        )
        self._refusals = Refusals(config.retry)
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT_MAX)
        self._base: Mapping[str, TensorEntry] | None = None
        self._first_seen: dict[str, float] = {}
        self._last_install = _LastInstall()
        self._figures = dict.fromkeys(_FIGURES, 0.0)
        self._newest = -1
        self._pins: Sequence[Pin] = ()
        self._pins_at = clock.monotonic()
        self._pin: Pin | None = None
        self._astray = ""
        self._answered_at = clock.monotonic()
        self._register_at = clock.monotonic()
        self._registered_until = clock.monotonic()
        self._outages = 0
        self._ask_at = clock.monotonic()
        self._told: InstalledReport | None = None
        self._uncertain = ""
        self._crash = ""
        self._is_draining = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def worker_id(self) -> str:
        """The name it is registered under."""
        return self._config.worker_id

    @property
    def crash(self) -> str:
        """Why it stopped by itself; empty while it works."""
        return self._crash

    @property
    def newest(self) -> int:
        """The highest READY sequence seen, -1 for none."""
        return self._newest

    def register(self) -> None:
        """Tell the control service that this process lives.

        Raises:
            ControlError: it does not answer, or refuses.
        """
        ttl_s = self._config.registration_ttl_s
        self._control.register_worker(
            WorkerRegistration(
                worker_id=self._config.worker_id,
                role=WorkerRole.GENERATOR,
                model_name=self._config.model_name,
            ),
            ttl_seconds=ttl_s,
        )
        now_s = self._clock.monotonic()
        if now_s >= self._registered_until:
            self._told = None  # with the registration, the report may have been forgotten
        self._register_at, self._registered_until = now_s + ttl_s / 3, now_s + ttl_s

    def start(self) -> None:
        """Run steps in a thread until ``stop``."""
        self._thread = threading.Thread(target=self._run, name="receive", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Say from now on that the engine takes nothing new."""
        self._is_draining = True

    def stop(self, *, timeout_s: float) -> None:
        """End the thread at the next read or step. Idempotent.

        Raises:
            DeadlineExceededError: it is still inside a read.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise DeadlineExceededError(f"the receiver did not stop within {timeout_s:g} s")

    def health(self) -> EngineHealth:
        """Return what the engine may say of itself now; no I/O."""
        seen = Observation(
            installed=self._engine.installed(),
            newest=self._newest,
            silent_s=self._clock.monotonic() - self._answered_at,
            is_draining=self._is_draining,
            updating="" if self._gate is None else self._gate.updating,
            astray=self._astray,
            is_pinned=self._pin is not None,
            uncertain=self._uncertain,
            crash=self._crash,
        )
        return judge(seen, self._config.bound)

    def figures(self) -> Mapping[str, float]:
        """Return counts and last durations, by the names of telemetry.metrics.GAUGES."""
        return {
            **self._figures,
            **({} if self._gate is None else self._gate.figures()),
            "refit_seconds": self._last_install.refit_s,
            "pause_seconds": self._last_install.pause_s,
        }

    def step(self) -> bool:
        """Do one round; True when there is more to install at once.

        Never raises for a control service, source or version that fails.
        """
        if self._clock.monotonic() < self._ask_at:
            return False
        try:
            has_more = self._follow()
            self._tell()
        except ControlError as exc:
            self._note_outage(exc)
            return False
        self._outages = 0
        return has_more

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if not self.step():
                    self._clock.sleep(self._config.poll_interval_s)
        except _StopError:
            log.info("the receiver stopped in mid-install; the version before is live")
        except Exception as exc:
            # A dead receiver behind a living engine would serve old weights for ever.
            self._crash = f"{type(exc).__name__}: {exc}"
            log.exception("the receiver crashed")

    def _follow(self) -> bool:
        self._register_if_due()
        versions = self._control.list_versions(self._config.model_name, run_id=self._config.run_id)
        now_s = self._clock.monotonic()
        self._answered_at = now_s
        self._newest = newest_sequence(versions)
        uids = frozenset(version.uid for version in versions)
        self._refusals.keep_only(uids)
        self._installer.keep_only(uids)
        self._first_seen = {
            version.uid: self._first_seen.get(version.uid, now_s)
            for version in versions
            if version.state is VersionState.READY
        }
        plan = self._plan(versions, now_s=now_s)
        if not plan.path:
            return False
        log.debug("%s", plan.reason)
        return self._install(plan.path[0]) and len(plan.path) > 1

    def _plan(self, versions: Sequence[WeightVersion], *, now_s: float) -> InstallPlan:
        """Return the way to the newest version, or to the one that this engine is pinned to."""
        self._ask_pins(now_s)
        installed = self._engine.installed()
        held = (
            None
            if installed is None
            else Holding(sequence=installed.sequence, root_digest=installed.root_digest)
        )
        avoid = self._refusals.current(now_s=now_s)
        costs = self._installer.costs()
        if self._pin is None:
            self._astray = ""
            return plan_install(versions, held=held, avoid=avoid, costs=costs)
        plan = plan_pinned(versions, self._pin, held=held, avoid=avoid, costs=costs)
        self._judge_pin(self._pin, versions, held, plan)
        return plan

    def _ask_pins(self, now_s: float) -> None:
        if now_s < self._pins_at:
            return
        self._pins_at = now_s + self._config.pin_interval_s
        try:
            self._pins = self._control.list_pins(self._config.model_name)
        except ControlError as exc:
            if type(exc) is not ControlError:
                raise
            log.debug("this control service knows no pins: %s", exc)
        self._pin = pin_of(self._config.worker_id, self._pins)

    def _judge_pin(
        self,
        pin: Pin,
        versions: Sequence[WeightVersion],
        held: Holding | None,
        plan: InstallPlan,
    ) -> None:
        """Say why this engine must not serve, while something else than its pin is in."""
        roots = {
            v.description.root_digest for v in versions if v.uid == pin.version_id and v.description
        }
        is_there = held is not None and held.root_digest in roots
        self._astray = "" if is_there else f"pinned to {pin.version_id}: {plan.reason}"

    def _install(self, version: WeightVersion) -> bool:
        """Install one version; False, with the reason told, if it did not go in."""
        began_s = self._clock.monotonic()
        try:
            installed = self._installer.install(
                version, base=self._base, between_reads=self._between_reads
            )
        except (NotFoundError, PreconditionError) as exc:
            # It was released between listing and leasing: nobody's fault, and no event.
            log.info("version %s cannot be held: %s", version.uid, exc)
            self._leave_alone(version)
        except UncertainStateError as exc:
            self._disown_weights(str(exc))
            self._refuse(version, exc)
        except (RefitError, DeadlineExceededError) as exc:
            if isinstance(exc, VerifyError):
                self._check_base_is_live()
            self._refuse(version, exc)
        else:
            if self._gate is not None:
                self._gate.note_install(began_s)
            self._accept(version, installed)
            return True
        return False

    def _accept(self, version: WeightVersion, installed: Installed) -> None:
        self._base = installed.entries
        self._uncertain = ""
        refit_s = self._clock.monotonic() - self._first_seen[version.uid]
        self._last_install = _LastInstall(
            at_unix_ms=self._now_unix_ms(),
            fetched_bytes=installed.fetched_bytes,
            refit_s=refit_s,
            pause_s=installed.pause_s,
        )
        self._figures["installs"] += 1
        self._figures["fetched_bytes"] += installed.fetched_bytes
        for record in installed.transfers:
            self._figures["fetch_seconds"] += record.seconds
            self._figures["fetch_retries"] += record.retries
            self._figures["fetch_problems"] += bool(record.problem)
        self._note_event(
            "version.installed",
            {
                "version_id": installed.version.version_id,
                "sequence": installed.version.sequence,
                "root_digest": installed.version.root_digest,
                "fetched_bytes": installed.fetched_bytes,
                "refit_ms": refit_s * 1000,
                "pause_ms": installed.pause_s * 1000,
                **fields_of(installed.transfers),
            },
        )

    def _refuse(self, version: WeightVersion, error: PacelineError) -> None:
        log.warning("version %s was not installed: %s", version.uid, error)
        self._leave_alone(version)
        self._figures["refusals"] += 1
        fields: dict[str, object] = {
            "version_id": version.uid,
            "sequence": require_description(version).sequence,
            "reason": str(error)[:REASON_CHARS_MAX],
        }
        self._note_event("version.refused", fields)

    def _leave_alone(self, version: WeightVersion) -> None:
        now_s = self._clock.monotonic()
        self._refusals.add(version.uid, now_s=now_s, chance=self._chance())

    def _check_base_is_live(self) -> None:
        """After a refusal, find out whether it was our own memory that is not as it should be."""
        if self._base is None:
            return
        try:
            self._installer.check_live(self._base)
        except VerifyError as exc:
            self._disown_weights(f"live weights changed by themselves: {exc}")

    def _disown_weights(self, reason: str) -> None:
        """Refuse to serve until a full version is in: what is live has no name."""
        self._base = None
        self._uncertain = reason
        self._engine.at_safe_point(
            _write_nothing, installed=None, timeout_s=self._config.limits.safe_point_timeout_s
        )

    def _between_reads(self) -> None:
        if self._stop.is_set():
            raise _StopError
        try:
            self._register_if_due()
        except ControlUnavailableError as exc:
            log.warning("heartbeat failed in mid-install: %s", exc)

    def _register_if_due(self) -> None:
        if self._clock.monotonic() >= self._register_at:
            self.register()

    def _tell(self) -> None:
        """Report what is live if that has changed, then the events that wait."""
        report = self._report()
        # An install may have lasted longer than the registration.
        self._register_if_due()
        if report != self._told:
            self._control.report_installed(report)
            self._told = report
        while self._events:
            try:
                self._control.record_event(self._events[0])
            except InvalidRequestError as exc:
                log.warning("event %s was refused and is dropped: %s", self._events[0].name, exc)
            self._events.popleft()

    def _report(self) -> InstalledReport:
        health, last = self.health(), self._last_install
        installed = health.installed
        return InstalledReport(
            worker_id=self._config.worker_id,
            model_name=self._config.model_name,
            endpoint=self._config.endpoint,
            version_id="" if installed is None else installed.version_id,
            sequence=-1 if installed is None else installed.sequence,
            root_digest="" if installed is None else installed.root_digest,
            state=health.state.value,
            installed_at_unix_ms=last.at_unix_ms,
            fetched_bytes=last.fetched_bytes,
            refit_ms=last.refit_s * 1000,
            pause_ms=last.pause_s * 1000,
            verified="" if installed is None else proof_of(self._engine),
        )

    def _note_outage(self, error: ControlError) -> None:
        self._outages += 1
        delay_s = backoff_s(self._config.retry, self._outages, chance=self._chance())
        self._ask_at = self._clock.monotonic() + delay_s
        log.warning("the control service failed, asking again in %.1f s: %s", delay_s, error)

    def _note_event(self, name: str, fields: dict[str, object]) -> None:
        event = Event(
            worker_id=self._config.worker_id,
            name=name,
            at_unix_ms=self._now_unix_ms(),
            fields=fields,
        )
        self._events.append(event)

    def _now_unix_ms(self) -> int:
        return int(self._clock.time() * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LastInstall:
    at_unix_ms: int = 0
    fetched_bytes: int = 0
    refit_s: float = 0.0
    pause_s: float = 0.0


def _write_nothing() -> None:
    """Stand in for a write where only the label changes."""
