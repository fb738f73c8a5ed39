"""Which engine a prompt goes to: decided from reports and our own load on each engine alone."""

from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b

from paceline.refit.generators.protocol import EngineState
from paceline.refit.model import InstalledReport
from paceline.refit.rollouts.model import Fleet, RolloutConfig, Want


def choose_engine(
    fleet: Fleet,
    loads: Mapping[str, int],
    *,
    want: Want,
    config: RolloutConfig,
    avoided: Collection[str] = (),
) -> InstalledReport | None:
    """Return a fit engine: the one the prompt's beginning prefers, or the least loaded one.

    Preference is by highest hash of (beginning, engine): when an engine comes or goes only the
    prompts that preferred it move.
    """
    fit = [
        report
        for report in fleet.reports
        if report.worker_id not in avoided and is_fit(report, fleet, want=want, config=config)
    ]
    if not fit:
        return None
    least = min(loads.get(report.worker_id, 0) for report in fit)
    light = [
        report for report in fit if loads.get(report.worker_id, 0) <= least + config.affinity_slack
    ]
    prefix = want.prompt[: config.affinity_tokens]
    if not prefix:
        return min(light, key=lambda report: (loads.get(report.worker_id, 0), report.worker_id))
    return max(light, key=lambda report: _preference(prefix, report.worker_id))


def is_fit(report: InstalledReport, fleet: Fleet, *, want: Want, config: RolloutConfig) -> bool:
    """Return whether an engine may be asked: ready, reachable, and with the weights wanted."""
    if report.state != EngineState.READY.value or not report.endpoint:
        return False
    if want.version_id is not None:
        return report.version_id == want.version_id
    return report.sequence >= max(fleet.newest - config.max_staleness, 0)


def explain_none(
    fleet: Fleet, avoided: Collection[str], *, want: Want, config: RolloutConfig
) -> str:
    """Say why ``choose_engine`` found nobody."""
    if not fleet.reports:
        return "no engine has reported"
    return "; ".join(_explain(each, fleet, avoided, want, config) for each in fleet.reports)


def may_hedge(*, hedges: int, prompts: int, config: RolloutConfig) -> bool:
    """Return whether one more prompt may be asked twice; the first always may."""
    return hedges < max(1.0, prompts * config.hedge_share)


def _explain(
    report: InstalledReport,
    fleet: Fleet,
    avoided: Collection[str],
    want: Want,
    config: RolloutConfig,
) -> str:
    said = f"{report.worker_id} is {report.state} at sequence {report.sequence}"
    floor = fleet.newest - config.max_staleness
    if want.version_id is not None:
        if report.version_id != want.version_id:
            said += f" with version {report.version_id or 'none'}, {want.version_id} is wanted"
    elif report.sequence < floor:
        said += f", at least {floor} is needed"
    return said + (", it failed a moment ago" if report.worker_id in avoided else "")


def _preference(prefix: Sequence[int], worker_id: str) -> bytes:
    digest = blake2b(worker_id.encode(), digest_size=8)
    digest.update(",".join(map(str, prefix)).encode())
    return digest.digest()
