"""Asks backends for offers and makes a plan of what they have."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from paceline.core.errors import UsageError
from paceline.rental.backends.protocol import BackendAdapter, SupportsSpot
from paceline.rental.catalogue import parse_target
from paceline.rental.drivers.parts import RentalParts
from paceline.rental.errors import BackendError, NoOffersError
from paceline.rental.model import Offer, OfferConstraints
from paceline.rental.plan import (
    BackendAnswer,
    Experience,
    PastFailure,
    RentPlan,
    RentRequest,
    plan_attempts,
)
from paceline.rental.relaxing import wide


class Searcher:
    """Makes plans; creates nothing."""

    def __init__(self, parts: RentalParts) -> None:
        self._parts = parts

    def plan(
        self, request: RentRequest, *, failures: Iterable[PastFailure] = (), explain: bool = False
    ) -> RentPlan:
        """Ask all backends of the request at once and order what they have.

        With ``explain`` each backend is also asked what it has beside, so that the plan can say
        what was passed over for which reason, and what giving way would bring.
        """
        target = parse_target(request.gpu)
        constraints = OfferConstraints(
            str(target),
            min_disk_gb=request.min_disk_gb,
            min_inet_down_mbps=request.min_inet_down_mbps,
            min_reliability=request.min_reliability,
            max_dph=request.max_dph,
        )
        if not request.backends:
            raise UsageError(f"role {request.role}: no backend is named; name at least one")

        def ask(name: str) -> BackendAnswer:
            return self._ask(name, constraints, is_spot=request.is_spot, explain=explain)

        now_s = self._parts.clock.time()
        memory = self._parts.memory
        return plan_attempts(
            self._parts.ask_all(ask, request.backends),
            constraints=constraints,
            num_gpus=target.count,
            experience=Experience(
                failures=tuple(failures),
                blocks=memory.blocks(now_s=now_s),
                hosts=memory.hosts(),
                now_s=now_s,
            ),
        )

    def _ask(
        self, name: str, c: OfferConstraints, *, is_spot: bool, explain: bool
    ) -> BackendAnswer:
        backend = self._parts.backend(name)
        if is_spot and not isinstance(backend, SupportsSpot):
            no_spot = "rents nothing as spot; say spot: false to rent there"
            return BackendAnswer(backend=name, refusal=no_spot)
        refusal: str | None = None
        offers: Sequence[Offer] = ()
        try:
            offers = _search(backend, c, is_spot=is_spot)
        except BackendError as exc:
            refusal = str(exc)
            if not isinstance(exc, NoOffersError):
                return BackendAnswer(backend=name, refusal=refusal)
        others = _others(backend, c, is_spot=is_spot) if explain else []
        return BackendAnswer(
            backend=name, offers=tuple(offers), refusal=refusal, others=tuple(others)
        )


def _search(backend: BackendAdapter, c: OfferConstraints, *, is_spot: bool) -> Sequence[Offer]:
    if is_spot and isinstance(backend, SupportsSpot):
        return [replace(offer, is_spot=True) for offer in backend.search_spot_offers(c)]
    return backend.search_offers(c)


def _others(backend: BackendAdapter, c: OfferConstraints, *, is_spot: bool) -> Sequence[Offer]:
    """Return what fits no constraint but the kind; an explanation is not worth a failure."""
    try:
        return _search(backend, wide(c), is_spot=is_spot)
    except BackendError:
        return []
