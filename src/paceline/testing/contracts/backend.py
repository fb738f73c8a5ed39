"""What every backend must do; subclass BackendContract and say how yours is made.

The claims are those of the eight methods. A machine is rented for each test that needs one, so
against a paid provider this costs money: there, run it on purpose.
"""

import logging
import os
import stat
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError
from paceline.core.waiting import wait_until
from paceline.rental.backends.protocol import BackendAdapter, SupportsListing
from paceline.rental.errors import (
    BackendError,
    CommandTimeoutError,
    InstanceNotFoundError,
    NoOffersError,
    ProvisionError,
)
from paceline.rental.model import InstanceHandle, InstanceState, OfferConstraints
from paceline.system import system_clock

_SECRET = "hunter2-7f3a9c"  # noqa: S105 - planted, to be looked for


class BackendContract(ABC):
    """The claims of the backend port, tested against one implementation."""

    gpu_target = "cpu-1x"
    image = "ubuntu:24.04"
    disk_gb = 1
    clock: Clock = system_clock()
    """The clock that processes on the machine live by."""

    @abstractmethod
    def make(self) -> BackendAdapter:
        """Return an adapter; a second one must see the machines of the first."""

    @pytest.fixture
    def adapter(self) -> BackendAdapter:
        """Return an adapter."""
        return self.make()

    @pytest.fixture
    def h(self, adapter: BackendAdapter, tmp_path: Path) -> Iterator[InstanceHandle]:
        """Yield a machine that runs, and destroy it afterwards."""
        handle = self.provision(adapter, tmp_path)
        adapter.wait_running(handle, timeout_s=600)
        yield handle
        adapter.teardown(handle, force=True)

    def provision(self, adapter: BackendAdapter, tmp_path: Path) -> InstanceHandle:
        """Rent the cheapest machine under a label of its own."""
        offer = adapter.search_offers(self.constraints())[0]
        return adapter.provision(
            offer.id,
            disk_gb=self.disk_gb,
            image=self.image,
            ssh_pubkey_path=self.public_key_path(tmp_path),
            label=f"paceline-contract-{uuid.uuid4().hex[:8]}",
        )

    def public_key_path(self, tmp_path: Path) -> Path:
        """Return the public key that machines let in; a backend without ssh looks at no key."""
        path = tmp_path / "key.pub"
        path.write_text("ssh-ed25519 AAAA test\n")
        return path

    def constraints(self, *, max_dph: float | None = None) -> OfferConstraints:
        """Return constraints that at least one offer meets."""
        return OfferConstraints(self.gpu_target, min_disk_gb=self.disk_gb, max_dph=max_dph)

    def test_signs_the_contract(self, adapter: BackendAdapter) -> None:
        """An adapter has the eight methods and a name."""
        assert isinstance(adapter, BackendAdapter)
        assert adapter.name

    def test_offers_come_cheapest_first_and_fit(self, adapter: BackendAdapter) -> None:
        """Offers are sorted by price and name their backend."""
        offers = adapter.search_offers(self.constraints())
        assert offers
        assert [offer.dph for offer in offers] == sorted(offer.dph for offer in offers)
        assert {offer.backend for offer in offers} == {adapter.name}
        assert len({offer.id for offer in offers}) == len(offers)
        assert all(offer.disk_space_gb >= self.disk_gb for offer in offers)

    def test_no_offer_is_an_error_of_its_own(self, adapter: BackendAdapter) -> None:
        """Where nothing fits, search raises NoOffersError and does not return an empty list."""
        with pytest.raises(NoOffersError):
            adapter.search_offers(self.constraints(max_dph=-1.0))

    def test_an_offer_that_never_was_creates_nothing(
        self, adapter: BackendAdapter, tmp_path: Path
    ) -> None:
        """Provisioning from an unknown offer raises ProvisionError without a leaked handle."""
        with pytest.raises(ProvisionError) as caught:
            adapter.provision(
                "no-such-offer",
                disk_gb=self.disk_gb,
                image=self.image,
                ssh_pubkey_path=tmp_path / "key.pub",
                label="paceline-contract-none",
            )
        assert caught.value.leaked is None

    def test_a_machine_runs_and_others_see_it(
        self, adapter: BackendAdapter, h: InstanceHandle
    ) -> None:
        """After wait_running a second adapter reads running, and lists it under its label."""
        other = self.make()
        status = other.status(h)
        assert status.state == InstanceState.RUNNING
        assert status.uptime_s is None or status.uptime_s >= 0
        if isinstance(other, SupportsListing):
            assert [found.instance_id for found in other.list_instances(label_prefix=h.label)] == [
                h.instance_id
            ]
            assert other.list_instances(label_prefix=h.label + "x") == []

    @pytest.mark.parametrize("code", [0, 1, 3, 255])
    def test_the_exit_code_is_the_commands_own(
        self, adapter: BackendAdapter, h: InstanceHandle, code: int
    ) -> None:
        """Whatever a command exits with is what comes back."""
        result = adapter.run_remote(h, f"exit {code}", stream=False)
        assert result.code == code
        assert result.duration_s >= 0

    @pytest.mark.parametrize("signum", [9, 15])
    def test_a_signal_is_128_and_its_number(
        self, adapter: BackendAdapter, h: InstanceHandle, signum: int
    ) -> None:
        """A shell that ends itself by a signal, and a child of it, both report 128 + n."""
        assert adapter.run_remote(h, f"kill -{signum} $$", stream=False).code == 128 + signum
        child = f"sh -c 'kill -{signum} $$' 2>/dev/null; exit $?"
        assert adapter.run_remote(h, child, stream=False).code == 128 + signum

    def test_env_arrives_and_is_in_no_argument_list(
        self, adapter: BackendAdapter, h: InstanceHandle
    ) -> None:
        """A value from env is in the command's environment and in nobody's command line."""
        arrived = f'test "$TOKEN" = {_SECRET} && test "$ODD" = "a b\'c;$(printf x)"'
        odd = "a b'c;x"
        env = {"TOKEN": _SECRET, "ODD": odd}
        assert adapter.run_remote(h, arrived, env=env, stream=False).code == 0
        look = (
            'printf %s "$TOKEN" > pattern; grep -qsF -f pattern /proc/[0-9]*/cmdline; '
            "found=$?; rm pattern; test $found -ne 0"
        )
        hidden = {"TOKEN": f"{_SECRET}-{uuid.uuid4().hex}"}
        assert adapter.run_remote(h, look, env=hidden, stream=False).code == 0

    def test_streamed_output_passes_through(
        self, adapter: BackendAdapter, h: InstanceHandle, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """With stream both outputs arrive; without it neither does."""
        adapter.run_remote(h, "echo to-out; echo to-err >&2")
        seen = capfd.readouterr()
        assert "to-out" in seen.out
        assert "to-err" in seen.out + seen.err
        adapter.run_remote(h, "echo to-out; echo to-err >&2", stream=False)
        assert capfd.readouterr() == ("", "")

    def test_a_timeout_ends_the_whole_group(
        self, adapter: BackendAdapter, h: InstanceHandle
    ) -> None:
        """After timeout_s neither the command, nor its children, nor their sessions go on."""
        command = (
            "beat() { while :; do date +%s%N > $1; sleep 0.05; done; }; "
            "export -f beat; setsid bash -c 'beat far' & beat near & wait"
        )
        with pytest.raises(CommandTimeoutError):
            adapter.run_remote(h, command, stream=False, timeout_s=1)
        still = "cp near near1; cp far far1; sleep 0.3; cmp -s near near1 && cmp -s far far1"
        assert adapter.run_remote(h, still, stream=False).code == 0

    def test_a_background_process_outlives_its_command(
        self, adapter: BackendAdapter, h: InstanceHandle
    ) -> None:
        """A command returns when its shell does; what it left behind runs on."""
        started = "(sleep 0.2; touch late) >/dev/null 2>&1 & exit 0"
        assert adapter.run_remote(h, started, stream=False).code == 0
        wait_until(
            lambda: adapter.run_remote(h, "test -e late", stream=False).code == 0,
            what="the background process",
            clock=self.clock,
            timeout_s=10,
            interval_s=0.05,
        )

    def test_a_tree_goes_there_and_back(
        self, adapter: BackendAdapter, h: InstanceHandle, tmp_path: Path
    ) -> None:
        """Contents, modes, links and empty directories survive both ways."""
        src = _make_tree(tmp_path / "src")
        adapter.sync_to(h, src, "deep/er/dst")
        back = tmp_path / "some" / "back"
        adapter.sync_from(h, "deep/er/dst", back)
        assert _describe(back) == _describe(src)

    def test_includes_win_over_excludes(
        self, adapter: BackendAdapter, h: InstanceHandle, tmp_path: Path
    ) -> None:
        """What both speak of is copied, in both directions."""
        src = _make_tree(tmp_path / "src")
        includes, excludes = ["keep.log"], ["*.log", "/sub/", "empty"]
        adapter.sync_to(h, src, "dst", includes=includes, excludes=excludes)
        adapter.sync_from(h, "dst", tmp_path / "all")
        assert sorted(_describe(tmp_path / "all")) == ["keep.log", "link", "run.sh"]
        adapter.sync_to(h, src, "full")
        some = tmp_path / "some"
        adapter.sync_from(h, "full", some, includes=includes, excludes=excludes)
        assert sorted(_describe(some)) == ["keep.log", "link", "run.sh"]

    def test_delete_removes_what_is_not_there_and_spares_what_is_excluded(
        self, adapter: BackendAdapter, h: InstanceHandle, tmp_path: Path
    ) -> None:
        """Only with delete, and never what an exclude speaks of."""
        src = _make_tree(tmp_path / "src")
        adapter.run_remote(h, "mkdir -p dst/old && touch dst/old/x dst/mine.ckpt", stream=False)
        adapter.sync_to(h, src, "dst")
        assert adapter.run_remote(h, "test -e dst/old/x", stream=False).code == 0
        adapter.sync_to(h, src, "dst", excludes=["*.ckpt"], delete=True)
        assert adapter.run_remote(h, "test ! -e dst/old", stream=False).code == 0
        assert adapter.run_remote(h, "test -e dst/mine.ckpt", stream=False).code == 0

    def test_a_single_file_is_copied_under_the_name_that_was_asked_for(
        self, adapter: BackendAdapter, h: InstanceHandle, tmp_path: Path
    ) -> None:
        """A file becomes the destination, or goes into it where that is a directory."""
        (tmp_path / "a.txt").write_text("a")
        adapter.sync_to(h, tmp_path / "a.txt", "b.txt")
        adapter.sync_to(h, tmp_path / "a.txt", "into/")
        assert adapter.run_remote(h, "cmp b.txt into/a.txt", stream=False).code == 0
        adapter.sync_from(h, "b.txt", tmp_path / "c.txt")
        assert (tmp_path / "c.txt").read_text() == "a"

    def test_a_missing_source_is_an_error(
        self, adapter: BackendAdapter, h: InstanceHandle, tmp_path: Path
    ) -> None:
        """Nothing to copy is a BackendError in both directions, not an empty success."""
        with pytest.raises(BackendError):
            adapter.sync_to(h, tmp_path / "nothing", "dst")
        with pytest.raises(BackendError):
            adapter.sync_from(h, "nothing", tmp_path / "dst")

    def test_teardown_ends_processes_and_can_be_repeated(
        self, adapter: BackendAdapter, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A second teardown is a warning, and every reader sees destroyed from then on."""
        h = self.provision(adapter, tmp_path)
        adapter.wait_running(h, timeout_s=600)
        adapter.run_remote(h, "sleep 600 >/dev/null 2>&1 & true", stream=False)
        adapter.teardown(h)
        assert self.make().status(h).state == InstanceState.DESTROYED
        with caplog.at_level(logging.WARNING, logger="paceline"):
            adapter.teardown(h)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        if isinstance(adapter, SupportsListing):
            assert adapter.list_instances(label_prefix=h.label) == []

    def test_an_unknown_machine_is_gone_and_not_found(
        self, adapter: BackendAdapter, tmp_path: Path
    ) -> None:
        """Status says destroyed, teardown passes, everything else says not found."""
        for instance_id in ("i-never-was", "../../etc", ""):
            h = InstanceHandle(adapter.name, instance_id, "paceline-contract-x", 0.0)
            assert adapter.status(h).state == InstanceState.DESTROYED
            adapter.teardown(h)
            with pytest.raises(InstanceNotFoundError):
                adapter.run_remote(h, "true")
            with pytest.raises(InstanceNotFoundError):
                adapter.sync_to(h, tmp_path, "dst")
            with pytest.raises(InstanceNotFoundError):
                adapter.sync_from(h, "src", tmp_path)
            with pytest.raises((InstanceNotFoundError, DeadlineExceededError)):
                adapter.wait_running(h, timeout_s=1)


def _make_tree(root: Path) -> Path:
    (root / "sub" / "inner").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o750)
    (root / "drop.log").write_text("drop")
    (root / "keep.log").write_text("keep")
    (root / "sub" / "inner" / "data").write_bytes(bytes(range(256)) * 300)
    (root / "link").symlink_to("run.sh")
    os.utime(root / "run.sh", ns=(1_500_000_000_123_456_789, 1_500_000_000_987_654_321))
    return root


def _describe(root: Path) -> dict[str, tuple[str, int, object, int]]:
    """Return kind, mode, content and time of everything under ``root``, by relative path."""
    found: dict[str, tuple[str, int, object, int]] = {}
    for path in sorted(root.rglob("*")):
        facts = path.lstat()
        content: object = None
        if path.is_symlink():
            content = str(path.readlink())
        elif path.is_file():
            content = path.read_bytes()
        kind = stat.filemode(facts.st_mode)[0]
        mode = 0 if path.is_symlink() else stat.S_IMODE(facts.st_mode)
        seconds = 0 if path.is_symlink() else int(facts.st_mtime)
        found[str(path.relative_to(root))] = (kind, mode, content, seconds)
    return found
