"""Drives a RunPod by the vendor's own client and prints what it made of the answers, as JSON.

Runs in the client's own environment, not in ours: RUNPOD_API_BASE_URL says where, argument 1 is
the key.
"""

import json
import sys

import runpod

runpod.api_key = sys.argv[1]
found = {
    "gpus": [gpu["id"] for gpu in runpod.get_gpus()],
    "memory_gb": runpod.get_gpu("NVIDIA H200")["memoryInGb"],
}
pod = runpod.create_pod(
    "paceline-fidelity-1",
    "ubuntu:24.04",
    "NVIDIA H200",
    gpu_count=2,
    ports="22/tcp",
    env={"PUBLIC_KEY": "ssh-ed25519 AAAA test"},
)
found["created"] = pod["id"]
found["listed"] = [(row["id"], row["name"], row["gpuCount"]) for row in runpod.get_pods()]
found["ports"] = runpod.get_pod(pod["id"])["runtime"]["ports"]
found["stopped"] = runpod.stop_pod(pod["id"])["desiredStatus"]
found["resumed"] = runpod.resume_pod(pod["id"], 2)["desiredStatus"]
runpod.terminate_pod(pod["id"])
found["gone"] = runpod.get_pod(pod["id"])
runpod.api_key = "wrong"
try:
    runpod.get_pods()
except runpod.error.AuthenticationError as exc:
    found["refused"] = str(exc)
print(json.dumps(found))
