"""Scripts for a machine's shell: what is secret stays in them, and odd values mean themselves."""

import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.rental.remote.frames import FrameParser, Output, Word
from paceline.rental.remote.script import (
    COMMAND_MARK,
    Job,
    render_count,
    render_end,
    render_job,
    render_look,
    render_make,
)

SHELLS = ("dash", "bash")
TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=30)


def job_of(home: Path, command: str, env: Mapping[str, str], *, job_id: str = "0123abcd") -> Job:
    return Job(
        id=job_id,
        machine_id="m",
        home=str(home),
        jobs="jobs",
        command=command,
        env=env,
        keeps_output=True,
    )


def follow(
    script: str, *, shell: str = "sh", answers: bool = True
) -> tuple[int | None, bytes, bytes, list[Word]]:
    """Run a script in a shell and return the exit status it tells, the outputs and the words."""
    parser, events = FrameParser(), []
    with subprocess.Popen([shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(script.encode())
        process.stdin.flush()
        while content := os.read(process.stdout.fileno(), 1 << 16):
            events += parser.feed(content)
            if any(isinstance(event, Word) and event.letter == "X" for event in events):
                process.stdin.write(b"ok\n" if answers else b"\n")
                process.stdin.flush()
    outputs = [
        b"".join(e.content for e in events if isinstance(e, Output) and e.stream == stream)
        for stream in (1, 2)
    ]
    words = [event for event in events if isinstance(event, Word)]
    codes = [int(word.rest) for word in words if word.letter == "X"]
    return (codes[0] if codes else None), outputs[0], outputs[1], words


@pytest.mark.parametrize("shell", SHELLS)
def test_a_job_runs_once_and_is_followed_again(shell: str, tmp_path: Path) -> None:
    """The same script sent twice starts once; the second is told all, or the part it lacks."""
    job = job_of(tmp_path, "echo once >> ran; echo out; echo err >&2; exit 5", {})
    script = render_job(job, may_start=True, num_out=0, num_err=0)
    assert follow(script, shell=shell, answers=False)[:3] == (5, b"out\n", b"err\n")
    rest = render_job(job, may_start=True, num_out=1, num_err=4)
    assert follow(rest, shell=shell)[:3] == (5, b"ut\n", b"")
    assert (tmp_path / "ran").read_text() == "once\n"
    assert list((tmp_path / "jobs").iterdir()) == []


@pytest.mark.parametrize("shell", SHELLS)
def test_a_follower_goes_on_where_it_was(shell: str, tmp_path: Path) -> None:
    """Offsets skip what has arrived; what is not there is lost, and is not started again."""
    record = tmp_path / "jobs" / "0123abcd"
    record.mkdir(parents=True)
    (record / "out").write_bytes(b"0123456789")
    (record / "err").write_bytes(b"abc")
    (record / "exit").write_text("3\n")
    job = job_of(tmp_path, "touch started", {})
    script = render_job(job, may_start=False, num_out=4, num_err=3)
    assert follow(script, shell=shell)[:3] == (3, b"456789", b"")
    assert not record.exists()
    code, *_, words = follow(script, shell=shell)
    assert (code, [str(word.rest) for word in words]) == (None, ["lost"])
    assert not (tmp_path / "started").exists()


def test_a_script_that_was_cut_off_does_nothing(tmp_path: Path) -> None:
    """A connection that breaks while the script is sent starts no part of it."""
    script = render_job(
        job_of(tmp_path, "touch ran", {"A": "b"}), may_start=True, num_out=0, num_err=0
    )
    for part in range(0, len(script) - len("main; exit\n"), 97):
        subprocess.run(["/bin/sh"], input=script[:part].encode(), check=False, capture_output=True)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "jobs").exists()


@settings(max_examples=15)
@given(value=TEXTS, word=TEXTS)
def test_any_text_survives_the_shell(
    tmp_path_factory: pytest.TempPathFactory, value: str, word: str
) -> None:
    """Values and words with quotes, newlines, placeholders and dollars arrive as they are."""
    home = tmp_path_factory.mktemp("home")
    command = f'printf %s "$VALUE"; printf %s {shlex.quote(word)} >&2'
    job = job_of(home, command, {"VALUE": value})
    script = render_job(job, may_start=True, num_out=0, num_err=0)
    code, out, err, _ = follow(script)
    assert (code, out.decode(), err.decode()) == (0, value, word)


def test_a_placeholder_in_a_value_is_text(tmp_path: Path) -> None:
    """What looks like a place to fill is not filled inside what the user gave."""
    job = job_of(tmp_path, "printf '%s' '@HOME@ @ID@'", {"A": "@COMMAND@"})
    script = render_job(job, may_start=True, num_out=0, num_err=0)
    assert follow(script)[:2] == (0, b"@HOME@ @ID@")


@pytest.mark.parametrize("name", ["", "A B", "1A", "A;rm", "A=B"])
def test_a_name_that_is_no_variable_is_refused(name: str, tmp_path: Path) -> None:
    """Nothing that the shell could read as more than a name gets into the script."""
    with pytest.raises(UsageError, match="environment variable"):
        render_job(job_of(tmp_path, "true", {name: "x"}), may_start=True, num_out=0, num_err=0)


def test_a_nul_byte_is_refused(tmp_path: Path) -> None:
    """No shell can be given one."""
    with pytest.raises(UsageError, match="NUL"):
        render_job(job_of(tmp_path, "true", {"A": "\0"}), may_start=True, num_out=0, num_err=0)


def test_a_job_shows_no_value_in_its_repr(tmp_path: Path) -> None:
    """A job in a log names its variables and keeps what they hold to itself."""
    assert "hunter2" not in repr(job_of(tmp_path, "true", {"TOKEN": "hunter2"}))


@pytest.mark.parametrize("shell", SHELLS)
def test_output_survives_a_script_that_truncates_its_own(shell: str, tmp_path: Path) -> None:
    """``> /dev/stderr`` in a command writes to it and does not cut off what was there."""
    job = job_of(tmp_path, "echo one >&2; echo two > /dev/stderr; echo three >&2", {})
    script = render_job(job, may_start=True, num_out=0, num_err=0)
    assert follow(script, shell=shell)[:3] == (0, b"", b"one\ntwo\nthree\n")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_end_finds_what_dropped_its_mark_or_its_session(shell: str, tmp_path: Path) -> None:
    """By mark, by recorded session and by descent: none of these three escapes alone."""
    command = "setsid sleep 601 & env -i sleep 602 & setsid env -i sh -c 'sleep 603; :' & wait"
    job = job_of(tmp_path, command, {}, job_id=os.urandom(8).hex())
    mark = (COMMAND_MARK, job.id)
    count = render_count(home=str(tmp_path), jobs="jobs", mark=mark)
    end = render_end(home=str(tmp_path), jobs="jobs", mark=mark, job_id=job.id, grace_s=0.2)
    with subprocess.Popen([shell], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        process.stdin.write(render_job(job, may_start=True, num_out=0, num_err=0).encode())
        process.stdin.flush()
        counts = (follow(count, shell=shell)[3][0].rest for _ in range(500))
        # The shell, three sleeps, and the shell that the third one has.
        seen = next((found for found in counts if found == "5"), None)
        left = follow(end, shell=shell)[3][0]
    assert seen == "5"
    assert (left.letter, left.rest.split()) == ("L", [])
    assert follow(count, shell=shell)[3][0].rest == "0"


@pytest.mark.parametrize("name", ["plain", "with space", "-dash", "it's", "$(touch x)"])
def test_a_look_and_a_make_take_any_path(name: str, tmp_path: Path) -> None:
    """Paths are words, whatever is in them."""
    path = f"./{name}/deep"
    assert follow(render_look(home=str(tmp_path), path=path))[3][0].rest == "nothing"
    assert follow(render_make(home=str(tmp_path), path=path))[3][0].rest == "made"
    assert follow(render_look(home=str(tmp_path), path=path))[3][0].rest == "directory"
    assert follow(render_look(home=str(tmp_path / "none"), path="."))[3][0] == Word("F", "no-home")
