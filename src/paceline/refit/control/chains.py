"""How versions lead to one another: a run's own order, chains of bases, artefacts that skip."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.refit.control import records
from paceline.refit.control.lookup import require_version
from paceline.refit.control.records import RunHead
from paceline.refit.control.transaction import Transaction
from paceline.refit.errors import AlreadyExistsError, ExhaustedError, PreconditionError
from paceline.refit.model import Delta, VersionDescription, WeightVersion

CHAIN_MAX = 1024
"""Links of a chain that are followed; clients of the public protocol stop at 64."""

ROOTS_KEPT = 128
"""Sequences of a run that an anchor may still be made for."""

DELTAS_MAX = 256
"""Artefacts that are kept to one version."""


def follow_run(tx: Transaction, version: WeightVersion, description: VersionDescription) -> None:
    """Note how far a run is. Raises if this description would rewrite what it has published.

    An anchor has the sequence and the root digest of the delta that it equals; anything else
    under a sequence that is taken is a second trainer, or one that forgot where it was.
    """
    key = records.run_head_key(version.model_name, description.run_id)
    value = tx.get(key)
    roots = () if value is None else records.decode_run_head(value).roots
    sequence, known = description.sequence, dict(roots)
    if sequence in known:
        if description.root_digest != known[sequence]:
            raise AlreadyExistsError(
                f"run {description.run_id!r} published sequence {sequence} with another root "
                "digest; go on after its last one, or take a new run id"
            )
        return
    if roots and sequence < roots[-1][0]:
        raise PreconditionError(
            f"run {description.run_id!r} is at sequence {roots[-1][0]} already and did not "
            f"publish {sequence}; go on after it, or take a new run id"
        )
    roots = (*roots, (sequence, description.root_digest))[-ROOTS_KEPT:]
    tx.put(key, records.encode(RunHead(roots=roots, at_unix_ms=tx.now_ms)))


def read_chain(tx: Transaction, uid: str) -> Sequence[WeightVersion]:
    """Return the versions that lead to ``uid``, the one without a base first.

    Raises:
        NotFoundError: it is unknown, or one on the way is gone.
        ExhaustedError: CHAIN_MAX links did not reach the start.
    """
    chain = [require_version(tx, uid).version]
    while (base := chain[-1].base_version_id) is not None:
        if len(chain) == CHAIN_MAX:
            raise ExhaustedError(f"the chain of version {uid!r} has more than {CHAIN_MAX} links")
        chain.append(require_version(tx, base).version)
    return chain[::-1]


def put_delta(tx: Transaction, delta: Delta) -> Delta:
    """Record an artefact; the same one again is fine.

    Raises:
        NotFoundError: base or target is unknown.
        PreconditionError: they are of different models.
        AlreadyExistsError: there is another artefact between them.
        ExhaustedError: DELTAS_MAX lead to this target already.
    """
    base = require_version(tx, delta.base_version_id).version
    target = require_version(tx, delta.target_version_id).version
    if base.model_name != target.model_name:
        raise PreconditionError(f"{base.uid!r} and {target.uid!r} are of different models")
    key = records.delta_key(target.uid, base.uid)
    value = tx.get(key)
    if value is not None:
        kept = records.decode_delta(value)
        if replace(kept, created_at_unix_ms=0) != replace(delta, created_at_unix_ms=0):
            raise AlreadyExistsError(f"there is another delta from {base.uid!r} to {target.uid!r}")
        return kept
    if len(tx.list(records.deltas_prefix(target.uid))) >= DELTAS_MAX:
        raise ExhaustedError(f"{DELTAS_MAX} deltas lead to version {target.uid!r} already")
    delta = replace(delta, created_at_unix_ms=tx.now_ms)
    tx.put(key, records.encode(delta))
    return delta
