"""What every served rollout engine must do, whatever is behind the routes: inherit, implement two.

The claims are about what somebody sees over HTTP: which state is told, what is admitted, and which
versions are named.
"""

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from paceline.core.waiting import wait_until
from paceline.refit.errors import UncertainStateError
from paceline.refit.generators.protocol import InstalledVersion, RolloutEngine
from paceline.refit.receiver.policy import UpdatePolicy
from paceline.refit.receiver.standing import Observation, StalenessBound, judge
from paceline.refit.receiver.updating import UpdateGate
from paceline.refit.serving.app import ServingParts, build_app
from paceline.refit.serving.server import EngineServer
from paceline.system import system_clock

V1 = InstalledVersion(version_id="v1", sequence=1, root_digest="aa")
V2 = InstalledVersion(version_id="v2", sequence=2, root_digest="bb")
TIMEOUT_S = 30.0
ATTEMPTS = 20
MOMENT_S = 0.005
TOKEN = "token-of-a-contract"  # noqa: S105


@dataclass
class Served:
    """An engine behind its gate and its routes."""

    gate: UpdateGate
    client: httpx.Client
    newest: int = 1
    uncertain: str = ""

    def complete(self, prompt: Sequence[int], **fields: object) -> httpx.Response:
        """Ask for a completion."""
        return self.client.post("/v1/completions", json={"prompt": list(prompt), **fields})

    def stream(
        self, prompt: Sequence[int], *, first: Callable[[], None] = lambda: None, **fields: object
    ) -> list[dict[str, Any]]:
        """Return the choices of a stream's events; ``first`` is called when the first is here."""
        body = {"prompt": list(prompt), "stream": True, **fields}
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines: list[str] = []
            for line in filter(None, response.iter_lines()):
                if not lines:
                    first()
                lines.append(line)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:])["choices"][0] for line in lines[:-1]]

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return the status and body of the health route."""
        response = self.client.get("/health")
        return response.status_code, response.json()


class ServingContract(ABC):
    """Claims about states, admission and attribution, for any rollout engine behind the routes."""

    prompt: Sequence[int] = (10, 11, 12)
    long = 100
    """Tokens of a choice that is still growing when an update comes."""

    @abstractmethod
    def make(self) -> RolloutEngine:
        """Return a fresh engine in which nothing is installed."""

    @abstractmethod
    def weights(self) -> Mapping[str, bytes]:
        """Return weights that make sense, for every live tensor."""

    @pytest.fixture(params=[UpdatePolicy.IMMEDIATE])
    def served(self, request: pytest.FixtureRequest) -> Iterator[Served]:
        """Serve a fresh engine under a policy."""
        clock = system_clock()
        gate = UpdateGate(self.make(), policy=request.param, drain_s=TIMEOUT_S, clock=clock)
        server = EngineServer(host="127.0.0.1", port=0, clock=clock)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(
            base_url=server.endpoint, headers=headers, timeout=TIMEOUT_S, trust_env=False
        ) as client:
            made = Served(gate, client)
            server.start(build_app(self._parts(made)), grace_s=1)
            yield made
        gate.close(timeout_s=TIMEOUT_S)
        server.close(timeout_s=TIMEOUT_S)

    def _parts(self, served: Served) -> ServingParts:
        def observed() -> Observation:
            return Observation(
                installed=served.gate.installed(),
                newest=served.newest,
                silent_s=0,
                updating=served.gate.updating,
                uncertain=served.uncertain,
            )

        return ServingParts(
            engine=served.gate,
            model_name="m",
            token=TOKEN,
            health=lambda: judge(observed(), StalenessBound(versions=3)),
            figures=served.gate.figures,
            newest=lambda: served.newest,
            clock=system_clock(),
            new_id=lambda: "x",
        )

    def install(self, served: Served, label: InstalledVersion) -> None:
        """Write sensible weights, as a receiver does."""
        wanted = self.weights()

        def write() -> None:
            for name, buffer in served.gate.live_tensors().items():
                buffer.data[:] = wanted[name]

        served.gate.at_safe_point(write, installed=label, timeout_s=TIMEOUT_S)

    def in_background(self, act: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
        """Run something beside the test; what it returns is in the list when it is done."""
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(act()))
        thread.start()
        return thread, results

    def test_loading_until_something_is_installed(self, served: Served) -> None:
        """Before the first version nothing is admitted, and the state says why."""
        status, body = served.health()
        assert (status, body["state"]) == (503, "loading")
        assert served.complete(self.prompt).status_code == 503
        self.install(served, V1)
        status, body = served.health()
        body.pop("weights_held", None)
        assert (status, body) == (
            200,
            {
                "state": "ready",
                "reason": "",
                "version_id": "v1",
                "sequence": 1,
                "root_digest": "aa",
                "staleness": 0,
            },
        )

    def test_every_choice_names_its_versions(self, served: Served) -> None:
        """Spans cover the tokens from the first to the last, and staleness counts from them."""
        self.install(served, V1)
        served.newest = 3
        fields = {"max_tokens": 5, "n": 2, "logprobs": 0, "ignore_eos": True}
        choices = served.complete(self.prompt, **fields).json()["choices"]
        assert len(choices) == 2
        for choice in choices:
            assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 5
            assert choice["weight_versions"] == [
                {"version_id": "v1", "sequence": 1, "root_digest": "aa", "start": 0, "end": 5}
            ]
            assert choice["staleness"] == 2

    def test_a_stream_is_the_same_choice(self, served: Served) -> None:
        """Pieces joined are what the whole answer says, for the same seed."""
        self.install(served, V1)
        fields: dict[str, Any] = {
            "max_tokens": 6,
            "seed": 4,
            "logprobs": 0,
            "ignore_eos": True,
        }
        whole = served.complete(self.prompt, **fields).json()["choices"][0]
        pieces = served.stream(self.prompt, **fields)
        assert [t for piece in pieces for t in piece["token_ids"]] == whole["token_ids"]
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        assert pieces[-1]["finish_reason"] == whole["finish_reason"] == "length"
        spans = [span for piece in pieces for span in piece["weight_versions"]]
        assert (spans[0]["start"], spans[-1]["end"]) == (0, 6)

    def test_uncertain_weights_are_never_served(self, served: Served) -> None:
        """After a write that could not be undone the engine says failed, until a version is in."""
        self.install(served, V1)

        def fail() -> None:
            raise UncertainStateError("half written")

        with pytest.raises(UncertainStateError):
            served.gate.at_safe_point(fail, installed=V2, timeout_s=TIMEOUT_S)
        served.uncertain = "half written"
        status, body = served.health()
        assert (status, body["state"], body["reason"]) == (503, "failed", "half written")
        assert "root_digest" not in body
        assert served.complete(self.prompt).status_code == 503
        served.uncertain = ""
        self.install(served, V2)
        choice = served.complete(self.prompt, max_tokens=1).json()["choices"][0]
        assert choice["weight_versions"][0]["version_id"] == "v2"

    def test_old_weights_are_not_admitted(self, served: Served) -> None:
        """The engine's own bound makes it stale; a request may ask for less."""
        self.install(served, V1)
        served.newest = 3
        assert served.complete(self.prompt, max_tokens=1, max_staleness=1).status_code == 503
        assert served.complete(self.prompt, max_tokens=1, max_staleness=2).status_code == 200
        served.newest = 5
        status, body = served.health()
        assert (status, body["state"]) == (503, "stale")
        assert served.complete(self.prompt, max_tokens=1, max_staleness=9).status_code == 503

    def test_an_update_in_the_middle_is_recorded(self, served: Served) -> None:
        """A choice that is in flight goes on under both versions, in order and without a gap."""

        def crossed(old: InstalledVersion, new: InstalledVersion, moment_s: float) -> bool:
            fields = {"max_tokens": self.long, "ignore_eos": True}
            thread, answers = self.in_background(lambda: served.complete(self.prompt, **fields))
            self.wait(lambda: served.gate.load().running > 0 or not thread.is_alive())
            system_clock().sleep(moment_s)
            self.install(served, new)
            thread.join(TIMEOUT_S)
            spans = answers[0].json()["choices"][0]["weight_versions"]
            assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
            assert spans[-1]["end"] == self.long
            named = [span["version_id"] for span in spans]
            assert named in ([old.version_id, new.version_id], named[:1])
            return len(named) > 1

        self.until(crossed, served)

    @pytest.mark.parametrize("served", [UpdatePolicy.DRAIN], indirect=True)
    def test_draining_gives_whole_samples(self, served: Served) -> None:
        """Under ``drain`` running requests finish before the version goes in, and new ones wait."""
        self.install(served, V1)
        fields = {"max_tokens": self.long, "ignore_eos": True}
        first, answers = self.in_background(lambda: served.complete(self.prompt, **fields))
        self.wait(lambda: served.gate.load().running > 0 or not first.is_alive())
        second, _ = self.in_background(lambda: self.install(served, V2))
        self.wait(lambda: served.gate.updating != "" or not second.is_alive())
        status, body = served.health()
        if body["state"] != "ready":  # it may have drained between the two looks
            assert (status, body["state"]) == (503, "draining")
        for thread in (first, second):
            thread.join(TIMEOUT_S)
        spans = answers[0].json()["choices"][0]["weight_versions"]
        assert [span["version_id"] for span in spans] == ["v1"]
        assert served.health()[1]["version_id"] == "v2"
        assert served.gate.figures()["drain_seconds"] > 0

    @pytest.mark.parametrize("served", [UpdatePolicy.ABORT], indirect=True)
    def test_aborting_tells_whoever_waits(self, served: Served) -> None:
        """Under ``abort`` a running request is answered at once: ask again."""

        def aborted(old: InstalledVersion, new: InstalledVersion, moment_s: float) -> bool:
            fields = {"max_tokens": self.long, "ignore_eos": True}
            thread, answers = self.in_background(lambda: served.complete(self.prompt, **fields))
            self.wait(lambda: served.gate.load().running > 0 or not thread.is_alive())
            system_clock().sleep(moment_s)
            self.install(served, new)
            thread.join(TIMEOUT_S)
            again = served.complete(self.prompt, max_tokens=2).json()["choices"][0]
            assert again["weight_versions"][0]["version_id"] == new.version_id
            if answers[0].status_code == 200:
                (span,) = answers[0].json()["choices"][0]["weight_versions"]
                assert (span["version_id"], span["end"]) == (old.version_id, self.long)
                return False
            assert answers[0].status_code == 503
            assert answers[0].headers["retry-after"]
            return True

        self.until(aborted, served)

    def test_figures_of_an_update(self, served: Served) -> None:
        """Pause, drain, apply, verify and staleness can be scraped."""
        self.install(served, V1)
        served.complete(self.prompt, max_tokens=1)
        text = served.client.get("/metrics").text
        for name in ("drain_seconds", "apply_seconds", "verify_seconds", "staleness", "ready"):
            assert f"\npaceline_{name} " in text
        assert "paceline_choice_staleness_count 1.0" in text

    def until(
        self, happened: Callable[[InstalledVersion, InstalledVersion, float], bool], served: Served
    ) -> None:
        """Try at other moments: on a busy machine an update comes before a choice, or after it."""
        for attempt in range(ATTEMPTS):
            old, new = (
                InstalledVersion(version_id=f"v{number}", sequence=number, root_digest="aa")
                for number in (2 * attempt + 1, 2 * attempt + 2)
            )
            served.newest = old.sequence
            self.install(served, old)
            if happened(old, new, attempt * MOMENT_S):
                return
        pytest.fail(f"no update came in the middle of a choice, {ATTEMPTS} times")

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait for the engine to be somewhere."""
        wait_until(
            ready, what="the engine", clock=system_clock(), timeout_s=TIMEOUT_S, interval_s=0.002
        )
