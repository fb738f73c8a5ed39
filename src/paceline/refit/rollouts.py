"""A client of many rollout engines: least loaded first, fresh enough, another one when one dies.

Blocking, with one thread per prompt in flight; each call to ``complete`` returns when every
prompt has its choices or one of them has finally failed.
"""

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import httpx

from paceline.core.clock import Clock
from paceline.core.errors import DeadlineExceededError, UsageError
from paceline.core.retry import RetryPolicy
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.errors import (
    AccessRefusedError,
    ControlUnavailableError,
    EngineBusyError,
    EngineNotReadyError,
    RefitError,
    StaleVersionError,
)
from paceline.refit.generators.protocol import (
    Choice,
    EngineState,
    InstalledVersion,
    Sampling,
    VersionSpan,
)
from paceline.refit.model import InstalledReport
from paceline.refit.plan import newest_sequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One choice of one prompt, with everything that training needs to know of its making."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    spans: tuple[VersionSpan, ...]
    staleness: int
    """Newest sequence when the answer came, less the oldest that produced a token; at least 0."""
    engine_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Who could be asked, and what is the newest version, at one moment."""

    reports: tuple[InstalledReport, ...]
    newest: int
    """Highest sequence published; -1 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How fresh completions must be and how patient the client is."""

    max_staleness: int
    """How many sequences behind the newest an engine may be when it is asked."""
    token: str = field(repr=False)
    """The run's data token."""
    model_name: str
    parallel: int = 16
    """Prompts in flight."""
    engine_wait_s: float = 120.0
    """How long to wait for an engine that qualifies."""
    request_timeout_s: float = 120.0
    """For one prompt at one engine."""
    avoid_s: float = 3.0
    """How long an engine that failed is left alone."""
    busy_s: float = 0.3
    """How long one that is busy or not ready is."""
    poll_interval_s: float = 0.1
    answer_bytes_max: int = 64 * 2**20
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(attempts=8, delay_s_max=5.0))
    """For one prompt over all engines."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or self.poll_interval_s <= 0 or self.parallel < 1:
            raise UsageError(
                "max_staleness must be at least 0, parallel at least 1, poll_interval_s above 0"
            )


def fleet_of(control: ControlPlane, *, model_name: str, run_id: str) -> Callable[[], Fleet]:
    """Return a function that asks the control service who serves the run and what is newest.

    Engines of other runs may serve the same model: whoever has installed something that is no
    version of this run is left out.
    """

    def ask() -> Fleet:
        versions = control.list_versions(model_name, run_id=run_id)
        ours = {"", *(version.uid for version in versions)}
        reports = control.list_installed(model_name)
        return Fleet(
            reports=tuple(report for report in reports if report.version_id in ours),
            newest=newest_sequence(versions),
        )

    return ask


class EngineFailedError(RefitError):
    """An engine died, broke off or answered nonsense; another may do better."""


class RolloutClient:
    """Sends prompts to the engines of one run. Safe to use from several threads."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        fleet: Callable[[], Fleet],
        clock: Clock,
        chance: Callable[[], float],
    ) -> None:
        """Take the parts; opens nothing.

        Args:
            config: see there.
            fleet: who lives and what is newest; asked at most every ``poll_interval_s``.
            clock: for waits.
            chance: places delays inside their jitter.
        """
        self._config = config
        self._clock = clock
        self._chance = chance
        self._roster = _Roster(config, fleet=fleet, clock=clock)
        limits = httpx.Limits(
            max_connections=config.parallel, max_keepalive_connections=config.parallel
        )
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {config.token}"},
            timeout=httpx.Timeout(config.request_timeout_s, connect=5.0),
            limits=limits,
            trust_env=False,
        )
        self._pool = ThreadPoolExecutor(config.parallel, thread_name_prefix="rollout")
        self._closing = threading.Event()

    def complete(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        """Return ``sampling.n`` completions for each prompt, in the order of the prompts.

        With a seed, each prompt gets one of its own, so that equal prompts differ.

        Raises:
            DeadlineExceededError: no engine qualified for too long.
            StaleVersionError: engines kept answering with older weights than allowed.
            EngineFailedError, EngineBusyError, EngineNotReadyError: one prompt failed that way on
                engine after engine.
            UsageError: an engine refused the request itself.
            AccessRefusedError: the token is wrong.
        """
        futures = [
            self._pool.submit(self._complete_one, tuple(prompt), sampling.for_prompt(at))
            for at, prompt in enumerate(prompts)
        ]
        done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        for future in done:
            future.result()  # raises what failed, before a cancelled one is asked
        return [future.result() for future in futures]

    def close(self) -> None:
        """End waits and give connections back. Idempotent."""
        self._closing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._http.close()

    def _complete_one(self, prompt: tuple[int, ...], sampling: Sampling) -> list[Completion]:
        tries = 0
        while True:
            picked = self._wait_for_engine(sampling.n)
            try:
                return self._ask(picked, prompt, sampling)
            except (EngineBusyError, EngineNotReadyError, StaleVersionError) as exc:
                self._roster.avoid(picked, seconds=self._config.busy_s)
                problem: RefitError = exc
            except EngineFailedError as exc:
                self._roster.avoid(picked, seconds=self._config.avoid_s)
                problem = exc
            finally:
                self._roster.give_back(picked)
            tries += 1
            delay_s = self._config.retry.delay_s(tries, chance=self._chance())
            if delay_s is None:
                raise problem
            log.info("trying again in %.1f s: %s", delay_s, problem)
            self._clock.sleep(delay_s)

    def _wait_for_engine(self, num_choices: int) -> "_Picked":
        deadline = self._clock.monotonic() + self._config.engine_wait_s
        while True:
            picked = self._roster.take(num_choices)
            if isinstance(picked, _Picked):
                return picked
            if self._closing.is_set() or self._clock.monotonic() >= deadline:
                raise DeadlineExceededError(
                    f"no rollout engine qualified within {self._config.engine_wait_s:g} s: {picked}"
                )
            self._clock.sleep(self._config.poll_interval_s)

    def _ask(
        self, picked: "_Picked", prompt: tuple[int, ...], sampling: Sampling
    ) -> list[Completion]:
        worker_id = picked.report.worker_id
        choices = parse_choices(self._post(picked, prompt, sampling), worker_id=worker_id)
        if len(choices) != sampling.n:
            raise EngineFailedError(f"engine {worker_id} sent {len(choices)} of {sampling.n}")
        newest = self._roster.newest()
        floor = picked.newest - self._config.max_staleness
        completions = []
        for choice in choices:
            oldest = min((span.installed.sequence for span in choice.spans), default=-1)
            if oldest < floor:
                raise StaleVersionError(
                    f"engine {worker_id} answered with sequence {oldest}; {floor} was the oldest "
                    "allowed; it is asked again when it has caught up"
                )
            completions.append(
                Completion(
                    prompt_token_ids=prompt,
                    token_ids=choice.token_ids,
                    logprobs=choice.logprobs,
                    text=choice.text,
                    finish_reason=choice.finish_reason,
                    spans=choice.spans,
                    staleness=max(0, newest - oldest),
                    engine_id=worker_id,
                )
            )
        return completions

    def _post(self, picked: "_Picked", prompt: tuple[int, ...], sampling: Sampling) -> bytes:
        """Return the body of a good answer; every other outcome is one of our errors."""
        who = f"engine {picked.report.worker_id} at {picked.report.endpoint}"
        answer = bytearray()
        try:
            with self._http.stream(
                "POST",
                f"{picked.report.endpoint}/v1/completions",
                json=render_request(prompt, sampling, model_name=self._config.model_name),
            ) as response:
                for piece in response.iter_bytes():
                    answer += piece
                    if len(answer) > self._config.answer_bytes_max:
                        raise EngineFailedError(f"{who} sent too long an answer")
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise EngineFailedError(f"{who} did not answer: {type(exc).__name__} {exc}") from exc
        check_status(response.status_code, bytes(answer), who=who)
        return bytes(answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picked:
    """An engine that was chosen for a prompt."""

    report: InstalledReport
    newest: int
    """At that moment; what the bound counts from."""
    num_choices: int


class _Roster:
    """Who is asked next: reports, our own load on each engine, and who is left alone."""

    def __init__(self, config: RolloutConfig, *, fleet: Callable[[], Fleet], clock: Clock) -> None:
        self._config = config
        self._ask_fleet = fleet
        self._clock = clock
        self._lock = threading.Lock()
        self._fleet: Fleet | None = None
        self._refresh_at = clock.monotonic()
        self._loads: Counter[str] = Counter()
        self._avoided_until: dict[str, float] = {}

    def take(self, num_choices: int) -> _Picked | str:
        """Pick an engine and count the load on it, or say why there is none."""
        with self._lock:
            fleet = self._current()
            if fleet is None:
                return "the control service does not answer"
            now_s = self._clock.monotonic()
            avoided = {name for name, until in self._avoided_until.items() if now_s < until}
            report = choose_engine(
                fleet, self._loads, avoided=avoided, max_staleness=self._config.max_staleness
            )
            if report is None:
                return explain_none(fleet, avoided, max_staleness=self._config.max_staleness)
            self._loads[report.worker_id] += num_choices
            return _Picked(report=report, newest=fleet.newest, num_choices=num_choices)

    def give_back(self, picked: _Picked) -> None:
        with self._lock:
            self._loads[picked.report.worker_id] -= picked.num_choices

    def avoid(self, picked: _Picked, *, seconds: float) -> None:
        with self._lock:
            self._avoided_until[picked.report.worker_id] = self._clock.monotonic() + seconds

    def newest(self) -> int:
        with self._lock:
            fleet = self._current()
            return -1 if fleet is None else fleet.newest

    def _current(self) -> Fleet | None:
        """Return the fleet, asked anew when due; the last known one while nobody can say."""
        if self._clock.monotonic() >= self._refresh_at:
            try:
                self._fleet = self._ask_fleet()
            except ControlUnavailableError as exc:
                log.warning("rollouts go on with the engines known before: %s", exc)
            self._refresh_at = self._clock.monotonic() + self._config.poll_interval_s
        return self._fleet


def choose_engine(
    fleet: Fleet, loads: Mapping[str, int], *, avoided: Collection[str], max_staleness: int
) -> InstalledReport | None:
    """Return the least loaded engine that is ready, fresh enough and not avoided."""
    fit = [
        report
        for report in fleet.reports
        if _is_fit(report, fleet.newest - max_staleness) and report.worker_id not in avoided
    ]
    return min(
        fit, key=lambda report: (loads.get(report.worker_id, 0), report.worker_id), default=None
    )


def explain_none(fleet: Fleet, avoided: Collection[str], *, max_staleness: int) -> str:
    """Say why ``choose_engine`` found nobody."""
    floor = fleet.newest - max_staleness
    if not fleet.reports:
        return "no engine has reported"
    return "; ".join(
        f"{report.worker_id} is {report.state} at sequence {report.sequence}"
        + (f", at least {floor} is needed" if report.sequence < floor else "")
        + (", it failed a moment ago" if report.worker_id in avoided else "")
        for report in fleet.reports
    )


def _is_fit(report: InstalledReport, floor: int) -> bool:
    is_ready = report.state == EngineState.READY.value
    return is_ready and report.endpoint != "" and report.sequence >= max(floor, 0)


def render_request(
    prompt: Sequence[int], sampling: Sampling, *, model_name: str
) -> dict[str, object]:
    """Return the JSON of one prompt's request."""
    return {
        "model": model_name,
        "prompt": list(prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "n": sampling.n,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,
    }


def check_status(status: int, answer: bytes, *, who: str) -> None:
    """Raise what a status other than 200 means for the next try."""
    if status == httpx.codes.OK:
        return
    text = answer[:300].decode("utf-8", "replace")
    if status in (401, 403):
        raise AccessRefusedError(f"{who} refused the data token of this run")
    if status == httpx.codes.TOO_MANY_REQUESTS:
        raise EngineBusyError(f"{who} is busy")
    if status == httpx.codes.SERVICE_UNAVAILABLE:
        raise EngineNotReadyError(f"{who} is not ready: {text}")
    if httpx.codes.is_client_error(status):
        raise UsageError(f"{who} refused the request ({status}): {text}")
    raise EngineFailedError(f"{who} failed ({status}): {text}")


def parse_choices(answer: bytes, *, worker_id: str) -> list[Choice]:
    """Read the choices of an answer.

    Raises:
        EngineFailedError: it is not what our serving routes send.
    """
    try:
        return [_parse_choice(each) for each in json.loads(answer)["choices"]]
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise EngineFailedError(
            f"engine {worker_id} sent no completion: {type(exc).__name__} {exc}"
        ) from exc


def _parse_choice(each: Mapping[str, Any]) -> Choice:
    choice = Choice(
        token_ids=tuple(map(int, each["token_ids"])),
        logprobs=tuple(map(float, each["logprobs"]["token_logprobs"])),
        text=str(each["text"]),
        finish_reason=str(each["finish_reason"]),
        spans=tuple(_parse_span(span) for span in each["weight_versions"]),
    )
    bounds = [0, *(span.end for span in choice.spans)]
    if [span.start for span in choice.spans] != bounds[:-1] or bounds[-1] != len(choice.token_ids):
        raise ValueError("the version spans do not cover the tokens")
    if len(choice.logprobs) != len(choice.token_ids):
        raise ValueError("not one log-probability per token")
    return choice


def _parse_span(span: Mapping[str, Any]) -> VersionSpan:
    installed = InstalledVersion(
        version_id=str(span["version_id"]),
        sequence=int(span["sequence"]),
        root_digest=str(span["root_digest"]),
    )
    return VersionSpan(installed=installed, start=int(span["start"]), end=int(span["end"]))
