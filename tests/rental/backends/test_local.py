"""What is special about machines of this computer: they outlive the CLI and share its disk."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from paceline.core.waiting import wait_until
from paceline.rental.backends.defaults import Parts, default_parts
from paceline.rental.backends.local import adapter, mapping
from paceline.rental.backends.local.adapter import LocalBackend
from paceline.rental.errors import (
    BackendError,
    InstanceNotFoundError,
    NoOffersError,
    ProvisionError,
    RemoteCommandError,
)
from paceline.rental.model import InstanceHandle, OfferConstraints
from paceline.system import environ, system_clock

_SRC = str(Path(__file__).parents[3] / "src")


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return replace(default_parts(), state_dir=tmp_path / "state")


@pytest.fixture
def local(parts: Parts) -> LocalBackend:
    return LocalBackend(parts=parts)


def provision(local: LocalBackend, label: str = "paceline-t") -> InstanceHandle:
    return local.provision("cpu-0", disk_gb=1, image="", ssh_pubkey_path=Path("k"), label=label)


def workspace(local: LocalBackend, h: InstanceHandle) -> Path:
    return Path(str(local.status(h).raw["workspace"]))


def wait_for(ready: Callable[[], bool]) -> None:
    wait_until(ready, what="the test", clock=system_clock(), timeout_s=20, interval_s=0.02)


def read_pid(path: Path) -> int:
    wait_for(lambda: path.is_file() and path.read_text().strip().isdigit())
    return int(path.read_text())


def test_a_killed_cli_leaves_a_machine_that_the_next_one_ends(
    local: LocalBackend, tmp_path: Path
) -> None:
    """After kill -9 in run_remote the machine still runs, and teardown ends all its processes.

    Among them are one that made a session of its own and one that dropped its environment.
    """
    h = provision(local)
    command = (
        "echo $$ > shell; setsid sh -c 'echo $$ > far; exec sleep 600' & "
        "env -i sh -c 'echo $$ > bare; exec sleep 600' & wait"
    )
    program = f"""
        from pathlib import Path
        from paceline.rental.backends.registry import load_backend
        from paceline.rental.model import InstanceHandle
        h = InstanceHandle("local", {h.instance_id!r}, {h.label!r}, 0.0)
        load_backend("local")().run_remote(h, {command!r})
    """
    cli = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=dict(environ()) | {"PYTHONPATH": _SRC, "PACELINE_STATE_DIR": str(tmp_path / "state")},
    )
    pids = [read_pid(workspace(local, h) / name) for name in ("shell", "far", "bare")]
    cli.kill()
    cli.wait()
    assert local.status(h).state == "running"
    assert all(psutil.pid_exists(pid) for pid in pids)

    local.teardown(h)

    assert not any(is_alive(pid) for pid in pids)
    assert local.status(h).state == "destroyed"
    assert sorted(path.name for path in (tmp_path / "state" / "local").iterdir()) == [".lock"]


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_background_process_without_mark_and_parents_is_ended(local: LocalBackend) -> None:
    """What a finished command left, with its environment dropped, is still the machine's."""
    h = provision(local)
    command = "env -i sh -c 'echo $$ > bare; exec sleep 600' >/dev/null 2>&1 & exit 0"
    assert local.run_remote(h, command).code == 0
    pid = read_pid(workspace(local, h) / "bare")
    local.teardown(h, force=True)
    assert not is_alive(pid)


def test_a_number_that_somebody_else_has_now_is_never_signalled(local: LocalBackend) -> None:
    """A record whose pid was used again names another start, and that process lives on."""
    h = provision(local)
    bystander = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    try:
        record = workspace(local, h).parent / "commands" / "0123.json"
        record.write_text(json.dumps({"pid": bystander.pid, "start": "another-boot:42"}))
        record.with_name("4567.json").write_text("{half a rec")
        local.teardown(h)
        assert bystander.poll() is None
        assert local.status(h).state == "destroyed"
    finally:
        bystander.kill()
        bystander.wait()


def test_a_process_that_ignores_requests_is_killed(local: LocalBackend) -> None:
    """SIGTERM is asked for first; what stays is ended by SIGKILL."""
    h = provision(local)
    command = "sh -c 'trap \"\" TERM; echo $$ > stubborn; while :; do sleep 0.05; done' & exit 0"
    local.run_remote(h, f"({command}) >/dev/null 2>&1")
    pid = read_pid(workspace(local, h) / "stubborn")
    LocalBackend(parts=replace_grace(local, 0.2)).teardown(h)
    assert not is_alive(pid)


