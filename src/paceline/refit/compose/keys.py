"""A run's keys: who signs weights, who is believed, and what its machines serve bytes with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from paceline import system
from paceline.refit.control import auth

DATA_NAME = "data.paceline.internal"
"""The name in the certificate of everybody who serves bytes of a run: machines' addresses are not
known when it is issued, and whoever has it is of this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKeys:
    """Everything secret about moving weights that is made once for a run."""

    verify_key: str
    signing_key: str = field(repr=False)
    data_certificate: str
    """PEM, with the authority's behind it: whom readers trust is in it."""
    data_key: str = field(repr=False)

    def credentials_of(self, role: str) -> Mapping[str, str]:
        """Return what a role's credentials say beside its tokens; only a trainer may sign."""
        fields = {
            "verify_key": self.verify_key,
            "data_certificate": self.data_certificate,
            "data_key": self.data_key,
        }
        if role == auth.TokenRole.READER:
            return {"verify_key": self.verify_key}
        if role == auth.TokenRole.TRAINER:
            fields["signing_key"] = self.signing_key
        return fields


def create_run_keys(path: Path) -> RunKeys:
    """Make a run's keys and write them to a private file. Raises PreflightError."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from paceline.refit.control.tls import issue, new_authority

    signing = Ed25519PrivateKey.generate()
    now = datetime.fromtimestamp(system.system_clock().time(), UTC)
    authority = new_authority("bytes of a run", now=now)
    issued = issue(authority, [DATA_NAME], now=now)
    keys = RunKeys(
        verify_key=signing.public_key().public_bytes_raw().hex(),
        signing_key=signing.private_bytes_raw().hex(),
        data_certificate=(issued.certificate + authority.certificate).decode("ascii"),
        data_key=issued.key.decode("ascii"),
    )
    auth.write_private_json(path, {name: getattr(keys, name) for name in keys.__slots__})
    return keys


def read_run_keys(path: Path) -> RunKeys:
    """Return the keys that ``create_run_keys`` wrote. Raises PreflightError."""
    from paceline.core.errors import PreflightError

    fields = auth.read_private_json(path)
    if fields.keys() != set(RunKeys.__slots__):
        raise PreflightError(f"{path} does not hold a run's keys; start the run anew")
    return RunKeys(**fields)
