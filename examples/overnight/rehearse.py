"""Rehearse a bad night against a provider that exists only here: no account, no cost.

python examples/overnight/rehearse.py preemption|budget|kill

A fake Vast.ai listens on loopback; each machine that is rented there is a real sshd on this
computer. The command line is the real one. What a night brings is brought at once: a higher bid,
five hours that pass, a kill -9.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.rental.records import KEY_PREFIX, parse_machine, render_machine
from paceline.store.sqlite import SqliteStore
from paceline.system import environ, system_clock
from paceline.testing.fakes.machines import SshMachines
from paceline.testing.fakes.registry import serve_fake
from paceline.testing.fakes.vast import FakeVast

HERE = Path(__file__).parent
CLOCK = system_clock()
WAIT_S = 150.0
RUN = "night-1"
ROLES = ("trainer", "rollout")
SOFT_USD, HARD_USD = 20.0, 40.0
"""As the job file says."""


@dataclass
class Night:
    """One run of the job, and the provider that it rents from."""

    home: Path
    fake: FakeVast
    env: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = field(default=None)

    def begin(self, edit: Callable[[str], str] = str) -> None:
        """Start `paceline up` on the job file, as `edit` changes its text."""
        for name in ("train.sh", "job.yaml"):
            (self.home / name).write_text((HERE / name).read_text(encoding="utf-8"))
        job = self.home / "job.yaml"
        job.write_text(edit(job.read_text(encoding="utf-8")))
        words = ("up", "job.yaml", "--yes", "--run-id", RUN, "--out", "out")
        say(f"$ paceline {' '.join(words)}")
        self.process = subprocess.Popen(  # noqa: S603 - our own command line
            self._argv(*words), cwd=self.home, env=dict(self.env)
        )

    def paceline(self, *words: str) -> str:
        """Type one command, show it with what it says, and return that."""
        say(f"$ paceline {' '.join(words)}")
        done = subprocess.run(  # noqa: S603 - our own command line
            self._argv(*words),
            cwd=self.home,
            env=dict(self.env),
            capture_output=True,
            text=True,
            check=False,
        )
        say((done.stdout + done.stderr).rstrip())
        return done.stdout

    def _argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "paceline", *words]

    def events(self, name: str) -> list[dict[str, object]]:
        """Return what the run's journal says under one name."""
        path = self.home / "out" / "events.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if event["event"] == name]

    def await_it(self, what: str, is_so: Callable[[], object]) -> None:
        """Wait for something, or give up."""
        deadline_s = CLOCK.monotonic() + WAIT_S
        while not is_so():
            if CLOCK.monotonic() > deadline_s:
                raise SystemExit(f"did not happen within {WAIT_S:g} s: {what}")
            CLOCK.sleep(0.2)
        say(f"--- {what}")

    def await_end(self) -> int:
        """Wait until the command has ended and return its status."""
        if self.process is None:
            raise SystemExit("nothing was begun")
        status = self.process.wait(WAIT_S)
        say(f"--- paceline ended with status {status}")
        return status

    def outbid(self, role: str) -> None:
        """Let somebody bid more for a role's machine."""
        (label,) = [r.label for r in self.fake.billing() if f"-{role}-" in r.label]
        rental = next(r for r in self.fake.billing() if r.label == label)
        self.fake.halt(rental)

    def let_hours_pass(self, *, until_usd: float) -> None:
        """Make every machine on record older, until the run has cost so much: the night passes."""
        store = SqliteStore(self.home / "state" / "paceline.sqlite", clock=CLOCK)
        machines = [(record, parse_machine(record.value)) for record in store.list(KEY_PREFIX)]
        spent_usd = sum(machine.cost_usd(now_s=CLOCK.time()) for _, machine in machines)
        burn_dph = sum(machine.offer.dph for _, machine in machines)
        hours = (until_usd - spent_usd) / burn_dph
        for record, machine in machines:
            older = replace(machine, intended_at=machine.intended_at - 3600 * hours)
            store.commit(
                expect={record.key: record.revision}, writes={record.key: render_machine(older)}
            )
        store.close()
        say(f"--- {hours:.1f} hours pass")


