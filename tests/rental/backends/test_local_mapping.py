"""The local backend's pure part never crashes and loses nothing."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rental.backends.local.mapping import (
    MachineRecord,
    is_instance_id,
    machine_environ,
    offers_of,
    parse_offer_id,
    parse_record,
    render_record,
)
from paceline.rental.errors import NoOffersError, ProvisionError
from paceline.rental.model import OfferConstraints

_records = st.builds(
    MachineRecord,
    instance_id=st.text(),
    label=st.text(),
    created_at=st.floats(allow_nan=False),
    num_slots=st.integers(1, 1000),
)


@given(_records)
def test_records_round_trip(record: MachineRecord) -> None:
    """What is written is read back equal."""
    assert parse_record(render_record(record)) == record


@given(st.binary() | st.text().map(str.encode) | st.just(b"[" * 100_000))
def test_any_bytes_are_a_record_or_none(content: bytes) -> None:
    """Damage is an answer, not an exception."""
    assert parse_record(content) is None


@given(st.integers(1, 64), st.integers(1, 80))
def test_every_offer_can_be_taken_and_no_other(num_cpus: int, count: int) -> None:
    """What is offered is accepted for as many slots as were asked for."""
    c = OfferConstraints(f"cpu-{count}x", min_disk_gb=1)
    if count > num_cpus:
        with pytest.raises(NoOffersError):
            offers_of(c, num_cpus=num_cpus, free_disk_gb=10.0, ram_gb=8)
        return
    offers = offers_of(c, num_cpus=num_cpus, free_disk_gb=10.0, ram_gb=8)
    assert len(offers) == num_cpus - count + 1
    for offer in offers:
        assert parse_offer_id(offer.id, num_cpus=num_cpus) == count
    with pytest.raises(ProvisionError):
        parse_offer_id(f"cpu-{num_cpus - count + 1}-{count}x", num_cpus=num_cpus)


@given(st.text())
def test_foreign_offer_ids_are_refused(text: str) -> None:
    """Text that is no offer is a ProvisionError, whatever it is."""
    try:
        assert parse_offer_id(text, num_cpus=4) >= 1
    except ProvisionError:
        return


@given(st.text(st.sampled_from("ab0-/.\x00 A"), max_size=80))
def test_an_instance_id_is_never_a_path(text: str) -> None:
    """What passes has no slash, no dot, no upper case and is not empty."""
    if is_instance_id(text):
        assert Path("home", text).parent == Path("home")
        assert not text.startswith((".", "-"))


@given(st.dictionaries(st.sampled_from(["PATH", "PACELINE_X", "HOME", "PYTHONPATH"]), st.text()))
def test_the_environment_is_the_users_with_our_programs_first(environ: dict[str, str]) -> None:
    """PATH starts with our directory, PACELINE variables are gone, the rest is untouched."""
    made = machine_environ(environ, interpreter_dir=Path("/venv/bin"), working_dir=Path("/w"))
    assert made["PATH"].split(":")[0] == "/venv/bin"
    assert "PACELINE_X" not in made
    assert made.get("HOME") == environ.get("HOME")
