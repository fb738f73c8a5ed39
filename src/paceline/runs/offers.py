"""What each role of a job would be rented from, and for how much."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from paceline.rental import NoOffersError
from paceline.rental.orchestrator import Orchestrator
from paceline.runs.fleet import rent_request
from paceline.runs.model import JobSpec, RoleSpec


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
class PlanRow:
    """The offer that one role would take first."""

    role: str
    count: int
    backend: str
    offer_id: str
    gpu: str
    dph: float
    """US dollars per hour for one of its machines."""

    def as_json(self) -> dict[str, object]:
        """Return the row for ``--json``."""
        return asdict(self)


def plan_rows(planning: Planning, job: JobSpec) -> list[PlanRow]:
    """Ask for all roles at once. Raises NoOffersError for the first role that nothing fits."""
    with ThreadPoolExecutor(max_workers=len(job.roles)) as pool:
        return list(pool.map(lambda role: _row(planning, role), job.roles))


def total_dph(rows: list[PlanRow]) -> float:
    """Return what all machines of a plan cost per hour."""
    return sum(row.dph * row.count for row in rows)


def _row(planning: Planning, role: RoleSpec) -> PlanRow:
    request = rent_request(role, 0, run_id="plan", ssh_pubkey_path=planning.ssh_pubkey_path)
    plan = planning.rental.plan(request)
    if not plan.attempts:
        raise NoOffersError(
            f"role {role.name}: nothing on offer fits {role.gpu}: {plan.explain()}; "
            "relax the role, or allow another backend"
        )
    offer = plan.attempts[0]
    return PlanRow(
        role=role.name,
        count=role.count,
        backend=offer.backend,
        offer_id=offer.id,
        gpu=role.gpu,
        dph=offer.dph,
    )
