"""The network floor: measured from the machine's own package index, and no verdict without one."""

import gzip
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rental import netfloor
from paceline.rental.acceptance import parse, script
from paceline.rental.model import Offer
from paceline.system import environ
from paceline.testing.fakes.machine import NO_INDEX

SIZE = 4_000_000


def offer(mbps: float, *, dph: float = 1.0, **raw: object) -> Offer:
    return Offer("x", "1", "h100-sxm", 1, 80, dph, 0.99, mbps, 500.0, "", raw)


@pytest.mark.parametrize(
    ("claimed", "wanted", "floor"),
    [
        (offer(1000.0), None, 100.0),
        (offer(300.0), None, 30.0),
        (offer(50_000.0), None, netfloor.AUTO_MBPS_MAX),
        (offer(0.0), None, netfloor.AUTO_MBPS),
        (offer(float("nan")), None, netfloor.AUTO_MBPS),
        (offer(None), None, netfloor.AUTO_MBPS),  # type: ignore[arg-type]  # of others' adapters
        (offer(1e9), None, netfloor.AUTO_MBPS_MAX),
        (offer(1000.0, synthetic=None), None, 100.0),
        (offer(10_000.0, synthetic=("inet_down_mbps",)), None, netfloor.AUTO_MBPS),
        (offer(10_000.0, dph=0.0), None, 0.0),
        (offer(1000.0), 700.0, 700.0),
        (offer(1000.0), 0.0, 0.0),
    ],
)
def test_the_floor_is_a_share_of_the_claim(
    claimed: Offer, wanted: float | None, floor: float
) -> None:
    """Modest where nothing is claimed, bounded where much is; the job file has the last word."""
    assert netfloor.floor_mbps(claimed, wanted) == floor


@given(st.none() | st.floats(0, 1e9), st.text(), st.floats(0, 1e6))
def test_only_a_measurement_speaks_against_a_machine(
    bytes_s: float | None, word: str, floor: float
) -> None:
    """Whatever a machine says instead is no verdict, in words that can be shown."""
    found = netfloor.seen(bytes_s, word)
    against = netfloor.objection(found, floor)
    assert (against is None) == (bytes_s is None or bytes_s * 8 / 1e6 >= floor)
    assert str(found).isprintable()
    assert len(str(found)) < 160


class Index(BaseHTTPRequestHandler):
    """A package index with one wheel, behind a redirect, as mirrors have it."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        Index.asked.append((self.path, self.headers.get("Range", "")))
        if self.path == "/simple/nvidia-cublas-cu12/":
            self.send_response(301)
            self.send_header("Location", "/mirror/nvidia-cublas-cu12/")
            self.end_headers()
        elif self.path == "/mirror/nvidia-cublas-cu12/":
            links = ("../../f/a-1.tar.gz", "../../f/a-2.whl?k=1&amp;l=2#sha256=0")
            self._answer("".join(f"<a href='{link}'>a</a>" for link in links).encode())
        elif self.path == "/f/a-2.whl?k=1&l=2":
            self._answer(b"x" * SIZE)
        else:
            self.send_error(404)

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_args: object) -> None:
        """Say nothing."""


@pytest.fixture
def index() -> Iterator[str]:
    Index.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def measured(tmp_path: Path, url: str, *, timeout_s: int = 60) -> tuple[str, str]:
    """Run the whole check here, with pip set to an index; return its report and what it knows."""
    subprocess.run(
        ["/bin/sh", "-c", script("check", has_net=True, net_timeout_s=timeout_s)],
        cwd=tmp_path,
        env={
            "PATH": f"{Path(sys.executable).parent}:{environ()['PATH']}",
            "PIP_INDEX_URL": url,
            "HOME": str(tmp_path),
        },
        check=True,
        timeout=120,
    )
    text = (tmp_path / "check" / "report").read_text()
    return text, str(parse(text).net)


def test_the_index_of_pip_on_the_machine_is_measured(tmp_path: Path, index: str) -> None:
    """By ranges of a wheel of it, beside the other checks; no address is in the report."""
    text, said = measured(tmp_path, f"{index}/simple")
    assert parse(text).is_whole
    assert said.endswith("Mbit/s"), text
    assert "127.0.0.1" not in text
    ranges = {found for path, found in Index.asked if path.startswith("/f/")}
    assert "bytes=0-16777215" in ranges


@pytest.mark.parametrize("where", [NO_INDEX, "{index}/nothing", "file:///srv/wheels"])
def test_an_index_that_does_not_answer_is_no_verdict(
    tmp_path: Path, index: str, where: str
) -> None:
    """Refused, without the package, not of the web: said, and nothing is held against it."""
    text, said = measured(tmp_path, where.format(index=index))
    report = parse(text)
    assert report.is_whole
    assert said.startswith("network not measured: ")
    assert netfloor.objection(report.net, 1e9) is None


class Oddity(BaseHTTPRequestHandler):
    """Where pip fetches something, and what is there is not what it should be."""

    protocol_version = "HTTP/1.1"
    stop: ClassVar[Event] = Event()

    def do_GET(self) -> None:
        kind, _, rest = self.path.removeprefix("/").partition("/")
        if rest.endswith(".whl") or kind == "page":
            self._say(b"<html>please log in</html>" if kind == "portal" else b"x" * 200_000)
        elif kind == "gzip":
            self._say(gzip.compress(b"<a href='a.whl'>"), ("Content-Encoding", "gzip"))
        elif kind == "elsewhere":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif kind == "large":
            self._say(b"<a href='b.tar.gz'>" * 600_000)
        elif kind in ("hangs", "endless"):
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            while not Oddity.stop.wait(0.05):
                self.wfile.write(b"<" if kind == "endless" else b"")
        else:
            self._say(b"<a href='a.whl'>")

    def _say(self, content: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(200)
        for name, value in (("Content-Length", str(len(content))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_args: object) -> None:
        """Say nothing."""

    def handle(self) -> None:
        """Take it that whoever asked may be gone."""
        with suppress(OSError):
            super().handle()


@pytest.fixture(scope="module")
def oddity() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Oddity)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Oddity.stop.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("portal", "too little came to tell, "),
        ("elsewhere", "the index of pip there does not answer"),
        pytest.param("gzip", "the index of pip there does", marks=pytest.mark.slow),
        pytest.param("large", "the index of pip there does", marks=pytest.mark.slow),
        pytest.param("small", "too little came to tell, 800000", marks=pytest.mark.slow),
        pytest.param("hangs", "not measured", marks=pytest.mark.slow),
        pytest.param("endless", "not measured", marks=pytest.mark.slow),
    ],
)
def test_an_odd_index_is_no_verdict(tmp_path: Path, oddity: str, kind: str, why: str) -> None:
    """A login page, a file of a few bytes, a body without end: none says that a line is slow."""
    lasts = kind in ("hangs", "endless")
    text, said = measured(tmp_path, f"{oddity}/{kind}", timeout_s=2 if lasts else 60)
    assert why in said, text
    assert parse(text).is_whole
    assert netfloor.objection(parse(text).net, 1e9) is None
