"""How parts of a run reach each other: every combination has one answer, with a reason."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runs.model import Reach, RoleKind, RoleSpec, Slot
from paceline.runs.reach import (
    Mode,
    Place,
    Shortcut,
    UnreachableError,
    control_link,
    exposed,
    forwards_of,
    links_of,
    may_shorten,
    role_link,
)

TRAINER, ROLLOUT = Slot(role="trainer", index=0), Slot(role="rollout", index=0)
PORTS = {TRAINER: (20001, 20002), ROLLOUT: (20003,)}


def place(slot: Slot = ROLLOUT, **more: object) -> Place:
    fields: dict[str, object] = {
        "slot": slot,
        "kind": RoleKind(slot.role),
        "backend": "vast",
        "is_here": False,
        "dials_control": False,
        "can_tunnel": True,
        "address": "192.0.2.7",
    }
    return Place(**(fields | more))  # type: ignore[arg-type]


def test_a_rented_machine_is_reached_by_tunnel() -> None:
    """Nobody can dial a laptop: control and weights go through ssh, samples as well."""
    links = links_of([place(TRAINER), place(ROLLOUT)], has_store=False)
    assert {link.mode for link in links} == {Mode.TUNNEL}
    assert len(links) == 4
    found = forwards_of(place(ROLLOUT), control_port=9, ports=PORTS)
    assert (found.to_here, found.from_here) == ((9, 20001, 20002), (20003,))
    found = forwards_of(place(TRAINER), control_port=9, ports=PORTS)
    assert (found.to_here, found.from_here) == ((9, 20003), (20001, 20002))


def test_this_computer_needs_no_tunnel() -> None:
    """Loopback is loopback, also for a machine whose other end is elsewhere."""
    here = place(TRAINER, is_here=True, backend="local", can_tunnel=False)
    assert control_link(here).mode is Mode.DIRECT
    assert forwards_of(here, control_port=9, ports=PORTS).to_here == ()
    both = links_of([here, place(ROLLOUT, is_here=True)], has_store=False)
    assert {link.mode for link in both} == {Mode.DIRECT}
    mixed = links_of([here, place(ROLLOUT)], has_store=False)
    assert [link.mode for link in mixed] == [Mode.DIRECT, *[Mode.TUNNEL] * 3]


def test_an_address_that_answers_is_dialled() -> None:
    """Where the control service's own address works, no tunnel carries it."""
    assert control_link(place(dials_control=True)).mode is Mode.DIRECT
    assert 9 not in forwards_of(place(dials_control=True), control_port=9, ports=PORTS).to_here


def test_the_job_file_decides() -> None:
    """Each mode can be asked for, and what is impossible then is refused with what to do."""
    wanted = place(TRAINER, wanted=Reach.DIRECT, dials_control=True)
    assert role_link(place(), wanted, has_store=False).mode is Mode.DIRECT
    assert forwards_of(wanted, control_port=9, ports=PORTS).from_here == ()
    here = place(is_here=True, wanted=Reach.TUNNEL)
    assert control_link(here).mode is Mode.TUNNEL
    with pytest.raises(UnreachableError, match=r"refit\.listen"):
        control_link(place(wanted=Reach.DIRECT))
    bucket = place(wanted=Reach.OBJECTSTORE)
    assert role_link(bucket, place(TRAINER), has_store=True).mode is Mode.OBJECTSTORE
    assert forwards_of(bucket, control_port=9, ports=PORTS).to_here == (9,)
    with pytest.raises(UnreachableError, match=r"add objectstore to refit\.transports"):
        role_link(bucket, place(TRAINER), has_store=False)


