"""Drives a Nebius by the official SDK's own machinery and prints what came of it, as JSON.

Arguments: host:port, token, project.
"""

import json
import sys

from nebius.aio.service_error import RequestError
from nebius.api.nebius.common.v1 import ResourceMetadata
from nebius.api.nebius.compute.v1 import (
    AttachedDiskSpec,
    CreateInstanceRequest,
    DeleteInstanceRequest,
    DiskSpec,
    GetInstanceRequest,
    InstanceServiceClient,
    InstanceSpec,
    IPAddress,
    ListInstancesRequest,
    ListPlatformsRequest,
    ManagedDisk,
    NetworkInterfaceSpec,
    PlatformServiceClient,
    PublicIPAddress,
    ResourcesSpec,
)
from nebius.base.options import INSECURE
from nebius.base.resolver import Constant
from nebius.sdk import SDK

endpoint, token, project = sys.argv[1:4]


def connect(credentials: str) -> SDK:
    """Return the SDK, pointed at the fake."""
    return SDK(credentials=credentials, resolver=Constant(endpoint), options=[(INSECURE, True)])


sdk = connect(token)
instances = InstanceServiceClient(sdk)
platforms = PlatformServiceClient(sdk).list(ListPlatformsRequest(parent_id=project)).wait()
found: dict[str, object] = {"platforms": [row.metadata.name for row in platforms.items]}
disk = DiskSpec(size_gibibytes=50, type=DiskSpec.DiskType.NETWORK_SSD)
operation = instances.create(
    CreateInstanceRequest(
        metadata=ResourceMetadata(parent_id=project, name="paceline-fidelity-1"),
        spec=InstanceSpec(
            resources=ResourcesSpec(platform="gpu-h100-sxm", preset="1gpu-16vcpu-200gb"),
            boot_disk=AttachedDiskSpec(
                attach_mode=AttachedDiskSpec.AttachMode.READ_WRITE,
                managed_disk=ManagedDisk(name="boot", spec=disk),
            ),
            network_interfaces=[
                NetworkInterfaceSpec(
                    name="eth0",
                    subnet_id="vpcsubnet-e00fake",
                    ip_address=IPAddress(),
                    public_ip_address=PublicIPAddress(),
                )
            ],
        ),
    )
).wait()
found["created"] = operation.resource_id
operation.sync_wait()
instance = instances.get(GetInstanceRequest(id=operation.resource_id)).wait()
found["state"] = instance.status.state.name
found["address"] = instance.status.network_interfaces[0].public_ip_address.address
listed = instances.list(ListInstancesRequest(parent_id=project)).wait()
found["listed"] = [row.metadata.name for row in listed.items]
instances.delete(DeleteInstanceRequest(id=operation.resource_id)).wait()
try:
    instances.get(GetInstanceRequest(id="computeinstance-e00nobody")).wait()
except RequestError as exc:
    found["absent"] = exc.status.code.name
sdk.sync_close()
print(json.dumps(found))
