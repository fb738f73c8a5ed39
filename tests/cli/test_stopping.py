"""A signal is never lost, whatever the main thread was doing."""

import signal
import subprocess
import sys
import threading

from paceline.cli.stopping import STOP_SIGNALS, stop_signals
from paceline.system import system_clock

# A handler that takes a lock which the waiting thread holds hangs within a few hundred of these.
MANY = """
import os, signal, threading
from paceline.cli.stopping import stop_signals

def tell():
    while not done.is_set():
        os.kill(os.getpid(), signal.SIGTERM)

done = threading.Event()
with stop_signals() as stopping:
    thread = threading.Thread(target=tell)
    thread.start()
    heard = sum(stopping.wait(0.00001) for _ in range(20_000))
    done.set()
    thread.join()
print(heard > 0)
"""


def test_each_signal_ends_the_wait() -> None:
    """Told once, it stays told; handlers of before come back."""
    for number in STOP_SIGNALS:
        before = signal.getsignal(number)
        with stop_signals() as stopping:
            assert not stopping.wait(0)
            signal.raise_signal(number)
            assert stopping.wait()
            assert stopping.wait(0)
        assert signal.getsignal(number) is before


def test_a_signal_that_another_thread_takes_ends_the_wait() -> None:
    """The kernel may hand it to any thread, and nothing interrupts the one that waits."""

    def take() -> None:
        system_clock().sleep(0.3)  # the main thread waits by now
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    with stop_signals() as stopping:
        thread = threading.Thread(target=take)
        thread.start()
        assert stopping.wait(5)
        thread.join()


def test_a_signal_of_another_kind_ends_no_wait() -> None:
    """What wakes the wait is looked at."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    with stop_signals() as stopping:
        signal.raise_signal(signal.SIGUSR1)
        assert not stopping.wait(0)
    signal.signal(signal.SIGUSR1, before)


def test_signals_at_any_moment_hang_nothing() -> None:
    """Thousands of signals while the main thread goes in and out of its wait."""
    found = subprocess.run(
        [sys.executable, "-c", MANY],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout == "True\n"
