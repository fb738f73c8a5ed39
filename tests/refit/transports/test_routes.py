"""A shorter way is taken while it works, and forgotten for one try when it does not."""

import json
import socket
from pathlib import Path

import pytest

from paceline.refit.model import ObjectRange
from paceline.refit.transports.http.reader import HttpObjectReader, HttpReaderOptions
from paceline.refit.transports.http.server import HttpObjectServer
from paceline.refit.transports.protocol import read_object
from paceline.refit.transports.routes import Routes
from paceline.system import chance, system_clock
from paceline.testing.fakes.published import PublishedPort

pytestmark = pytest.mark.enable_socket


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    "text", ["", "[]", '{"127.0.0.1:1": 7}', "{", "\xff", '{"127.0.0.1:2": "a:1"}']
)
def test_what_is_no_table_says_nothing(tmp_path: Path, text: str) -> None:
    """An address without a way is itself, whatever is in the file, or if there is none."""
    file = tmp_path / "routes.json"
    assert Routes(file).of("http://127.0.0.1:1") == "http://127.0.0.1:1"
    file.write_text(text, encoding="latin-1")
    assert Routes(file).of("http://127.0.0.1:1") == "http://127.0.0.1:1"
    assert Routes().of("https://h:1/x") == "https://h:1/x"


def test_scheme_and_path_stay(tmp_path: Path) -> None:
    """Only where is dialled changes; addresses may have colons."""
    file = tmp_path / "routes.json"
    file.write_text(json.dumps({"127.0.0.1:20001": "[2001:db8::1]:40001"}))
    found = Routes(file).of("https://127.0.0.1:20001/v1/objects/o")
    assert found == "https://[2001:db8::1]:40001/v1/objects/o"


def test_a_reader_takes_the_shorter_way_and_the_long_one_when_it_is_gone(tmp_path: Path) -> None:
    """The table is read anew for each connection."""
    server = HttpObjectServer(token=lambda: "t")
    port = int(server.endpoint.rpartition(":")[2])
    shorter = PublishedPort(("127.0.0.1", port))
    file = tmp_path / "routes.json"
    server.serve_object("o", [memoryview(b"bytes")])
    try:
        for way, num_short in ((shorter.port, 1), (closed_port(), 1)):
            file.write_text(json.dumps({f"127.0.0.1:{port}": f"127.0.0.1:{way}"}))
            reader = HttpObjectReader(
                token=lambda: "t",
                clock=system_clock(),
                chance=chance,
                options=HttpReaderOptions(routes=Routes(file)),
            )
            into = bytearray(5)
            wanted = ObjectRange(object_id="o", offset=0, size=5)
            read_object(reader, server.endpoint, wanted, memoryview(into), timeout_s=10.0)
            assert bytes(into) == b"bytes"
            assert shorter.num_connections == num_short
            reader.close()
    finally:
        shorter.close()
        server.close()