def preemption(night: Night) -> None:
    """A trainer is outbid; another machine goes on from its last checkpoint, and ends the job."""
    night.begin(lambda text: text.replace("run: sh train.sh", "run: STEPS=12 sh train.sh"))
    night.await_it("a checkpoint is safe here", lambda: night.events("checkpoint.pulled"))
    night.outbid("trainer")
    night.await_it("the trainer's machine is lost", lambda: night.events("machine.lost"))
    expect(night.await_end() == 0, "the job is done")
    (lost,) = night.events("machine.lost")
    expect(lost["cause"] == "outbid", "the journal says why")
    log = (night.home / "out/logs/trainer-0.log").read_text()
    step = int(re.findall(r"going on from step (\d+)", log)[0])
    expect(step > 0, f"the second machine went on from step {step}")
    night.paceline("checkpoints", "ls", RUN)
    expect(len(night.events("role.replaced")) == 1, "the rollout was left alone")


def budget(night: Night) -> None:
    """Hours pass: the soft cap warns, the hard cap pulls what there is and ends everything."""
    hook = "notify: {command: cat >> notices}\n"
    night.begin(lambda text: hook + text)
    night.await_it("both roles run", lambda: len(night.events("role.started")) == len(ROLES))
    night.let_hours_pass(until_usd=SOFT_USD + 1)
    night.await_it("the soft cap has warned", lambda: night.events("budget.soft"))
    night.let_hours_pass(until_usd=HARD_USD - 0.03)
    expect(night.await_end() == 1, "the run ended at its hard cap")
    report = json.loads((night.home / "out/report.json").read_text())
    expect(report["cost_usd"] <= HARD_USD, f"it cost {report['cost_usd']:.2f} of 40 USD")
    expect((night.home / "out/artifacts/trainer-0/checkpoints").is_dir(), "artifacts were pulled")
    told = (night.home / "notices").read_text()
    expect("budget.soft" in told and "run.finished" in told, "the hook was told")


def kill(night: Night) -> None:
    """The operator's computer dies: the machines end themselves, with their own keys."""
    night.begin(lambda text: text.replace("{after: 2h}", "{after: 8s}"))
    night.await_it("a checkpoint is safe here", lambda: night.events("checkpoint.pulled"))
    if night.process is None:
        raise SystemExit("nothing was begun")
    night.process.kill()
    night.process.wait()
    say(f"--- kill -9 of the operator; {len(night.fake.billing())} machines bill on")
    night.fake.key = "lost with the operator"
    night.await_it("no machine bills any more", lambda: night.fake.billing() == [])
    night.fake.key = night.env["VAST_API_KEY"]
    night.paceline("gc", "--yes")
    night.paceline("status", RUN)
    expect((night.home / "out/checkpoints").is_dir(), "what was pulled before is here")


SCENARIOS: Mapping[str, Callable[[Night], None]] = {
    "preemption": preemption,
    "budget": budget,
    "kill": kill,
}


def expect(is_so: object, what: str) -> None:
    """Say what is so, or end with what is not."""
    if not is_so:
        raise SystemExit(f"NOT SO: {what}")
    say(f"ok  {what}")


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def main() -> None:
    """Rehearse what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scenario", choices=sorted(SCENARIOS))
    scenario = SCENARIOS[parser.parse_args().scenario]
    with tempfile.TemporaryDirectory(prefix="paceline-night-") as folder:
        home = Path(folder)
        machines = SshMachines(home / "machines")
        fake = FakeVast(clock=CLOCK, machines=machines, boot_s=0.0)
        with serve_fake(fake) as found:
            env = {
                **{name: environ()[name] for name in ("PATH", "PYTHONPATH") if name in environ()},
                **found,
                "HOME": str(home),
                "PACELINE_STATE_DIR": str(home / "state"),
            }
            night = Night(home=home, fake=fake, env=env)
            try:
                scenario(night)
            finally:
                if night.process is not None and night.process.poll() is None:
                    night.process.terminate()
                    night.process.wait(WAIT_S)
                fake.close()
    expect(fake.billing() == [], "nothing bills at the provider")


if __name__ == "__main__":
    main()
