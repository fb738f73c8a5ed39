"""Roles on hosts that can dial nobody: control and weights flow through tunnels, for real."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.namespaces import Hosts, RentedHosts, can_make
from e2e.operating import ROOT, Operator
from paceline.system import system_clock
from paceline.testing.fakes.registry import FAKES, serve_fake

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not can_make(), reason="network namespaces need root, iproute2 and sshd"),
    pytest.mark.enable_socket,
    pytest.mark.usefixtures("socket_enabled"),
]

TRAINER = """
import sys, time, urllib.request
from pathlib import Path
from paceline.refit.compose import connect_control, load_credentials
from paceline.refit.compose.trainer import run_settings
from paceline.refit.model import Event, TensorBuffer
from paceline.refit.transports.http.server import HttpObjectServer
from paceline.refit.transports.routes import Routes
from paceline.system import environ
from paceline.testing.fakes.trainer import FakeTrainer, root_of

settings, mine = run_settings(environ()), load_credentials()
control = connect_control(settings.control, token=mine.control_token)
server = HttpObjectServer(token=lambda: mine.data_token, host=settings.host, port=settings.port)
trainer = FakeTrainer(control, server, model_name="m", run_id=settings.run_id)
def state(fill):
    data = bytes([fill]) * (1 << 20)
    return {"w": TensorBuffer(name="w", dtype="U8", shape=(1 << 20,), data=memoryview(data))}
def await_root(root):
    deadline = time.monotonic() + 40
    while True:
        reports = control.list_installed("m")
        if any(one.root_digest == root for one in reports):
            return next(one for one in reports if one.root_digest == root)
        assert time.monotonic() < deadline, [(r.sequence, r.root_digest) for r in reports]
        time.sleep(0.05)
def publish(number):
    root = root_of(states[number])
    control.record_event(Event(worker_id="trainer", name="version.published", at_unix_ms=number,
        fields=dict(version_id=f"v{number}", sequence=number, step=number, root_digest=root)))
    trainer.publish_full(f"v{number}", number, states[number])
    return await_root(root)
states = [state(1), state(2)]
publish(0)
print("first installed", flush=True)
if "wait" in sys.argv:
    import os
    while not os.path.exists("go"):
        time.sleep(0.1)
report = publish(1)
near = Routes(Path(environ()["PACELINE_ROUTES"])).of(report.endpoint)
said = urllib.request.urlopen(near, timeout=20).read()
assert said == b"here", said
print("weights at", server.endpoint, "control at", settings.control, "engine at", near)
"""

ROLLOUT = """
import threading
from pathlib import Path
from http.server import BaseHTTPRequestHandler, HTTPServer
from paceline.refit.compose import connect_control, load_credentials
from paceline.refit.compose.trainer import run_settings
from paceline.refit.model import TensorBuffer
from paceline.refit.receiver.loop import Receiver, ReceiverConfig
from paceline.refit.transports.http.reader import HttpObjectReader, HttpReaderOptions
from paceline.refit.transports.routes import Routes
from paceline.system import chance, environ, system_clock
from paceline.testing.fakes.generator import FakeGenerator

settings, mine = run_settings(environ()), load_credentials()
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"here")
    def log_message(self, *_): pass
web = HTTPServer((settings.host, settings.port), Answer)
threading.Thread(target=web.serve_forever, daemon=True).start()
control = connect_control(settings.control, token=mine.control_token, timeout_s=5)
empty = memoryview(bytes(1 << 20))
engine = FakeGenerator([TensorBuffer(name="w", dtype="U8", shape=(1 << 20,), data=empty)])
receiver = Receiver(
    ReceiverConfig(worker_id=f"{settings.run_id}-rollout", model_name="m", run_id=settings.run_id,
        endpoint=f"http://{settings.host}:{web.server_port}/"),
    control=control, engine=engine,
    reader=HttpObjectReader(token=lambda: mine.data_token, clock=system_clock(), chance=chance,
        options=HttpReaderOptions(routes=Routes(Path(environ()["PACELINE_ROUTES"])))),
    clock=system_clock(), chance=chance)
receiver.register(); receiver.start()
threading.Event().wait()
"""

JOB = """
name: far
refit: {{model: m}}
roles:
  trainer:
    {{backend: {trainer}, gpu: cpu-1x, workdir: code, install_paceline: false, env: {env},
      run: python trainer.py {words}}}
  rollout:
    {{backend: ssh, gpu: cpu-1x, workdir: code, install_paceline: false, env: {env},
      run: exec python rollout.py}}
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    with Hosts(tmp_path / "hosts", ("a", "b"), path=path) as hosts:
        yield hosts


@pytest.fixture
def far(operator: Operator, hosts: Hosts) -> Operator:
    """An operator whose hosts are far away from each other, and have Paceline."""
    hosts.write_config(operator.home / "config")
    operator.env["PACELINE_CONFIG_DIR"] = str(operator.home / "config")
    write_code(operator)
    return operator


