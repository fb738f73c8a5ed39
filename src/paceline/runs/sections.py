"""What each section of a job file may hold. Messages for people are made in ``spec.py``."""

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
)

from paceline.core.address import PORT_MAX
from paceline.rental.catalogue import parse_target
from paceline.runs.document import shown

BUCKET_SCHEMES = ("s3", "gs", "az", "file")
DEAD_MAN_S_MIN = 5.0
STORE_SCHEMES = ("s3://", "gs://", "az://", "file:///")

_DURATION = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_ENV_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a job file is checked against."""

    base: Path
    """Relative directories count from here."""
    backends: Collection[str]
    is_dir: Callable[[Path], bool]


def nearest(word: str, known: Collection[str]) -> str:
    """Return what may have been meant, and what there is."""
    near = difflib.get_close_matches(word, known, n=1)
    listed = ", ".join(sorted(known))
    return f"did you mean {near[0]!r}? known: {listed}" if near else f"known: {listed}"


def duration_s(value: object) -> object:
    """Turn ``10m`` or a number of seconds into seconds; anything else raises ValueError."""
    if isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        return int(match[1]) * _UNIT_S[match[2]]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError("expected a duration such as 90s, 10m, 2h or 1d")


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("holds a NUL character")
    return value


def _blank(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return _no_nul(value)


def _gpu_token(value: str) -> str:
    return str(parse_target(value))  # a UsageError is a ValueError


def _around(info: ValidationInfo) -> Surroundings:
    return cast(Surroundings, info.context)


def _known_backends(value: list[str], info: ValidationInfo) -> list[str]:
    known = _around(info).backends
    for name in value:
        if name not in known:
            raise ValueError(f"unknown backend {shown(name)}; {nearest(name, known)}")
    if not value or len(set(value)) != len(value):
        raise ValueError("name at least one backend, each once")
    return value


def _existing_dir(value: str, info: ValidationInfo) -> Path:
    around = _around(info)
    path = around.base / _no_nul(value)
    if not around.is_dir(path):
        raise ValueError(f"no such directory: {path}")
    return path


def _inside(value: list[str]) -> list[str]:
    for item in value:
        path = PurePosixPath(_blank(item))
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{shown(item)} must be a path below the working directory")
    return value


def _environment(value: Mapping[str, str | int]) -> dict[str, str]:
    for key in value:
        if not _ENV_KEY.fullmatch(key) or key.startswith("PACELINE_"):
            raise ValueError(f"{shown(key)} cannot be set: not a variable name, or ours")
    return {key: _no_nul(str(item)) for key, item in value.items()}


def _env_item(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("expected text; put the value in quotes")  # noqa: TRY004 - pydantic's way
    return str(value)


def _listen(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port[:6]) > PORT_MAX:
        raise ValueError(f"expected HOST:PORT such as 127.0.0.1:0, got {shown(value)}")
    return value


def _bucket_url(value: str) -> str:
    scheme, found, rest = value.partition("://")
    if value and (not found or scheme not in BUCKET_SCHEMES or not rest.strip("/")):
        raise ValueError(
            f"expected a bucket and prefix such as s3://bucket/runs, got {shown(value)}"
        )
    return value


def _web_address(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("expected an address that begins with https:// or http://")
    return value


def _store_address(value: str) -> str:
    if not value.startswith(STORE_SCHEMES):
        raise ValueError(f"expected the URL of an object store: {', '.join(STORE_SCHEMES)}...")
    return value


_Text = Annotated[str, AfterValidator(_blank)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Duration = Annotated[float, BeforeValidator(duration_s), Field(gt=0, le=30 * 86400.0)]
_Count = Annotated[int, Field(ge=1, le=256)]


class Section(BaseModel):
    """What all sections keep: no unknown key, no other type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Top(Section):
    """The file itself."""

    name: str
    roles: dict[str, Any]
    budget: Any = None
    refit: Any = None
    artifacts: Any = None
    notify: Any = None
    dead_man: Any = None


class Budget(Section):
    """``budget:``."""

    soft_usd: _Positive
    hard_usd: _Positive | None = None
    grace: _Duration = 120.0


class Notify(Section):
    """``notify:``."""

    command: _Text | None = None
    webhook: Annotated[_Text, AfterValidator(_web_address)] | None = None


class DeadMan(Section):
    """``dead_man:``."""

    after: Annotated[_Duration, Field(ge=DEAD_MAN_S_MIN)] = 7200.0


class Refit(Section):
    """``refit:``."""

    model: _Text
    payload: Literal["XOR_DELTA", "FULL_TENSOR", "FULL_HF_CHECKPOINT"] = "XOR_DELTA"
    format: Literal["paceline", "canonical"] = "paceline"
    staging: Literal["COPY_TO_HOST", "COPY_TO_DEVICE", "IN_PLACE", "WRITE_TO_STORAGE"] = (
        "COPY_TO_HOST"
    )
    when_leased: Literal["block", "drop", "skip"] = "block"
    when_in_place: Literal["wait", "copy"] = "wait"
    when_unproven: Literal["anchor", "new-run", "refuse"] = "anchor"
    transports: Annotated[
        list[Literal["nixl", "http", "objectstore"]], BeforeValidator(_listed), Field(min_length=1)
    ] = ["http"]
    bucket: Annotated[str, AfterValidator(_bucket_url)] = ""
    max_staleness: Annotated[int, Field(ge=0, le=1_000_000)] = 2
    link_mbps: Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)] | None = None
    anchor_every: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    listen: Annotated[str, AfterValidator(_listen)] = "127.0.0.1:0"


class Role(Section):
    """An entry under ``roles:``."""

    backend: Annotated[list[str], BeforeValidator(_listed), AfterValidator(_known_backends)]
    gpu: Annotated[str, AfterValidator(_gpu_token)]
    run: _Text
    kind: Literal["trainer", "rollout", "task"] | None = None
    setup: _Text | None = None
    workdir: Annotated[str, AfterValidator(_existing_dir)] | None = None
    exclude: Annotated[list[_Text], BeforeValidator(_listed)] = []
    env: Annotated[
        dict[str, Annotated[str, BeforeValidator(_env_item)]], AfterValidator(_environment)
    ] = {}
    count: _Count = 1
    disk_gb: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    spot: bool = False
    image: str = ""
    max_dph: _Positive | None = None
    min_reliability: Annotated[float, Field(ge=0, le=1)] = 0.97
    min_inet_mbps: Annotated[int, Field(ge=0, le=1_000_000)] = 500
    net_floor_mbps: Literal["auto"] | Annotated[float, Field(ge=0, le=1_000_000)] = "auto"
    restart: Literal["never", "on-failure", "always"] | None = None
    max_restarts: Annotated[int, Field(ge=0, le=1000)] | None = None
    reach: Literal["auto", "direct", "tunnel", "objectstore"] = "auto"
    install_paceline: bool = True
    boot_timeout: _Duration = 1200.0
    setup_timeout: _Duration = 1800.0


class Artifacts(Section):
    """``artifacts:``."""

    pull: Annotated[list[str], BeforeValidator(_listed), AfterValidator(_inside)] = []
    every: _Duration | None = None
    keep: _Count = 4
    to: Annotated[_Text, AfterValidator(_store_address)] | None = None
