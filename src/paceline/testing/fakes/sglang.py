"""An SGLang server without a model, built from its documented routes: real sockets, real files.

It holds the bytes of every tensor that it has loaded, and its tokens depend on all of them. What
is known to go wrong with the real one can be had: a flush that is refused after the weights went
in, a load that fails half way, answers that are lost, an old release that tells no spans.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from paceline.refit.serving.server import EngineServer
from paceline.system import system_clock

TOKEN_S = 0.002
"""How long one forward pass takes."""
GENERATE_FIELDS = {
    "rid",
    "input_ids",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "stream",
}
SAMPLING_FIELDS = {
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "sampling_seed",
}
UPDATE_FIELDS = {
    "model_path",
    "load_format",
    "abort_all_requests",
    "weight_version",
    "flush_cache",
    "keep_pause",
    "recapture_cuda_graph",
    "token_step",
    "manifest",
}


class FakeSglang:
    """One server on loopback; ``url`` is where."""

    def __init__(self, model_path: Path, *, vocabulary_size: int, key: str = "") -> None:
        """Load the checkpoint and listen.

        Args:
            model_path: as ``--model-path``.
            vocabulary_size: tokens are below it.
            key: what requests must bring; empty for an open server.
        """
        self._model_path = model_path
        self.restart()
        self._vocabulary_size = vocabulary_size
        self._key = key
        self._server = EngineServer(host="127.0.0.1", port=0, clock=system_clock())
        self.url = self._server.endpoint
        self._server.start(self._app(), grace_s=1)

    def restart(self) -> None:
        """Be as after a start: the checkpoint's weights, no label, no request, no fault."""
        self.tensors = read_tensors(self._model_path)
        self.weight_version = "default"
        self.calls: list[str] = []
        self.failures: dict[str, list[str]] = {}
        """Route -> how its next calls go wrong: refuse, flush_refused, half, lost."""
        self.tells_spans = True
        self._running: dict[str, bool] = {}
        self.num_tokens = 0
        self.hold_at: int | None = None
        """No request gets more tokens than this until it is None again."""
        self._is_paused = False

    def close(self) -> None:
        """Stop answering."""
        self._server.close(timeout_s=20)

    @property
    def num_running(self) -> int:
        """Requests that have not finished."""
        return len(self._running)

    def _app(self) -> Starlette:
        handlers: dict[str, Callable[[Any], Awaitable[Response]]] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._resume,
            "/update_weights_from_disk": self._update,
            "/flush_cache": self._flush,
        }
        routes = [
            Route(path, self._guarded(path, handler), methods=["POST"])
            for path, handler in handlers.items()
        ]
        info = self._guarded("/model_info", self._info)
        return Starlette(routes=[*routes, Route("/model_info", info)])

    def _guarded(
        self, path: str, handler: Callable[[Any], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            self.calls.append(path)
            if self._key and request.headers.get("authorization") != f"Bearer {self._key}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            body = await request.body()
            fault = self._fault(path, "refuse", "lost")
            if fault == "refuse":
                return _said(is_success=False, message=f"{path} was refused")
            response = await handler(json.loads(body) if body else {})
            return Response(status_code=502) if fault == "lost" else response

        return answer

    def _fault(self, path: str, *kinds: str) -> str:
        waiting = self.failures.get(path, [])
        return waiting.pop(0) if waiting and waiting[0] in kinds else ""

    async def _info(self, body: object) -> Response:
        return JSONResponse({"weight_version": self.weight_version})

    async def _pause(self, body: Mapping[str, Any]) -> Response:
        if body.get("mode", "abort") not in ("abort", "retract", "in_place"):
            return JSONResponse({"error": "Invalid mode"}, 400)
        self._is_paused = True
        if body.get("mode", "abort") == "abort":
            self._running = dict.fromkeys(self._running, False)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _resume(self, body: object) -> Response:
        self._is_paused = False
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, body: object) -> Response:
        return _said(is_success=self._can_flush(), message="flush")

    def _can_flush(self) -> bool:
        return self._is_paused or not self._running

    async def _update(self, body: Mapping[str, Any]) -> Response:
        unknown = body.keys() - UPDATE_FIELDS
        if unknown:
            return JSONResponse({"error": f"unknown fields {sorted(unknown)}"}, 422)
        fault = self._fault("/update_weights_from_disk", "flush_refused", "half")
        try:
            found = read_tensors(Path(body["model_path"]))
        except OSError as exc:
            return _said(is_success=False, message=f"Failed to load: {exc}")
        if fault == "half":
            for name in sorted(found)[: len(found) // 2]:
                self.tensors[name] = found[name]
            return _said(is_success=False, message="weights are partially updated, discard them")
        self.tensors |= found
        if fault == "flush_refused" or (body.get("flush_cache", True) and not self._can_flush()):
            return _said(is_success=False, message="Cache flush failed after updating weights")
        self.weight_version = body.get("weight_version") or self.weight_version
        return _said(is_success=True, message="Succeeded to update model weights.")

    async def _abort(self, body: Mapping[str, Any]) -> Response:
        if body["rid"] in self._running:
            self._running[body["rid"]] = False
        return Response(status_code=200)

    async def _generate(self, body: Mapping[str, Any]) -> Response:
        params = body["sampling_params"]
        if body.keys() - GENERATE_FIELDS or params.keys() - SAMPLING_FIELDS:
            return JSONResponse({"error": {"message": "unknown fields"}}, 400)
        rid = body["rid"]
        self._running[rid] = True
        tokens: list[int] = []
        versions: list[str] = []
        try:
            while len(tokens) < params["max_new_tokens"] and self._running.get(rid):
                await asyncio.sleep(TOKEN_S)  # noqa: TID251 - a server of its own, on its own time
                if not self._is_paused and len(tokens) != self.hold_at and rid in self._running:
                    tokens.append(self._next_token(body["input_ids"], tokens, params))
                    self.num_tokens += 1
                    versions.append(self.weight_version)
            is_whole = self._running.get(rid, False)
        finally:
            self._running.pop(rid, None)
        return JSONResponse(self._document(rid, tokens, versions, is_whole=is_whole))

    def _next_token(self, prompt: list[int], tokens: list[int], params: Mapping[str, Any]) -> int:
        seed = params["sampling_seed"] if params["temperature"] else 0
        state = hashlib.sha256(self.digest().encode())
        state.update(json.dumps([prompt, tokens, seed]).encode())
        draw = np.random.default_rng(list(state.digest()))
        return int(draw.integers(0, self._vocabulary_size))

    def digest(self) -> str:
        """Return one hash over everything that is loaded."""
        state = hashlib.sha256()
        for name in sorted(self.tensors):
            state.update(name.encode() + self.tensors[name])
        return state.hexdigest()

    def _document(
        self, rid: str, tokens: list[int], versions: list[str], *, is_whole: bool
    ) -> dict[str, object]:
        meta: dict[str, object] = {
            "id": rid,
            "finish_reason": {"type": "length" if is_whole else "abort"},
            "weight_version": self.weight_version,
            "completion_tokens": len(tokens),
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        }
        if self.tells_spans:
            meta["weight_versions"] = _spans(versions)
        return {"text": "", "output_ids": tokens, "meta_info": meta}


def read_tensors(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every tensor in a folder's files. Raises OSError where there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").exists():
        raise OSError(f"{folder} is no checkpoint")
    return {
        name: bytes(spec["data"])
        for file in files
        for name, spec in safetensors.deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    }


def _spans(versions: list[str]) -> list[dict[str, object]]:
    spans: list[dict[str, object]] = []
    for at, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": version, "start": at, "end": at + 1})
    return spans


def _said(*, is_success: bool, message: str) -> Response:
    return JSONResponse({"success": is_success, "message": message}, 200 if is_success else 400)
