"""What every control plane that has a ReplicaBoard must do beside the rest of its contract.

Subclass it together with ControlPlaneContract, whose fixtures it uses.
"""

from dataclasses import replace
from typing import Any

import pytest

from paceline.refit.errors import InvalidRequestError, NotFoundError, PreconditionError
from paceline.refit.model import Replica, VersionState
from paceline.testing.clock import FakeClock
from paceline.testing.contracts.control import FULL, GENERATOR, TTL_S, shard_of

SLOT = FULL.expected_source_slots[0]


class ReplicaBoardContract:
    """The claims of a replica board; ``plane`` has a trainer ``t-0`` and a generator ``g-0``."""

    def ready_uid(self, plane: Any) -> str:
        """Return a READY version's uid."""
        uid: str = plane.create_version(FULL).uid
        for slot in FULL.expected_source_slots:
            plane.create_shard(shard_of(uid, slot))
        return uid

    def replica(self, uid: str, **changes: Any) -> Replica:
        """Return what the generator may announce."""
        told = Replica(
            version_id=uid,
            source_slot_id=SLOT,
            worker_id="g-0",
            manifest_endpoint="http://10.0.0.1:1/v1/manifests/v/s",
            region="eu",
            chunks=b"\x05",
            coming=b"\x02",
            load=2,
            rates=(("t-0", 1.5e6),),
        )
        return replace(told, **changes)

    def test_what_is_announced_is_what_others_hear(self, plane: Any, clock: FakeClock) -> None:
        """An announcement replaces the one before, and comes back with the service's time."""
        uid = self.ready_uid(plane)
        plane.register_worker(replace(GENERATOR, worker_id="g-1"), ttl_seconds=TTL_S)
        mine = self.replica(uid)
        assert [each.worker_id for each in plane.announce_replica(mine)] == ["g-0"]
        clock.advance(1)
        whole = replace(mine, chunks=b"", is_complete=True)
        plane.announce_replica(whole)
        heard = plane.announce_replica(self.replica(uid, worker_id="g-1"))
        assert [each.worker_id for each in heard] == ["g-0", "g-1"]
        now_ms = heard[0].updated_at_unix_ms
        assert heard[0] == replace(whole, updated_at_unix_ms=now_ms)
        assert heard[1].updated_at_unix_ms == now_ms
        assert list(plane.list_replicas(uid)) == list(heard)

    def test_the_dead_have_nothing(self, plane: Any, clock: FakeClock) -> None:
        """A replica counts while its worker is registered, and is taken back once."""
        uid = self.ready_uid(plane)
        plane.register_worker(replace(GENERATOR, worker_id="g-1"), ttl_seconds=1)
        plane.announce_replica(self.replica(uid, worker_id="g-1"))
        plane.announce_replica(self.replica(uid))
        clock.advance(1)
        assert [each.worker_id for each in plane.list_replicas(uid)] == ["g-0"]
        names = {"version_id": uid, "source_slot_id": SLOT, "worker_id": "g-0"}
        assert plane.withdraw_replica(**names) is True
        assert plane.withdraw_replica(**names) is False
        assert list(plane.list_replicas(uid)) == []

    def test_only_living_generators_announce_ready_versions(self, plane: Any) -> None:
        """Trainers, strangers, versions on their way out and slots that are none are refused."""
        uid = self.ready_uid(plane)
        for worker_id in ("t-0", "g-nobody"):
            with pytest.raises(PreconditionError):
                plane.announce_replica(self.replica(uid, worker_id=worker_id))
        with pytest.raises(NotFoundError):
            plane.announce_replica(self.replica("v-none"))
        with pytest.raises(NotFoundError):
            plane.list_replicas("v-none")
        with pytest.raises(InvalidRequestError):
            plane.announce_replica(self.replica(uid, source_slot_id="other"))
        plane.update_version_state(uid, VersionState.RELEASING)
        with pytest.raises(PreconditionError):
            plane.announce_replica(self.replica(uid))

    @pytest.mark.parametrize(
        "changes",
        [
            {"version_id": " "},
            {"worker_id": ""},
            {"chunks": bytes(2049)},
            {"coming": bytes(2049)},
            {"rates": (("t-0", -1.0),)},
            {"rates": (("t-0", float("nan")),)},
            {"rates": (("t-0", 1.0),) * 17},
            {"manifest_endpoint": "x" * 5000},
            {"region": "x" * 2000},
        ],
    )
    def test_senseless_replicas_are_refused(self, plane: Any, changes: dict[str, Any]) -> None:
        """What says too little or too much is not kept."""
        uid = self.ready_uid(plane)
        with pytest.raises(InvalidRequestError):
            plane.announce_replica(self.replica(uid, **changes))
        assert list(plane.list_replicas(uid)) == []
