"""Typed options of the RunPod backend, and where its key is found."""

import tomllib
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.rental.answers import text_at
from paceline.rental.credentials import Credential, KeyFile, find_credential, home_of

Cloud = Literal["SECURE", "COMMUNITY"]
KEY_NAMES = ("RUNPOD_API_KEY", "RUNPOD_AI_API_KEY")


class RunpodConfig(BaseModel):
    """Options; unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_url: str = "https://api.runpod.io"
    """REST is below ``/v2``, what REST lacks below ``/graphql``."""
    clouds: tuple[Cloud, ...] = Field(default=("SECURE",), min_length=1)
    """COMMUNITY is other people's hosts: cheaper, and a stranger can read what is on them."""
    ssh_user: str = "root"
    image: str = "runpod/pytorch:2.8.0-py3.11-cuda12.8.1-cudnn-devel-ubuntu22.04"
    """For machines that name none. A tag that is no longer there is refused or fails to start."""
    container_disk_gb: int = Field(default=20, ge=1)
    """For the image's own changes; what is asked for with ``disk_gb`` is a volume beside it."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "RunpodConfig":
        """Return the options that the environment sets."""
        values: dict[str, object] = {}
        if environ.get("RUNPOD_API_BASE_URL"):
            values["api_url"] = environ["RUNPOD_API_BASE_URL"]
        if environ.get("PACELINE_RUNPOD_SSH_USER"):
            values["ssh_user"] = environ["PACELINE_RUNPOD_SSH_USER"]
        if environ.get("PACELINE_RUNPOD_IMAGE"):
            values["image"] = environ["PACELINE_RUNPOD_IMAGE"]
        if environ.get("PACELINE_RUNPOD_CLOUDS"):
            values["clouds"] = tuple(environ["PACELINE_RUNPOD_CLOUDS"].split(","))
        return cls.model_validate(values)


def find_key(environ: Mapping[str, str]) -> Credential | None:
    """Return the key, or None. Raises AuthError for a file that cannot be read."""
    path = home_of(environ) / ".runpod" / "config.toml"
    return find_credential(
        environ, names=KEY_NAMES, files=[KeyFile(path=path, parse=_key_in_config)]
    )


def _key_in_config(text: str) -> str | None:
    try:
        return text_at(tomllib.loads(text), "default", "api_key") or None
    except tomllib.TOMLDecodeError:
        return None  # no key is in it as far as anybody can tell; `check` names the place
