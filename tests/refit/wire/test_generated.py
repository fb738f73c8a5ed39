"""Generated code is current, lives in its own pool, and is the public protocol."""

import types
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool

from paceline.core.errors import PreflightError
from paceline.refit.wire import generate, pool, refit_pb2
from paceline.refit.wire.rpc import CONTROL_RPCS, PUBLIC_SERVICE, RPCS, WORKER_SERVICE

SOURCE_ROOT = Path(generate.__file__).resolve().parents[3]


def generated(root: Path) -> dict[str, str]:
    """Return the generated files below a root."""
    folder = root / generate.PACKAGE_DIR
    return {path.name: path.read_text("utf8") for path in folder.glob("*_pb2*")}


def test_generated_files_are_what_the_protos_give(tmp_path: Path) -> None:
    """Nothing is stale and nothing is edited by hand: regenerating changes no byte."""
    if generate.installed_tools() != generate.TOOLS_VERSION:
        pytest.skip("make proto-check compares, in an environment of its own")
    generate.generate(SOURCE_ROOT, target_root=tmp_path)
    assert generated(tmp_path) == generated(SOURCE_ROOT)
    assert generate.stale_files(SOURCE_ROOT) == ()


def test_every_proto_is_generated() -> None:
    """A .proto that generate.py does not know would be forgotten."""
    found = {path.stem for path in (SOURCE_ROOT / generate.PACKAGE_DIR).glob("*.proto")}
    assert found == set(generate.PROTO_NAMES)
    assert generated(SOURCE_ROOT).keys() == {
        f"{name}_pb2{end}" for name in found for end in (".py", ".pyi")
    }


def test_output_that_changed_its_form_is_noticed() -> None:
    """If protoc writes other text, moving it to our pool fails instead of doing nothing."""
    with pytest.raises(PreflightError, match="protoc changed"):
        generate.use_own_pool("import nothing\n")


def test_a_second_copy_of_the_public_package_does_no_harm() -> None:
    """Another generated copy loads beside ours, in the default pool, and both read each other."""
    text = (SOURCE_ROOT / generate.PACKAGE_DIR / "refit_pb2.py").read_text("utf8")
    for old, new in generate._OWN_POOL.items():
        text = text.replace(new, old)
    other = types.ModuleType("somebody_elses_refit_pb2")
    exec(compile(text, "somebody_elses_refit_pb2.py", "exec"), other.__dict__)  # noqa: S102 - a module
    assert other.DESCRIPTOR.pool is descriptor_pool.Default()
    assert refit_pb2.DESCRIPTOR.pool is pool.POOL
    ours = refit_pb2.WeightVersion(uid="v", base_version_id="b", expected_source_slots=["s"])
    theirs = other.WeightVersion.FromString(ours.SerializeToString())
    assert (theirs.uid, theirs.base_version_id, list(theirs.expected_source_slots)) == (
        "v",
        "b",
        ["s"],
    )
    assert refit_pb2.WeightVersion.FromString(theirs.SerializeToString()) == ours


PUBLIC_FIELDS = {
    "WorkerRegistration": "1 worker_id, 2 role, 3 model_name, 4 expires_at_unix_ms",
    "RegisterWorkerRequest": "1 worker, 2 ttl_seconds",
    "RegisterWorkerResponse": "1 worker",
    "WeightVersion": "1 uid, 2 model_name, 3 idempotency_key, 4 payload_format, "
    "5 base_version_id?, 6 expected_source_slots*, 7 layout_signature, 8 state, "
    "9 created_at_unix_ms, 10 object_storage",
    "CreateWeightVersionRequest": "1 model_name, 2 idempotency_key, 3 payload_format, "
    "4 base_version_id?, 5 expected_source_slots*, 6 object_storage, 7 state, 8 uid?",
    "CreateWeightVersionResponse": "1 version",
    "GetWeightVersionRequest": "1 uid",
    "GetWeightVersionResponse": "1 version",
    "DeleteWeightVersionRequest": "1 uid",
    "DeleteWeightVersionResponse": "1 version",
    "UpdateWeightVersionStateRequest": "1 uid, 2 state",
    "UpdateWeightVersionStateResponse": "1 version",
    "WeightVersionShard": "1 version_id, 2 source_slot_id, 3 worker_id, 4 tensor_count, "
    "5 total_bytes, 6 manifest_digest, 7 manifest_endpoint",
    "ObjectStorageSource": "1 uri, 2 storage_type",
    "CreateWeightVersionShardRequest": "1 shard",
    "CreateWeightVersionShardResponse": "1 shard, 2 version",
    "ListWeightVersionShardsRequest": "1 version_id",
    "ListWeightVersionShardsResponse": "1 shards*",
    "GetWeightVersionShardManifestRequest": "1 version_id, 2 source_slot_id",
    "GetWeightVersionShardManifestResponse": "1 manifest, 2 manifest_digest",
    "DeleteWeightVersionShardRequest": "1 version_id, 2 source_slot_id, 3 worker_id",
    "DeleteWeightVersionShardResponse": "1 deleted",
    "VersionLease": "1 lease_id, 2 version_id, 3 worker_id, 4 expires_at_unix_ms",
    "RegisterVersionLeaseRequest": "1 version_id, 2 worker_id, 3 ttl_seconds",
    "RegisterVersionLeaseResponse": "1 lease",
    "DeleteVersionLeaseRequest": "1 version_id, 2 lease_id, 3 worker_id",
    "DeleteVersionLeaseResponse": "1 deleted",
}
"""Written down from the public protocol; ``?`` optional, ``*`` repeated."""


def test_fields_are_those_of_the_public_protocol() -> None:
    """Names, numbers, presence and repetition of every public message, none more or less."""

    def mark(field: object) -> str:
        if field.is_repeated:  # type: ignore[attr-defined]
            return "*"
        oneof = field.containing_oneof  # type: ignore[attr-defined]
        return "?" if oneof is not None else ""

    found = {
        name: ", ".join(f"{f.number} {f.name}{mark(f)}" for f in message.fields)
        for name, message in refit_pb2.DESCRIPTOR.message_types_by_name.items()
    }
    assert found == PUBLIC_FIELDS


def test_calls_are_named_as_clients_name_them() -> None:
    """Ten calls of the central public service, one of the workers', 24 of ours."""
    names = {rpc.path for rpc in RPCS.values()}
    assert "/model_express.refit.RefitService/CreateWeightVersionShard" in names
    assert "/model_express.refit.RefitWorkerService/GetWeightVersionShardManifest" in names
    services = [rpc.service for rpc in RPCS.values()]
    assert (services.count(PUBLIC_SERVICE), services.count(WORKER_SERVICE)) == (10, 1)
    assert len({rpc.name for rpc in CONTROL_RPCS}) == len(CONTROL_RPCS) == 34
