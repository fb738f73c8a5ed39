"""What a run's events say, as one value that live progress, report and dashboard all read. Pure.

Events come from workers, so their fields are taken with care: an event without the fields that it
must have is counted as malformed and otherwise ignored, and no field can make this raise.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.text import printable
from paceline.refit.model import Event, InstalledReport, WeightPayloadFormat

NOTE_MAX = 80
_TRANSFERS_MAX, _STAGES_MAX = 16, 8
"""Characters of a worker's own words that are shown."""
EDGE_STEPS = 5
"""How many steps at each end the first and last mean rewards are taken over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """One optimizer step as the trainer told it; None where it did not say."""

    step: int
    reward: float | None
    loss: float | None
    staleness: float | None
    step_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleProgress:
    """How far a role says it is in something that takes long and is no training step."""

    worker_id: str
    phase: str
    done: int
    total: int
    """The most that ``done`` can reach; 0 while nobody knows."""
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One version as the trainer published it."""

    version_id: str
    sequence: int
    step: int
    root_digest: str
    payload_format: str
    payload_bytes: int
    full_bytes: int
    changed_elements: int
    total_elements: int
    publish_ms: float

    @property
    def is_delta(self) -> bool:
        """Say whether it was told as a change to the version before."""
        return self.payload_format == WeightPayloadFormat.XOR_DELTA.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one source gave to one install, over one transport."""

    over: str
    source: str
    num_bytes: int
    ms: float
    stages_ms: Mapping[str, float]
    """By the transport's own words, such as ``move`` and ``prove``."""
    retries: int
    problem: str
    """Why not all of it arrived; empty if it did."""

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0 where no time passed."""
        return 1000 * self.num_bytes / self.ms if self.ms > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """One weight state as one engine said it installed it; repeats are folded into the last."""

    worker_id: str
    version_id: str
    sequence: int
    root_digest: str
    fetched_bytes: int
    fetched_over: str
    """Names of the transports, empty where nobody said."""
    fetch_sources: int
    fetch_ms: float
    fetch_bytes_per_s: float
    fetch_retries: int
    fetch_problems: tuple[str, ...]
    """What went wrong on the way, a few of them."""
    transfers: tuple[Transfer, ...]
    """One for each source; none where nobody said."""
    refit_ms: float
    pause_ms: float
    is_equal: bool
    """The engine's digest is the trainer's, in every report of this state by this engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightState:
    """One sequence number: the version told first, and what became of it."""

    version: Published
    anchors: tuple[Published, ...]
    """Further versions that are the same state in full, for engines that join late."""
    is_consistent: bool
    """All versions of this state have one digest."""
    installs: Mapping[str, Installed]
    """By engine; an engine that skipped it is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Everything the events of one run say."""

    steps: tuple[TrainStep, ...]
    states: tuple[WeightState, ...]
    """By sequence."""
    unknown: tuple[Installed, ...]
    """Installs of states that nobody published: they count as mismatches."""
    engines: tuple[str, ...]
    """Ids of the workers that installed something, sorted."""
    progress: tuple[RoleProgress, ...]
    """Every report of long work, in order."""
    refused: int
    """How often an engine refused a version."""
    malformed: int

    @property
    def mismatches(self) -> int:
        """Count installs and states whose digest is not the trainer's."""
        installs = [i for state in self.states for i in state.installs.values() if not i.is_equal]
        states = [state for state in self.states if not state.is_consistent]
        return len(installs) + len(states) + len(self.unknown)

    @property
    def versions(self) -> tuple[Published, ...]:
        """Return every version published, anchors too."""
        return tuple(v for state in self.states for v in (state.version, *state.anchors))

    @property
    def delta_bytes(self) -> int:
        """Bytes of all versions told as deltas."""
        return sum(version.payload_bytes for version in self.versions if version.is_delta)

    @property
    def full_bytes(self) -> int:
        """What full weights would have taken for the versions told as deltas."""
        return sum(version.full_bytes for version in self.versions if version.is_delta)

    @property
    def anchor_bytes(self) -> int:
        """Bytes of all versions told in full."""
        return sum(version.payload_bytes for version in self.versions if not version.is_delta)

    def reward_first(self, count: int = EDGE_STEPS) -> float | None:
        """Return the mean reward of the first ``count`` steps, None without any."""
        return _mean(self._rewards()[:count])

    def reward_last(self, count: int = EDGE_STEPS) -> float | None:
        """Return the mean reward of the last ``count`` steps, None without any."""
        return _mean(self._rewards()[-count:])

    def _rewards(self) -> list[float]:
        return [step.reward for step in self.steps if step.reward is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnd:
    """What one engine served when the run ended."""

    worker_id: str
    version_id: str
    root_digest: str


def short_name(worker_id: str, run_id: str) -> str:
    """Return a worker's id as people read it inside its own run."""
    return worker_id.removeprefix(f"{run_id}-")


def view_of(events: Iterable[Event]) -> RunView:
    """Fold events, in the order of the control service, into what they say."""
    by_name: dict[str, list[Event]] = {}
    for event in events:
        by_name.setdefault(event.name, []).append(event)
    steps = [_step(event.fields) for event in by_name.get("train.step", ())]
    told = [_published(event.fields) for event in by_name.get("version.published", ())]
    versions = {version.version_id: version for version in told if version is not None}
    roots: dict[int, str] = {}
    for version in versions.values():
        roots.setdefault(version.sequence, version.root_digest)
    read = [
        _installed(event.worker_id, event.fields, roots)
        for event in by_name.get("version.installed", ())
    ]
    installs = [install for install in read if install is not None]
    progress = [_progress(e.worker_id, e.fields) for e in by_name.get("role.progress", ())]
    by_step = {step.step: step for step in steps if step is not None}
    return RunView(
        steps=tuple(by_step[step] for step in sorted(by_step)),
        states=_states(versions.values(), installs),
        unknown=_unknown(versions.values(), installs),
        engines=tuple(sorted({install.worker_id for install in installs})),
        progress=tuple(one for one in progress if one is not None),
        refused=len(by_name.get("version.refused", ())),
        malformed=sum(one is None for one in (*steps, *told, *read, *progress)),
    )


def engines_at_end(view: RunView, reports: Sequence[InstalledReport]) -> tuple[EngineEnd, ...]:
    """Return what each engine serves: as it reports, else its last install on record."""
    if reports:
        return tuple(
            EngineEnd(worker_id=r.worker_id, version_id=r.version_id, root_digest=r.root_digest)
            for r in sorted(reports, key=lambda r: r.worker_id)
        )
    last: dict[str, Installed] = {}
    for state in view.states:
        last.update(state.installs)
    return tuple(
        EngineEnd(worker_id=i.worker_id, version_id=i.version_id, root_digest=i.root_digest)
        for _, i in sorted(last.items())
    )


def _states(
    versions: Iterable[Published], installs: Sequence[Installed]
) -> tuple[WeightState, ...]:
    told: dict[int, list[Published]] = {}
    for version in versions:
        told.setdefault(version.sequence, []).append(version)
    by_state: dict[int, dict[str, Installed]] = {}
    for install in installs:
        engines = by_state.setdefault(install.sequence, {})
        before = engines.get(install.worker_id)
        if before is None or before.is_equal:  # one different digest is not forgotten
            engines[install.worker_id] = install
    return tuple(
        WeightState(
            version=first,
            anchors=tuple(rest),
            is_consistent=all(other.root_digest == first.root_digest for other in rest),
            installs=by_state.get(sequence, {}),
        )
        for sequence, (first, *rest) in sorted(told.items())
    )


def _unknown(versions: Iterable[Published], installs: Sequence[Installed]) -> tuple[Installed, ...]:
    told = {version.sequence for version in versions}
    found = {(i.worker_id, i.sequence): i for i in installs if i.sequence not in told}
    return tuple(found.values())


def _step(fields: Mapping[str, object]) -> TrainStep | None:
    step = _whole(fields, "step")
    if step is None:
        return None
    return TrainStep(
        step=step,
        reward=_number(fields, "reward"),
        loss=_number(fields, "loss"),
        staleness=_number(fields, "staleness"),
        step_s=_number(fields, "step_s"),
    )


def _progress(worker_id: str, fields: Mapping[str, object]) -> RoleProgress | None:
    phase = _text(fields, "phase")
    if phase is None:
        return None
    return RoleProgress(
        worker_id=worker_id,
        phase=phase[:NOTE_MAX],
        done=_whole(fields, "done") or 0,
        total=_whole(fields, "total") or 0,
        note=(_text(fields, "note") or "")[:NOTE_MAX],
    )


def _published(fields: Mapping[str, object]) -> Published | None:
    version_id, root = _text(fields, "version_id"), _text(fields, "root_digest")
    sequence = _whole(fields, "sequence")
    if version_id is None or root is None or sequence is None:
        return None
    return Published(
        version_id=version_id,
        sequence=sequence,
        step=_whole(fields, "step") or 0,
        root_digest=root,
        payload_format=_text(fields, "payload_format") or WeightPayloadFormat.UNSPECIFIED.value,
        payload_bytes=_whole(fields, "payload_bytes") or 0,
        full_bytes=_whole(fields, "full_bytes") or 0,
        changed_elements=_whole(fields, "changed_elements") or 0,
        total_elements=_whole(fields, "total_elements") or 0,
        publish_ms=_number(fields, "publish_ms") or 0.0,
    )


def _installed(
    worker_id: str, fields: Mapping[str, object], roots: Mapping[int, str]
) -> Installed | None:
    version_id, root = _text(fields, "version_id"), _text(fields, "root_digest")
    sequence = _whole(fields, "sequence")
    if version_id is None or root is None or sequence is None:
        return None
    return Installed(
        worker_id=worker_id,
        version_id=version_id,
        sequence=sequence,
        root_digest=root,
        fetched_bytes=_whole(fields, "fetched_bytes") or 0,
        fetched_over=_text(fields, "fetched_over") or "",
        fetch_sources=_whole(fields, "fetch_sources") or 0,
        fetch_ms=_number(fields, "fetch_ms") or 0.0,
        fetch_bytes_per_s=_number(fields, "fetch_bytes_per_s") or 0.0,
        fetch_retries=_whole(fields, "fetch_retries") or 0,
        fetch_problems=_texts(fields, "fetch_problems"),
        transfers=_transfers(fields),
        refit_ms=_number(fields, "refit_ms") or 0.0,
        pause_ms=_number(fields, "pause_ms") or 0.0,
        is_equal=roots.get(sequence) == root,
    )


def _number(fields: Mapping[str, object], key: str) -> float | None:
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None  # noqa: PLR2004


def _whole(fields: Mapping[str, object], key: str) -> int | None:
    value = _number(fields, key)
    return int(value) if value is not None and value >= 0 and value == int(value) else None


def _text(fields: Mapping[str, object], key: str) -> str | None:
    value = fields.get(key)
    return printable(value) if isinstance(value, str) and value else None


def _texts(fields: Mapping[str, object], key: str) -> tuple[str, ...]:
    values = fields.get(key)
    found = values[:5] if isinstance(values, list) else ()
    return tuple(printable(each)[:200] for each in found if isinstance(each, str))


def _transfers(fields: Mapping[str, object]) -> tuple[Transfer, ...]:
    rows = fields.get("transfers")
    found = rows[:_TRANSFERS_MAX] if isinstance(rows, list) else ()
    return tuple(_transfer(row) for row in found if isinstance(row, dict))


def _transfer(row: Mapping[str, object]) -> Transfer:
    stages = row.get("stages_ms")
    named = list(stages.items())[:_STAGES_MAX] if isinstance(stages, dict) else ()
    return Transfer(
        over=_text(row, "over") or "",
        source=_text(row, "source") or "",
        num_bytes=_whole(row, "bytes") or 0,
        ms=_number(row, "ms") or 0.0,
        stages_ms={
            printable(str(name))[:40]: _number({"ms": ms}, "ms") or 0.0 for name, ms in named
        },
        retries=_whole(row, "retries") or 0,
        problem=(_text(row, "problem") or "")[:200],
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
