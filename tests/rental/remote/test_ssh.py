"""What the ssh remote does beyond the contract, over a real sshd."""

import os
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.errors import PreflightError
from paceline.core.waiting import wait_until
from paceline.rental.errors import (
    ConnectionLostError,
    InstanceNotFoundError,
    RemoteCommandError,
    SshKeyError,
)
from paceline.rental.remote.job import Patience
from paceline.rental.remote.keys import ensure_key_pair
from paceline.rental.remote.local import usable_rsync
from paceline.rental.remote.protocol import Progress, SshTarget
from paceline.rental.remote.shell import ShellParts, ShellRemote
from paceline.rental.remote.ssh import ssh_remote
from paceline.system import system_clock
from paceline.testing.fakes.machine import FakeMachine, has_sshd, make_key_pair

pytestmark = pytest.mark.skipif(not has_sshd(), reason="needs sshd: apt-get install openssh-server")


class Host:
    """A machine, and remotes to it."""

    def __init__(self, root: Path, sockets: Path) -> None:
        self.root = root
        self.sockets = sockets
        self.clock = system_clock()
        self.printed: dict[int, bytes] = {1: b"", 2: b""}
        self.seen: list[Progress] = []
        self.machine = FakeMachine(root / "m", authorized_keys=[make_key_pair(root / "key")])
        self.machine.start()

    def target(self, *, home: str = ".", identity: Path | None = None) -> SshTarget:
        return SshTarget(
            name="box",
            host=self.machine.host,
            port=self.machine.port,
            user=self.machine.user,
            known_hosts=self.root / "known" / "box",
            identity=identity or self.root / "key",
            home=home,
        )

    def remote(
        self,
        target: SshTarget | None = None,
        *,
        reattach_s: float = 60.0,
        silence_s: float = 30.0,
        control_dir: Path | None = None,
    ) -> ShellRemote:
        parts = ShellParts(
            clock=self.clock,
            rsync=usable_rsync(),
            patience=Patience(reattach_s=reattach_s, silence_s=silence_s, grace_s=0.3),
            sink=self.keep,
            watch=self.seen.append,
        )
        where = control_dir or self.sockets
        return ssh_remote(target or self.target(), machine_id="m1", parts=parts, control_dir=where)

    def keep(self, stream: int, content: bytes) -> None:
        self.printed[stream] += content

    def wait_for(self, name: str) -> None:
        wait_until(
            (self.machine.home / name).exists,
            what=name,
            clock=self.clock,
            timeout_s=30,
            interval_s=0.01,
        )


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    # A test's own directory is too long a path for a socket.
    with tempfile.TemporaryDirectory(prefix="pl-") as short:
        host = Host(tmp_path, Path(short) / "c")
        yield host
        host.machine.stop()


def test_a_missing_key_is_named_with_the_command_that_makes_one(host: Host) -> None:
    """Ssh alone would only say that it was not let in."""
    missing = host.root / "nowhere"
    with pytest.raises(SshKeyError, match=r"nowhere.*ssh-keygen"):
        host.remote(host.target(identity=missing)).probe()


def test_a_key_that_others_can_read_is_named_with_the_fix(host: Host) -> None:
    """A copied key is often too open; the error says chmod."""
    key = host.root / "open"
    key.write_bytes((host.root / "key").read_bytes())
    key.chmod(0o644)
    with pytest.raises(SshKeyError, match=r"chmod 600"):
        host.remote(host.target(identity=key)).probe()


def test_a_directory_that_is_gone_is_a_machine_that_is_gone(host: Host) -> None:
    """Where the machine's home was removed nothing is started and nothing is copied."""
    remote = host.remote(host.target(home="gone"))
    with pytest.raises(InstanceNotFoundError):
        remote.run("true", env={}, stream=False, timeout_s=None)
    with pytest.raises(InstanceNotFoundError):
        remote.pull("x", host.root / "x", includes=(), excludes=())


def test_a_connection_that_went_silent_is_left_and_the_output_goes_on(host: Host) -> None:
    """A connection that stays open and says nothing is replaced by another."""
    remote = host.remote(silence_s=1.0)
    done: list[int] = []
    command = "echo one; touch up; while [ ! -e on ]; do sleep 0.05; done; echo two"
    runner = threading.Thread(
        target=lambda: done.append(remote.run(command, env={}, stream=True, timeout_s=60).code)
    )
    runner.start()
    host.wait_for("up")
    host.machine.freeze_connections()
    (host.machine.home / "on").touch()
    runner.join(timeout=50)
    assert done == [0]
    assert host.printed[1] == b"one\ntwo\n"


def test_a_machine_that_stays_away_is_given_up(host: Host) -> None:
    """After the patience that was asked for, the error says that the command may run on."""
    remote = host.remote(reattach_s=1.0)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            remote.run("touch up; sleep 600", env={}, stream=False, timeout_s=None)
        except ConnectionLostError as exc:
            failures.append(exc)

    runner = threading.Thread(target=work)
    runner.start()
    host.wait_for("up")
    host.machine.stop()
    runner.join(timeout=30)
    assert [str(failure) for failure in failures if "may be running" in str(failure)]


