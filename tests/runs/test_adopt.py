"""Taking up a run: what is kept of it, and what becomes of its machines."""

import json
from pathlib import Path

import pytest

from paceline.core.errors import ExitStatus, UsageError
from paceline.rental import InstanceHandle
from paceline.rental.lifecycle import MachineState
from paceline.rental.records import Machine, RentedOffer
from paceline.runs.adopt import JobSource, adoption_of, ending_of, load_order, save_order
from paceline.runs.model import Outcome, Slot

SLOT = Slot(role="task", index=0)


def machine(label: str, state: MachineState = MachineState.RUNNING, index: int = 0) -> Machine:
    return Machine(
        label=label,
        run_id="r",
        role="task",
        index=index,
        backend="fake",
        offer=RentedOffer(id="o", gpu_name="cpu", num_gpus=1, dph=0.0),
        state=state,
        intended_at=0.0,
        instance=InstanceHandle("fake", label, label, 0.0),
    )


def test_of_each_slot_the_newest_that_runs_is_kept() -> None:
    """Half booted, stopped, superfluous and unknown ones end."""
    machines = [
        machine("old"),
        machine("new"),
        machine("booting", MachineState.CREATED),
        machine("stopped"),
        machine("other", index=1),
    ]
    found = adoption_of(machines, [SLOT], running={"old", "new", "booting", "other"})
    assert {slot: one.label for slot, one in found.kept.items()} == {SLOT: "new"}
    assert {one.label for one in found.ended} == {"old", "booting", "stopped", "other"}


def test_an_order_comes_back_as_it_was(tmp_path: Path) -> None:
    """Byte for byte, and readable by nobody else."""
    text = "name: x\nroles: {t: {backend: local, gpu: cpu-1x, run: 'echo é'}}\n".encode()
    source = JobSource(name="job.yaml", base=tmp_path, text=text)
    save_order(tmp_path, source, out=tmp_path / "out", stream=True)
    found = load_order(tmp_path)
    assert (found.source, found.out, found.stream) == (source, tmp_path / "out", True)
    assert found.source.parse(backends=["local"]).roles[0].run == "echo é"
    assert (tmp_path / "order.json").stat().st_mode & 0o777 == 0o600


def test_a_run_without_an_order_is_told_how_to_end(tmp_path: Path) -> None:
    """What cannot be taken up can be ended."""
    with pytest.raises(UsageError, match="paceline down"):
        load_order(tmp_path)


def test_a_run_that_was_ending_goes_on_ending(tmp_path: Path) -> None:
    """The last decision counts; lines that were cut off or are not ours say nothing."""
    journal = tmp_path / "events.jsonl"
    assert ending_of(journal) is None
    line = {"event": "run.ending", "outcome": "failed", "status": 1, "reason": "task-0 failed"}
    journal.write_text(json.dumps({"event": "role.started"}) + "\n")
    assert ending_of(journal) is None
    journal.write_text(json.dumps(line) + '\n{"event": "run.ending", "outc')
    found = ending_of(journal)
    assert found is not None
    assert (found.outcome, found.status) == (Outcome.FAILED, ExitStatus.FAILED)