def replace_grace(local: LocalBackend, grace_s: float) -> Parts:
    from paceline.rental.remote.local import LocalRemote

    parts = local._parts
    return replace(
        parts,
        process_remote=lambda root, machine_id, env: LocalRemote(
            root, machine_id=machine_id, clock=parts.clock, environ=env, grace_s=grace_s
        ),
    )


def test_teardown_ends_a_command_that_another_thread_waits_for(local: LocalBackend) -> None:
    """The waiting run_remote returns with the signal's status, and nothing more can start."""
    h = provision(local)
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(local.run_remote(h, "echo $$ > pid; sleep 600").code)
    )
    thread.start()
    read_pid(workspace(local, h) / "pid")
    local.teardown(h)
    thread.join(20)
    assert codes == [128 + signal.SIGTERM]
    with pytest.raises(InstanceNotFoundError):
        local.run_remote(h, "true")


def test_an_exception_in_the_waiting_thread_ends_the_command(
    local: LocalBackend, parts: Parts
) -> None:
    """Ctrl-C while run_remote waits leaves nothing of the command behind."""
    h = provision(local)
    pid_file = workspace(local, h) / "pid"
    program = f"""
        import signal
        from paceline.rental.backends.registry import load_backend
        from paceline.rental.model import InstanceHandle
        signal.signal(signal.SIGINT, signal.default_int_handler)
        h = InstanceHandle("local", {h.instance_id!r}, {h.label!r}, 0.0)
        try:
            load_backend("local")().run_remote(h, "setsid sleep 600 & echo $$ > pid; sleep 600")
        except KeyboardInterrupt:
            raise SystemExit(130)
    """
    cli = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=dict(environ()) | {"PYTHONPATH": _SRC, "PACELINE_STATE_DIR": str(parts.state_dir)},
    )
    pid = read_pid(pid_file)
    cli.send_signal(signal.SIGINT)
    assert cli.wait(20) == 130
    assert not is_alive(pid)
    assert parts.process_remote(pid_file.parents[1], h.instance_id, {}).num_processes() == 0
    local.teardown(h)


def test_our_programs_come_first_and_our_settings_stay_here(local: LocalBackend) -> None:
    """A role finds this interpreter as python, and none of the operator's PACELINE variables."""
    local = LocalBackend(
        parts=replace(
            local._parts,
            environ={"PATH": "/usr/bin:/bin", "PACELINE_TOKEN": "t", "PYTHONPATH": "src", "A": "b"},
            working_dir=Path("/somewhere"),
        )
    )
    h = provision(local)
    local.run_remote(h, "command -v python > which; env > seen")
    seen = (workspace(local, h) / "seen").read_text().splitlines()
    found = (workspace(local, h) / "which").read_text().strip()
    assert Path(found).parent == Path(sys.executable).parent
    assert "PYTHONPATH=/somewhere/src" in seen
    assert "A=b" in seen
    assert not [line for line in seen if line.startswith("PACELINE_TOKEN")]
    assert f"PACELINE_MACHINE_ID={h.instance_id}" in seen
    local.teardown(h)


def test_a_label_is_used_once(local: LocalBackend) -> None:
    """The second machine of one label is refused with the id of the first, also from elsewhere."""
    h = provision(local)
    with pytest.raises(ProvisionError, match=h.instance_id) as caught:
        provision(LocalBackend(parts=local._parts))
    assert caught.value.leaked is None
    assert len(local.list_instances()) == 1
    local.teardown(h)
    local.teardown(provision(local))


