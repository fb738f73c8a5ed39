"""A run's control service in this process: made once, and taken up again by whoever adopts the run.

What it is started from (tokens, certificate, where it listens) stays in the run's directory until
the run is over, so that roles which talked to it before find the same service again.
"""

import json
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import PreflightError
from paceline.refit.control.protocol import ControlPlane
from paceline.rental.catalogue import parse_target
from paceline.runs.bootstrap import CONTROL_SECRETS
from paceline.runs.files import make_private, write_private
from paceline.runs.links import Address
from paceline.runs.model import JobSpec, RoleKind, RoleSpec, Slot, slots_of
from paceline.runs.scripts import AUTHORITY_FILE, CREDENTIALS_FILE

if TYPE_CHECKING:
    from paceline.refit.compose import RunKeys
    from paceline.refit.control.tls import TlsFiles

CONTROL_TIMEOUT_S = 5.0
CONTROL_STORE = "control.sqlite"
HOSTING_FILE = "hosting.json"
TOKENS_FILE = "tokens.json"
KEYS_FILE = "keys.json"
TOKEN_ROLES = {
    RoleKind.TRAINER: "trainer",
    RoleKind.ROLLOUT: "generator",
    RoleKind.TASK: "reader",
}
"""Kind of role -> whose token its machines get: never more rights than they need."""
PORTS = range(20_000, 26_000)
"""Where servers of a run listen that others reach by number. Above is where tunnels of trainers
lead, and all of it is below those that systems give out."""
PORT_TRIES_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """What a control service is started from again."""

    listen: str
    data_token: str = field(repr=False)
    ports: Mapping[Slot, Sequence[int]]
    """Where each role's servers listen; empty where every machine is this computer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The run's control service; all is empty for a job without refit."""

    address: Address | None
    plane: ControlPlane | None
    tokens: Mapping[str, str] = field(repr=False)
    authority: str = ""
    """PEM of the certificate that the service's clients trust."""
    ports: Mapping[Slot, Sequence[int]] = field(default_factory=dict)
    keys: "RunKeys | None" = None

    def secrets_of(self, role: RoleSpec) -> Mapping[str, str]:
        """Return what a role of this kind may know, as files."""
        if not self.tokens:
            return {}
        name = TOKEN_ROLES[role.kind]
        credentials = {
            "role": name,
            "control_token": self.tokens[name],
            "data_token": self.tokens["data"],
            **({} if self.keys is None else self.keys.credentials_of(name)),
        }
        return {CREDENTIALS_FILE: json.dumps(credentials), AUTHORITY_FILE: self.authority}

    def redact(self, text: str) -> str:
        """Take the run's tokens and keys out of a text."""
        keys = () if self.keys is None else (self.keys.signing_key,)
        for secret in (*self.tokens.values(), *keys):
            text = text.replace(secret, "[token]")
        return text


@contextmanager
def control_for(
    job: JobSpec, run_dir: Path, *, nonce: Callable[..., str], chance: Callable[[], float]
) -> Iterator[Control]:
    """Serve this run's control service while entered; a job without refit has none.

    One that was served before and whose driver was killed is served again as it was. What it is
    started from goes when the block is left.
    """
    if job.refit is None:
        yield Control(address=None, plane=None, tokens={})
        return
    from paceline.refit import compose as refit_compose

    secrets = make_private(run_dir / CONTROL_SECRETS)
    with ExitStack() as undo:
        hosting = _read_hosting(secrets)
        if hosting is None:
            undo.callback(_remove, secrets)
            hosting = _new_hosting(job, secrets, nonce=nonce, chance=chance)
        tokens, tls, trusted = _files(secrets)
        service = refit_compose.start_control_server(
            token_file=secrets / TOKENS_FILE,
            store=f"sqlite:{run_dir / CONTROL_STORE}",
            listen=hosting.listen,
            tls=tls,
        )
        undo.callback(service.stop)
        plane = refit_compose.connect_control(
            service.address,
            token_file=secrets / TOKENS_FILE,
            timeout_s=CONTROL_TIMEOUT_S,
            trusted_file=trusted,
        )
        undo.callback(plane.close)
        _write_hosting(secrets, hosting, listen=service.address)
        # From here on the run ends when the block is left, and nobody takes it up any more.
        undo.callback(_remove, secrets)
        yield Control(
            address=_address(service.address),
            plane=plane,
            tokens={**tokens, "data": hosting.data_token},
            authority=trusted.read_text(encoding="ascii"),
            ports=hosting.ports,
            keys=refit_compose.read_run_keys(secrets / KEYS_FILE),
        )


