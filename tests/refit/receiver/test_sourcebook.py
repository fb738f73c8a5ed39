"""Who failed rests, who lied is avoided, who is fast is remembered."""

from paceline.refit.errors import FetchError, VerifyError
from paceline.refit.receiver.sourcebook import BLAME_S, REST, SourceBook


def test_a_source_rests_longer_each_time_and_starts_anew_after_a_good_read() -> None:
    """Failures in a row double the rest up to a bound; one good read ends it."""
    book = SourceBook()
    rests = []
    for _ in range(REST.attempts + 3):
        book.note_problem("a", FetchError("gone"), now_s=0.0)
        at_s = 0.0
        while not book.is_usable("a", now_s=at_s):
            at_s += 0.25
        rests.append(at_s)
    assert rests[0] == 0.5
    assert rests == sorted(rests)
    assert rests[-1] <= REST.delay_s_max
    book.note_read("a", num_bytes=10, seconds=1.0)
    book.note_problem("a", FetchError("gone"), now_s=100.0)
    assert book.is_usable("a", now_s=100.5)


def test_a_liar_is_avoided_for_long_unless_there_is_nobody_else() -> None:
    """Bytes with another hash are no accident that a moment later is over."""
    book = SourceBook()
    book.note_problem("a", VerifyError("another hash"), now_s=0.0)
    assert not book.is_usable("a", now_s=BLAME_S - 1)
    assert book.is_usable("a", now_s=BLAME_S)
    book.note_problem("a", VerifyError("another hash"), now_s=0.0)
    book.note_read("a", num_bytes=5, seconds=1.0)
    book.forgive(["a"])
    assert book.is_usable("a", now_s=1.0)
    assert book.rate_of("a") == 5.0


def test_rates_follow_what_is_measured() -> None:
    """The newest measurement moves a rate, one odd one does not make it."""
    book = SourceBook()
    assert book.rate_of("a") is None
    for _ in range(3):
        book.note_read("a", num_bytes=100, seconds=1.0)
    book.note_read("a", num_bytes=1000, seconds=1.0)
    rate = book.rate_of("a")
    assert rate is not None
    assert 100 < rate < 500
    book.note_read("b", num_bytes=10, seconds=0.0)
    assert book.rates() == {"a": rate}
