"""What each role of a job would be rented from, for how much, and what was passed over."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from paceline.core.clock import Clock
from paceline.core.text import told_by
from paceline.rental import AllRefusedError, BudgetError, NoOffersError, Offer
from paceline.rental.budget import AtWorst, PlannedRole, refuse_plan, worst_case
from paceline.rental.catalogue import parse_target
from paceline.rental.drivers.parts import each_at_once
from paceline.rental.drivers.renting import AGAIN
from paceline.rental.orchestrator import Orchestrator
from paceline.rental.plan import NUM_ATTEMPTS_MAX, RentPlan, nothing_to_try
from paceline.runs.fleet import rent_request
from paceline.runs.model import JobSpec, RoleKind, RoleSpec, Slot
from paceline.runs.reach import exposed

NUM_ALTERNATIVES = 3
NUM_REASONS = 5


class Planning(Protocol):
    """What offers are asked of."""

    @property
    def rental(self) -> Orchestrator:
        """Who asks the backends."""
        ...

    @property
    def ssh_pubkey_path(self) -> Path:
        """The operator's public key."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """An offer that is taken when the first one cannot be had."""

    backend: str
    offer_id: str
    dph: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """The offer that one role would take first, and what else there is."""

    role: str
    count: int
    backend: str
    offer_id: str
    gpu: str
    dph: float
    """US dollars per hour for the first of its machines."""
    spot: bool
    alternatives: tuple[Alternative, ...]
    """What comes next, in that order."""
    passed_over: tuple[str, ...]
    """What is cheaper and not taken, each with its reason."""
    relaxations: tuple[str, ...]
    """What giving way a little would bring."""
    planned: PlannedRole

    def as_json(self) -> dict[str, object]:
        """Return the row for ``--json``."""
        found = asdict(self)
        del found["planned"]
        return found


def plan_rows(planning: Planning, job: JobSpec, *, explain: bool = True) -> list[PlanRow]:
    """Ask for all roles, as many at once as can be without two finding a backend down.

    Raises:
        NoOffersError: the first role that nothing fits.
        BudgetError: the hard cap does not pay for the plan.
    """

    def ask(role: RoleSpec) -> RentPlan:
        return _plan(planning, job, role, explain=explain)

    plans: dict[str, RentPlan] = {}
    for wave in waves(job.roles):
        plans |= zip((role.name for role in wave), each_at_once(ask, wave), strict=True)
    taken: set[tuple[str, str]] = set()
    rows = [_row(role, plans[role.name], taken) for role in job.roles]
    refusal = refuse_plan([row.planned for row in rows], job.budget)
    if refusal is not None:
        raise BudgetError(refusal)
    return rows


def waves(roles: Sequence[RoleSpec]) -> list[list[RoleSpec]]:
    """Return roles in the order in which they are asked for, those of a wave at once.

    A backend that nobody has asked yet is asked by one role, so that one which does not answer
    is waited for once.
    """
    left, known = list(roles), set[str]()
    found: list[list[RoleSpec]] = []
    while left:
        wave: list[RoleSpec] = []
        fresh: set[str] = set()
        for role in left:
            new = set(role.backends) - known
            if new.isdisjoint(fresh):
                wave.append(role)
                fresh |= new
        known |= fresh
        left = [role for role in left if role not in wave]
        found.append(wave)
    return found


def patient_rows(
    planning: Planning,
    job: JobSpec,
    *,
    clock: Clock,
    retry_for_s: float | None,
    tell: Callable[[NoOffersError, float], None],
    explain: bool,
) -> list[PlanRow]:
    """Return ``plan_rows``, asked for again and again where nothing fits and that is wanted."""
    deadline_s = clock.monotonic() + (retry_for_s or 0.0)
    tries = 0
    while True:
        try:
            return plan_rows(planning, job, explain=explain)
        except NoOffersError as exc:
            if isinstance(exc, AllRefusedError):
                raise
            tries += 1
            wait_s = AGAIN.delay_s(tries, chance=0.0) or 0.0
            if clock.monotonic() + wait_s > deadline_s:
                raise
            tell(exc, wait_s)
            clock.sleep(wait_s)


