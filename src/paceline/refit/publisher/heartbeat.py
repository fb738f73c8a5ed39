"""The registration that says that a publisher lives, renewed behind training."""

import threading
from collections.abc import Callable

from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import ControlError
from paceline.refit.model import WorkerRegistration, WorkerRole
from paceline.refit.publisher.values import PublisherOptions


class Heartbeat:
    """Registers, and goes on registering until it is stopped."""

    def __init__(
        self, control: ControlPlane, options: PublisherOptions, *, then: Callable[[], None]
    ) -> None:
        """Take what to do after each renewal; it must not raise."""
        self._control = control
        self._options = options
        self._then = then
        self._stopped = threading.Event()
        self._wait = options.heartbeat_wait or self._stopped.wait
        self._thread: threading.Thread | None = None
        self.trouble: ControlError | None = None
        """Why the last renewal failed; None once one succeeds."""

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._thread is not None and not self._stopped.is_set()

    def register(self) -> None:
        """Register once. Raises ControlError."""
        options = self._options
        self._control.register_worker(
            WorkerRegistration(
                worker_id=options.worker_id,
                role=WorkerRole.TRAINER,
                model_name=options.model_name,
            ),
            ttl_seconds=options.registration_ttl_s,
        )

    def start(self) -> None:
        """Begin to renew."""
        self._thread = threading.Thread(target=self._beat, name="paceline-publisher", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Renew no more."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _beat(self) -> None:
        while not self._wait(self._options.registration_ttl_s / 3):
            try:
                self.register()
                self.trouble = None
            except ControlError as exc:
                self.trouble = exc
                continue
            self._then()
