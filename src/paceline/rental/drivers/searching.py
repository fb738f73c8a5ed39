"""Asks backends for offers and makes a plan of what they have."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from threading import Lock

from paceline.core.errors import MissingExtraError, UsageError
from paceline.rental.backends.protocol import BackendAdapter, SupportsPorts, SupportsSpot
from paceline.rental.catalogue import parse_target
from paceline.rental.drivers.parts import RentalParts
from paceline.rental.errors import BackendError, NoAnswerError, NoOffersError, Silence
from paceline.rental.model import Offer, OfferConstraints
from paceline.rental.plan import (
    BackendAnswer,
    Experience,
    PastFailure,
    RentPlan,
    RentRequest,
    plan_attempts,
    silence_of,
)
from paceline.rental.relaxing import wide

FRESH_S = 60.0
"""For so long the answers to one search serve all machines that ask for the same."""
DOWN_S = 20.0
"""For so long one that gave no answer is not asked again; less than what a retry waits."""


class Plans:
    """The last plan for each kind of machine, so that a role's machines do not all search.

    Providers allow a search every few seconds; whoever comes late to an offer takes the next one.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._plans: dict[RentRequest, tuple[float, RentPlan]] = {}
        self._down: dict[str, tuple[float, BackendAnswer]] = {}

    def put(self, request: RentRequest, plan: RentPlan, *, now_s: float) -> None:
        """Keep a plan that was just made."""
        with self._lock:
            self._plans[_kind(request)] = (now_s, plan)

    def take(self, request: RentRequest, *, now_s: float) -> RentPlan | None:
        """Return a plan that is fresh, if there is one."""
        with self._lock:
            made_s, plan = self._plans.get(_kind(request), (float("-inf"), None))
        return plan if now_s - made_s < FRESH_S else None

    def heard(self, answer: BackendAnswer, *, now_s: float) -> None:
        """Keep that a backend gave no answer, or forget it when it does."""
        with self._lock:
            self._down.pop(answer.backend, None)
            if answer.silence is Silence.UNREACHABLE:
                self._down[answer.backend] = (now_s, answer)

    def down(self, name: str, *, now_s: float) -> BackendAnswer | None:
        """Return what became of asking a backend that gave no answer just now."""
        with self._lock:
            since_s, answer = self._down.get(name, (float("-inf"), None))
        return answer if now_s - since_s < DOWN_S else None


def _kind(request: RentRequest) -> RentRequest:
    """Return what a request has in common with those of the same kind of machine."""
    ports = (0,) * len(request.ports)  # how many there are decides which host fits
    return replace(
        request, run_id="", role="", index=0, hard_usd=None, retry_for_s=None, ports=ports
    )


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
            return self._ask(name, request, constraints, explain=explain)

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

    def _ask(
        self, name: str, request: RentRequest, constraints: OfferConstraints, *, explain: bool
    ) -> BackendAnswer:
        """Ask one backend, unless it gave no answer just now: then that is the answer still."""
        clock = self._parts.clock
        down = self._plans.down(name, now_s=clock.monotonic())
        if down is not None:
            return down
        try:
            backend = self._parts.backend(name)
        except MissingExtraError as exc:
            return BackendAnswer(backend=name, refusal=str(exc), silence=silence_of(exc))
        if request.ports and isinstance(backend, SupportsPorts):
            backend = backend.with_ports(request.ports)
        answer = _answer(backend, name, constraints, is_spot=request.is_spot, explain=explain)
        self._plans.heard(answer, now_s=clock.monotonic())
        return answer

    def is_down(self, name: str) -> bool:
        """Return whether a backend gave no answer just now."""
        return self._plans.down(name, now_s=self._parts.clock.monotonic()) is not None

    def heard(self, name: str, failure: Exception) -> None:
        """Take note that another question never reached a backend; offers need not be asked for."""
        if isinstance(failure, NoAnswerError) and not failure.was_sent:
            answer = BackendAnswer(backend=name, refusal=str(failure), silence=silence_of(failure))
            self._plans.heard(answer, now_s=self._parts.clock.monotonic())

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
        return BackendAnswer(backend=name, refusal=no_spot, silence=Silence.REFUSED)
    refusal: str | None = None
    offers: Sequence[Offer] = ()
    try:
        offers = _search(backend, c, is_spot=is_spot)
    except BackendError as exc:
        refusal = str(exc)
        if not isinstance(exc, NoOffersError):
            return BackendAnswer(backend=name, refusal=refusal, silence=silence_of(exc))
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
