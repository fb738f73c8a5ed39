"""A machine with a real sshd, for whatever rents machines that exist only here.

It is this host under another name: host keys, port, home directory and processes are its own,
programs and users are this host's. Everything that was started through its sshd carries a mark
in its environment, so that ending the machine ends that, and nothing else.
"""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from paceline.core.clock import Clock
from paceline.core.errors import PreflightError
from paceline.core.waiting import wait_until
from paceline.rental.remote.processes import Identity, end_processes, find_processes
from paceline.system import new_nonce, system_clock
from paceline.testing.fakes.gpus import FakeGpus, install_driver

_MARK = "PACELINE_FAKE_MACHINE"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PRIVILEGE_SEPARATION = Path("/run/sshd")
_HOST_KEY_FILES = ("host_key", "host_key.pub")
_START_TIMEOUT_S = 20.0
_NUM_PORTS_TRIED = 20
NO_INDEX = "http://127.0.0.1:9/simple"
"""What pip on a machine fetches from unless told otherwise: nobody, so that no test leaves this
computer because a machine measures its network."""
_CONFIG = """\
ListenAddress {host}
Port {port}
HostKey {root}/host_key
PidFile none
AuthorizedKeysFile {root}/authorized_keys {root}/home/.ssh/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
PrintMotd no
SetEnv HOME={root}/home {mark}={nonce} PATH={path}{more}
"""
_AT_HOME = """\
ForceCommand cd "$HOME" && eval "${SSH_ORIGINAL_COMMAND:-exec $SHELL -l}"
"""


