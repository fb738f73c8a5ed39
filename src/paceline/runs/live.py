"""How a run stands now, as the driver writes it down and ``status`` shows it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.runs.plan import SlotView
from paceline.runs.queries import RunView

LIVE_NAME = "live.json"
SCHEMA = 1
BYTES_MAX = 1 << 20


def live_state(
    slots: Sequence[SlotView],
    *,
    at_s: float,
    spent_usd: float,
    burn_dph: float,
    checkpoints: Mapping[str, str],
    view: RunView,
) -> dict[str, object]:
    """Return the present state as one JSON object."""
    last = view.steps[-1] if view.steps else None
    return {
        "schema": SCHEMA,
        "at": round(at_s, 3),
        "spent_usd": round(spent_usd, 6),
        "burn_dph": round(burn_dph, 6),
        "step": None if last is None else last.step,
        "reward": None if last is None else last.reward,
        "versions": len(view.states),
        "roles": [slot_json(slot, checkpoints) for slot in slots],
    }


def slot_json(view: SlotView, checkpoints: Mapping[str, str]) -> dict[str, object]:
    """Return what is known of one slot."""
    return {
        "role": view.slot.role,
        "index": view.slot.index,
        "phase": view.phase.value,
        "restarts": view.restarts,
        "machines_lost": view.num_lost,
        "last_cause": None if view.cause is None else view.cause.value,
        "last_code": view.code,
        "checkpoint": checkpoints.get(str(view.slot)),
    }


def read_live(path: Path) -> dict[str, object] | None:
    """Return what a driver wrote last; None when there is nothing or it cannot be read."""
    try:
        if path.stat().st_size > BYTES_MAX:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(found, dict) and found.get("schema") == SCHEMA
    return found if is_ours else None
