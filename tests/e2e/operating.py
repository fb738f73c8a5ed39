"""One user at one computer, who types commands and looks at what they leave."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0


class Operator:
    """One user with one state directory, who types commands in one folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.state = home / "state"
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "PYTHONPATH": str(ROOT / "src"),
            "PACELINE_STATE_DIR": str(self.state),
        }
        self.started: list[subprocess.Popen[str]] = []

    def job(self, text: str, name: str = "job.yaml") -> str:
        (self.home / name).write_text(text, encoding="utf-8")
        return name

    def start(self, *words: str, progress: Path | None = None) -> subprocess.Popen[str]:
        """Type a command; with ``progress`` its stderr goes to that file, to be read meanwhile."""
        with ExitStack() as files:
            err = subprocess.PIPE if progress is None else files.enter_context(progress.open("w"))
            process = subprocess.Popen(
                [sys.executable, "-m", "paceline", *words],
                cwd=self.home,
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
            )
        self.started.append(process)
        return process

    def type(self, *words: str, timeout_s: float = WAIT_S) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=timeout_s)
        assert "Traceback" not in err, err
        return process.returncode, out, err

    def type_json(self, *words: str) -> tuple[int, Any]:
        status, out, _ = self.type(*words, "--json")
        return status, json.loads(out.splitlines()[-1])

    def processes(self, word: str | None = None) -> set[int]:
        """Return every process that runs in a machine of ours, or those with ``word`` in argv."""
        found = set()
        for process in psutil.process_iter():
            try:
                is_ours = process.cwd().startswith(str(self.state))
                if is_ours and (word is None or word in process.cmdline()):
                    found.add(process.pid)
            except psutil.Error:  # ended while we looked
                continue
        return found

    def lose_machine(self, pid: int) -> None:
        """Take the local machine that a process runs on away, as a fire does: files and all."""
        local = self.state / "local"
        machine = local / psutil.Process(pid).cwd().removeprefix(f"{local}/").split("/")[0]
        burnt = self.state / f"burnt-{machine.name}"
        machine.rename(burnt)  # at once: what runs there goes on writing until it is killed
        while lost := [one for one in self.processes() if self._is_on(one, burnt)]:
            for each in lost:  # again and again: a shell may start something while we look
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(each).kill()
        shutil.rmtree(burnt)

    def _is_on(self, pid: int, machine: Path) -> bool:
        try:
            process = psutil.Process(pid)
            dead = process.status() == psutil.STATUS_ZOMBIE
            return not dead and process.cwd().startswith(str(machine))
        except psutil.Error:
            return False

    def sleeping(self) -> set[int]:
        """Return the processes that are a role's ``sleep 300``."""
        return self.processes("300")

    def machines(self) -> Any:
        return self.type_json("ls")[1]

    def assert_nothing_left(self) -> None:
        assert self.machines() == []
        assert self.processes() == set()
        assert list((self.state / "local").glob("local-*")) == []

    def wait_for(self, what: Callable[[], object], *, timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, "did not happen in time"
            time.sleep(0.05)

    def end_all(self) -> None:
        """End what a failed test left."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()
        for pid in self.processes():
            psutil.Process(pid).kill()
