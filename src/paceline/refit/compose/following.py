"""What an engine follows: a control service, or a bucket that names one run's versions."""

from typing import cast

from paceline import system
from paceline.refit.compose.control import connect_control
from paceline.refit.compose.data import DataPlane, data_plane, follow_bucket, is_bucket
from paceline.refit.control.protocol import ControlClient, ControlPlane, ReplicaBoard


def open_control(
    address: str,
    *,
    token: str,
    run_id: str,
    data: DataPlane | None = None,
    timeout_s: float = 30.0,
    allow_plaintext: bool = False,
) -> ControlPlane:
    """Return the control service at an address, or the bucket that it names.

    Raises as ``connect_control`` and ``data_plane`` do.
    """
    if is_bucket(address):
        plane = data or data_plane(system.environ(), run_id=run_id)
        return follow_bucket(address, allow_http=plane.allow_http_bucket)
    return connect_control(
        address, token=token, timeout_s=timeout_s, allow_plaintext=allow_plaintext
    )


def replica_board_of(address: str, control: ControlPlane) -> ReplicaBoard | None:
    """Return where receivers tell each other what they have; a bucket is no such place."""
    return None if is_bucket(address) else cast(ControlClient, control)
