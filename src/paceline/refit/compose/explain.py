"""Asking the control service why an engine installs what it installs."""

from collections.abc import Sequence

from paceline.core.errors import UsageError
from paceline.refit.control.protocol import ControlClient
from paceline.refit.errors import NotFoundError
from paceline.refit.model import Replica, VersionState
from paceline.refit.plan import Costs, plan_install
from paceline.refit.plan.explain import Explanation, held_by, measured_by, source_lines
from paceline.refit.receiver.install import STEP_S


def explain_versions(
    plane: ControlClient,
    *,
    model_name: str,
    run_id: str | None,
    worker_id: str = "",
    from_sequence: int | None = None,
) -> Explanation:
    """Return what an engine would install now, which ways were weighed, and who has the bytes.

    Args:
        plane: of the caller.
        model_name: what is served.
        run_id: whose versions; None takes all of the model.
        worker_id: an engine that has reported; empty for one that comes new.
        from_sequence: what it holds instead of what it reports.

    Raises:
        UsageError: no such engine or sequence.
    """
    versions = plane.list_versions(model_name, run_id=run_id)
    reports = plane.list_installed(model_name)
    try:
        held = held_by(worker_id, reports, from_sequence=from_sequence, versions=versions)
    except LookupError as exc:
        known = ", ".join(report.worker_id for report in reports) or "nobody"
        raise UsageError(
            f"{exc.args[0]!r} is no engine that has reported ({known}) and no sequence on record"
        ) from exc
    ready = [each.uid for each in versions if each.state is VersionState.READY]
    replicas = {uid: _replicas(plane, uid) for uid in ready}
    rates = measured_by(worker_id, [each for found in replicas.values() for each in found])
    costs = Costs(bytes_per_s=max(rates.values(), default=None), step_s=STEP_S)
    plan = plan_install(versions, held=held, costs=costs)
    return Explanation(
        worker_id=worker_id,
        held=held,
        plan=plan,
        sources={
            version.uid: source_lines(
                plane.list_shards(version.uid),
                replicas[version.uid],
                worker_id=worker_id,
                rates=rates,
            )
            for version in plan.path
        },
    )


def _replicas(plane: ControlClient, uid: str) -> Sequence[Replica]:
    try:
        return plane.list_replicas(uid)
    except NotFoundError:
        return ()  # released since it was listed
