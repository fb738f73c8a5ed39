"""What the unmodified clients of the public protocol do with our service, told as JSON lines.

Runs in ``.venv-peer``, where ModelExpress 0.7.0 is installed and Paceline is not. One word on the
command line says which scene to play; the test that starts it compares what it prints.
"""

# ruff: noqa: T201, TID251 - Paceline's ways to print and to read the environment are not there

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import modelexpress_rl.control as mx_control
from modelexpress_rl import refit_pb2, refit_pb2_grpc
from modelexpress_rl.object_storage import ObjectStorageSource, ObjectStorageType
from modelexpress_rl.train import WeightPayloadFormat
from modelexpress_rl.version import WeightVersionRef

MODEL = "peer-model"


def show(**facts: object) -> None:
    """Tell the test something."""
    print(json.dumps(facts, sort_keys=True), flush=True)


def descriptors() -> None:
    """Tell every field, enum value and method of their protocol file."""
    file = refit_pb2.DESCRIPTOR
    for message in file.message_types_by_name.values():
        for field in message.fields:
            show(
                message=message.full_name,
                number=field.number,
                name=field.name,
                type=field.type,
                presence=field.has_presence,
                repeated=field.is_repeated,
                of=(field.message_type or field.enum_type).full_name
                if field.message_type or field.enum_type
                else "",
            )
    for enum in file.enum_types_by_name.values():
        for value in enum.values:
            show(enum=enum.full_name, number=value.number, name=value.name)
    for service in file.services_by_name.values():
        for method in service.methods:
            show(
                service=service.full_name,
                name=method.name,
                takes=method.input_type.full_name,
                returns=method.output_type.full_name,
                streams=bool(method.client_streaming or method.server_streaming),
            )


def control() -> None:
    """Play an orchestrator: create, repeat, read, move on, retire; and be refused."""
    with mx_control.ModelExpressControlClient.connect() as client:
        made = create(client, "k-1", slots=["rank-0", "rank-1"])
        show(state=made.state.value, slots=made.expected_source_slots, base=made.base_version_id)
        show(again=create(client, "k-1", slots=["rank-0", "rank-1"]) == made)
        with refused("ALREADY_EXISTS"):
            create(client, "k-1", slots=["rank-0"])
        with refused("INVALID_ARGUMENT"):
            create(client, "k-2", slots=[])
        with refused("NOT_FOUND"):
            client.get_weight_version("nothing")
        with refused("FAILED_PRECONDITION"):
            client.update_weight_version_state(made.version_id, mx_control.WeightVersionState.READY)
        gone = client.delete_weight_version(made.version_id)
        show(retired=gone.state.value)
        with refused("FAILED_PRECONDITION"):
            client.update_weight_version_state(made.version_id, mx_control.WeightVersionState.READY)
    Path(os.environ["MX_AUTH_TOKEN_PATH"]).write_text("not-a-token-of-anybody", encoding="utf8")
    os.environ |= {"MX_AUTH_TOKEN_TTL_SECONDS": "0"}
    with (
        mx_control.ModelExpressControlClient.connect() as client,
        refused("UNAUTHENTICATED", "OK"),
    ):
        client.get_weight_version(made.version_id)


def create(client: Any, key: str, **more: Any) -> Any:
    """Create a version."""
    slots = more.pop("slots", None)
    return client.create_weight_version(
        model_name=MODEL,
        idempotency_key=key,
        payload_format=more.pop("payload_format", WeightPayloadFormat.FULL_TENSOR),
        expected_source_slots=slots,
        **more,
    )


@contextlib.contextmanager
def refused(*codes: str) -> Any:
    """Tell which status a call was refused with."""
    try:
        yield
    except grpc.RpcError as exc:
        show(refused=exc.code().name, expected=list(codes))
    else:
        show(refused="OK", expected=list(codes))


