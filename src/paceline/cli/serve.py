"""``paceline serve``: a rollout engine that follows its run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from paceline.cli.stopping import stop_signals
from paceline.core.errors import ExitStatus, UsageError
from paceline.refit.errors import RefitError

CRASH_LOOK_S = 0.5
"""How often the foreground looks whether the receiver still lives."""


@click.command(context_settings={"show_default": True})
@click.option("--engine", "engine_name", default="transformers", help="Which rollout engine.")
@click.option(
    "--model",
    "model_dir",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory with config.json and a tokenizer; weights come from the trainer.",
)
@click.option("--dtype", default="bfloat16", help="Of the parameters; must be the trainer's.")
@click.option("--device", default="cpu", help="Where the model runs: cpu, cuda, cuda:1 ...")
@click.option("--threads", default=1, help="Threads of the math library.")
@click.option("--max-batch", default=32, help="Choices generated together.")
@click.option("--max-waiting", default=256, help="Prompts in the queue; more are refused.")
@click.option(
    "--host",
    envvar="PACELINE_HOST",
    show_envvar=True,
    default="127.0.0.1",
    help="Address to listen on.",
)
@click.option(
    "--port",
    envvar="PACELINE_PORT",
    show_envvar=True,
    default=0,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--control", envvar="PACELINE_CONTROL", show_envvar=True, required=True, help="HOST:PORT."
)
@click.option(
    "--credentials",
    envvar="PACELINE_CREDENTIALS",
    show_envvar=True,
    type=click.Path(path_type=Path),
    required=True,
    help="This process's credentials file, mode 0600.",
)
@click.option(
    "--model-name",
    envvar="PACELINE_MODEL",
    show_envvar=True,
    required=True,
    help="As the run calls it.",
)
@click.option(
    "--run-id",
    envvar="PACELINE_RUN_ID",
    show_envvar=True,
    required=True,
    help="Whose versions to follow.",
)
@click.option(
    "--role",
    envvar="PACELINE_ROLE",
    show_envvar=True,
    default="rollout",
    help="Role in the job file.",
)
@click.option(
    "--index",
    envvar="PACELINE_INDEX",
    show_envvar=True,
    default=0,
    help="Which process of the role.",
)
@click.option(
    "--max-staleness",
    envvar="PACELINE_MAX_STALENESS",
    show_envvar=True,
    type=click.IntRange(min=0),
    default=None,
    help="Versions behind the newest at which it refuses to serve; default: no limit.",
)
@click.option(
    "--update",
    type=click.Choice(["immediate", "drain", "abort"]),
    default="immediate",
    help="Requests in flight when a version goes in: go on, are waited for, or are aborted.",
)
@click.option("--drain", "drain_s", default=10.0, help="Seconds that --update drain waits.")
@click.option(
    "--reproducible",
    is_flag=True,
    help="A seed gives the same tokens whatever runs beside it; slower.",
)
@click.option(
    "--tensor-names",
    "names",
    type=click.Choice(["memory", "checkpoint"]),
    default="memory",
    help="How versions call tensors: as the trainer's state_dict does, or as files do.",
)
@click.option(
    "--weights",
    type=click.Choice(["auto", "once", "twice"]),
    default="auto",
    help="How often weights are held; twice, where memory allows it, makes updates pause nothing.",
)
@click.option(
    "--quantised",
    "quantised_rules",
    multiple=True,
    metavar="GLOB=SCHEME",
    help="Tensors that the trainer quantises, and how: fp8-block or int8-channel.",
)
@click.option(
    "--lora",
    is_flag=True,
    help="Read the weights from --model; versions are LoRAs of them.",
)
@click.option(
    "--draft-model",
    "draft_dir",
    type=click.Path(path_type=Path),
    help="Directory like --model of a draft model, which is part of every version.",
)
@click.option(
    "--engine-url",
    "url",
    envvar="PACELINE_ENGINE_URL",
    show_envvar=True,
    default="",
    help="Of a server that runs already, for engines that drive one (sglang).",
)
@click.option(
    "--engine-key-file",
    "key_file",
    type=click.Path(path_type=Path),
    help="File with that server's key, if it wants one.",
)
@click.option("--grace", "grace_s", default=20.0, help="Seconds for requests in flight at the end.")
@click.argument("server_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- SERVER_ARGS]...")
@click.option(
    "--insecure-plaintext", is_flag=True, help="Admit a control service on another machine."
)
def serve(**options: Any) -> int:
    """Generate with the newest weights of a run; SIGTERM or Ctrl-C drains and ends it.

    Prints one JSON line with its address as soon as its routes answer. Options that a run sets
    for its processes are read from the environment. What follows ``--`` goes to the server of an
    engine that brings its own: ``paceline serve --engine vllm ... -- --max-model-len 4096``.
    """
    from paceline.refit import compose
    from paceline.refit.generators.protocol import EngineConfig

    engine_fields = (
        "model_dir",
        "dtype",
        "device",
        "threads",
        "max_batch",
        "max_waiting",
        "reproducible",
        "names",
        "weights",
        "lora",
        "draft_dir",
        "url",
        "key_file",
    )
    engine = EngineConfig(
        **{name: options.pop(name) for name in engine_fields},
        quantised=_rules(options.pop("quantised_rules")),
    )
    allow_plaintext = options.pop("insecure_plaintext")
    config = compose.EngineServiceConfig(engine=engine, allow_plaintext=allow_plaintext, **options)
    with stop_signals() as stopping:
        service = compose.start_any_engine(config)
        try:
            shown = {"endpoint": service.endpoint, "worker_id": service.worker_id}
            click.echo(json.dumps(shown))
            while not stopping.wait(CRASH_LOOK_S):
                if service.crash():
                    raise RefitError(
                        f"the receiver stopped, restart this engine: {service.crash()}"
                    )
        finally:
            service.stop()
    return int(ExitStatus.OK)


def _rules(words: Sequence[str]) -> dict[str, str]:
    pairs = [word.rpartition("=") for word in words]
    for word, (glob, _, _) in zip(words, pairs, strict=True):
        if not glob:
            raise UsageError(f"--quantised {word!r} must be GLOB=SCHEME, as the trainer has it")
    return {glob: scheme for glob, _, scheme in pairs}
