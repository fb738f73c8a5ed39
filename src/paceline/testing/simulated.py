"""What simulated runs are made of: a store that a crash can strike in, providers with moods."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.rental import InstanceHandle, Offer, OfferConstraints
from paceline.store.memory import MemoryStore
from paceline.testing.fakes.backend import Fault, ListingFakeBackend
from paceline.testing.scheduler import Countdown


class SimStore(MemoryStore):
    """A store in which the process can end just before or just after a write."""

    countdown: Countdown

    def commit(self, *, expect: Mapping[str, int], writes: Mapping[str, bytes | None]) -> None:
        """Write, unless the process ends."""
        self.countdown.tick()
        super().commit(expect=expect, writes=writes)
        self.countdown.tick()


@dataclass(slots=True, kw_only=True)
class SimBackend(ListingFakeBackend):
    """A provider whose calls fail by chance, whose hosts are known, and who also rents as spot."""

    rng: random.Random = field(default_factory=random.Random)
    fault_chance: float = 0.0

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        """Return what is on sale, each on a host of its own."""
        found = ListingFakeBackend.search_offers(self, c)
        return [replace(offer, host=f"host-{offer.id}") for offer in found]

    def search_spot_offers(self, c: OfferConstraints) -> list[Offer]:
        """Return the same for half the price."""
        return [replace(offer, dph=offer.dph / 2) for offer in self.search_offers(c)]

    def provision_spot(
        self,
        offer_id: str,
        *,
        disk_gb: int,
        image: str,
        ssh_pubkey_path: Path,
        label: str,
        max_dph: float,
    ) -> InstanceHandle:
        """Rent at the bid."""
        try:
            return self.provision(
                offer_id, disk_gb=disk_gb, image=image, ssh_pubkey_path=ssh_pubkey_path, label=label
            )
        finally:
            for instance in self.instances:
                if instance.handle.label == label:
                    instance.dph = max_dph

    def _take_fault(self, *kinds: Fault) -> Fault | None:
        """Draw whether this call goes wrong."""
        if self.rng.random() >= self.fault_chance:
            return None
        return self.rng.choice(kinds)