def workers() -> None:
    """Play trainers and a generator by hand: their manifest service, our control service."""
    from modelexpress.auth import with_auth
    from modelexpress_rl.inference.source.trainer import TrainerSourceResolver
    from modelexpress_rl.train.manifest import WeightVersionShardManifestService

    ours = os.environ["OUR_MANIFESTS"]
    service = refit_pb2_grpc.RefitServiceStub(
        with_auth(grpc.insecure_channel(os.environ["MODEL_EXPRESS_URL"]))
    )
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    manifests = WeightVersionShardManifestService(endpoint=f"127.0.0.1:{port}")
    refit_pb2_grpc.add_RefitWorkerServiceServicer_to_server(manifests, server)
    server.start()
    with mx_control.ModelExpressControlClient.connect() as client:
        version = create(client, "workers", slots=["rank-0", "rank-1"], uid="by-workers")
        for worker, role in (("t-0", "TRAINER"), ("g-0", "GENERATOR")):
            service.RegisterWorker(
                refit_pb2.RegisterWorkerRequest(
                    worker=refit_pb2.WorkerRegistration(
                        worker_id=worker,
                        role=f"WORKER_ROLE_{role}",
                        model_name=MODEL,
                    ),
                    ttl_seconds=60,
                )
            )
        from modelexpress_rl.train.adapter import WeightVersionShardManifest

        data = json.dumps({"from": "theirs"}).encode()
        manifests.publish_manifest(
            version_id=version.version_id,
            source_slot_id="rank-0",
            manifest=WeightVersionShardManifest(
                data=data, tensor_count=1, total_bytes=1, transport="NIXL"
            ),
        )
        for slot, endpoint, digest in (
            ("rank-0", f"127.0.0.1:{port}", hashlib.sha256(data).hexdigest()),
            ("rank-1", ours, os.environ["OUR_DIGEST"]),
        ):
            reply = service.CreateWeightVersionShard(
                refit_pb2.CreateWeightVersionShardRequest(
                    shard=refit_pb2.WeightVersionShard(
                        version_id=version.version_id,
                        source_slot_id=slot,
                        worker_id="t-0",
                        tensor_count=1,
                        total_bytes=1,
                        manifest_digest=digest,
                        manifest_endpoint=endpoint,
                    )
                )
            )
            show(slot=slot, state=refit_pb2.WeightVersionState.Name(reply.version.state))
        lease = service.RegisterVersionLease(
            refit_pb2.RegisterVersionLeaseRequest(
                version_id=version.version_id, worker_id="g-0", ttl_seconds=60
            )
        ).lease
        show(lease=lease.lease_id)
        shards = service.ListWeightVersionShards(
            refit_pb2.ListWeightVersionShardsRequest(version_id=version.version_id)
        ).shards
        fetch = TrainerSourceResolver._fetch_manifest
        resolver = types.SimpleNamespace(_rpc_timeout_seconds=10.0)
        for shard in shards:
            show(slot=shard.source_slot_id, manifest=fetched(fetch, resolver, shard))
        client.delete_weight_version(version.version_id)
        with refused("FAILED_PRECONDITION"):
            evict(service, version.version_id)
        done = service.DeleteVersionLease(
            refit_pb2.DeleteVersionLeaseRequest(
                version_id=version.version_id, lease_id=lease.lease_id, worker_id="g-0"
            )
        )
        show(given_back=done.deleted)
        show(evicted=evict(service, version.version_id))
    server.stop(0)


def fetched(fetch: Any, resolver: Any, shard: Any) -> str:
    """Fetch a manifest as a generator does, digest checks included."""
    with grpc.insecure_channel(shard.manifest_endpoint) as channel:
        reply = refit_pb2_grpc.RefitWorkerServiceStub(channel).GetWeightVersionShardManifest(
            refit_pb2.GetWeightVersionShardManifestRequest(
                version_id=shard.version_id, source_slot_id=shard.source_slot_id
            ),
            timeout=10,
        )
    digest = hashlib.sha256(reply.manifest).hexdigest()
    if not digest == reply.manifest_digest == shard.manifest_digest:
        raise RuntimeError("digests differ")
    return str(reply.manifest, "utf8")


