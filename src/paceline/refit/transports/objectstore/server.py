"""Publishing into a bucket: data first, then the manifest that names it."""

from collections.abc import Mapping, Sequence

from paceline.refit.errors import PublishError
from paceline.refit.model import Shard, WeightVersion, WeightVersionShardManifest
from paceline.refit.transports.address import manifest_path, object_path
from paceline.refit.transports.objectstore.bucket import Bucket
from paceline.refit.transports.objectstore.log import CommitLog
from paceline.refit.transports.protocol import CHECKPOINT_INDEX


class BucketObjectServer:
    """Signs ObjectServer and the publisher's port; what it published outlives the process."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._is_open = True
        self._log = CommitLog(bucket)
        self._uploaded: set[str] = set()
        """By this process: staging uploads before publishing serves."""
        self._ready: dict[str, tuple[WeightVersion, Sequence[Shard]]] = {}
        """What is to be in the newest commit, also where an earlier one failed."""

    @property
    def transport(self) -> str:
        """The name this transport is registered under."""
        return "objectstore"

    @property
    def endpoint(self) -> str:
        """The bucket's URL."""
        return self._bucket.url

    def serve_object(self, object_id: str, parts: Sequence[memoryview]) -> None:
        """Upload an object, unless it is there; returns when all of it is. Raises PublishError."""
        self._require_open()
        if object_id not in self._uploaded:
            self._bucket.put_new(key_of_object(object_id), parts)
            self._uploaded.add(object_id)

    def replace_object(self, object_id: str, parts: Sequence[memoryview]) -> None:
        """Do nothing: what was uploaded is read from the bucket."""

    def withdraw_object(self, object_id: str) -> None:
        """Delete an object; a reader that is inside gets an error. Idempotent."""
        self._uploaded.discard(object_id)
        self._bucket.remove(key_of_object(object_id))

    def publish_manifest(
        self, *, version_id: str, source_slot_id: str, manifest: WeightVersionShardManifest
    ) -> str:
        """Write a manifest whose objects are there, and return its address.

        Raises:
            PublishError: another one is there.
        """
        self._require_open()
        key = key_of_manifest(version_id, source_slot_id)
        self._bucket.put_new(key, [memoryview(manifest.data)])
        return f"{self._bucket.url}/{key}"

    def release_manifest(self, *, version_id: str, source_slot_id: str) -> None:
        """Delete it; idempotent."""
        self._bucket.remove(key_of_manifest(version_id, source_slot_id))

    def checkpoint_url(self, folder: str) -> str:
        """Return where the index of a checkpoint is going to be."""
        return f"{self._bucket.url}/{folder}/{CHECKPOINT_INDEX}"

    def publish_checkpoint(
        self, folder: str, files: Mapping[str, str], documents: Mapping[str, bytes]
    ) -> None:
        """Show objects as the files of a checkpoint; the index is last of the documents.

        Whoever loads it holds no lease, so it stays until somebody removes the folder.

        Raises:
            PublishError: the store does not take it; without its index nobody sees it.
        """
        self._require_open()
        for name, object_id in files.items():
            self._bucket.copy_new(key_of_object(object_id), f"{folder}/{name}")
        for name in sorted(documents, key=lambda name: name == CHECKPOINT_INDEX):
            self._bucket.put_new(f"{folder}/{name}", [memoryview(documents[name])])

    def commit_version(self, version: WeightVersion, shards: Sequence[Shard]) -> None:
        """Commit it, and those of ours that an earlier commit could not tell of."""
        self._ready[version.uid] = (version, shards)
        for each in list(self._ready.values()):
            self._log.add(*each)
        self._ready = {version.uid: (version, shards)}

    def retire_version(self, uid: str) -> None:
        """Commit that it goes."""
        self._ready.pop(uid, None)
        self._log.drop(frozenset({uid}))

    def close(self) -> None:
        """Publish nothing more; what is there stays. Idempotent."""
        self._is_open = False

    def _require_open(self) -> None:
        if not self._is_open:
            raise PublishError(f"{self._bucket.url} was closed here")


def key_of_object(object_id: str) -> str:
    """Return the key of an object."""
    return object_path(object_id).lstrip("/")


def key_of_manifest(version_id: str, source_slot_id: str) -> str:
    """Return the key of a manifest."""
    return manifest_path(version_id, source_slot_id).lstrip("/")