def test_a_full_disk_leaves_no_half_machine(
    local: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC while the record is written removes the directory and says what to do."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ProvisionError, match="No space left") as caught:
        provision(local)
    assert caught.value.leaked is None
    monkeypatch.undo()
    assert local.list_instances() == []
    assert [path.name for path in local._home.iterdir()] == [".lock"]


def test_what_a_killed_process_left_half_way_is_swept(local: LocalBackend) -> None:
    """Half-made and half-removed machines are no machines, and go with the next call."""
    for name in (".new-local-1", ".gone-local-2-x"):
        (local._home / name / "workspace").mkdir(parents=True)
    assert local.list_instances() == []
    local.teardown(provision(local))
    assert [path.name for path in local._home.iterdir()] == [".lock"]


@pytest.mark.parametrize("path", ["/etc", "../outside", "a/../../outside"])
def test_paths_that_leave_the_workspace_are_refused(
    local: LocalBackend, tmp_path: Path, path: str
) -> None:
    """A machine that is a directory must not be a way to write anywhere on the disk."""
    h = provision(local)
    with pytest.raises(RemoteCommandError, match="outside the machine's workspace"):
        local.sync_to(h, tmp_path, path, delete=True)
    with pytest.raises(RemoteCommandError, match="outside the machine's workspace"):
        local.sync_from(h, path, tmp_path / "got")
    local.teardown(h)


def test_a_damaged_record_is_unknown_and_can_be_torn_down(local: LocalBackend) -> None:
    """Text that nobody wrote is state unknown, not an exception; teardown still works."""
    h = provision(local)
    (workspace(local, h).parent / "machine.json").write_bytes(b"\xff{")
    assert local.status(h).state == "unknown"
    local.teardown(h)
    assert local.status(h).state == "destroyed"


def test_a_machine_that_cannot_be_removed_stays_a_machine(
    local: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the directory resists, teardown raises and status does not claim it is gone."""
    h = provision(local)

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        with pytest.raises(BackendError, match="cannot be removed"):
            local.teardown(h)
    assert local.status(h).state == "running"
    local.teardown(h)
    assert local.status(h).state == "destroyed"


def test_offers_say_what_does_not_fit(local: LocalBackend) -> None:
    """Each constraint that fails is named in the error."""
    for c, text in (
        (OfferConstraints("cpu-9999x", min_disk_gb=1), "CPU slots"),
        (OfferConstraints("h100-1x", min_disk_gb=1), "CPU slots only"),
        (OfferConstraints("a100", min_disk_gb=1), "write <gpu>-<n>x"),
        (OfferConstraints("cpu-1x", min_disk_gb=10**9), "free disk"),
    ):
        with pytest.raises(NoOffersError, match=text):
            local.search_offers(c)
    with pytest.raises(ProvisionError, match="free disk"):
        local.provision("cpu-0", disk_gb=10**9, image="", ssh_pubkey_path=Path("k"), label="x")


def test_slots_are_shared(local: LocalBackend) -> None:
    """There is one offer per slot and any number of machines on one."""
    local = LocalBackend(parts=replace(local._parts, num_cpus=2))
    offers = local.search_offers(OfferConstraints("cpu-1x", min_disk_gb=1))
    assert [offer.id for offer in offers] == ["cpu-0", "cpu-1"]
    pair = local.search_offers(OfferConstraints("cpu-2x", min_disk_gb=1))
    assert [(offer.id, offer.num_gpus) for offer in pair] == [("cpu-0-2x", 2)]
    machines = [provision(local, f"paceline-{n}") for n in range(3)]
    assert local.list_instances(label_prefix="paceline-") == machines
    for h in machines:
        local.teardown(h)


def test_the_logger_is_ours(local: LocalBackend, caplog: pytest.LogCaptureFixture) -> None:
    """The warning about a machine that is gone goes to the paceline logger."""
    with caplog.at_level(logging.WARNING, logger="paceline"):
        local.teardown(InstanceHandle("local", "local-none", "x", 0.0))
    assert [record.name for record in caplog.records] == [adapter._log.name]
    assert mapping.parse_record(b"[]") is None


def test_what_a_role_made_unwritable_goes_too(parts: Parts, tmp_path: Path) -> None:
    """A machine with closed directories disappears, also for a user who is not root."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    code = """
        import dataclasses, sys
        from pathlib import Path
        from paceline.rental.backends.defaults import default_parts
        from paceline.rental.backends.local.adapter import LocalBackend
        state, outside = map(Path, sys.argv[1:])
        local = LocalBackend(parts=dataclasses.replace(default_parts(), state_dir=state))
        h = local.provision("cpu-0", disk_gb=0, image="", ssh_pubkey_path=Path("k"), label="a")
        made = f"mkdir -p a/b/c && touch a/b/f && ln -s {outside} a/out && chmod -R a-w a"
        assert local.run_remote(h, made + " && mkdir d && chmod 0 d", stream=False).code == 0
        local.teardown(h)
        local.provision("cpu-0", disk_gb=0, image="", ssh_pubkey_path=Path("k"), label="b")
        print(sorted(path.name[:6] for path in (state / "local").iterdir()))
    """
    argv = [sys.executable, "-c", textwrap.dedent(code), str(parts.state_dir), str(outside)]
    if os.geteuid() == 0:  # root may do everything, unless it gives that up
        argv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *argv]
    env = {"PATH": environ()["PATH"], "PYTHONPATH": _SRC}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    assert done.stdout == "['.lock', 'local-']\n", done.stderr
    assert outside.stat().st_mode & 0o777 == 0o500
