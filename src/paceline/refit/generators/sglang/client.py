"""SGLang's routes as calls: what each is asked, what its answers mean, and how long it may take."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from paceline.core.errors import PacelineError
from paceline.refit.errors import EngineNotReadyError, GenerationError

CONTROL_S = 60.0
"""For pausing, going on, flushing and asking."""
UPDATE_S = 600.0
"""For reading a whole checkpoint from disk."""
GENERATE_S = 600.0
CONNECTIONS_MAX = 1024
ERROR_CHARS_MAX = 300


class SglangError(PacelineError):
    """The server refused, failed or did not answer; what it did is not known unless it says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One finished request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    version: str
    """The label at the end."""
    spans: tuple[tuple[str, int, int], ...]
    """(label, first token, behind the last); empty where the release tells of none."""


class SglangClient:
    """One server. Safe to use from several threads."""

    def __init__(self, url: str, *, key: str = "") -> None:
        """Prepare; nothing connects yet. ``key`` is the server's API or admin key."""
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(CONTROL_S, connect=5.0),
            limits=httpx.Limits(max_connections=CONNECTIONS_MAX),
            trust_env=False,
        )

    def weight_version(self) -> str:
        """Return the label of what the server serves."""
        response = self._ask("GET", "/model_info")
        return str(_field(response, "weight_version"))

    def pause(self) -> None:
        """Stop between two passes; running requests wait, and are computed again later.

        Frozen in place they would keep blocks of the cache, and it could not be flushed.
        """
        self._do("/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        """Go on."""
        self._do("/continue_generation", {})

    def update_from_disk(self, folder: Path, *, label: str) -> None:
        """Load the tensors of a folder into the model, flush the cache and set the label.

        Raises:
            SglangError: it failed. The new weights may be live all the same, for instance when
                only the flush was refused.
        """
        self._do(
            "/update_weights_from_disk",
            {
                "model_path": str(folder),
                "weight_version": label,
                "flush_cache": True,
                "abort_all_requests": False,
            },
            timeout_s=UPDATE_S,
        )

    def generate(
        self, input_ids: tuple[int, ...], params: Mapping[str, object], *, request_id: str
    ) -> Sample:
        """Return one continuation.

        Raises:
            EngineNotReadyError: it was aborted.
            GenerationError: the server failed, or answers what its documentation does not say.
        """
        body = {
            "rid": request_id,
            "input_ids": list(input_ids),
            "sampling_params": dict(params),
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        try:
            response = self._ask("POST", "/generate", body, timeout_s=GENERATE_S)
            return _sample(response.json())
        except (SglangError, ValueError, TypeError, KeyError, IndexError) as exc:
            raise GenerationError(f"SGLang: {type(exc).__name__} {exc}") from exc

    def abort(self, request_id: str) -> None:
        """End one request; unknown ones are none of its affair."""
        self._ask("POST", "/abort_request", {"rid": request_id})

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def _do(self, path: str, body: Mapping[str, object], *, timeout_s: float = CONTROL_S) -> None:
        """Post, and believe neither a good status nor a good word alone."""
        response = self._ask("POST", path, body, timeout_s=timeout_s)
        try:
            answer = response.json()
        except ValueError:
            return  # some releases answer in plain words
        if isinstance(answer, dict) and answer.get("success") is False:
            raise SglangError(f"{path}: {str(answer.get('message'))[:ERROR_CHARS_MAX]}")

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        timeout_s: float = CONTROL_S,
    ) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=5.0)
        try:
            response = self._http.request(method, path, json=body, timeout=timeout)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise SglangError(f"{path}: {type(exc).__name__} {exc}") from exc
        if response.is_error:
            raise SglangError(f"{path}: {response.status_code} {response.text[:ERROR_CHARS_MAX]}")
        return response


def _field(response: httpx.Response, name: str) -> object:
    try:
        return response.json()[name]
    except (ValueError, TypeError, KeyError) as exc:
        raise SglangError(f"{response.url.path} does not say {name}") from exc


def _sample(document: Any) -> Sample:
    meta = document["meta_info"]
    kind = meta["finish_reason"]["type"]
    if kind == "abort":
        raise EngineNotReadyError("SGLang aborted the request; ask again")
    chosen = meta["output_token_logprobs"]
    token_ids = tuple(int(token_id) for token_id in document["output_ids"])
    if [int(each[1]) for each in chosen] != list(token_ids):
        raise ValueError("log-probabilities and tokens do not agree")
    return Sample(
        token_ids=token_ids,
        logprobs=tuple(float(each[0]) for each in chosen),
        text=str(document["text"]),
        finish_reason=str(kind),
        version=str(meta["weight_version"]),
        spans=tuple(
            (str(span["version"]), int(span["start"]), int(span["end"]))
            for span in meta.get("weight_versions") or ()
        ),
    )
