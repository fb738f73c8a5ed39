"""Why a slot got the machine that it got: the plan as it was made, on record with the run."""

import json

from paceline.core.errors import PacelineError
from paceline.rental.plan import RentPlan, RentRequest
from paceline.store.protocol import Store

_PREFIX = "why/"
_SCHEMA = 1
_NUM_OFFERS_MAX = 40
"""Of each kind: what is cheaper than what was taken is among the first."""


class Reasons:
    """Plans in a store, the latest of each slot."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def record(self, request: RentRequest, plan: RentPlan, *, now_s: float) -> None:
        """Put the plan of one slot on record, in the place of an older one that says less."""
        key = f"{_PREFIX}{request.run_id}/{request.slot}"
        cheap_first = sorted(plan.passed_over, key=lambda left: (left.dph is not None, left.dph))
        document = {
            "schema": _SCHEMA,
            "slot": request.slot,
            "at_s": now_s,
            "gpu": request.gpu,
            "spot": request.is_spot,
            "max_dph": request.max_dph,
            "attempts": [
                {"backend": offer.backend, "offer": offer.id, "dph": offer.dph}
                for offer in plan.attempts[:_NUM_OFFERS_MAX]
            ],
            "passed_over": [
                {
                    "backend": left.backend,
                    "offer": left.offer_id,
                    "dph": left.dph,
                    "reasons": list(left.reasons),
                }
                for left in cheap_first[:_NUM_OFFERS_MAX]
            ],
            "relaxations": [str(one) for one in plan.relaxations],
        }
        self._store.commit(expect={}, writes={key: json.dumps(document).encode()})

    def of(self, run_id: str) -> list[dict[str, object]]:
        """Return what is on record for a run, by slot."""
        found = []
        for record in self._store.list(f"{_PREFIX}{run_id}/"):
            document: dict[str, object] = json.loads(record.value)
            if document.get("schema") != _SCHEMA:
                raise PacelineError(
                    f"record {record.key} has schema {document.get('schema')!r}, this Paceline "
                    f"reads {_SCHEMA}; use the Paceline that wrote it"
                )
            found.append(document)
        return found
