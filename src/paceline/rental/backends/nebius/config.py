"""Typed options of the Nebius backend, and where its credentials are found."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from paceline.rental.credentials import Credential, KeyFile, find_credential, home_of

KEY_NAMES = ("NEBIUS_IAM_TOKEN",)
_OPTIONS = {
    "NEBIUS_ENDPOINT": "endpoint",
    "NEBIUS_PROJECT_ID": "project_id",
    "NEBIUS_TENANT_ID": "tenant_id",
    "PACELINE_NEBIUS_SSH_USER": "ssh_user",
    "PACELINE_NEBIUS_SSH_PORT": "ssh_port",
}


class NebiusConfig(BaseModel):
    """Options; unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str | None = None
    """``host:port`` for all services, in clear text on loopback; None is the provider's own."""
    project_id: str | None = None
    """Where machines are made; a project is in one region. None looks for all there are."""
    tenant_id: str | None = None
    """Whose capacity is asked about; None leaves that out."""
    image_family: str = "ubuntu24.04-cuda13.0"
    ssh_user: str = Field(default="ubuntu", pattern=r"[a-z_][a-z0-9_-]{0,31}")
    """Made by cloud-init; the provider blocks root."""
    ssh_port: int = Field(default=22, ge=1, le=65_535)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "NebiusConfig":
        """Return the options that the environment sets."""
        return cls.model_validate(
            {option: environ[name] for name, option in _OPTIONS.items() if environ.get(name)}
        )


def find_key(environ: Mapping[str, str]) -> Credential | None:
    """Return a token, or the text of a service account's credentials, or None.

    Raises AuthError for a file that cannot be read.
    """
    folder = home_of(environ) / ".nebius"
    files = [
        KeyFile(path=folder / "NEBIUS_IAM_TOKEN.txt"),
        KeyFile(path=folder / "credentials.json"),
    ]
    return find_credential(environ, names=KEY_NAMES, files=files)
