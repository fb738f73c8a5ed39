"""Which version an engine is to serve, and the way there: decided from records alone."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from paceline.refit.model import Pin, VersionState, WeightVersion
from paceline.refit.plan import Costs, Holding, InstallPlan, plan_install


def pin_of(worker_id: str, pins: Iterable[Pin]) -> Pin | None:
    """Return the pin that counts for a worker: of the longest pattern that its id matches."""
    matching = [pin for pin in pins if fnmatchcase(worker_id, pin.workers)]
    return max(matching, key=lambda pin: (len(pin.workers), pin.workers), default=None)


def plan_pinned(
    versions: Sequence[WeightVersion],
    pin: Pin,
    *,
    held: Holding | None,
    avoid: frozenset[str] = frozenset(),
    costs: Costs | None = None,
) -> InstallPlan:
    """Plan the way to the pinned version, back or forth; an empty path if there is none now.

    Back means from a full version: a delta cannot be undone on engines that have forgotten what
    it wrote over. What lies between is installed on the way, and named as what it is.
    """
    wanted = next((each for each in versions if each.uid == pin.version_id), None)
    if wanted is None or wanted.description is None or wanted.state is not VersionState.READY:
        return InstallPlan(path=(), payload_bytes=0, reason=f"{pin.version_id} is not there")
    goal = wanted.description
    if held is not None and held.root_digest == goal.root_digest:
        return InstallPlan(path=(), payload_bytes=0, reason=f"{pin.version_id} is installed")
    start = held if held is not None and held.sequence < goal.sequence else None
    plan = plan_install(versions, held=start, target=goal.sequence, avoid=avoid, costs=costs)
    end = plan.path[-1].description if plan.path else None
    if end is None or end.root_digest != goal.root_digest:
        return InstallPlan(
            path=(), payload_bytes=0, reason=f"{pin.version_id} cannot be reached: {plan.reason}"
        )
    return plan
