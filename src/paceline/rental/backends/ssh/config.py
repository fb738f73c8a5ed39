"""The list of hosts, as TOML at the edge becomes values."""

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from paceline.core.errors import PreflightError, UsageError
from paceline.rental.catalogue import parse_target

FILE_NAME = "hosts.toml"
EXAMPLE = 'host = [{name = "box", address = "192.0.2.7", user = "me", gpu = "rtx4090-2x"}]'


class HostConfig(BaseModel):
    """One ``[[host]]``: where it is and what it has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?$")]
    """How the host is called here; part of the names of its machines."""
    address: Annotated[str, Field(min_length=1, pattern=r"^[^-\s][^\s]*$")]
    gpu: str
    """All that it has, ``<gpu>-<n>x``; ``cpu-<n>x`` for one without GPUs."""
    user: Annotated[str, Field(min_length=1, pattern=r"^[^-\s][^\s]*$")] = "root"
    port: Annotated[int, Field(ge=1, le=65535)] = 22
    identity: Path | None = None
    """Private key; without it ssh's own choice."""
    proxy_jump: str | None = None
    dph: Annotated[float, Field(ge=0)] = 0.0
    """What an hour of it costs you, US dollars."""
    directory: Annotated[str, Field(pattern=r"^[^-\s'\"][^\n]*$")] = ".paceline"
    """Where workspaces go; relative to the user's login directory, or absolute."""
    lock: Annotated[str, Field(pattern=r"^[^-\s'\"][^\n]*$")] = "/var/tmp/paceline.lock"  # noqa: S108
    """The mark that the host is taken: one path for all users of the host, or they share it."""

    @field_validator("gpu")
    @classmethod
    def _is_target(cls, text: str) -> str:
        return str(parse_target(text))

    @field_validator("identity")
    @classmethod
    def _from_home(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser()


class SshConfig(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: tuple[HostConfig, ...] = ()

    @field_validator("host")
    @classmethod
    def _has_unique_names(cls, hosts: tuple[HostConfig, ...]) -> tuple[HostConfig, ...]:
        names = [host.name for host in hosts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two hosts are named {', '.join(twice)}")
        return hosts


def load_config(path: Path) -> SshConfig:
    """Read the file; one that is not there names no hosts.

    Raises:
        UsageError: it is not what it should be; every mistake is named.
        PreflightError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return SshConfig()
    except (OSError, UnicodeDecodeError) as exc:
        raise PreflightError(f"cannot read {path}: {exc}; mend its permissions or text") from exc
    try:
        return SshConfig.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as exc:
        raise UsageError(f"{path}: {exc}") from exc
    except ValidationError as exc:
        told = "; ".join(_tell(error["loc"], error["msg"]) for error in exc.errors())
        raise UsageError(f"{path}: {told}") from exc


def _tell(place: tuple[int | str, ...], message: str) -> str:
    words = [f"host {part + 1}" if isinstance(part, int) else str(part) for part in place]
    return f"{' '.join(words[1:]) or words[0]}: {message}"
