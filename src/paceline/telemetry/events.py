"""The only list of event names and of the fields each one carries."""

from typing import Final

EVENT_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    # trainer
    "train.step": ("step", "reward", "loss", "staleness", "step_s"),
    "version.published": (
        "version_id",
        "sequence",
        "step",
        "root_digest",
        "payload_format",
        "payload_bytes",
        "full_bytes",
        "changed_elements",
        "total_elements",
        "publish_ms",
    ),
    "version.failed": ("version_id", "sequence", "step", "reason"),
    "version.skipped": ("version_id", "sequence", "step", "reason"),
    "version.left_undone": ("version_id", "sequence", "step", "reason"),
    "chain.continued": ("run_id", "sequence", "last_version_id", "root_digest", "reason"),
    "chain.broken": ("run_id", "sequence", "last_version_id", "root_digest", "reason"),
    "chain.slot": ("run_id", "slot", "incarnation", "last_version_id", "root_digest"),
    # any role
    "role.progress": ("phase", "done", "total", "note"),
    # generator
    "version.installed": (
        "version_id",
        "sequence",
        "root_digest",
        "fetched_bytes",
        "refit_ms",
        "pause_ms",
    ),
    "version.refused": ("version_id", "sequence", "reason"),
    # run
    "run.planned": ("roles", "dph"),
    "machine.provisioned": ("role", "index", "backend", "instance_id", "label"),
    "machine.running": ("role", "index", "label"),
    "attempt.failed": ("role", "index", "backend", "offer", "kind", "reason", "cost_usd"),
    "renting.waiting": ("role", "index", "wait_s", "num_tried"),
    "machine.died": ("role", "index", "label", "cause", "reason"),
    "machine.destroyed": ("role", "index", "backend", "instance_id", "label"),
    "role.started": ("role", "index", "attempt"),
    "role.exited": ("role", "index", "code", "attempt"),
    "role.replaced": ("role", "index", "attempt", "reason"),
    "role.crash_loop": ("role", "index", "code", "times"),
    "machine.lost": ("role", "index", "cause", "reason"),
    "machine.found": ("kind", "label", "backend", "instance_id", "note"),
    "machine.stray": ("kind", "label", "backend", "instance_id", "note"),
    "reconcile.failed": ("reason",),
    "deadman.armed": ("role", "index", "after_s", "guarantee"),
    "checkpoint.pulled": ("role", "index", "path", "num_bytes"),
    "checkpoint.stored": ("role", "index"),
    "budget.soft": ("spent_usd", "soft_usd", "burn_dph"),
    "budget.hard": ("spent_usd", "hard_usd"),
    "notify.failed": ("reason",),
    "watcher.lost": ("reason",),
    "run.ending": ("outcome", "status", "reason"),
    "run.finished": ("outcome", "reason", "wall_s", "cost_usd"),
}
"""Event name -> its fields, in order; further fields are allowed, missing ones are not."""