def _new_hosting(
    job: JobSpec, secrets: Path, *, nonce: Callable[..., str], chance: Callable[[], float]
) -> Hosting:
    """Write tokens and certificate, and choose where servers listen."""
    from paceline.refit import compose as refit_compose

    refit = job.refit
    listen = "127.0.0.1:0" if refit is None else refit.listen
    host, _, port = listen.rpartition(":")
    refit_compose.create_token_file(secrets / TOKENS_FILE)
    refit_compose.create_run_keys(secrets / KEYS_FILE)
    # Also on loopback: where machines are elsewhere nothing is different.
    refit_compose.create_certificate_files(
        secrets,
        name=f"run {secrets.parent.name}",
        hosts=sorted({host.strip("[]"), "127.0.0.1", "localhost"}),
    )
    ports: dict[Slot, Sequence[int]] = {}
    if is_spread(job):
        if port == "0":
            port = str(free_ports(1, chance=chance)[0])
        for slot, role in slots_of(job).items():
            if role.kind is not RoleKind.TASK:
                ports[slot] = free_ports(parse_target(role.gpu).count, chance=chance)
    return Hosting(
        listen=f"{host}:{port}", data_token=nonce(refit_compose.TOKEN_BYTES), ports=ports
    )


def _remove(secrets: Path) -> None:
    if secrets.is_dir():
        shutil.rmtree(secrets)


def is_spread(job: JobSpec) -> bool:
    """Return whether some machine may be another than this computer."""
    return any(name != "local" for role in job.roles for name in role.backends)


def free_ports(count: int, *, chance: Callable[[], float]) -> tuple[int, ...]:
    """Return ``count`` ports in a row that nobody here listens on now. Raises PreflightError."""
    for _ in range(PORT_TRIES_MAX):
        first = PORTS.start + int(chance() * (len(PORTS) - count))
        if all(_is_free(first + number) for number in range(count)):
            return tuple(range(first, first + count))
    raise PreflightError(
        f"no {count} free ports between {PORTS.start} and {PORTS.stop}; end what listens there"
    )


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _files(secrets: Path) -> "tuple[Mapping[str, str], TlsFiles, Path]":
    from paceline.refit.control.tls import TlsFiles

    tokens = json.loads((secrets / TOKENS_FILE).read_text(encoding="utf-8"))
    tls = TlsFiles(certificate=secrets / "control.crt", key=secrets / "control.key")
    return tokens, tls, secrets / "control-ca.crt"


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return Address(host=host.strip("[]"), port=int(port))


def _write_hosting(secrets: Path, hosting: Hosting, *, listen: str) -> None:
    ports = [[slot.role, slot.index, list(found)] for slot, found in hosting.ports.items()]
    fields = {"listen": listen, "data_token": hosting.data_token, "ports": ports}
    write_private(secrets / HOSTING_FILE, json.dumps(fields))


def _read_hosting(secrets: Path) -> Hosting | None:
    """Return what is left of a service whose driver was killed; None if it never listened."""
    path = secrets / HOSTING_FILE
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        ports = {Slot(role=role, index=index): tuple(own) for role, index, own in fields["ports"]}
        return Hosting(listen=fields["listen"], data_token=fields["data_token"], ports=ports)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise PreflightError(
            f"{path} cannot be read ({exc}); end the run with paceline down, and start another"
        ) from exc
