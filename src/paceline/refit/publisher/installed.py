"""Which engines serve a version: what the end of a run waits for."""

from paceline.refit.control.protocol import ControlPlane
from paceline.refit.model import InstalledReport, WorkerRole
from paceline.refit.publisher.values import Head, sequence_of


def is_installed(control: ControlPlane, head: Head, *, model_name: str, run_id: str) -> bool:
    """Say whether every live generator serves ``head``, or follows another run of the model.

    Raises:
        ControlError: the control service does not answer, or refuses.
    """
    workers = control.list_workers(model_name)
    reports = {report.worker_id: report for report in control.list_installed(model_name)}
    return all(
        _has_it_or_is_elsewhere(reports.get(worker.worker_id), head, run_id=run_id)
        for worker in workers
        if worker.role is WorkerRole.GENERATOR
    )


def _has_it_or_is_elsewhere(report: InstalledReport | None, head: Head, *, run_id: str) -> bool:
    if report is None:
        return False
    uid = report.version_id
    is_elsewhere = uid != "" and sequence_of(uid, run_id) < 0
    return is_elsewhere or report.root_digest == head.root_digest
