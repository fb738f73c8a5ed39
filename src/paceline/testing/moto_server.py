"""A real S3 server on loopback, for tests and benchmarks: moto's, in this process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ACCESS_KEY, SECRET_KEY, REGION = "testing", "testing-too", "us-east-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3:
    """Where it is."""

    endpoint: str
    name: str
    """Of its one bucket."""

    def url(self, prefix: str = "") -> str:
        """Return the URL of a prefix of its bucket."""
        return f"s3://{self.name}/{prefix}".rstrip("/")

    @property
    def config(self) -> dict[str, str]:
        """How to get in, in obstore's words."""
        return {
            "endpoint": self.endpoint,
            "region": REGION,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
        }


@contextmanager
def serve_s3(name: str = "weights", *, host: str = "127.0.0.1") -> Iterator[S3]:
    """Serve S3 with one empty bucket while entered."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=host, port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        ).create_bucket(Bucket=name)
        yield S3(endpoint=endpoint, name=name)
    finally:
        server.stop()
