"""ModelExpress 0.7.0 over S3, timed in a venv of its own: canonical deltas out and in.

Takes the folder of its seed, two .npy files of bf16 words and a count of tensors; the weights are
so many tensors of those words. Tells the seconds of the second delta, in which nothing is done for
the first time, as one JSON line.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "interop"))

import modelexpress_rl.control as mx_control
import peer
from modelexpress_rl.train import WeightPayloadFormat
from modelexpress_rl.version import WeightVersionRef
from safetensors.torch import save_file

PREFIX = "s3://weights/theirs"


def main() -> None:
    """Go from old to new and back, as often as asked."""
    old_path, new_path, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    root = Path(tempfile.mkdtemp(dir="/var/tmp"))
    (root / "seed").mkdir()
    states = [_weights(path, count) for path in (old_path, new_path)]
    save_file(states[0], root / "seed" / "model.safetensors")
    names = {"weight_map": dict.fromkeys(states[0], "model.safetensors")}
    (root / "seed" / "model.safetensors.index.json").write_text(json.dumps(names))
    dist.init_process_group("gloo", init_method=f"file://{root / 'meet'}", rank=0, world_size=1)
    with mx_control.ModelExpressControlClient.connect() as client:
        peer.create(
            client,
            "seed",
            uid="seed",
            payload_format=WeightPayloadFormat.FULL_HF_CHECKPOINT,
            object_storage=peer.source(f"{PREFIX}/seed/model.safetensors.index.json"),
            state=mx_control.WeightVersionState.READY,
        )
        with (
            peer.trainer(root / "seed", PREFIX) as training,
            peer.generator(root / "seed", root) as (serving, _),
        ):
            training.prepare_delta_base(hf_tensor_iter=[list(states[0].items())])
            base = "seed"
            print(json.dumps({}), flush=True)
            for step, _ in enumerate(sys.stdin, 1):
                answer = _move(client, training, serving, states[step % 2], f"delta-{step}", base)
                base = f"delta-{step}"
                print(json.dumps(answer), flush=True)
    os._exit(0)


def _move(client, training, serving, weights, uid, base):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    peer.create(
        client,
        uid,
        uid=uid,
        base_version_id=base,
        payload_format=WeightPayloadFormat.XOR_DELTA,
        object_storage=peer.source(f"{PREFIX}/{uid}/model.safetensors.index.json"),
    )
    started = time.perf_counter()
    staged = training.stage_shard(
        version=WeightVersionRef(uid), hf_tensor_iter=[list(weights.items())]
    )
    staged.publish()
    published = time.perf_counter()
    client.update_weight_version_state(uid, mx_control.WeightVersionState.READY)
    handle = serving.stage_weight(version=WeightVersionRef(uid))
    serving.apply_weight(handle)
    handle.release()
    done = time.perf_counter()
    return {
        "publish_s": published - started,
        "apply_s": done - published,
        "seconds": done - started,
    }


def _weights(path: str, count: int) -> dict[str, torch.Tensor]:
    words = torch.from_numpy(np.load(path).view(np.int16)).view(torch.bfloat16)
    return {f"w{index:02d}": words.clone() for index in range(count)}


if __name__ == "__main__":
    main()
