"""Which records a request will be decided on, as far as the request itself tells.

A store elsewhere is asked for all of them at once, for all requests of a group. Nothing depends
on these lists being complete: what is missing costs a question of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from paceline.refit.control import records
from paceline.refit.wire.rpc import Rpc

Keys = Sequence[str]


def keys_of(rpc: Rpc, request: Any) -> Keys:
    """Return keys of records that answering will need; an empty list for what is seldom asked."""
    hint = _HINTS.get(rpc.name)
    return () if hint is None else hint(request)


def _register(request: Any) -> Keys:
    return (records.worker_key(request.worker.worker_id),)


def _version(request: Any) -> Keys:
    return (records.version_key(request.uid),)


def _create(request: Any) -> Keys:
    keys = [
        records.idempotency_key(request.model_name, request.idempotency_key),
        records.VERSIONS_HEAD,
        records.model_head_key(request.model_name),
    ]
    if request.uid:
        keys += [records.version_key(request.uid), records.tombstone_key(request.uid)]
    if request.base_version_id:
        keys.append(records.version_key(request.base_version_id))
    return keys


def _shard(request: Any) -> Keys:
    shard = request.shard
    return (
        records.version_key(shard.version_id),
        records.worker_key(shard.worker_id),
        records.shard_key(shard.version_id, shard.source_slot_id, shard.worker_id),
        records.drain_key(shard.worker_id),
    )


def _acquire(request: Any) -> Keys:
    lease_id = records.lease_id_of(request.version_id, request.worker_id)
    return (
        records.version_key(request.version_id),
        records.worker_key(request.worker_id),
        records.lease_key(request.version_id, lease_id),
        records.drain_key(request.worker_id),
    )


def _release(request: Any) -> Keys:
    return (records.lease_key(request.version_id, request.lease_id),)


def _report(request: Any) -> Keys:
    report = request.report
    return (
        records.worker_key(report.worker_id),
        records.report_key(report.model_name, report.worker_id),
    )


def _replica(request: Any) -> Keys:
    replica = request.replica
    return (
        records.version_key(replica.version_id),
        records.worker_key(replica.worker_id),
        records.replica_key(replica.version_id, replica.source_slot_id, replica.worker_id),
    )


def _model(request: Any) -> Keys:
    return (records.model_head_key(request.model_name),)


def _event(request: Any) -> Keys:
    return (records.EVENTS_HEAD,)


_HINTS: Final[Mapping[str, Callable[[Any], Keys]]] = {
    "RegisterWorker": _register,
    "CreateWeightVersion": _create,
    "GetWeightVersion": _version,
    "GetVersion": _version,
    "UpdateWeightVersionState": _version,
    "DeleteWeightVersion": _version,
    "DescribeVersion": _version,
    "CreateWeightVersionShard": _shard,
    "ListWeightVersionShards": lambda request: (records.version_key(request.version_id),),
    "RegisterVersionLease": _acquire,
    "DeleteVersionLease": _release,
    "ReportInstalled": _report,
    "AnnounceReplica": _replica,
    "ListVersions": _model,
    "RecordEvent": _event,
}
