"""What `paceline run` takes beyond the time in which a machine boots, against a fake provider.

Rented is from a provider on loopback with a real sshd behind its machine; the same command on this
computer's own backend is measured beside it. Overhead counts from typing the command to its exit,
less what the fake was told to take: to boot, and with Lambda and Nebius to end a machine, which
there is seen only after a while and waited for. `--provider all` measures one after the other.

The fakes refuse whoever calls faster than their provider allows. The first run of an operator at a
provider is told apart: it may have to register an ssh key. Between runs there is the rest that the
provider asks for between two rentals.
"""

import getpass
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from paceline.system import environ, system_clock
from paceline.testing.fakes.machines import SshMachines
from paceline.testing.fakes.registry import FAKES, serve_fake

BOOT_S = 1.0
END_S = 1.0
"""Of machines that take a while to end."""
SSH_PORT = 2222
"""Where machines listen whose providers know no port but one, each at an address of its own."""
OVERHEAD_S_MAX = 3.0
ROUNDS = 4
RESTS_S = {"lambda": 15.0, "vast": 6.5}
"""From one beginning to the next. Lambda allows a launch in twelve seconds, which the first run
makes two later than the others; Vast a search in six."""


def timed(words: list[str], env: dict[str, str], cwd: Path) -> float:
    """Run a command line that must succeed and return how long it took."""
    begun_s = time.perf_counter()
    argv = [sys.executable, "-m", "paceline", "run", *words, "--", "true"]
    done = subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise click.ClickException(f"{' '.join(argv)}: {done.stderr}")
    return time.perf_counter() - begun_s


def measure(provider: str, root: Path) -> dict[str, object]:
    """Return the overhead of the first round, and of the best of the others."""
    has_ports = provider in {"vast", "runpod"}
    machines = SshMachines(root / "machines", port=None if has_ports else SSH_PORT)
    fake = FAKES[provider]()(clock=system_clock(), machines=machines, boot_s=BOOT_S)
    fake.end_s = min(fake.end_s, END_S)
    fake.enforces_pace = True
    user = getpass.getuser()
    env = {
        "PATH": environ()["PATH"],
        "HOME": str(root),
        "PYTHONPATH": str(Path(__file__).parents[1] / "src"),
        "PACELINE_STATE_DIR": str(root / "state"),
        f"PACELINE_{provider.upper()}_SSH_USER": user,
        f"PACELINE_{provider.upper()}_SSH_PORT": str(SSH_PORT),
    }
    with serve_fake(fake) as found:
        words = ["--backend", provider, "--gpu", "h100-1x", "--budget-usd", "50", "--yes"]
        rented = []
        for _ in range(ROUNDS):
            rented.append(timed(words, {**env, **found}, root))
            time.sleep(max(0.0, RESTS_S.get(provider, 1.0) - rented[-1]))
    fake.close()
    here = [timed(["--backend", "local", "--gpu", "cpu-1x"], env, root) for _ in range(ROUNDS)]
    first_s, *again_s = (wall_s - BOOT_S - fake.end_s for wall_s in rented)
    overhead_s = min(again_s)
    return {
        "provider": provider,
        "boot_s": BOOT_S,
        "end_s": fake.end_s,
        "rented_s": round(min(rented[1:]), 3),
        "first_overhead_s": round(first_s, 3),
        "overhead_s": round(overhead_s, 3),
        "worst_overhead_s": round(max(again_s), 3),
        "num_refused": fake.num_rate_limited,
        "local_s": round(min(here), 3),
        "limit_s": OVERHEAD_S_MAX,
        "is_met": overhead_s < OVERHEAD_S_MAX,
    }


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--provider", default="all", type=click.Choice([*sorted(FAKES), "all"]))
def main(*, as_json: bool, provider: str) -> None:
    """Measure, and exit with 1 when the limit is not met."""
    rows = []
    for name in sorted(FAKES) if provider == "all" else [provider]:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as root:
            rows.append(measure(name, Path(root)))
        if not as_json:
            click.echo(" ".join(f"{key} {value}" for key, value in rows[-1].items()))
    if as_json:
        click.echo(json.dumps({"providers": rows}))
    sys.exit(0 if all(row["is_met"] for row in rows) else 1)


if __name__ == "__main__":
    main()
