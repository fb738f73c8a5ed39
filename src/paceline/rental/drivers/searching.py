"""Asks backends for offers and makes a plan of what they have."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from threading import Lock

from paceline.core.errors import UsageError
from paceline.rental.backends.protocol import BackendAdapter, SupportsPorts, SupportsSpot
from paceline.rental.catalogue import parse_target
from paceline.rental.drivers.parts import RentalParts
from paceline.rental.errors import (
    AuthError,
    BackendError,
    BalanceError,
    NoOffersError,
    RequestError,
)
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

FRESH_S = 60.0
"""For so long the answers to one search serve all machines that ask for the same."""


class Plans:
    """The last plan for each kind of machine, so that a role's machines do not all search.

    Providers allow a search every few seconds; whoever comes late to an offer takes the next one.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._plans: dict[RentRequest, tuple[float, RentPlan]] = {}

    def put(self, request: RentRequest, plan: RentPlan, *, now_s: float) -> None:
        """Keep a plan that was just made."""
        with self._lock:
            self._plans[_kind(request)] = (now_s, plan)

    def take(self, request: RentRequest, *, now_s: float) -> RentPlan | None:
        """Return a plan that is fresh, if there is one."""
        with self._lock:
            made_s, plan = self._plans.get(_kind(request), (float("-inf"), None))
        return plan if now_s - made_s < FRESH_S else None


def _kind(request: RentRequest) -> RentRequest:
    """Return what a request has in common with those of the same kind of machine."""
    return replace(request, run_id="", role="", index=0, hard_usd=None, retry_for_s=None)


class Searcher:
    """Makes plans; creates nothing."""

    def __init__(self, parts: RentalParts, plans: Plans) -> None:
        self._parts = parts
        self._plans = plans

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
            backend = self._parts.backend(name)
            if request.ports and isinstance(backend, SupportsPorts):
                backend = backend.with_ports(request.ports)
            return _answer(backend, name, constraints, is_spot=request.is_spot, explain=explain)

        now_s = self._parts.clock.time()
        memory = self._parts.memory
        plan = plan_attempts(
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
        self._plans.put(request, plan, now_s=self._parts.clock.monotonic())
        return plan

    def fresh_plan(self, request: RentRequest) -> RentPlan:
        """Return the plan that was made for such a machine just now, else make one."""
        known = self._plans.take(request, now_s=self._parts.clock.monotonic())
        if known is not None and known.attempts:
            return known
        plan = self.plan(request)
        # what fits nothing is worth a second question: what would fit instead
        return plan if plan.attempts else self.plan(request, explain=True)


def _answer(
    backend: BackendAdapter, name: str, c: OfferConstraints, *, is_spot: bool, explain: bool
) -> BackendAnswer:
    if is_spot and not isinstance(backend, SupportsSpot):
        no_spot = "rents nothing as spot; say spot: false to rent there"
        return BackendAnswer(backend=name, refusal=no_spot, is_lasting=True)
    refusal: str | None = None
    offers: Sequence[Offer] = ()
    try:
        offers = _search(backend, c, is_spot=is_spot)
    except BackendError as exc:
        refusal = str(exc)
        if not isinstance(exc, NoOffersError):
            is_lasting = isinstance(exc, AuthError | BalanceError | RequestError)
            return BackendAnswer(backend=name, refusal=refusal, is_lasting=is_lasting)
    others = _others(backend, c, is_spot=is_spot) if explain else []
    return BackendAnswer(backend=name, offers=tuple(offers), refusal=refusal, others=tuple(others))


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
