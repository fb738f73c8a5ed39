"""Typed options of the Lambda backend, and where its key is found."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from paceline.rental.credentials import (
    Credential,
    KeyFile,
    find_credential,
    home_of,
    value_of_line,
)

KEY_NAMES = (
    "LAMBDA_API_KEY",
    "LAMBDA_CLOUD_API_TOKEN",
    "LAMBDA_CLOUD_TOKEN",
    "LAMBDA_API_TOKEN",
)
_OPTIONS = {
    "LAMBDA_CLOUD_BASE_URL": "api_url",
    "PACELINE_LAMBDA_SSH_USER": "ssh_user",
    "PACELINE_LAMBDA_SSH_PORT": "ssh_port",
}


class LambdaConfig(BaseModel):
    """Options; unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_url: str = "https://cloud.lambda.ai/api/v1"
    """The older host redirects, and a redirected POST becomes a GET: do not use it."""
    ssh_user: str = "ubuntu"
    ssh_port: int = Field(default=22, ge=1, le=65_535)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "LambdaConfig":
        """Return the options that the environment sets."""
        return cls.model_validate(
            {option: environ[name] for name, option in _OPTIONS.items() if environ.get(name)}
        )


def find_key(environ: Mapping[str, str]) -> Credential | None:
    """Return the key, or None. Raises AuthError for a file that cannot be read."""
    path = home_of(environ) / ".lambda_cloud" / "lambda_keys"
    file = KeyFile(path=path, parse=lambda text: value_of_line(text, "api_key"))
    return find_credential(environ, names=KEY_NAMES, files=[file])
