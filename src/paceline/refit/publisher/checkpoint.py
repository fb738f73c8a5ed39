"""Versions that are checkpoints too: their files shown in a store, the index last."""

from collections.abc import Mapping
from typing import Final

from paceline.refit.errors import PublishError
from paceline.refit.model import ObjectStorageSource, ObjectStorageType
from paceline.refit.publisher.values import OwnVersion, WeightSource
from paceline.refit.transports.protocol import CHECKPOINT_INDEX, SupportsCheckpoints
from paceline.refit.transports.several import NO_STORE_OF_FILES

_TYPES: Final = {
    "s3": ObjectStorageType.S3,
    "gs": ObjectStorageType.GCS,
    "az": ObjectStorageType.AZURE,
}


def place_of_files(source: WeightSource, version: OwnVersion) -> ObjectStorageSource | None:
    """Return where stock receivers find a version; None if it is no checkpoint of a cloud's.

    Raises:
        PublishError: it is a checkpoint and there is no store for its files.
    """
    if not version.buffers.index:
        return None
    url = _store(source).checkpoint_url(version.uid)
    kind = _TYPES.get(url.partition("://")[0])
    return None if kind is None else ObjectStorageSource(uri=url, storage_type=kind)


def show_files(source: WeightSource, version: OwnVersion, beside: Mapping[str, bytes]) -> None:
    """Show the objects of a checkpoint, which are served already, as its files.

    Raises:
        PublishError: the store does not take it; nobody sees it.
    """
    buffers = version.buffers
    if buffers.index:
        files = {item.file: item.object_id for item in buffers.objects}
        documents = {**beside, CHECKPOINT_INDEX: buffers.index}
        _store(source).publish_checkpoint(version.uid, files, documents)


def _store(source: WeightSource) -> SupportsCheckpoints:
    if not isinstance(source, SupportsCheckpoints):
        raise PublishError(NO_STORE_OF_FILES)
    return source
