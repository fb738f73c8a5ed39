"""How long all backends together take to say what they have, beside the slowest of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from bars import Bar, at_most, run

from paceline.rental.market import survey
from paceline.rental.model import Offer, OfferConstraints
from paceline.system import system_clock
from paceline.testing.fakes.backend import FakeBackend

DELAYS_S = (0.1, 0.2, 0.3, 0.5, 0.5, 0.6, 0.8, 1.0)
NUM_OFFERS = 200


@dataclass(slots=True, kw_only=True)
class SlowBackend(FakeBackend):
    """A provider that takes its time."""

    delay_s: float

    def search_offers(self, c: OfferConstraints) -> list[Offer]:
        """Wait, and answer."""
        time.sleep(self.delay_s)
        return FakeBackend.search_offers(self, c)


def measure() -> Sequence[Bar]:
    """Ask eight backends of different slowness at once."""
    clock = system_clock()
    backends = {
        f"b{place}": SlowBackend(
            clock=clock, name=f"b{place}", delay_s=delay_s, dphs=(1.0,) * NUM_OFFERS
        )
        for place, delay_s in enumerate(DELAYS_S)
    }
    start = time.perf_counter()
    found = survey(
        tuple(backends),
        OfferConstraints("h100-1x", min_disk_gb=1),
        backend=backends.__getitem__,
        clock=clock,
        timeout_s=30,
    )
    wall_s = time.perf_counter() - start
    return [
        at_most("offers of all / the slowest backend", wall_s / max(DELAYS_S), 1.15),
        at_most("offers that are missing", len(DELAYS_S) * NUM_OFFERS - len(found.offers), 0),
    ]


if __name__ == "__main__":
    run(measure, __doc__)