def total_dph(rows: Sequence[PlanRow]) -> float:
    """Return what all machines of a plan cost per hour."""
    return sum(row.planned.best_dph for row in rows)


def worst_of(rows: Sequence[PlanRow]) -> AtWorst:
    """Return the most that a plan can cost."""
    return worst_case(row.planned for row in rows)


def _plan(planning: Planning, job: JobSpec, role: RoleSpec, *, explain: bool) -> RentPlan:
    request = rent_request(role, 0, run_id="plan", ssh_pubkey_path=planning.ssh_pubkey_path)
    ports = (0,) * _num_ports(job, role)
    plan = planning.rental.plan(replace(request, ports=ports), explain=explain)
    if not plan.attempts:
        raise nothing_to_try(plan, who=f"role {role.name}", gpu=role.gpu)
    return plan


def _num_ports(job: JobSpec, role: RoleSpec) -> int:
    """Return how many ports each of a role's machines is to have reached from outside."""
    if job.refit is None or role.kind is RoleKind.TASK:
        return 0
    slot = Slot(role=role.name, index=0)
    ports = {slot: (0,) * parse_target(role.gpu).count}
    found = exposed({slot: role}, ports, has_http="http" in job.refit.transports)
    return len(found.get(slot, ()))


def _row(role: RoleSpec, plan: RentPlan, taken: set[tuple[str, str]]) -> PlanRow:
    """Return a role's row from what earlier roles leave of its plan; what it takes is ``taken``."""
    left = tuple(one for one in plan.attempts if (one.backend, one.id) not in taken)
    is_cut = len(plan.attempts) >= NUM_ATTEMPTS_MAX
    firsts = first_takes(left, role, is_cut=is_cut)
    taken.update((one.backend, one.id) for one in firsts if one.host)
    offer, *others = left or plan.attempts
    return PlanRow(
        role=role.name,
        count=role.count,
        backend=offer.backend,
        offer_id=offer.id,
        gpu=role.gpu,
        dph=offer.dph,
        spot=role.spot,
        alternatives=tuple(
            Alternative(backend=one.backend, offer_id=one.id, dph=one.dph)
            for one in others[:NUM_ALTERNATIVES]
        ),
        passed_over=cheaper_reasons(plan),
        relaxations=tuple(map(str, plan.relaxations)),
        planned=PlannedRole(
            role=role.name,
            count=role.count,
            boot_timeout_s=role.boot_timeout_s,
            dphs=tuple(one.dph for one in left or plan.attempts),
            firsts=tuple(one.dph for one in firsts),
        ),
    )


def first_takes(offers: Sequence[Offer], role: RoleSpec, *, is_cut: bool) -> tuple[Offer, ...]:
    """Return what each machine of a role is if it takes the first offer that is left.

    ``is_cut``: there may be more offers than these. Raises NoOffersError where every offer is one
    machine and there are fewer than asked for.
    """
    found: list[Offer] = []
    for offer in offers:
        # One machine is behind an offer that names its host; others are a kind that is sold.
        found += [offer] * (1 if offer.host else role.count)
    if len(found) < role.count and not is_cut:
        raise NoOffersError(
            f"role {role.name}: {role.count} machines of {role.gpu} are asked for and only "
            f"{len(found)} are on offer that fit and that no role above it takes; ask for fewer, "
            "relax the role, allow another backend, or wait with --retry-until-up"
        )
    found += found[-1:] * (role.count - len(found))
    return tuple(found[: role.count])


def cheaper_reasons(plan: RentPlan) -> tuple[str, ...]:
    """Return why what is cheaper than the first attempt was passed over, cheapest first."""
    first_dph = plan.attempts[0].dph if plan.attempts else float("inf")
    cheaper = [left for left in plan.passed_over if left.dph is not None and left.dph < first_dph]
    told = [
        f"{left.backend} {left.offer_id} at {left.dph:.3f} $/h: {', '.join(left.reasons)}"
        for left in sorted(cheaper, key=lambda left: left.dph or 0.0)[:NUM_REASONS]
    ]
    silent = [left for left in plan.passed_over if left.offer_id is None]
    return (*told, *(told_by(left.backend, ", ".join(left.reasons)) for left in silent))
