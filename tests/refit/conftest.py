"""A disk that is soon full, and prefixes of a bucket on loopback."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.refit.transports.objectstore.bucket import Bucket, BucketOptions
from paceline.testing.moto_server import S3

SMALL_DISK_BYTES = 4 * 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few MiB; mounting one is for root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk is for root")
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(where)]
    subprocess.run(mount, check=True)
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)  # noqa: S607 - the system's own


def bucket_of(s3: S3, prefix: str) -> Bucket:
    """Return a prefix of the server's bucket."""
    return Bucket(
        s3.url(prefix), options=BucketOptions(config=s3.config, allow_http=True, retries=1)
    )
