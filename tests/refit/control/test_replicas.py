"""Two replicas over one Redis behave as one: every call goes to the other one."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from paceline.refit.control.ledger import ControlLedger
from paceline.refit.control.protocol import ControlPlane
from paceline.store.protocol import ConflictError
from paceline.store.redis import RedisStore
from paceline.system import system_clock
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.board import ReplicaBoardContract
from paceline.testing.contracts.control import ControlPlaneContract
from paceline.testing.fakes.control import counting
from paceline.testing.redis_server import NEEDS, RedisServer, redis_program

pytestmark = pytest.mark.skipif(redis_program() is None, reason=NEEDS)

_NUMBERS = itertools.count()


class Replicas:
    """Signs ControlPlane over several ledgers, in turns, each call in a group as the service's."""

    def __init__(self, ledgers: list[ControlLedger]) -> None:
        self._ledgers = ledgers
        self._turns = itertools.cycle(ledgers)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            ledger = next(self._turns)
            while True:
                try:
                    with ledger.group():
                        return getattr(ledger, name)(*args, **kwargs)
                except ConflictError:
                    continue

        return call

    def close(self) -> None:
        """Close every replica's store."""
        for ledger in self._ledgers:
            ledger.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path_factory.mktemp("redis"))
    yield made
    made.stop()


class TestReplicasOverRedis(ControlPlaneContract, ReplicaBoardContract):
    @pytest.fixture(autouse=True)
    def _place(self, server: RedisServer) -> None:
        self.url = server.url

    def make(self, clock: FakeClock) -> ControlPlane:
        prefix = f"t{next(_NUMBERS)}"

        def nonce(number: int) -> Callable[[], str]:
            numbers = counting()
            return lambda: f"{number}{numbers()[1:]}"

        ledgers = [
            ControlLedger(
                RedisStore(self.url, steady=system_clock(), clock=clock, prefix=prefix),
                nonce=nonce(number),
            )
            for number in range(2)
        ]
        return cast(ControlPlane, Replicas(ledgers))