def test_no_port_and_no_ssh_is_a_bucket() -> None:
    """What cannot be come in by is reached through a store alone, and the reason names it."""
    deaf = place(can_tunnel=False, dials_control=True)
    assert role_link(deaf, place(TRAINER), has_store=True).mode is Mode.OBJECTSTORE
    with pytest.raises(UnreachableError, match="rollout-0 on vast has no port and no ssh"):
        links_of([deaf, place(TRAINER)], has_store=False)
    with pytest.raises(UnreachableError, match="cannot reach the run's control service"):
        control_link(place(can_tunnel=False))


PLACES = st.builds(
    place,
    st.sampled_from([TRAINER, ROLLOUT]),
    is_here=st.booleans(),
    dials_control=st.booleans(),
    can_tunnel=st.booleans(),
    wanted=st.sampled_from(Reach),
)


@given(source=PLACES, target=PLACES, has_store=st.booleans())
def test_every_combination_has_an_answer(source: Place, target: Place, *, has_store: bool) -> None:
    """Total: a link with a reason, or a refusal of ours; a tunnel only where there can be one."""
    try:
        link = role_link(source, target, has_store=has_store)
    except UnreachableError:
        link = None
    if link is None:
        assert not has_store
        return
    assert link.why
    if link.mode is Mode.TUNNEL:
        assert all(each.is_here or each.can_tunnel for each in (source, target))


def test_a_shortcut_is_taken_before_the_operators_tunnel() -> None:
    """In each direction its own, with its reason; the control service stays where it was."""
    ends = [place(TRAINER, mapped={20001: "192.0.2.7:40001"}), place(ROLLOUT)]
    direct = Shortcut(
        source=ROLLOUT,
        target=TRAINER,
        mode=Mode.DIRECT,
        why="answers",
        ways={20001: "192.0.2.7:40001", 20002: "[2001:db8::1]:40002"},
    )
    found = {
        (link.source, link.target): (link.mode, link.why)
        for link in links_of(ends, has_store=False, shortcuts=[direct])
    }
    assert found["rollout-0", "trainer-0"] == (Mode.DIRECT, "answers")
    assert found["trainer-0", "rollout-0"][0] is Mode.TUNNEL
    assert "kept by the operator" in found["trainer-0", "rollout-0"][1]
    assert found["rollout-0", "control"][0] is Mode.TUNNEL
    assert direct.routes == {
        "127.0.0.1:20001": "192.0.2.7:40001",
        "127.0.0.1:20002": "[2001:db8::1]:40002",
    }


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, True),
        ({"wanted": Reach.TUNNEL}, False),
        ({"wanted": Reach.OBJECTSTORE}, False),
        ({"is_here": True}, False),
        ({"wanted": Reach.DIRECT}, True),
    ],
)
def test_shortcuts_are_looked_for_where_the_job_file_allows(
    more: dict[str, object], expected: bool
) -> None:
    """Not where it names another way, nor where one end is this computer."""
    assert may_shorten(place(TRAINER), place(ROLLOUT, **more)) is expected
    assert may_shorten(place(ROLLOUT, **more), place(TRAINER)) is expected


def test_only_what_speaks_tls_is_exposed_unasked() -> None:
    """A trainer's ports by default; an engine's only by the word of the job file."""
    roles = {TRAINER: role(RoleKind.TRAINER), ROLLOUT: role(RoleKind.ROLLOUT)}
    assert exposed(roles, PORTS, has_http=True) == {TRAINER: (20001, 20002)}
    assert exposed(roles, PORTS, has_http=False) == {}
    roles = {slot: replace(found, reach=Reach.DIRECT) for slot, found in roles.items()}
    assert set(exposed(roles, PORTS, has_http=True)) == {TRAINER, ROLLOUT}
    roles = {slot: replace(found, reach=Reach.TUNNEL) for slot, found in roles.items()}
    assert exposed(roles, PORTS, has_http=True) == {}
    assert exposed(roles, {}, has_http=True) == {}


def role(kind: RoleKind) -> RoleSpec:
    return RoleSpec(name=kind.value, kind=kind, backends=("vast",), gpu="h100-1x", run="true")
