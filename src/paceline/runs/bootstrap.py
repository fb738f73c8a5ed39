"""What is put on a fresh machine, and where: the guest's layout, its scripts, its credentials.

Everything lives under one directory named after the run, relative to where the remote's commands
start, so that any backend can hold it:

    <run>/work     the role's working directory      <run>/kit      scripts written here
    <run>/logs     one log per slot                  <run>/secrets  credentials, 0600
    <run>/out      what the role leaves behind       <run>/state    attempts to run the role
    <run>/venv     Paceline, where it was brought    <run>/wheel    what it was installed from

Tokens travel inside a file that is copied, never in a command line or an environment variable.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.core.errors import PreflightError
from paceline.rental import BackendAdapter, InstanceHandle, RemoteCommandError
from paceline.runs.model import JobSpec, RoleSpec, Slot
from paceline.runs.scripts import render_scripts

EXCLUDES = (
    ".git/",
    ".venv/",
    "__pycache__/",
    "*.pyc",
    "*.egg-info/",
    ".mypy_cache/",
    ".ruff_cache/",
    ".pytest_cache/",
    ".hypothesis/",
    "/runs/",
)
"""Never worth copying to a machine; a role's own ``exclude`` comes on top."""
KIT_PREFIX = "kit-"
CONTROL_SECRETS = "control"
"""Folder of a run's directory here: what its control service starts from, gone when it ends."""
PREPARE_TIMEOUT_S = 60
INSTALL_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """Where things are on one slot's machine, as paths relative to the remote's own start."""

    run_id: str
    slot: Slot

    def path(self, *parts: str) -> str:
        """Return a path below the run's directory."""
        return "/".join((self.run_id, *parts))

    @property
    def log(self) -> str:
        """Where the role's output is."""
        return self.path("logs", f"{self.slot}.log")

    def start(self, token: str) -> str:
        """Return the command that begins the attempt ``token`` unless it has begun; at once."""
        return f"sh {self.path('kit', 'start.sh')} {token}"

    def watch(self, token: str = "") -> str:
        """Return the command that lasts as long as the attempt, the latest one, and ends so."""
        return f"exec sh {self.path('kit', 'watch.sh')} {token}".rstrip()

    @property
    def has_started(self) -> str:
        """The command that succeeds when some attempt has begun."""
        return f"test -s {self.path('state', str(self.slot), 'current')}"

    @property
    def is_ready(self) -> str:
        """The command that succeeds when everything was put on the machine."""
        return f"test -e {self.path('state', 'ready')}"

    @property
    def stop(self) -> str:
        """The command that asks a running role to end; fine when nothing runs."""
        return f"sh {self.path('kit', 'stop.sh')}"


def role_env(
    job: JobSpec, role: RoleSpec, slot: Slot, *, run_id: str, control: str | None
) -> dict[str, str]:
    """Return the variables that a role is started with; paths on the machine are set there."""
    ours = {
        "PACELINE_RUN_ID": run_id,
        "PACELINE_ROLE": slot.role,
        "PACELINE_INDEX": str(slot.index),
        "PACELINE_HOST": "127.0.0.1",
    }
    if control is not None:
        ours["PACELINE_CONTROL"] = control
    if job.refit is not None:
        ours |= {
            "PACELINE_MODEL": job.refit.model,
            "PACELINE_PAYLOAD": job.refit.payload,
            "PACELINE_FORMAT": job.refit.format,
            "PACELINE_STAGING": job.refit.staging,
            "PACELINE_WHEN_LEASED": job.refit.when_leased,
            "PACELINE_WHEN_IN_PLACE": job.refit.when_in_place,
            "PACELINE_WHEN_UNPROVEN": job.refit.when_unproven,
            "PACELINE_TRANSPORTS": ",".join(job.refit.transports),
            "PACELINE_MAX_STALENESS": str(job.refit.max_staleness),
        }
        if job.refit.link_mbps is not None:
            ours["PACELINE_LINK_MBPS"] = repr(job.refit.link_mbps)
        if job.refit.bucket:
            ours["PACELINE_BUCKET"] = job.refit.bucket
        if job.refit.anchor_every is not None:
            ours["PACELINE_ANCHOR_EVERY"] = str(job.refit.anchor_every)
    return {**role.env, **ours}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """What one machine gets."""

    role: RoleSpec
    env: Mapping[str, str]
    """For the setup command."""
    secrets: Mapping[str, str] = field(repr=False)
    """Name -> text of the files that only the role may read."""
    scratch: Path
    """A directory of this run alone, where secrets lie until they are copied."""
    wheel: Path | None = None
    """Paceline, for a machine that has to have it; None where it is there or not needed."""


