"""The promises of examples/arithmetic, kept by real processes in a run that is a little shorter."""

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from e2e.operating import ROOT, Operator
from paceline.refit.compose import connect_control
from paceline.refit.digest import content_digest, root_digest
from paceline.refit.model import TensorEntry

EXAMPLE = ROOT / "examples" / "arithmetic"
RUN_S = 140.0
"""For one run, start to end; torch is imported four times on two cores."""
SUMMARY = {
    "run_id",
    "versions_published",
    "trainer",
    "engines",
    "reward_first5",
    "reward_last5",
    "delta_bytes",
    "full_bytes",
    "wall_s",
    "cost_usd",
    "mismatches",
}

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def example_job(operator: Operator, *flags: str) -> str:
    """Write the example's own job file, with flags for its trainer, and return its name."""
    job = yaml.safe_load((EXAMPLE / "local.yaml").read_text(encoding="utf-8"))
    trainer, rollout = job["roles"]["trainer"], job["roles"]["rollout"]
    trainer["run"] = " ".join((trainer["run"], "--prompts 8 --generations 4", *flags))
    # The console script is there only where the package is installed.
    assert rollout["run"].startswith("paceline serve ")
    rollout["run"] = "python -m " + rollout["run"]
    for role in (trainer, rollout):
        role["workdir"] = str(EXAMPLE)
    return operator.job(json.dumps(job))


class Running:
    """A run under way: what it has told so far, and its roles' processes."""

    def __init__(self, operator: Operator, job: str) -> None:
        self._operator = operator
        self._progress = operator.home / "progress"
        words = ("up", job, "--yes", "--json", "--out", "out")
        self._process = operator.start(*words, progress=self._progress)

    def told(self) -> str:
        return self._progress.read_text(encoding="utf-8")

    def await_text(self, text: str) -> None:
        def is_there() -> bool:
            assert self._process.poll() is None, self.told()
            return text in self.told()

        self._operator.wait_for(is_there, timeout_s=RUN_S)

    def kill(self, *words: str, index: int = 0) -> None:
        """SIGKILL the process of a role whose command line has all ``words``."""
        pids = set.intersection(*(self._operator.processes(word) for word in words))
        mine = [psutil.Process(pid) for pid in sorted(pids)]
        chosen = [one for one in mine if one.environ().get("PACELINE_INDEX") == str(index)]
        assert len(chosen) == 1, (words, mine)
        chosen[0].send_signal(signal.SIGKILL)

    def end(self) -> tuple[int, Any]:
        """Return the exit status and the JSON object that came last."""
        try:
            out, _ = self._process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end: {self.told()}")
        assert "Traceback" not in self.told(), self.told()
        return self._process.returncode, json.loads(out.splitlines()[-1])


def assert_digests_agree(report: Any) -> None:
    """Every version that any engine installed had the trainer's root digest there."""
    installs = [(v, install) for v in report["versions"] for install in v["installs"]]
    assert installs
    assert all(install["root_digest"] == v["root_digest"] for v, install in installs)
    assert (report["mismatches"], report["unknown_installs"]) == (0, [])


def assert_ends_equal(found: Any) -> None:
    """Trainer and both engines hold the last weights.

    Who joined late may have them under the name of the full version beside the delta, or of the
    delta that is composed from several.
    """
    roots = {engine["root_digest"] for engine in found["engines"]}
    assert len(found["engines"]) == 2
    assert roots == {found["trainer"]["root_digest"]}
    ids = [engine["version_id"] for engine in found["engines"]]
    names = {uid.partition("-from-")[0].removesuffix("-full") for uid in ids}
    assert names == {found["trainer"]["version_id"]}


def root_of_checkpoint(path: Path) -> str:
    """Return the root digest of a checkpoint as the wire rounds it, without the publisher."""
    entries = []
    for name, tensor in load_file(path).items():
        data = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
        entry = TensorEntry(
            name=name,
            dtype="BF16",
            shape=tuple(tensor.shape),
            digest=content_digest(data),
            num_bytes=len(data),
        )
        entries.append(entry)
    return root_digest(entries)


def test_a_short_run_keeps_its_promises(operator: Operator) -> None:
    """Equal digests everywhere for every version, a full summary, a report, and nothing left."""
    job = example_job(operator, "--warm-steps 30", "--steps 6")
    running = Running(operator, job)
    status, found = running.end()
    assert (status, found["outcome"]) == (0, "succeeded")
    assert "rollout-0 is stopped" in running.told()
    assert set(found) >= SUMMARY
    assert found["versions_published"] == 7
    assert 0 < found["delta_bytes"] < found["full_bytes"]
    assert_ends_equal(found)
    report = json.loads(Path(found["report"]).read_text())
    assert_digests_agree(report)
    assert [len(version["installs"]) for version in report["versions"]][-1] == 2
    assert [step["step"] for step in report["steps"]] == [1, 2, 3, 4, 5, 6]
    page = Path(found["html"]).read_text()
    assert found["trainer"]["root_digest"][:12] in page
    kept = operator.home / "out" / "artifacts" / "trainer-0" / "checkpoint-final"
    assert root_of_checkpoint(kept / "model.safetensors") == found["trainer"]["root_digest"]
    operator.assert_nothing_left()


