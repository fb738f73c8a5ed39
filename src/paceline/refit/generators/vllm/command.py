"""The command that starts vLLM's own server as an engine of a run."""

import json
import sys
from collections.abc import Sequence

from paceline.refit.generators.protocol import EngineConfig

MIDDLEWARE = "paceline.refit.compose.vllm_server.RunMiddleware"
EXTENSION = "paceline.refit.generators.vllm.extension.WorkerExtension"


def server_command(
    config: EngineConfig,
    *,
    host: str,
    port: int,
    model_name: str,
    grace_s: float,
    extra: Sequence[str],
) -> list[str]:
    """Return the arguments of a process that serves ``config`` with vLLM.

    Args:
        config: the model, without weights: they come as versions.
        host: to listen on.
        port: to listen on.
        model_name: as clients call it.
        grace_s: how long requests in flight may finish at the end.
        extra: further arguments of vLLM's server; the last of two equal ones wins.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options = {
        "model": str(config.model_dir),
        "served-model-name": model_name,
        "host": host,
        "port": str(port),
        "dtype": config.dtype,
        "load-format": "dummy",
        "max-num-seqs": str(config.max_batch),
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": json.dumps({"backend": "paceline"}),
        "worker-extension-cls": EXTENSION,
        "middleware": MIDDLEWARE,
        "shutdown-timeout": str(round(grace_s)),
    }
    for name, value in options.items():
        command += [f"--{name}", value]
    return [*command, "--disable-uvicorn-access-log", *extra]
