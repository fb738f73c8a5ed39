"""Why an engine would install what it would, and from whom: the planner's choice for people."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from paceline.refit.model import InstalledReport, Replica, Shard, WeightVersion
from paceline.refit.plan.install import Holding, InstallPlan

NEAR = "near: asked first"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """One process that has a version, or part of it."""

    worker_id: str
    role: str
    """``trainer`` or ``generator``."""
    region: str
    share: float
    """Of the payload that it has and proved, 0 to 1, as near as it is told."""
    bytes_per_s: float | None
    """As the asking worker measured it; None if it has not."""
    note: str
    """What that means for the asking worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The plan for one engine, and where each version of it can be had."""

    worker_id: str
    held: Holding | None
    plan: InstallPlan
    sources: Mapping[str, tuple[SourceLine, ...]]
    """By uid of the plan's versions, the likeliest first."""

    def to_fields(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {
            "worker_id": self.worker_id,
            "held": None if self.held is None else asdict(self.held),
            "kind": self.plan.kind.value,
            "reason": self.plan.reason,
            "path": [version.uid for version in self.plan.path],
            "payload_bytes": self.plan.payload_bytes,
            "options": [asdict(option) for option in self.plan.options],
            "sources": {
                uid: [asdict(line) for line in lines] for uid, lines in self.sources.items()
            },
        }


def held_by(
    worker_id: str,
    reports: Sequence[InstalledReport],
    *,
    versions: Sequence[WeightVersion],
    from_sequence: int | None,
) -> Holding | None:
    """Return what an engine has: as it reports, or as the asker supposes.

    Raises:
        LookupError: no such report, or no version of that sequence.
    """
    if from_sequence is not None:
        roots = {
            version.description.sequence: version.description.root_digest
            for version in versions
            if version.description is not None
        }
        return Holding(sequence=from_sequence, root_digest=roots[from_sequence])
    if not worker_id:
        return None
    report = {each.worker_id: each for each in reports}[worker_id]
    if report.sequence < 0:
        return None
    return Holding(sequence=report.sequence, root_digest=report.root_digest)


def measured_by(worker_id: str, replicas: Sequence[Replica]) -> Mapping[str, float]:
    """Return the rates that a worker told, by source."""
    mine = (each for each in replicas if each.worker_id == worker_id)
    return {name: rate for each in mine for name, rate in each.rates}


def source_lines(
    shards: Sequence[Shard],
    replicas: Sequence[Replica],
    *,
    worker_id: str,
    rates: Mapping[str, float],
) -> tuple[SourceLine, ...]:
    """Return who has a version, neighbours first and the fastest of them first."""
    region = next((each.region for each in replicas if each.worker_id == worker_id), "")
    lines = [
        SourceLine(
            worker_id=each.worker_id,
            role="trainer",
            region="",
            share=1.0,
            bytes_per_s=rates.get(each.worker_id),
            note="far: each byte is fetched from it once per region",
        )
        for each in shards
    ]
    others = (each for each in replicas if each.worker_id != worker_id and each.manifest_endpoint)
    lines += [_replica_line(each, region=region, rates=rates) for each in others]
    return tuple(sorted(lines, key=_likelihood))


def _replica_line(replica: Replica, *, region: str, rates: Mapping[str, float]) -> SourceLine:
    bits = int.from_bytes(replica.chunks, "little").bit_count()
    share = bits / (8 * len(replica.chunks)) if replica.chunks else 0.0
    return SourceLine(
        worker_id=replica.worker_id,
        role="generator",
        region=replica.region,
        share=1.0 if replica.is_complete else share,
        bytes_per_s=rates.get(replica.worker_id),
        note=NEAR if replica.region == region else "far: another region",
    )


def _likelihood(line: SourceLine) -> tuple[bool, float, str]:
    """Smaller is asked first."""
    return line.note != NEAR, -(line.bytes_per_s or 0.0), line.worker_id