def test_a_stop_in_the_caller_ends_the_command(host: Host) -> None:
    """What whoever takes the output raises comes through, and nothing runs on."""

    class EnoughError(Exception):
        pass

    def refuse(stream: int, content: bytes) -> None:
        raise EnoughError

    parts = ShellParts(clock=host.clock, rsync=None, sink=refuse)
    remote = ssh_remote(host.target(), machine_id="m1", parts=parts, control_dir=host.sockets)
    with pytest.raises(EnoughError):
        remote.run("echo x; exec sleep 600", env={}, stream=True, timeout_s=None)
    assert remote.num_processes() == 0


def test_much_output_arrives_whole(host: Host) -> None:
    """More than a frame, in both streams, at once."""
    command = "seq 400000; seq 100000 >&2"
    assert host.remote().run(command, env={}, stream=True, timeout_s=60).code == 0
    assert host.printed[1] == b"".join(b"%d\n" % (n + 1) for n in range(400_000))
    assert host.printed[2] == b"".join(b"%d\n" % (n + 1) for n in range(100_000))


def test_a_login_script_that_prints_is_not_taken_for_an_answer(host: Host) -> None:
    """Output of .bashrc before our first word is passed over."""
    (host.machine.home / ".bashrc").write_text("echo welcome; echo X 9\n")
    assert host.remote().run("exit 4", env={}, stream=False, timeout_s=30).code == 4


def test_short_commands_are_captured_and_long_output_is_refused(host: Host) -> None:
    """A question gets its answer; one that prints without end is ended."""
    remote = host.remote()
    answer = remote.capture("echo yes; echo no >&2; exit 2")
    assert (answer.code, answer.output, answer.errors) == (2, "yes\n", "no\n")
    with pytest.raises(RemoteCommandError, match="prints more"):
        remote.capture("exec yes")


def test_progress_is_told_while_a_copy_runs(host: Host) -> None:
    """Bytes and share grow to the whole."""
    src = host.root / "src"
    src.mkdir()
    (src / "big").write_bytes(os.urandom(3_000_000))
    host.remote().push(src, "dst", includes=(), excludes=(), delete=False)
    assert host.seen[-1] == Progress(num_bytes=3_000_000, share=1.0)
    assert (host.machine.home / "dst" / "big").read_bytes() == (src / "big").read_bytes()


def test_a_cut_copy_goes_on_by_itself(host: Host) -> None:
    """A connection that breaks under a copy is made again, and the copy is whole."""
    src = host.root / "src"
    src.mkdir()
    (src / "big").write_bytes(os.urandom(64_000_000))
    remote = host.remote()
    cuts: list[int] = []

    def cut() -> None:
        wait_until(
            lambda: any((host.machine.home / "dst").glob(".big.*")),
            what="the copy",
            clock=host.clock,
            timeout_s=30,
            interval_s=0.005,
        )
        host.machine.drop_connections()
        cuts.append(1)

    cutter = threading.Thread(target=cut)
    cutter.start()
    remote.push(src, "dst", includes=(), excludes=(), delete=False)
    cutter.join()
    assert cuts
    assert (host.machine.home / "dst" / "big").read_bytes() == (src / "big").read_bytes()


def test_paths_are_words_and_the_login_directory_is_home(host: Host) -> None:
    """Spaces, quotes and dollars in paths mean themselves; ~/ is the login directory."""
    (host.root / "a file").write_text("x")
    remote = host.remote()
    for there in ("it's a $HOME/`x`", "~/plain", "-dash"):
        remote.push(host.root / "a file", there, includes=(), excludes=(), delete=False)
        assert (host.machine.home / there.removeprefix("~/")).read_text() == "x"
        back = host.root / "back"
        remote.pull(there.removeprefix("~/"), back, includes=(), excludes=())
        assert back.read_text() == "x"


def test_a_socket_directory_of_others_is_not_used(host: Host) -> None:
    """Where somebody else could put a socket, each command has a connection of its own."""
    shared = host.root / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    host.remote(control_dir=shared).probe()
    assert list(shared.iterdir()) == []
    private = host.sockets
    remote = host.remote()
    remote.probe()
    assert [stat.S_ISSOCK(path.stat().st_mode) for path in private.iterdir()] == [True]
    remote.disconnect()
    wait_until(
        lambda: list(private.iterdir()) == [],
        what="the socket",
        clock=host.clock,
        timeout_s=10,
        interval_s=0.02,
    )


def test_a_key_pair_is_made_once_and_mended(tmp_path: Path) -> None:
    """A second call changes nothing; a lost public half is made again; a bad key is named."""
    public = tmp_path / "ssh" / "id_ed25519.pub"
    ensure_key_pair(public)
    private = public.with_suffix("")
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    kept, text = private.read_bytes(), public.read_text()
    public.unlink()
    ensure_key_pair(public)
    assert private.read_bytes() == kept
    assert public.read_text().split()[:2] == text.split()[:2]
    private.write_text("no key")
    public.unlink()
    with pytest.raises(PreflightError, match="id_ed25519"):
        ensure_key_pair(public)


def test_the_fake_machine_ends_what_was_started_in_it(host: Host) -> None:
    """Also what left its session; nothing of this host's own is touched."""
    bystander = subprocess.Popen(["/bin/sleep", "60"])
    try:
        started = "(setsid sleep 600 >/dev/null 2>&1 &) ; sleep 600 >/dev/null 2>&1 & true"
        host.remote().run(started, env={}, stream=False, timeout_s=30)
        assert host.machine.num_processes() >= 2
        host.machine.stop()
        assert host.machine.num_processes() == 0
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
