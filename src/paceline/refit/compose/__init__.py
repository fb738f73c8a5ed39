"""The composition root of refit: the only place that picks stores, clients and servers."""

from paceline.refit.compose.control import (
    TOKEN_BYTES,
    ControlService,
    connect_control,
    create_certificate_files,
    create_token_file,
    load_credentials,
    new_control_certificates,
    open_store,
    start_control_server,
    start_manifest_server,
    verify_version,
)
from paceline.refit.compose.engine import (
    EngineService,
    EngineServiceConfig,
    RunningEngine,
    start_any_engine,
    start_engine,
)
from paceline.refit.compose.explain import explain_versions
from paceline.refit.compose.keys import RunKeys, create_run_keys, read_run_keys
from paceline.refit.compose.trainer import (
    RunSettings,
    TrainerConnection,
    connect_rollouts,
    join_run,
    run_settings,
)

__all__ = [
    "TOKEN_BYTES",
    "ControlService",
    "EngineService",
    "EngineServiceConfig",
    "RunKeys",
    "RunSettings",
    "RunningEngine",
    "TrainerConnection",
    "connect_control",
    "connect_rollouts",
    "create_certificate_files",
    "create_run_keys",
    "create_token_file",
    "explain_versions",
    "join_run",
    "load_credentials",
    "new_control_certificates",
    "open_store",
    "read_run_keys",
    "run_settings",
    "start_any_engine",
    "start_control_server",
    "start_engine",
    "start_manifest_server",
    "verify_version",
]
