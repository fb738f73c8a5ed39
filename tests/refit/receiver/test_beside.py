"""Work beside a fetch: waited for, and its failure is what counts."""

import contextlib
import threading
from collections.abc import Callable

import pytest

from paceline.refit.errors import FetchError, VerifyError
from paceline.refit.receiver.beside import Beside


def fail() -> None:
    raise VerifyError("not the base")


def test_it_is_waited_for_and_done_by_another_thread() -> None:
    """Whoever goes on while it works meets the end of it at the end of the block."""
    go, done = threading.Event(), list[threading.Thread]()

    def work() -> None:
        assert go.wait(20)
        done.append(threading.current_thread())

    with Beside() as beside:
        beside.start(work)
        beside.check()  # neither waits nor fails while it is at work
        assert not done
        go.set()
    assert done != [threading.current_thread()]
    assert len(done) == 1


def test_nothing_to_do_is_nothing() -> None:
    """Without work nothing is waited for."""
    with Beside() as beside:
        beside.check()
        beside.finish()


def leave(work: Callable[[], None], error: BaseException | None) -> None:
    """Leave the block by ``error``, or by asking for the end."""
    with Beside() as beside:
        beside.start(work)
        if error is not None:
            raise error
        beside.finish()


def test_its_failure_is_told_by_whoever_asks() -> None:
    """``finish`` waits for it; ``check`` knows it from then on."""
    with pytest.raises(VerifyError, match="not the base"):
        leave(fail, None)
    with contextlib.suppress(VerifyError), Beside() as beside:
        beside.start(fail)
        with pytest.raises(VerifyError):
            beside.finish()
        with pytest.raises(VerifyError):
            beside.check()


def test_its_failure_comes_before_others() -> None:
    """The bytes' error is then what followed from it, and is kept as its context."""
    with pytest.raises(VerifyError) as caught:
        leave(fail, FetchError("the source was left"))
    assert isinstance(caught.value.__context__, FetchError)
    with pytest.raises(FetchError, match="is gone"):
        leave(lambda: None, FetchError("the source is gone"))


def test_an_interrupt_stays_one() -> None:
    """Whoever ends the process is not told of weights instead."""
    with pytest.raises(KeyboardInterrupt):
        leave(fail, KeyboardInterrupt())
