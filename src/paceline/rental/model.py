"""The nouns of rental: what can be rented, what is rented, what a backend said of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class InstanceState(StrEnum):
    """The five words for what a machine is doing; text nobody knows is read as UNKNOWN."""

    LOADING = "loading"
    RUNNING = "running"
    STOPPED = "stopped"
    DESTROYED = "destroyed"
    UNKNOWN = "unknown"

    @classmethod
    def parse(cls, text: object) -> "InstanceState":
        """Return the member named ``text``, or UNKNOWN; never raises."""
        try:
            return cls(str(text))
        except ValueError:
            return cls.UNKNOWN


@dataclass(frozen=True)
class OfferConstraints:
    """What an offer must have to be considered."""

    gpu_target: str
    """The backend's own token, e.g. ``b200-2x``; the adapter turns it into its native search."""
    min_disk_gb: int = 500
    min_inet_down_mbps: int = 500
    min_reliability: float = 0.97
    min_duration_days: float = 3.0
    max_dph: float | None = None
    """Highest price, US dollars per hour for the whole machine; None is no limit."""


@dataclass(frozen=True)
class Offer:
    """A machine that can be rented now, in one vocabulary for all backends."""

    backend: str
    id: str
    gpu_name: str
    num_gpus: int
    gpu_total_ram_gb: int
    dph: float
    """US dollars per hour for the whole machine, with the disk that was asked for."""
    reliability: float
    inet_down_mbps: float
    disk_space_gb: float
    geolocation: str
    raw: Mapping[str, object]
    """What the backend said, untouched."""
    host: str = ""
    """The box or owner behind it, where the backend tells: what a bad experience is about."""
    is_spot: bool = False
    """It may be taken back at any moment."""


@dataclass(frozen=True)
class InstanceHandle:
    """How a rented machine is named: backend and id together are unique in the world."""

    backend: str
    instance_id: str
    label: str
    """The operator's own tag, set at creation; machines are found by it after an ambiguity."""
    created_at: float
    """Unix seconds."""


@dataclass(frozen=True)
class InstanceStatus:
    """What a backend said once about a machine."""

    state: str
    """One of the values of InstanceState."""
    gpu_name: str
    num_gpus: int
    uptime_s: float | None
    public_endpoint: str | None
    """``ssh://user@host:port``, ``http://host:port``, or None while nothing is exposed."""
    raw: Mapping[str, object]
    ports: Mapping[int, str] = field(default_factory=dict)
    """Port of the machine -> ``host:port`` by which the world reaches it, where they differ."""


@dataclass(frozen=True)
class ExitCode:
    """How a command on a machine ended."""

    code: int
    """The command's own status; a command ended by signal n reports 128 + n."""
    duration_s: float


class DeathCause(StrEnum):
    """Why a machine that was ours to use is not any more, as far as its provider tells."""

    PREEMPTED = "preempted"
    """The provider took a spot machine back; another one may be had at once."""
    OUTBID = "outbid"
    """Somebody bids more for it: the same bid will lose again."""
    HOST_LOST = "host_lost"
    """Its host is offline or does not answer; it may come back, and it may bill meanwhile."""
    UNHEALTHY = "unhealthy"
    """The provider itself calls it failed: another machine of the same kind will do."""
    STOPPED = "stopped"
    """Halted by no order of ours: an empty account, an expired contract, or somebody."""
    DESTROYED = "destroyed"
    """Ended by no order of ours: by somebody with the same account, or by itself."""
    UNKNOWN = "unknown"
    """Nobody could be asked, or what they said explains nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialReport:
    """Whether a backend lets us in. Never holds the credential itself."""

    found_in: str | None
    """Where it was found, such as ``VAST_API_KEY`` or ``~/.config/vastai/vast_api_key``."""
    is_valid: bool
    balance_usd: float | None = None
    """Credit left, where the provider tells."""
    account: str = ""
    """Who we are there, where the provider tells."""
    advice: str = ""
    """What to do next; empty when all is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfDestroyRecipe:
    """How a machine ends itself, with nobody else awake."""

    command: str
    """For ``sh`` on the machine; exits 0 when the provider has accepted the end."""
    env: Mapping[str, str]
    """What the command needs beside the machine's own environment; may hold a secret."""
    guarantee: str
    """In one sentence, what still bills when the command has worked, and what it depends on."""

    def __repr__(self) -> str:
        return f"SelfDestroyRecipe(command={self.command!r}, env={sorted(self.env)!r})"
