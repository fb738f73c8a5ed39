"""The composition root of a run: picks store, clock, control service and backends, by name."""

from paceline.runs.compose.running import (
    Order,
    default_out,
    execute,
    job_of_command,
    new_run_id,
    read_job,
    resume,
)
from paceline.runs.compose.services import (
    Services,
    access_of,
    log_of,
    now_s,
    open_services,
    ssh_config,
)

__all__ = [
    "Order",
    "Services",
    "access_of",
    "default_out",
    "execute",
    "job_of_command",
    "log_of",
    "new_run_id",
    "now_s",
    "open_services",
    "read_job",
    "resume",
    "ssh_config",
]