class FakeMachine:
    """One machine on loopback; ``start`` and ``stop`` may be called again and again.

    What is in its home directory survives ``stop``, as a disk does; remove ``root`` to lose it.
    Needs OpenSSH's server on this host, and runs as whoever runs the test.
    """

    def __init__(  # noqa: PLR0913 - what machines differ in
        self,
        root: Path,
        *,
        authorized_keys: Iterable[str] = (),
        port: int | None = None,
        host: str = "127.0.0.1",
        without: Iterable[str] = (),
        environ: Mapping[str, str] | None = None,
        gpus: FakeGpus | None = None,
        clock: Clock | None = None,
        netns: str | None = None,
        path: str = _PATH,
        starts_at_home: bool = True,
    ) -> None:
        """Take ``root`` for the machine; nothing is started.

        Args:
            root: directory of the machine's own, made by ``start``; not below a link.
            authorized_keys: public keys, one line each, that are let in.
            port: where sshd listens; None takes a free one at the first start.
            host: the address on loopback.
            without: names of programs that this machine does not have, such as ``rsync``.
            environ: what every login finds in its environment; values without blanks.
            gpus: what its driver says it has; None: it has no driver.
            clock: what waiting is measured by; real, as the processes are.
            netns: the network namespace in which all of it runs; ``host`` is an address there.
            path: where its programs are found.
            starts_at_home: commands start in the machine's home, for which it overrules what
                authorized_keys says of commands; else in the user's, and it does not.
        """
        self.root = root
        self.host = host
        self.user = pwd.getpwuid(os.getuid()).pw_name
        self._authorized_keys = list(authorized_keys)
        self._port = port
        self._without = frozenset(without)
        self._environ = dict(environ or {})
        self._gpus = gpus
        self._clock = clock or system_clock()
        self._prefix = ["ip", "netns", "exec", netns] if netns else []
        self._own_path = path
        self._more_config = _AT_HOME if starts_at_home else ""
        self._nonce = new_nonce()
        self._sshd: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """Where sshd listens. Raises ValueError before the first start."""
        if self._port is None:
            raise ValueError("a fake machine has a port once it was started")
        return self._port

    @property
    def home(self) -> Path:
        """The directory in which a login starts."""
        return self.root / "home"

    @property
    def host_key(self) -> str:
        """The public host key, as a line of known_hosts has it after the host's name."""
        return " ".join((self.root / "host_key.pub").read_text().split()[:2])

    @property
    def log(self) -> str:
        """What sshd has said."""
        return (self.root / "sshd.log").read_text(errors="replace")

    def authorize(self, public_key: str) -> None:
        """Let one more key in, at once."""
        self._authorized_keys.append(public_key)
        if self.root.is_dir():
            self._write_keys()

    def start(self) -> None:
        """Start sshd and return once it greets; does nothing when it runs.

        Raises:
            PreflightError: there is no sshd on this host, or it does not start.
        """
        if self._sshd is not None:
            return
        sshd = _sshd_program()
        self._make_root()
        for _ in range(_NUM_PORTS_TRIED if self._port is None else 1):
            port = self._port or _free_port()
            if self._start_on(sshd, port):
                self._port = port
                return
        raise PreflightError(f"the fake machine's sshd did not start: {self.log[-500:]}")

    def stop(self) -> None:
        """End sshd, its connections and all that was started through it; idempotent."""
        self._end_sshd()
        end_processes(self._processes, clock=self._clock, grace_s=0.0)

    def drop_connections(self) -> None:
        """Cut every connection, as a network does; what runs on the machine goes on."""
        _kill(self._connections())

    def freeze_connections(self) -> None:
        """Let every connection stay open and silent; new ones work."""
        for process in self._connections():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)

    def refuse_all_keys(self) -> None:
        """Let nobody in, over connections that are made from now on; those there are end."""
        (self.root / "authorized_keys").write_text("")
        self.drop_connections()

    def accept_keys(self) -> None:
        """Let those in again who were let in before."""
        self._write_keys()

    def save_host_key(self) -> tuple[bytes, ...]:
        """Return the host key, for ``restore_host_key``."""
        return tuple((self.root / name).read_bytes() for name in _HOST_KEY_FILES)

    def change_host_key(self) -> None:
        """Answer with another host key from now on, as another machine at this address does."""
        self._replace_host_key(None)

    def restore_host_key(self, saved: tuple[bytes, ...]) -> None:
        """Answer with the key that was saved."""
        self._replace_host_key(saved)

    def _replace_host_key(self, new: tuple[bytes, ...] | None) -> None:
        """Exchange the key while sshd is down; what runs on the machine goes on."""
        was_running = self._sshd is not None
        self._end_sshd()
        for name in _HOST_KEY_FILES:
            (self.root / name).unlink(missing_ok=True)
        for name, content in zip(_HOST_KEY_FILES, new or (), strict=False):
            (self.root / name).touch(mode=0o600)
            (self.root / name).write_bytes(content)
        if was_running:
            self.start()

    def num_processes(self) -> int:
        """Return how many processes there are that were started through sshd."""
        return len(self._processes())

    def _processes(self) -> set[Identity]:
        return find_processes(mark=(_MARK, self._nonce), leaders=(), root=self.root)

    def _connections(self) -> list[psutil.Process]:
        """Return sshd's own processes for connections, which do not carry the mark."""
        if self._sshd is None:
            return []
        children = psutil.Process(self._sshd.pid).children(recursive=True)
        return [child for child in children if _is_sshd(child)]

    def _end_sshd(self) -> None:
        if self._sshd is not None:
            connections = self._connections()
            self._sshd.terminate()
            self._sshd.wait()
            self._sshd = None
            _kill(connections)

    def _make_root(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (self.root / "host_key").exists():
            make_key_pair(self.root / "host_key")
        self._write_keys()
        if os.getuid() == 0:
            _PRIVILEGE_SEPARATION.mkdir(exist_ok=True)

    def _write_keys(self) -> None:
        lines = "".join(f"{key.strip()}\n" for key in self._authorized_keys)
        (self.root / "authorized_keys").write_text(lines)

    def _own_programs(self) -> list[str]:
        """Return where what stands in for a driver is, once it was put there."""
        if self._gpus is None:
            return []
        driver = self.root / "driver"
        install_driver(driver, self._gpus)
        return [str(driver)]

    def _path(self) -> str:
        """Return where programs are found; a directory of links where some are to be missing."""
        if not self._without:
            return self._own_path
        programs = self.root / "bin"
        shutil.rmtree(programs, ignore_errors=True)
        programs.mkdir()
        for directory in map(Path, reversed(_PATH.split(":"))):
            for program in directory.glob("*"):
                if program.name not in self._without:
                    link = programs / program.name
                    link.unlink(missing_ok=True)
                    link.symlink_to(program)
        return str(programs)

    def _more_environ(self) -> str:
        """Return what else logins find, as sshd's SetEnv takes it."""
        more = {"PIP_INDEX_URL": NO_INDEX, **self._environ}
        if self._gpus is not None:
            more["LD_LIBRARY_PATH"] = f"{self.root}/driver"
        return "".join(f" {name}={value}" for name, value in more.items())

    def _start_on(self, sshd: str, port: int) -> bool:
        """Start sshd on ``port`` and return whether it greets; False when it ended instead."""
        config = self.root / "sshd_config"
        config.write_text(
            _CONFIG.format(
                root=self.root,
                host=self.host,
                port=port,
                mark=_MARK,
                nonce=self._nonce,
                path=":".join((*self._own_programs(), self._path())),
                more=self._more_environ(),
            )
            + self._more_config
        )
        with (self.root / "sshd.log").open("wb") as log:
            process = subprocess.Popen(
                [*self._prefix, sshd, "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            wait_until(
                lambda: process.poll() is not None or _greets(self.host, port),
                what="the fake machine's sshd",
                clock=self._clock,
                timeout_s=_START_TIMEOUT_S,
                interval_s=0.02,
            )
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.poll() is not None:
            return False
        self._sshd = process
        return True


def make_key_pair(private: Path) -> str:
    """Make a key pair in ``private`` and ``private.pub`` and return the public half."""
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "paceline test", "-f"]
    subprocess.run([*argv, str(private)], check=True)
    return Path(f"{private}.pub").read_text()


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _sshd_program() -> str:
    """Return sshd's full path, by which alone it can be started."""
    program = shutil.which("sshd", path=_PATH)
    if program is None:
        raise PreflightError("there is no sshd on this host: apt-get install openssh-server")
    return program


def has_sshd() -> bool:
    """Return whether a fake machine can be started on this host."""
    return shutil.which("sshd", path=_PATH) is not None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _greets(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1) as connection:
            connection.settimeout(5)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _is_sshd(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("sshd")
    except psutil.Error:
        return False
