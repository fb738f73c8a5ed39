"""Copying as tar: what is removed there is what rsync would remove, and nothing lands outside."""

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rental.remote.argv import container_words, remote_rsync_argv, rsync_argv, ssh_words
from paceline.rental.remote.protocol import ContainerTarget, SshTarget
from paceline.rental.remote.rules import compile_rules
from paceline.rental.remote.tarball import _keep_inside, plan_deletion

NAMES = st.sampled_from(["a", "b", "c", "a/x", "a/y", "b/x", "a/x/z", "keep", "keep/x"])


@given(
    kept=st.dictionaries(NAMES, st.booleans()),
    others=st.sets(NAMES),
    directories=st.sets(NAMES),
)
def test_deletion_spares_what_is_meant_to_be_there(
    kept: dict[str, bool], others: set[str], directories: set[str]
) -> None:
    """Nothing that is in the source as the same kind goes, nor what an exclude speaks of."""
    rules = compile_rules(includes=(), excludes=("keep",))
    doomed, doomed_directories = plan_deletion(
        kept, others=others, directories=directories, rules=rules
    )
    assert set(doomed) <= others
    assert set(doomed_directories) <= directories
    assert not any(kept.get(path) is False for path in doomed)
    assert not any(kept.get(path) is True for path in doomed_directories)
    assert not any(path.startswith("keep") for path in (*doomed, *doomed_directories))
    depths = [path.count("/") for path in doomed_directories]
    assert depths == sorted(depths, reverse=True)


@pytest.mark.parametrize("name", ["../out", "a/../../out"])
def test_a_member_outside_is_refused(name: str, tmp_path: Path) -> None:
    """A machine cannot write beside what was asked of it."""
    info = tarfile.TarInfo(name)
    with pytest.raises(tarfile.FilterError):
        _keep_inside(info, str(tmp_path))


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A link that points out, and a member below it, do not leave the directory."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        tar.addfile(link)
        member = tarfile.TarInfo("link/out")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    content.seek(0)
    (tmp_path / "in").mkdir()
    with tarfile.open(fileobj=content) as tar, pytest.raises(tarfile.FilterError):
        tar.extractall(tmp_path / "in", filter=_keep_inside)  # noqa: S202 - the filter is what is tested
    assert not (tmp_path / "out").exists()


def test_a_mode_survives() -> None:
    """Group and other bits, which the standard filter takes away, are kept."""
    info = tarfile.TarInfo("a")
    info.mode = 0o4775
    assert _keep_inside(info, "/tmp").mode == 0o775  # noqa: S108 - a name


def ssh_target(**fields: object) -> SshTarget:
    facts: dict[str, object] = {
        "name": "m",
        "host": "h",
        "port": 2222,
        "user": "u",
        "known_hosts": Path("/a b/%h"),
        "identity": Path("/k"),
    }
    return SshTarget(**(facts | fields))  # type: ignore[arg-type]


def test_ssh_asks_nobody_and_trusts_one_file() -> None:
    """No question, no configuration of the user's, a host key file of the machine's own."""
    words = ssh_words(ssh_target(), control_path=Path("/s"), connect_timeout_s=10)
    assert words[:3] == ["ssh", "-F", "none"]
    assert {"BatchMode=yes", "IdentitiesOnly=yes", 'UserKnownHostsFile="/a b/%%h"'} <= set(words)
    assert "ControlMaster=auto" in words
    alone = ssh_words(ssh_target(identity=None), control_path=None, connect_timeout_s=10)
    assert not any("Control" in word or "IdentitiesOnly" in word for word in alone)


def test_rsync_gets_its_shell_in_words_that_it_can_read() -> None:
    """A word with a space or a quote is quoted as rsync reads it, without backslashes."""
    local = rsync_argv("rsync", "src/", "h:dst/", excludes=["*.pyc"])
    argv = remote_rsync_argv(
        local, words=["ssh", "-o", "A=it's b"], make_parent="d e", timeout_s=60, with_progress=True
    )
    assert argv[argv.index("-e") + 1] == "ssh -o 'A=it''s b'"
    assert "--rsync-path=mkdir -p 'd e' && rsync" in argv
    assert "--info=progress2" in argv
    assert argv[-2:] == ["src/", "h:dst/"]


def test_a_container_is_reached_by_exec() -> None:
    """The engine that was chosen stays chosen."""
    target = ContainerTarget(name="m", container="c", docker=("docker", "-H", "x"))
    assert container_words(target) == ["docker", "-H", "x", "exec", "-i"]
