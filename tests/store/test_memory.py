"""The reference store keeps the contract."""

from paceline.core.clock import Clock
from paceline.store.memory import MemoryStore
from paceline.testing.contracts.store import StoreContract


class TestMemoryStore(StoreContract):
    def make(self, clock: Clock) -> MemoryStore:
        return MemoryStore(clock=clock)
