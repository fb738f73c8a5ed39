"""``hosts``, ``why``, ``cost`` and ``gc`` over a state directory that has something in it."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import run
from paceline.rental.failover import FailureKind
from paceline.rental.ledger import Ledger
from paceline.rental.lifecycle import MachineState
from paceline.rental.model import InstanceHandle, Offer, OfferConstraints
from paceline.rental.plan import BackendAnswer, RentRequest, plan_attempts
from paceline.rental.reasons import Reasons
from paceline.rental.records import Machine, RentedOffer
from paceline.runs import compose
from paceline.runs.ledger import RunRecord


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def offer(number: int, dph: float, *, reliability: float = 0.99) -> Offer:
    return Offer(
        "vast", f"{number}", "h100", 1, 80, dph, reliability, 900.0, 500.0, "DE", {}, host="h1"
    )


def test_hosts_are_shown_blocked_and_forgotten(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What became of a machine, what is passed over for it, and the operator's own word."""
    assert run(["hosts", "ls"]) == 0
    assert said(capsys) == "nothing is remembered\n"
    with compose.open_services() as services:
        now_s = services.clock.time()
        memory = services.rental.memory
        memory.remember_failure(offer(1, 1.0), FailureKind.ACCESS, reason="publickey", now_s=now_s)
    assert run(["hosts", "block", "vast", "h2", "--days", "2"]) == 0
    capsys.readouterr()
    assert run(["hosts", "ls"]) == 0
    shown = said(capsys)
    assert "vast h1: 0 used, 1 failed, boot -; access: publickey" in shown
    assert "passed over for 24.0 h: vast host h1: access: publickey" in shown
    assert "passed over for 48.0 h: vast host h2: rejected: by hand" in shown
    assert run(["hosts", "ls", "--json"]) == 0
    assert {one["name"] for one in json.loads(said(capsys))["passed_over"]} == {"h1", "h2"}
    assert run(["hosts", "forget"]) == 2
    assert run(["hosts", "forget", "vast", "h1"]) == 0
    assert "2 records" in said(capsys)
    assert run(["hosts", "forget", "--all"]) == 0
    assert run(["hosts", "block", "nowhere", "h"]) == 2


def test_why_tells_the_plan_of_each_machine(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attempts in order, what was cheaper with its reason, and what giving way would bring."""
    plan = plan_attempts(
        [
            BackendAnswer(
                backend="vast",
                offers=(offer(1, 2.0),),
                others=(offer(2, 1.5, reliability=0.91),),
            ),
            BackendAnswer(backend="lambda", refusal="sold out"),
        ],
        constraints=OfferConstraints("h100-1x", min_disk_gb=10),
        num_gpus=1,
    )
    request = RentRequest(
        run_id="r1",
        role="trainer",
        index=0,
        gpu="h100-1x",
        backends=("vast", "lambda"),
        min_disk_gb=10,
        max_dph=None,
        image="",
        ssh_pubkey_path=Path("k"),
    )
    with compose.open_services() as services:
        Reasons(services.store).record(request, plan, now_s=1.0)
        services.ledger.create(
            RunRecord(run_id="r1", name="r1", created_at_ms=0, pid=1, out=str(state))
        )
    assert run(["why", "r1"]) == 0
    assert said(capsys).splitlines() == [
        "trainer-0: h100-1x",
        "  vast 1 at 2.000 $/h",
        "  passed over: lambda: sold out",
        "  passed over: vast 2 at 1.500 $/h: reliability 0.91 < 0.97",
        "  to be had: vast 2 at 1.500 $/h (-0.500 $/h) with min_reliability 0.91",
    ]
    found: list[Any] = []
    assert run(["why", "r1", "--json"]) == 0
    found = json.loads(said(capsys))
    assert found[0]["attempts"] == [{"backend": "vast", "offer": "1", "dph": 2.0}]
    assert run(["why", "nobody"]) == 2


def test_costs_add_up_to_nothing_before_anything_was_rented(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a run all runs are meant, and --actual needs one."""
    assert run(["cost"]) == 0
    assert said(capsys) == "nothing was rented\n0.0000 USD\n"
    assert run(["cost", "--by", "day", "--json"]) == 0
    assert json.loads(said(capsys))["rows"] == []
    assert run(["cost", "--actual"]) == 2


@pytest.mark.parametrize("net", ["87 Mbit/s", "network not measured: there is no Python"])
def test_status_shows_what_a_machine_measured(
    state: Path, capsys: pytest.CaptureFixture[str], net: str
) -> None:
    """The verdict on its network, or why there is none; for people and for programs."""
    with compose.open_services() as services:
        run_record = RunRecord(run_id="r1", name="r1", created_at_ms=0, pid=1, out=str(state))
        services.ledger.create(run_record)
        ledger = Ledger(services.store)
        ledger.add(
            Machine(
                label="paceline-r1-trainer-0-aa",
                run_id="r1",
                role="trainer",
                index=0,
                backend="vast",
                offer=RentedOffer(id="1", gpu_name="h100", num_gpus=1, dph=2.0),
                state=MachineState.CREATED,
                intended_at=0.0,
                instance=InstanceHandle("vast", "7", "paceline-r1-trainer-0-aa", 0.0),
            )
        )
        ledger.move(ledger.find("paceline-r1-trainer-0-aa"), MachineState.RUNNING, net=net)
    assert run(["status", "r1"]) == 0
    assert net in said(capsys)
    assert run(["status", "r1", "--json"]) == 0
    assert json.loads(said(capsys))["machines"][0]["net"] == net
