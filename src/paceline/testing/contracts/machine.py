"""How a backend under test is made, and the claims about files, which several tests share."""

import os
import stat
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.clock import Clock
from paceline.rental.backends.protocol import BackendAdapter
from paceline.rental.errors import BackendError
from paceline.rental.model import InstanceHandle, OfferConstraints
from paceline.system import system_clock


class MachineContract(ABC):
    """How a backend is made for a test, and a machine of it."""

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


class CopyContract(MachineContract):
    """What every backend does with files."""

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