def bootstrap(backend: BackendAdapter, handle: InstanceHandle, *, guest: Guest, kit: Kit) -> None:
    """Put everything on the machine and run the role's setup command. Safe to repeat.

    Raises:
        PreflightError: the scratch directory cannot be written.
        RemoteCommandError: setup failed; its output is in the machine's ``logs``.
        BackendError: the machine does not answer, or a copy failed.
    """
    role = kit.role
    if role.workdir is not None:
        excludes = (*EXCLUDES, *role.exclude)
        backend.sync_to(handle, role.workdir, guest.path("work"), excludes=excludes)
    with ExitStack() as made:
        try:
            folder = TemporaryDirectory(prefix=KIT_PREFIX, dir=kit.scratch)
            here = Path(made.enter_context(folder))
            write_kit(here, guest=guest, role=role, secrets=kit.secrets)
        except OSError as exc:
            raise PreflightError(
                f"cannot write below {kit.scratch}: {exc.strerror}; free the disk or point "
                "PACELINE_STATE_DIR elsewhere"
            ) from exc
        backend.sync_to(handle, here, guest.run_id)
    prepare = f"sh {guest.path('kit', 'prepare.sh')}"
    mark = f": > {guest.path('state', 'ready')}"
    if kit.wheel is None and role.setup is None:
        _must(backend, handle, f"{prepare} && {mark}", {}, PREPARE_TIMEOUT_S)
        return
    _must(backend, handle, prepare, {}, PREPARE_TIMEOUT_S)
    if kit.wheel is not None:
        backend.sync_to(handle, kit.wheel, guest.path("wheel/"))
        install = f"exec sh {guest.path('kit', 'install.sh')}"
        _must(backend, handle, install, kit.env, INSTALL_TIMEOUT_S)
    if role.setup is not None:
        setup = f"exec sh {guest.path('kit', 'setup.sh')}"
        _must(backend, handle, setup, kit.env, role.setup_timeout_s)
    _must(backend, handle, mark, {}, PREPARE_TIMEOUT_S)


def write_kit(kit: Path, *, guest: Guest, role: RoleSpec, secrets: Mapping[str, str]) -> None:
    """Write what is copied to the machine below ``kit``; secrets are readable by us alone."""
    scripts = render_scripts(str(guest.slot), run=role.run, setup=role.setup)
    (kit / "kit").mkdir()
    for name, text in scripts.items():
        (kit / "kit" / name).write_text(text, encoding="utf-8")
    (kit / "secrets").mkdir(mode=0o700)
    for name, text in secrets.items():
        write_secret(kit / "secrets" / name, text)


def write_secret(path: Path, text: str) -> None:
    """Write a file that is never readable by anybody else, not even for a moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _must(
    backend: BackendAdapter,
    handle: InstanceHandle,
    command: str,
    env: Mapping[str, str],
    timeout_s: int,
) -> None:
    ended = backend.run_remote(handle, command, env=env, stream=False, timeout_s=timeout_s)
    if ended.code != 0:
        raise RemoteCommandError(f"setup on {handle.label} exited with status {ended.code}")