def evict(service: Any, version_id: str) -> bool:
    """Take a shard away."""
    reply = service.DeleteWeightVersionShard(
        refit_pb2.DeleteWeightVersionShardRequest(
            version_id=version_id, source_slot_id="rank-0", worker_id="t-0"
        )
    )
    return bool(reply.deleted)


def storage() -> None:
    """Publish two deltas with their trainer client and install them with their generator."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file, save_file

    root = Path(tempfile.mkdtemp())
    seed = root / "seed"
    seed.mkdir()
    weights = {"w": torch.arange(64, dtype=torch.bfloat16), "n": torch.tensor([1, 2, 3])}
    save_file(weights, seed / "model.safetensors")
    names = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (seed / "model.safetensors.index.json").write_text(json.dumps(names), encoding="utf8")
    dist.init_process_group(
        "gloo", init_method=f"file://{root / 'rendezvous'}", rank=0, world_size=1
    )
    prefix = "s3://bucket/run"
    with mx_control.ModelExpressControlClient.connect() as client:
        create(
            client,
            "seed",
            uid="seed",
            payload_format=WeightPayloadFormat.FULL_HF_CHECKPOINT,
            object_storage=source(f"{prefix}/seed/model.safetensors.index.json"),
            state=mx_control.WeightVersionState.READY,
        )
        with trainer(seed, prefix) as training, generator(seed, root) as (serving, installed):
            training.prepare_delta_base(hf_tensor_iter=buckets(weights))
            base = "seed"
            for step in range(2):
                weights["w"][step] = float("nan")
                weights["n"][step] = -step
                uid = f"delta-{step}"
                create(
                    client,
                    uid,
                    uid=uid,
                    base_version_id=base,
                    payload_format=WeightPayloadFormat.XOR_DELTA,
                    object_storage=source(f"{prefix}/{uid}/model.safetensors.index.json"),
                )
                staged = training.stage_shard(
                    version=WeightVersionRef(uid), hf_tensor_iter=buckets(weights)
                )
                staged.publish()
                client.update_weight_version_state(uid, mx_control.WeightVersionState.READY)
                base = uid
            handle = serving.stage_weight(version=WeightVersionRef(base))
            serving.apply_weight(handle)
            handle.release()
            got = {}
            for path in sorted(Path(installed[-1]).glob("*.safetensors")):
                got.update(load_file(path))
            for name, tensor in weights.items():
                same = torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8))
                show(tensor=name, same=same)
    dist.destroy_process_group()


def reads_ours() -> None:
    """Install a delta and then a full version that Paceline wrote, with their generator."""
    from safetensors.torch import load_file

    root = Path(os.environ["SEED"])
    with generator(root / "seed", root) as (serving, installed):
        for uid in ("our-delta", "our-full"):
            handle = serving.stage_weight(version=WeightVersionRef(uid))
            serving.apply_weight(handle)
            handle.release()
            for path in sorted(Path(installed[-1]).glob("*.safetensors")):
                for name, tensor in sorted(load_file(path).items()):
                    data = tensor.view(-1).view(dtype=torch_uint8()).numpy().tobytes()
                    show(uid=uid, tensor=name, sha256=hashlib.sha256(data).hexdigest())


def shard_table() -> None:
    """Read a NIXL manifest of ours as their receiver does, up to what it would plan to read."""
    from modelexpress.refit.reshard.rendezvous import build_sources, decode_shard_table

    blob = Path(os.environ["TABLE"]).read_bytes()
    sources, agents, devices = build_sources(decode_shard_table(blob))
    show(agents=sorted(agents.values()), devices=sorted(set(devices.values())))
    for name, found in sorted(sources.items()):
        (shard,) = found.shards
        show(
            tensor=name,
            dtype=str(found.dtype),
            shape=list(found.global_shape),
            elsize=found.elsize,
            addr=shard.addr,
        )


def torch_uint8() -> Any:
    """Return the dtype of plain bytes."""
    import torch

    return torch.uint8


def follow() -> None:
    """Install versions that Paceline published, one after another; the first is the seed."""
    import torch
    from safetensors.torch import load_file

    root = Path(tempfile.mkdtemp())
    first, *later = os.environ["VERSIONS"].split(",")
    with generator(Path(os.environ["SEED"]), root, initial=first) as (serving, installed):
        for uid in later:
            handle = serving.stage_weight(version=WeightVersionRef(uid))
            serving.apply_weight(handle)
            handle.release()
            got = {}
            for path in sorted(Path(installed[-1]).glob("*.safetensors")):
                got.update(load_file(path))
            expected = load_file(Path(os.environ["EXPECTED"]) / f"{uid}.safetensors")
            same = {
                name: got[name].dtype == tensor.dtype
                and got[name].shape == tensor.shape
                and torch.equal(bits(got[name]), bits(tensor))
                for name, tensor in expected.items()
            }
            show(version=uid, same=same, more=sorted(got.keys() - expected.keys()))


def bits(tensor: Any) -> Any:
    """Return a tensor's bytes."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def buckets(weights: Any) -> list[list[Any]]:
    """Return the tensors as their trainer client takes them."""
    return [[(name, tensor.clone()) for name, tensor in weights.items()]]


