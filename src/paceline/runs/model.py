"""The nouns of a run: the job as asked for, frozen and complete. No text, no defaults to guess."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from paceline.rental.budget import Budget

FREE_BACKENDS = frozenset({"local", "local-docker", "ssh"})
"""Backends that cost nothing; every other one needs a budget."""


class RoleKind(StrEnum):
    """What the end of a role means for the run."""

    TRAINER = "trainer"
    """Its success ends the run, and its failure fails it unless it may be started again."""
    ROLLOUT = "rollout"
    """Serves until the trainer is done; restarted when it dies."""
    TASK = "task"
    """Runs to its own end; the run is done when all tasks are."""


class RestartMode(StrEnum):
    """When a role that ended is started again."""

    NEVER = "never"
    ON_FAILURE = "on-failure"
    ALWAYS = "always"


class Reach(StrEnum):
    """How a role's machine is to be reached by the rest of its run, as the job file says."""

    AUTO = "auto"
    """Whatever works, tried when the machine is there."""
    DIRECT = "direct"
    """Others dial its address; it must be one that they reach."""
    TUNNEL = "tunnel"
    """Through the operator's computer."""
    OBJECTSTORE = "objectstore"
    """Not at all: weights go through a bucket."""


class Outcome(StrEnum):
    """How a run ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    ABANDONED = "abandoned"
    """Whoever drove it is gone; its machines were ended later by somebody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitSpec:
    """How weights get from the trainer to the engines of this run."""

    model: str
    payload: str = "XOR_DELTA"
    format: str = "paceline"
    """``canonical``: what ModelExpress receivers read from the bucket, and ours do not."""
    staging: str = "COPY_TO_HOST"
    when_leased: str = "block"
    """What the trainer does while all its memory for staging is needed; or ``drop``, ``skip``."""
    when_in_place: str = "wait"
    """Whether steps wait for readers of live weights, or ``copy`` the weights."""
    when_unproven: str = "anchor"
    """What a trainer does that starts again with other weights; or ``new-run``, ``refuse``."""
    transports: tuple[str, ...] = ("http",)
    """What weights travel over, the preferred first."""
    bucket: str = ""
    """URL of a bucket and prefix, for the transport ``objectstore``."""
    max_staleness: int = 2
    """How many versions a sample's weights may be behind the trainer's."""
    link_mbps: float | None = None
    """Megabits per second to the slowest engine: a slow link gets smaller deltas, which take longer
    to make. None: one machine or a fast network."""
    anchor_every: int | None = None
    """Publish a full version every so many deltas; None leaves it to the publisher."""
    listen: str = "127.0.0.1:0"
    """Where the control service listens; port 0 takes any free one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """One entry under ``roles:``; ``count`` machines that all run the same command."""

    name: str
    kind: RoleKind
    backends: tuple[str, ...]
    """In order of preference."""
    gpu: str
    run: str
    setup: str | None = None
    workdir: Path | None = None
    """Local directory that is copied to the machine; None copies nothing."""
    exclude: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    count: int = 1
    disk_gb: int = 20
    spot: bool = False
    image: str = ""
    max_dph: float | None = None
    min_reliability: float = 0.97
    """Of the host, where its backend tells; shares of 1."""
    min_inet_mbps: int = 500
    net_floor_mbps: float | None = None
    """What a machine must download at to be taken; None: by what its offer claims; 0: anything."""
    restart: RestartMode = RestartMode.NEVER
    max_restarts: int = 0
    reach: Reach = Reach.AUTO
    install_paceline: bool = True
    """With refit: bring this Paceline to the machine. False where the image has one."""
    boot_timeout_s: int = 1200
    setup_timeout_s: int = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactSpec:
    """What is copied back from the machines."""

    pull: tuple[str, ...] = ()
    """Paths under the role's working directory, beside what is always pulled: logs and out/."""
    every_s: float | None = None
    """Also while the run lasts, this often; None: at the end alone."""
    keep: int = 4
    """How many checkpoints of each role are kept, the newest."""
    to: str | None = None
    """URL of an object store that machines send checkpoints to; None: they are pulled here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifySpec:
    """Who is told, beside the terminal, when something needs a person."""

    command: str | None = None
    """For the operator's shell; the event is its standard input."""
    webhook: str | None = None
    """URL that the event is posted to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadManSpec:
    """When a machine that hears of nobody ends itself."""

    after_s: float = 7200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A whole job file, checked."""

    name: str
    roles: tuple[RoleSpec, ...]
    budget: Budget | None = None
    refit: RefitSpec | None = None
    artifacts: ArtifactSpec = field(default_factory=ArtifactSpec)
    notify: NotifySpec = field(default_factory=NotifySpec)
    dead_man: DeadManSpec = field(default_factory=DeadManSpec)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Slot:
    """One machine's place in a run: the role and which of its ``count``."""

    role: str
    index: int

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


def slots_of(job: JobSpec) -> dict[Slot, RoleSpec]:
    """Return every machine that the job asks for, in the order of the job file."""
    return {
        Slot(role=role.name, index=index): role for role in job.roles for index in range(role.count)
    }