GATED = """
import time
from pathlib import Path
import train
score, scored = train.score, []
def gated(*args, **kwargs):
    scored.append(1)
    while len(scored) == 6 and not Path({go!r}).exists():
        time.sleep(0.05)
    return score(*args, **kwargs)
train.score = gated
train.main()
"""
"""The example's trainer, which does not end step 6 before it may."""


def installers(operator: Operator) -> set[str]:
    """Ask the run's control service which engines have told what they serve."""
    (secrets,) = operator.state.glob("runs/*/control")
    control = connect_control(
        json.loads((secrets / "hosting.json").read_text())["listen"],
        token_file=secrets / "tokens.json",
        trusted_file=secrets / "control-ca.crt",
    )
    try:
        return {one.worker_id for one in control.list_installed("tiny-adder") if one.sequence >= 0}
    finally:
        control.close()


def test_an_engine_that_is_killed_is_replaced(operator: Operator) -> None:
    """After SIGKILL of one engine the steps go on and its successor ends on the same digest."""
    job = json.loads((operator.home / example_job(operator, "--warm-steps 1")).read_text())
    code = shutil.copytree(EXAMPLE, operator.home / "code")
    go = operator.home / "go"
    (code / "gated.py").write_text(GATED.format(go=str(go)))
    trainer = job["roles"]["trainer"]
    trainer["run"] = trainer["run"].replace("train.py", "gated.py") + " --steps 8"
    trainer["workdir"] = str(code)
    running = Running(operator, operator.job(json.dumps(job)))
    running.await_text("\nstep 2 ")
    before = installers(operator)
    running.kill("serve", "transformers", index=1)
    running.await_text("rollout-1: ended by signal 9; starting it again")
    running.await_text("\nstep 4 ")
    operator.wait_for(lambda: installers(operator) - before, timeout_s=RUN_S)
    go.touch()
    status, found = running.end()
    assert status == 0, running.told()
    assert_ends_equal(found)
    report = json.loads(Path(found["report"]).read_text())
    assert_digests_agree(report)
    assert [step["step"] for step in report["steps"]] == list(range(1, 9))
    workers = {i["worker_id"] for version in report["versions"] for i in version["installs"]}
    assert len(workers) == 3
    operator.assert_nothing_left()


@pytest.mark.slow
def test_a_trainer_that_is_killed_ends_the_run(operator: Operator) -> None:
    """After SIGKILL of the trainer the status is 1, the error says so, everything is torn down."""
    running = Running(operator, example_job(operator))
    running.await_text("warm start 20 of")
    running.kill("train.py")
    status, found = running.end()
    assert (status, found["outcome"], found["exit_status"]) == (1, "failed", 1)
    assert found["error"].startswith("trainer-0 ended by signal 9")
    assert found["error"] in running.told()
    assert Path(found["html"]).exists()
    operator.assert_nothing_left()


@pytest.mark.slow
def test_a_trainer_whose_machine_is_lost_continues_the_chain(operator: Operator) -> None:
    """Another machine, the newest checkpoint, the next sequence: the engine follows all along."""
    name = example_job(operator, "--warm-steps 1", "--steps 14", "--save-every 1")
    job = json.loads((operator.home / name).read_text())
    job["roles"]["trainer"]["restart"] = "on-failure"
    job["roles"]["rollout"]["count"] = 1
    job["artifacts"] = {"pull": ["checkpoints/"], "every": "500ms", "keep": 2}
    running = Running(operator, operator.job(json.dumps(job)))
    kept = operator.home / "out" / "checkpoints" / "trainer-0" / "work" / "checkpoints"
    operator.wait_for(lambda: any(kept.glob("*-checkpoint-*")), timeout_s=RUN_S)
    operator.lose_machine(max(operator.processes("train.py")))
    status, found = running.end()
    assert status == 0, running.told()
    report = json.loads(Path(found["report"]).read_text())
    assert_digests_agree(report)
    assert [role["machines_lost"] for role in report["roles"]] == [1, 0]
    steps = [step["step"] for step in report["steps"]]
    assert steps == list(range(1, 15))
    sequences = [version["sequence"] for version in report["versions"]]
    assert sequences == sorted(set(sequences))
    assert sequences[-1] <= len(sequences), "the one that was in the making is all that is missing"
    assert len(sequences) > 15, "some steps were made twice, and each is a version of its own"
    (engine,) = found["engines"]
    assert engine["root_digest"] == found["trainer"]["root_digest"]
    operator.assert_nothing_left()
