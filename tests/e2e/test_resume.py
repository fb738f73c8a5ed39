"""A role that starts again goes on from what it had: on its machine, on another, from a store."""

import json
from pathlib import Path

import pytest

from e2e.operating import WAIT_S, Operator

pytestmark = pytest.mark.e2e

TRAIN = """
n=0
test -s "$PACELINE_LEASE" || exit 9
from=${PACELINE_RESUME_FROM:-}
if [ -n "$from" ]; then n=$(cat "$from"/ckpt/*/n | tail -n 1); fi
echo "from $n"
while [ "$n" -lt 30 ]; do
  n=$((n + 1))
  name=ckpt/step-$(printf %02d "$n")
  mkdir -p "$name.tmp"; echo "$n" > "$name.tmp/n"; mv "$name.tmp" "$name"
  [ "$n" -ne "${DIES_AT:-0}" ] || kill -9 $$
  sleep 0.3
done
"""


def job(operator: Operator, *, dies_at: int = 0, to: str = "") -> str:
    (operator.home / "code").mkdir()
    (operator.home / "code" / "train.sh").write_text(TRAIN)
    trainer = {
        "backend": "local",
        "gpu": "cpu-1x",
        "disk_gb": 1,
        "workdir": "code",
        "run": "sh train.sh",
        "restart": "on-failure",
        "env": {"DIES_AT": str(dies_at)},
    }
    artifacts = {"pull": ["ckpt/"], "every": "500ms", "keep": 2} | ({"to": to} if to else {})
    return operator.job(
        json.dumps({"name": "again", "roles": {"trainer": trainer}, "artifacts": artifacts})
    )


def events(out: Path, name: str) -> list[dict[str, object]]:
    if not (out / "events.jsonl").exists():
        return []
    found = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == name]


def starts(out: Path, name: str = "trainer-0") -> list[int]:
    """Return at which step the trainer began on one machine, and began again."""
    lines = (out / "logs" / f"{name}.log").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("from ")]


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(False, id="pulled here"),
        pytest.param(True, id="in an object store", marks=pytest.mark.slow),
    ],
)
def test_a_machine_that_is_lost_costs_no_more_than_a_checkpoint(
    operator: Operator, stored: bool
) -> None:
    """The next machine is given the newest checkpoint that was whole somewhere else.

    A process that dies on a machine that lives goes on from its own files, which nobody copies.
    """
    out = operator.home / "out"
    name = job(operator, dies_at=3, to=f"file://{operator.home}/bucket" if stored else "")
    process = operator.start("up", name, "--yes", "--run-id", "again-1", "--out", "out")
    what = "checkpoint.stored" if stored else "checkpoint.pulled"
    bucket = operator.home / "bucket"

    def is_safe() -> bool:
        logs = out / "logs" / "trainer-0.log"
        is_second = logs.exists() and "from 3" in logs.read_text()
        where = bucket if stored else out / "checkpoints"
        return is_second and bool(events(out, what)) and any(where.rglob("*step-0[4-9]/n"))

    operator.wait_for(is_safe)
    if not stored:
        live = operator.type_json("status", "again-1")[1]["live"]
        assert [role["phase"] for role in live["roles"]] == ["running"]
    operator.lose_machine(min(operator.processes("train.sh")))
    _, err = process.communicate(timeout=2 * WAIT_S)
    assert process.returncode == 0, err
    assert starts(out, "trainer-0.1") == [0, 3]
    (began,) = starts(out)
    assert 4 <= began < 30
    (replaced,) = events(out, "role.replaced")
    assert replaced["role"] == "trainer"
    operator.assert_nothing_left()
    if stored:
        assert not (out / "checkpoints").exists()
        assert len(list(bucket.rglob("commits/**/*.json"))) == 2
        return
    kept = operator.type_json("checkpoints", "ls", "again-1")[1]
    assert 1 <= len(kept) <= 2
    assert (Path(kept[-1]["path"]) / "n").read_text().strip().isdigit()
    shown = operator.type("events", "again-1")[1]
    assert "machine.lost  trainer-0  " in shown
    assert operator.type("events", "again-1", "--json", "-f")[1].count("run.finished") == 1
