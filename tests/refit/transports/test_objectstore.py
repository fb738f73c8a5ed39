"""Buckets: obstore's memory and folders, and a real S3 server on loopback."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.errors import PreflightError
from paceline.refit.errors import FetchError, PublishError
from paceline.refit.model import ObjectRange
from paceline.refit.transports.objectstore import bucket as bucket_module
from paceline.refit.transports.objectstore.bucket import Bucket, BucketOptions
from paceline.refit.transports.objectstore.reader import BucketObjectReader
from paceline.refit.transports.objectstore.server import BucketObjectServer
from paceline.refit.transports.protocol import read_object
from paceline.system import system_clock
from paceline.testing.contracts.transport import Link, TransportContract
from paceline.testing.moto_server import S3, serve_s3
from refit.conftest import SMALL_DISK_BYTES, bucket_of


def link_of(bucket: Bucket) -> Link:
    return Link(
        server=BucketObjectServer(bucket), reader=BucketObjectReader(bucket, clock=system_clock())
    )


class TestMemoryBucket(TransportContract):
    """obstore's store in memory."""

    copies = True

    def make(self) -> Link:
        return link_of(Bucket("memory://here"))


class TestFolder(TransportContract):
    """A folder, as on a shared file system."""

    copies = True

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self) -> Link:
        return link_of(Bucket(f"file://{self.folder}/bucket"))


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serve_s3() as found:
        yield found


class TestS3(TransportContract):
    """A real S3 server."""

    copies = True

    @pytest.fixture(autouse=True)
    def _s3(self, s3: S3, request: pytest.FixtureRequest) -> None:
        self.s3, self.prefix = s3, request.node.name

    def make(self) -> Link:
        return link_of(bucket_of(self.s3, self.prefix))


DATA = bytes(range(256)) * 64


@pytest.fixture(params=["memory", "folder", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, s3: S3) -> Bucket:
    if request.param == "memory":
        return Bucket("memory://here")
    if request.param == "folder":
        return Bucket(f"file://{tmp_path}/bucket")
    return bucket_of(s3, request.node.name)


def test_keys_are_written_once(bucket: Bucket) -> None:
    """The same bytes again are fine, other bytes are refused and change nothing."""
    for _ in range(2):
        bucket.put_new("a/b", [memoryview(b"12"), memoryview(b""), memoryview(b"3")])
    with pytest.raises(PublishError, match="never changes"):
        bucket.put_new("a/b", [memoryview(b"124")])
    assert bucket.read("a/b", size_max=3) == b"123"
    with pytest.raises(FetchError, match="over 2"):
        bucket.read("a/b", size_max=2)


def test_two_writers_one_wins(bucket: Bucket) -> None:
    """Of many that write different bytes under one key at once, exactly one succeeds."""
    outcomes: list[str] = []

    def write(number: int) -> None:
        try:
            bucket.put_new("race", [memoryview(b"%d" % number)])
            outcomes.append("won")
        except PublishError:
            outcomes.append("lost")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(outcomes) == ["lost"] * 7 + ["won"]


def test_large_objects_go_in_parts(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A multipart upload arrives whole, again is a no-op, and another length is refused."""
    monkeypatch.setattr(bucket_module, "MULTIPART_BYTES_MIN", 2**20)
    monkeypatch.setattr(bucket_module, "_PART_BYTES", 5 * 2**20)
    data = memoryview(DATA * 800)  # 13 MB: three parts
    parts = [data[:7], data[7 : 6 * 2**20], data[6 * 2**20 :]]
    for _ in range(2):
        bucket.put_new("v1/objects/ab", parts)
    assert bucket.size_of("v1/objects/ab") == len(data)
    assert bytes(bucket.read_range("v1/objects/ab", 5, len(data))) == data[5:]
    with pytest.raises(PublishError, match="instead of"):
        bucket.put_new("v1/objects/ab", parts[1:])


def test_what_is_gone(bucket: Bucket) -> None:
    """Absent keys are None or errors, as the question has it, and removing them is fine."""
    bucket.put_new("k", [memoryview(b"123")])
    for _ in range(2):
        bucket.remove("k")
    assert bucket.read("k", size_max=9) is None
    assert bucket.size_of("k") is None
    with pytest.raises(FetchError, match="not there"):
        bucket.read_range("k", 0, 1)


def test_hints_are_replaced_and_listed(bucket: Bucket) -> None:
    """A hint may change; a listing tells name and size."""
    bucket.put_hint("hints/a", b"1")
    bucket.put_hint("hints/a", b"22")
    assert [(item.key, item.num_bytes) for item in bucket.list_keys("hints")] == [("hints/a", 2)]


def test_a_bucket_that_is_away_is_an_error_in_time(s3: S3) -> None:
    """A dead endpoint, a bucket that is not there, and a stranger are told apart in words."""
    wanted = ObjectRange(object_id="ab", offset=0, size=4)
    dead = Bucket(
        "s3://weights/x",
        options=BucketOptions(
            config={
                "endpoint": "http://127.0.0.1:9",
                "region": "us-east-1",
                "access_key_id": "a",
                "secret_access_key": "b",
            },
            allow_http=True,
            retries=1,
        ),
    )
    with pytest.raises(PublishError, match="failed writing"):
        dead.put_new("k", [memoryview(b"1")])
    reader = BucketObjectReader(dead, clock=system_clock())
    with pytest.raises(FetchError, match="failed reading") as caught:
        read_object(reader, dead.url, wanted, memoryview(bytearray(4)), timeout_s=5)
    assert caught.value.source == dead.url
    with pytest.raises(FetchError, match="another bucket"):
        read_object(reader, "s3://other/x", wanted, memoryview(bytearray(4)), timeout_s=5)
    with pytest.raises(FetchError, match="no manifest in"):
        reader.source_endpoint("s3://other/x/v1/manifests/a/b")
    reader.close()


@pytest.mark.parametrize("url", ["", "weights", "ftp://x/y", "s3://"])
def test_urls_are_checked(url: str) -> None:
    """What is no bucket is refused before any I/O."""
    with pytest.raises(PreflightError):
        Bucket(url)


def test_a_full_disk_is_an_error(small_disk: Path) -> None:
    """A folder that is full takes nothing half, and the error says what to free."""
    bucket = Bucket(f"file://{small_disk}/bucket")
    with pytest.raises(PublishError, match=r"failed writing k.*remove folders of old versions"):
        bucket.put_new("k", [memoryview(bytes(2 * SMALL_DISK_BYTES))])
    assert bucket.read("k", size_max=9) is None
    bucket.put_new("k", [memoryview(b"1")])
    assert bucket.read("k", size_max=9) == b"1"