def write_code(operator: Operator) -> None:
    (operator.home / "code").mkdir()
    (operator.home / "code" / "trainer.py").write_text(TRAINER)
    (operator.home / "code" / "rollout.py").write_text(ROLLOUT)


def job(trainer: str, words: str = "") -> str:
    env = json.dumps({"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"})
    return JOB.format(trainer=trainer, words=words, env=env)


@pytest.mark.parametrize("trainer", ["ssh", pytest.param("local", marks=pytest.mark.slow)])
def test_weights_flow_between_hosts_that_can_dial_nobody(far: Operator, trainer: str) -> None:
    """Control, weights and samples go through tunnels, chosen because nothing else works."""
    far.job(job(trainer))
    status, out, err = far.type(
        "up", "job.yaml", "--yes", "--json", "--out", "out", "--run-id", "r"
    )
    assert status == 0, err + (far.home / "out" / "logs" / "trainer-0.log").read_text()
    log = (far.home / "out" / "logs" / "trainer-0.log").read_text()
    assert "weights at http://127.0.0.1:" in log
    assert "rollout-0 reaches control by tunnel" in err
    assert (
        "rollout-0 reaches trainer-0 by tunnel" in err
        or "trainer-0 reaches rollout-0 by tunnel" in err
    )
    assert json.loads(out)["outcome"] == "succeeded"
    links = far.type_json("status", "r")[1]["links"]
    modes = {(link["source"], link["target"]): link["mode"] for link in links}
    assert modes["rollout-0", "control"] == "tunnel"
    assert modes["trainer-0", "control"] == ("direct" if trainer == "local" else "tunnel")
    assert modes["rollout-0", "trainer-0"] == modes["trainer-0", "rollout-0"] == "tunnel"
    far.assert_nothing_left()


RENTED = """
name: far
budget: {{soft_usd: 5}}
refit: {{model: m}}
roles:
  trainer:
    {{backend: {backend}, gpu: rtx4090-1x, workdir: code, install_paceline: false, env: {env},
      run: python trainer.py}}
  rollout:
    {{backend: {backend}, gpu: rtx4090-1x, workdir: code, install_paceline: false, env: {env},
      run: exec python rollout.py}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["runpod", "vast"])
def test_rented_machines_meet_without_the_operator(
    operator: Operator, tmp_path: Path, backend: str
) -> None:
    """Weights take the port that the provider mapped, samples the tunnel that the trainer keeps.

    The machines are behind one public address and cannot dial each other's own.
    """
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    with Hosts(tmp_path / "hosts", ("a", "b"), path=path, is_routed=True) as hosts:
        machines = RentedHosts(tmp_path / "machines", hosts)
        fake = FAKES[backend]()(clock=system_clock(), machines=machines, boot_s=0.1)
        write_code(operator)
        env = json.dumps({"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"})
        operator.job(RENTED.format(env=env, backend=backend))
        with serve_fake(fake) as found:
            operator.env |= found
            words = ("--yes", "--json", "--out", "out", "--run-id", "r")
            status, out, err = operator.type("up", "job.yaml", *words, timeout_s=90)
            links = operator.type_json("status", "r")[1]["links"]
        fake.close()
    log = (operator.home / "out" / "logs" / "trainer-0.log").read_text()
    assert status == 0, err + log
    assert json.loads(out)["outcome"] == "succeeded"
    told = {(link["source"], link["target"]): (link["mode"], link["why"]) for link in links}
    assert told["rollout-0", "control"][0] == "tunnel"
    assert told["rollout-0", "trainer-0"][0] == "direct"
    assert hosts.public_host in told["rollout-0", "trainer-0"][1]
    assert told["trainer-0", "rollout-0"][0] == "tunnel"
    assert "kept by trainer-0" in told["trainer-0", "rollout-0"][1]
    # nothing but the kept tunnel listens there on the trainer's machine
    assert int(log.split("engine at http://127.0.0.1:")[1].split("/")[0]) >= 26_000


@pytest.mark.slow
def test_a_wire_that_was_cut_costs_a_run_nothing(far: Operator, hosts: Hosts) -> None:
    """No role ends with its connection; when the wire is mended, tunnels and weights go on."""
    far.job(job("ssh", "wait"))
    process = far.start("up", "job.yaml", "--yes", "--json", "--out", "out", "--run-id", "r")
    codes = [hosts.machines[name].home / ".paceline" for name in ("a", "b")]

    def logs(word: str) -> list[Path]:
        found = [log for code in codes for log in code.rglob("logs/trainer-0.log")]
        return [log for log in found if word in log.read_text()]

    far.wait_for(lambda: logs("first installed"))
    for name in hosts.names:
        hosts.cut(name)
    time.sleep(20)  # longer than a tunnel may be silent
    for name in hosts.names:
        hosts.mend(name)
    (logs("first")[0].parents[1] / "work" / "go").touch()
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert json.loads(out)["outcome"] == "succeeded"
    assert "lost" not in err
