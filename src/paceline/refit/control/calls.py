"""Each call of both services: message in, one method of the control plane, message out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from paceline.refit.control.ledger import ControlLedger
from paceline.refit.control.protocol import ControlPlane
from paceline.refit.model import WorkerRegistration
from paceline.refit.wire import convert
from paceline.refit.wire import paceline_refit_v1_pb2 as own
from paceline.refit.wire import refit_pb2 as public
from paceline.refit.wire.convert import require_field
from paceline.refit.wire.rpc import OWN_SERVICE, PUBLIC_SERVICE, Message, rpc_named

Call = Callable[[Any, Any], Message]


def _register_worker(
    plane: ControlPlane, request: public.RegisterWorkerRequest
) -> public.RegisterWorkerResponse:
    require_field(request, "worker")
    worker = plane.register_worker(
        convert.parse_worker(request.worker), ttl_seconds=request.ttl_seconds
    )
    return public.RegisterWorkerResponse(worker=convert.to_worker(worker))


def _create_version(
    plane: ControlPlane, request: public.CreateWeightVersionRequest
) -> public.CreateWeightVersionResponse:
    version = plane.create_version(convert.parse_version_request(request))
    return public.CreateWeightVersionResponse(version=convert.to_version(version))


def _get_weight_version(
    plane: ControlPlane, request: public.GetWeightVersionRequest
) -> public.GetWeightVersionResponse:
    version = plane.get_version(request.uid)
    return public.GetWeightVersionResponse(version=convert.to_version(version))


def _update_state(
    plane: ControlPlane, request: public.UpdateWeightVersionStateRequest
) -> public.UpdateWeightVersionStateResponse:
    version = plane.update_version_state(request.uid, convert.STATES.member(request.state))
    return public.UpdateWeightVersionStateResponse(version=convert.to_version(version))


def _delete_version(
    plane: ControlPlane, request: public.DeleteWeightVersionRequest
) -> public.DeleteWeightVersionResponse:
    version = plane.delete_version(request.uid)
    return public.DeleteWeightVersionResponse(version=convert.to_version(version))


def _create_shard(
    plane: ControlPlane, request: public.CreateWeightVersionShardRequest
) -> public.CreateWeightVersionShardResponse:
    require_field(request, "shard")
    version = plane.create_shard(convert.parse_shard(request.shard))
    return public.CreateWeightVersionShardResponse(
        shard=request.shard, version=convert.to_version(version)
    )


def _list_shards(
    plane: ControlPlane, request: public.ListWeightVersionShardsRequest
) -> public.ListWeightVersionShardsResponse:
    shards = plane.list_shards(request.version_id)
    return public.ListWeightVersionShardsResponse(shards=map(convert.to_shard, shards))


def _delete_shard(
    plane: ControlPlane, request: public.DeleteWeightVersionShardRequest
) -> public.DeleteWeightVersionShardResponse:
    deleted = plane.delete_shard(
        version_id=request.version_id,
        source_slot_id=request.source_slot_id,
        worker_id=request.worker_id,
    )
    return public.DeleteWeightVersionShardResponse(deleted=deleted)


def _acquire_lease(
    plane: ControlPlane, request: public.RegisterVersionLeaseRequest
) -> public.RegisterVersionLeaseResponse:
    lease = plane.acquire_lease(
        version_id=request.version_id,
        worker_id=request.worker_id,
        ttl_seconds=request.ttl_seconds,
    )
    return public.RegisterVersionLeaseResponse(lease=convert.to_lease(lease))


def _release_lease(
    plane: ControlPlane, request: public.DeleteVersionLeaseRequest
) -> public.DeleteVersionLeaseResponse:
    lease = public.VersionLease(
        lease_id=request.lease_id, version_id=request.version_id, worker_id=request.worker_id
    )
    deleted = plane.release_lease(convert.parse_lease(lease))
    return public.DeleteVersionLeaseResponse(deleted=deleted)


def _get_version(plane: ControlPlane, request: own.GetVersionRequest) -> own.GetVersionResponse:
    return own.GetVersionResponse(record=convert.to_record(plane.get_version(request.uid)))


def _list_versions(
    plane: ControlPlane, request: own.ListVersionsRequest
) -> own.ListVersionsResponse:
    versions = plane.list_versions(
        request.model_name, run_id=request.run_id if request.HasField("run_id") else None
    )
    return own.ListVersionsResponse(records=map(convert.to_record, versions))


def _describe_version(
    plane: ControlPlane, request: own.DescribeVersionRequest
) -> own.DescribeVersionResponse:
    require_field(request, "description")
    version = plane.describe_version(
        request.uid,
        convert.parse_description(request.description),
        source_slot_id=request.source_slot_id if request.HasField("source_slot_id") else None,
    )
    return own.DescribeVersionResponse(record=convert.to_record(version))


def _list_leases(plane: ControlPlane, request: own.ListLeasesRequest) -> own.ListLeasesResponse:
    leases = plane.list_leases(request.version_id)
    return own.ListLeasesResponse(leases=map(convert.to_lease, leases))


def _list_workers(plane: ControlLedger, request: own.ListWorkersRequest) -> own.ListWorkersResponse:
    workers = plane.list_workers(request.model_name)
    return own.ListWorkersResponse(
        workers=map(convert.to_worker, workers), draining=_draining(plane, workers)
    )


def _draining(plane: ControlLedger, workers: Sequence[WorkerRegistration]) -> Sequence[str]:
    draining = set(plane.list_draining())
    return [w.worker_id for w in workers if w.worker_id in draining]


def watch_versions(
    plane: ControlLedger, request: own.WatchVersionsRequest
) -> own.WatchVersionsResponse:
    """Return what is new to a reader who knows everything up to ``request.after``."""
    changes = plane.version_changes(
        request.model_name,
        run_id=request.run_id if request.HasField("run_id") else None,
        after=request.after,
    )
    return convert.to_changes(changes)


def watch_workers(
    plane: ControlLedger, request: own.WatchWorkersRequest
) -> own.WatchWorkersResponse:
    """Return who lives now."""
    workers = plane.list_workers(request.model_name)
    return own.WatchWorkersResponse(
        workers=map(convert.to_worker, workers), draining=_draining(plane, workers)
    )


def watch_leases(plane: ControlLedger, request: own.WatchLeasesRequest) -> own.WatchLeasesResponse:
    """Return who reads now."""
    leases = plane.list_leases(request.version_id)
    return own.WatchLeasesResponse(leases=map(convert.to_lease, leases))


def _get_chain(plane: ControlLedger, request: own.GetChainRequest) -> own.GetChainResponse:
    return own.GetChainResponse(records=map(convert.to_record, plane.get_chain(request.uid)))


def _announce_replica(
    plane: ControlLedger, request: own.AnnounceReplicaRequest
) -> own.AnnounceReplicaResponse:
    require_field(request, "replica")
    found = plane.announce_replica(convert.parse_replica(request.replica))
    return own.AnnounceReplicaResponse(replicas=map(convert.to_replica, found))


def _list_replicas(
    plane: ControlLedger, request: own.ListReplicasRequest
) -> own.ListReplicasResponse:
    found = plane.list_replicas(request.version_id)
    return own.ListReplicasResponse(replicas=map(convert.to_replica, found))


def _withdraw_replica(
    plane: ControlLedger, request: own.WithdrawReplicaRequest
) -> own.WithdrawReplicaResponse:
    withdrawn = plane.withdraw_replica(
        version_id=request.version_id,
        source_slot_id=request.source_slot_id,
        worker_id=request.worker_id,
    )
    return own.WithdrawReplicaResponse(withdrawn=withdrawn)


def _record_delta(plane: ControlLedger, request: own.RecordDeltaRequest) -> own.RecordDeltaResponse:
    require_field(request, "delta")
    delta = plane.record_delta(convert.parse_delta(request.delta))
    return own.RecordDeltaResponse(delta=convert.to_delta(delta))


def _list_deltas(plane: ControlLedger, request: own.ListDeltasRequest) -> own.ListDeltasResponse:
    deltas = plane.list_deltas(request.target_version_id)
    return own.ListDeltasResponse(deltas=map(convert.to_delta, deltas))


def _set_retention(
    plane: ControlLedger, request: own.SetRetentionRequest
) -> own.SetRetentionResponse:
    require_field(request, "policy")
    plane.set_retention(request.model_name, convert.parse_retention(request.policy))
    return own.SetRetentionResponse()


def _get_retention(
    plane: ControlLedger, request: own.GetRetentionRequest
) -> own.GetRetentionResponse:
    policy = plane.get_retention(request.model_name)
    return own.GetRetentionResponse(policy=convert.to_retention(policy))


def _drain_worker(plane: ControlLedger, request: own.DrainWorkerRequest) -> own.DrainWorkerResponse:
    plane.drain_worker(request.worker_id, resume=request.resume)
    return own.DrainWorkerResponse()


def _set_pin(plane: ControlLedger, request: own.SetPinRequest) -> own.SetPinResponse:
    plane.set_pin(convert.parse_pin(request))
    return own.SetPinResponse()


def _list_pins(plane: ControlPlane, request: own.ListPinsRequest) -> own.ListPinsResponse:
    return own.ListPinsResponse(pins=map(convert.to_pin, plane.list_pins(request.model_name)))


def _list_tombstones(
    plane: ControlLedger, request: own.ListTombstonesRequest
) -> own.ListTombstonesResponse:
    tombstones = plane.list_tombstones(request.model_name)
    return own.ListTombstonesResponse(tombstones=map(convert.to_tombstone, tombstones))


def _report_installed(
    plane: ControlPlane, request: own.ReportInstalledRequest
) -> own.ReportInstalledResponse:
    require_field(request, "report")
    plane.report_installed(convert.parse_report(request.report))
    return own.ReportInstalledResponse()


def _list_installed(
    plane: ControlPlane, request: own.ListInstalledRequest
) -> own.ListInstalledResponse:
    reports = plane.list_installed(request.model_name, live_only=not request.include_expired)
    return own.ListInstalledResponse(reports=map(convert.to_report, reports))


def _record_event(plane: ControlPlane, request: own.RecordEventRequest) -> own.RecordEventResponse:
    require_field(request, "event")
    plane.record_event(convert.parse_event(request.event))
    return own.RecordEventResponse()


def _list_events(plane: ControlPlane, request: own.ListEventsRequest) -> own.ListEventsResponse:
    events = plane.list_events(after=request.after, limit=request.limit)
    return own.ListEventsResponse(events=map(convert.to_event, events))


_PUBLIC_CALLS: Mapping[str, Call] = {
    "RegisterWorker": _register_worker,
    "CreateWeightVersion": _create_version,
    "GetWeightVersion": _get_weight_version,
    "UpdateWeightVersionState": _update_state,
    "DeleteWeightVersion": _delete_version,
    "CreateWeightVersionShard": _create_shard,
    "ListWeightVersionShards": _list_shards,
    "DeleteWeightVersionShard": _delete_shard,
    "RegisterVersionLease": _acquire_lease,
    "DeleteVersionLease": _release_lease,
}

_OWN_CALLS: Mapping[str, Call] = {
    "GetVersion": _get_version,
    "ListVersions": _list_versions,
    "DescribeVersion": _describe_version,
    "ListLeases": _list_leases,
    "ListWorkers": _list_workers,
    "ReportInstalled": _report_installed,
    "ListInstalled": _list_installed,
    "RecordEvent": _record_event,
    "ListEvents": _list_events,
    "GetChain": _get_chain,
    "RecordDelta": _record_delta,
    "ListDeltas": _list_deltas,
    "AnnounceReplica": _announce_replica,
    "ListReplicas": _list_replicas,
    "WithdrawReplica": _withdraw_replica,
    "SetRetention": _set_retention,
    "GetRetention": _get_retention,
    "DrainWorker": _drain_worker,
    "SetPin": _set_pin,
    "ListPins": _list_pins,
    "ListTombstones": _list_tombstones,
}

CALLS: Final[Mapping[str, Call]] = {
    rpc_named(service, name).path: call
    for service, calls in ((PUBLIC_SERVICE, _PUBLIC_CALLS), (OWN_SERVICE, _OWN_CALLS))
    for name, call in calls.items()
}
"""Path -> what the central service does."""
