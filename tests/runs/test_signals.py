"""Which signals a run takes over."""

import os
import signal

from paceline.runs.signals import Signals


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    """Whoever says nohup wants the run to outlive the terminal; Ctrl-C still ends it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.received == "SIGINT"
    finally:
        signal.signal(signal.SIGHUP, before)