def source(uri: str) -> ObjectStorageSource:
    """Name an object."""
    return ObjectStorageSource(uri=uri, storage_type=ObjectStorageType.S3)


def trainer(seed: Path, prefix: str) -> Any:
    """Return their trainer client over object storage."""
    from modelexpress_rl.train import TrainerStagingMode
    from modelexpress_rl.train.client import (
        ModelExpressTrainerClient,
        ModelExpressTrainerConfig,
        ObjectStorageConfig,
    )

    return ModelExpressTrainerClient.initialize(
        ModelExpressTrainerConfig(
            model_name=MODEL,
            staging_mode=TrainerStagingMode.WRITE_TO_STORAGE,
            payload_format=WeightPayloadFormat.XOR_DELTA,
            object_storage=ObjectStorageConfig(
                storage_type=ObjectStorageType.S3,
                uri_prefix=prefix,
                initial_base_version_id="seed",
                seed_checkpoint_path=seed,
                endpoint_url=os.environ["S3_ENDPOINT"],
                region_name="us-east-1",
            ),
        )
    )


@contextlib.contextmanager
def generator(seed: Path, root: Path, *, initial: str = "seed") -> Any:
    """Yield their generator client, and where it says that checkpoints were installed from."""
    from modelexpress_rl.inference.client import (
        ModelExpressGeneratorClient,
        ModelExpressGeneratorConfig,
    )
    from modelexpress_rl.inference.engines.sglang import SglangGeneratorContext, installer
    from modelexpress_rl.inference.receiver import ObjectStorageGeneratorConfig

    installed: list[str] = []

    def note(self: Any, prepared: Any) -> None:
        installed.append(str(prepared.path))

    # The engine itself is not here: what it would load is looked at instead.
    installer._SglangInstaller._install_checkpoint = note
    runner = types.SimpleNamespace(model_config=types.SimpleNamespace(model_path=MODEL))
    client = ModelExpressGeneratorClient.initialize(
        ModelExpressGeneratorConfig(
            engine_context=SglangGeneratorContext(model_runner=runner),
            model_name=MODEL,
            object_storage=ObjectStorageGeneratorConfig(
                storage_type=ObjectStorageType.S3,
                initial_base_version_id=initial,
                seed_checkpoint_path=seed,
                refit_checkpoint_dir=root / "local",
                endpoint_url=os.environ["S3_ENDPOINT"],
                region_name="us-east-1",
            ),
        )
    )
    try:
        yield client, installed
    finally:
        client.close()


if __name__ == "__main__":
    todo = (descriptors, control, workers, storage, reads_ours, shard_table, follow)
    {f.__name__: f for f in todo}[sys.argv[1]]()
    # Their libraries leave threads behind that would keep the process.
    sys.stdout.flush()
    os._exit(0)
