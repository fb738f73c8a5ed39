"""Typed options of the Vast backend, and where its key is found."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from paceline.rental.credentials import Credential, KeyFile, find_credential, home_of

_OPTIONS = (
    ("VAST_URL", "api_url"),
    ("PACELINE_VAST_SSH_USER", "ssh_user"),
    ("PACELINE_VAST_IMAGE", "image"),
)
KEY_NAMES = ("VAST_API_KEY",)


class VastConfig(BaseModel):
    """Options; unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_url: str = "https://console.vast.ai"
    ssh_user: str = "root"
    image: str = "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-devel"
    """For machines that name none. A tag that is no longer there is refused or fails to start."""
    is_verified_only: bool = True
    """Leave out machines that Vast has not tested."""
    is_datacenter_only: bool = False
    """Leave out machines in people's homes."""
    num_offers_max: int = Field(default=1000, ge=1, le=10_000)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "VastConfig":
        """Return the options that the environment sets."""
        values: dict[str, object] = {}
        for name, option in _OPTIONS:
            if environ.get(name):
                values[option] = environ[name]
        return cls.model_validate(values)


def key_files(environ: Mapping[str, str]) -> list[KeyFile]:
    """Return where Vast's own tools keep a key; a session of two factors comes first, as there."""
    home = home_of(environ)
    folder = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "vastai"
    names = [folder / "vast_tfa_key", folder / "vast_api_key", home / ".vast_api_key"]
    return [KeyFile(path=path) for path in names]


def find_key(environ: Mapping[str, str]) -> Credential | None:
    """Return the key, or None. Raises AuthError for a file that cannot be read."""
    return find_credential(environ, names=KEY_NAMES, files=key_files(environ))
