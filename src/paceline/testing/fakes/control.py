"""The real control service on loopback, with known tokens, and clients of it."""

from collections.abc import Callable
from itertools import count

from paceline.core.retry import RetryPolicy
from paceline.refit.control.auth import FixedTokens, TokenRole, new_tokens
from paceline.refit.control.client import PATIENT, GrpcControlPlane
from paceline.refit.control.ledger import ControlLedger
from paceline.refit.control.pacing import ServiceLimits
from paceline.refit.control.service import ControlServer, ServiceOptions
from paceline.store.protocol import Store
from paceline.system import chance, system_clock

_NUMBERS = count()
TOKENS = new_tokens(lambda: f"token-of-a-test-{next(_NUMBERS)}")
"""Everybody's tokens; no secrets."""


def counting() -> Callable[[], str]:
    """Return a nonce function that counts in eight hex digits."""
    numbers = count(1)
    return lambda: f"{next(numbers):08x}"


class LoopbackControl:
    """A service over a store; it can be stopped and started again on its port."""

    def __init__(self, store: Store, *, limits: ServiceLimits | None = None) -> None:
        self._limits = limits or ServiceLimits()
        self.ledger = ControlLedger(store, nonce=counting())
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Serve, on the port of the last time if there was one."""
        self._server = ControlServer(
            self.ledger,
            tokens=FixedTokens(TOKENS),
            options=ServiceOptions(listen=self.address, limits=self._limits),
        )
        self.address = self._server.start()

    def stop(self) -> None:
        """Stop serving; the store stays open."""
        self._server.stop(grace_s=0.5)

    def client(
        self,
        role: TokenRole = TokenRole.OPERATOR,
        *,
        timeout_s: float = 30.0,
        retry: RetryPolicy = PATIENT,
    ) -> GrpcControlPlane:
        """Return a client with the token of ``role``."""
        return GrpcControlPlane(
            self.address,
            token=lambda: TOKENS[role],
            clock=system_clock(),
            chance=chance,
            timeout_s=timeout_s,
            retry=retry,
        )
