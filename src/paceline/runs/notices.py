"""Tell somebody who is not watching: a command of the operator's, or a webhook.

A notice is never worth a run. Each has a deadline, they wait in a queue of bounded length, and
what fails is put on record and forgotten. Nothing secret leaves: tokens are taken out before.
"""

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from queue import Full, Queue
from threading import Thread
from typing import Final

from paceline.core.clock import Clock
from paceline.runs.model import NotifySpec

TIMEOUT_S = 10.0
QUEUE_MAX = 100
CLOSE_S = 15.0
TOLD: Final = frozenset(
    {
        "budget.soft",
        "budget.hard",
        "machine.lost",
        "machine.stray",
        "role.crash_loop",
        "watcher.lost",
        "run.finished",
    }
)
"""Events that a person may want to be woken for."""

Record = Callable[[str, Mapping[str, object]], None]


class Notifier:
    """Sends notices from a thread of its own, in order."""

    def __init__(
        self,
        spec: NotifySpec,
        *,
        run_id: str,
        clock: Clock,
        redact: Callable[[str], str],
        record: Record,
    ) -> None:
        self._spec = spec
        self._run_id = run_id
        self._clock = clock
        self._redact = redact
        self._record = record
        self._queue: Queue[str | None] = Queue(maxsize=QUEUE_MAX)
        self._thread: Thread | None = None

    def tell(self, name: str, fields: Mapping[str, object]) -> None:
        """Queue one event if somebody asked for such; never blocks, never raises."""
        if name not in TOLD or (self._spec.command is None and self._spec.webhook is None):
            return
        told = {"run_id": self._run_id, "event": name, "at": round(self._clock.time(), 3), **fields}
        if self._thread is None:
            self._thread = Thread(target=self._work, name="paceline-notices", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(self._redact(json.dumps(told)))
        except Full:
            self._record("notify.failed", {"reason": f"more than {QUEUE_MAX} notices wait"})

    def close(self) -> None:
        """Let what is queued go out, for a bounded time."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except Full:
            return  # the thread is a daemon: what hangs does not keep the process
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        while (text := self._queue.get()) is not None:
            for send in (self._run_command, self._post):
                try:
                    problem = send(text)
                except (OSError, ValueError) as exc:
                    problem = str(exc)
                if problem is not None:
                    self._record("notify.failed", {"reason": self._redact(problem)})

    def _run_command(self, text: str) -> str | None:
        if self._spec.command is None:
            return None
        process = subprocess.Popen(  # noqa: S603 - the operator's own command is what is asked for
            ["/bin/sh", "-c", self._spec.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            process.communicate(text, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"notify.command did not end within {TIMEOUT_S:g} s and was killed"
        code = process.returncode
        return f"notify.command exited with {code}" if code else None

    def _post(self, text: str) -> str | None:
        if self._spec.webhook is None:
            return None
        request = urllib.request.Request(  # noqa: S310 - the job file admits http and https alone
            self._spec.webhook,
            data=text.encode(),
            headers={"Content-Type": "application/json", "User-Agent": "paceline"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):  # noqa: S310 - as above
                return None
        except urllib.error.URLError as exc:
            # The address may hold a secret of its own: it is not repeated.
            return f"notify.webhook: {exc.reason}"
