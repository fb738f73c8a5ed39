"""The canonical format: what a stock ModelExpress reads and writes, and nothing worse."""

import json
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as safetensors_load

from paceline.refit.delta import canonical
from paceline.refit.delta.canonical import CanonicalTensor, FullTensor
from paceline.refit.errors import ParseError, ParseReason
from paceline.testing.corpus import Case, corpus

PEER = Path(__file__).parents[2] / ".venv-peer" / "bin" / "python"
CASES = [case for case in corpus() if case.base != case.new]


def applied(item: CanonicalTensor, base: bytes) -> bytes:
    return b"".join(bytes(update.new) for update in canonical.decode_canonical(item, base))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_corpus_round_trip(case: Case) -> None:
    """Each corpus case goes through frame, shard and index and comes out bit for bit."""
    item = canonical.encode_canonical(case.base, case.new)
    assert item is not None
    shard = canonical.render_delta_shard({"w": item})
    back = canonical.parse_delta_shard(memoryview(shard), ["w"])
    assert applied(back["w"], case.base) == case.new
    assert bytes(safetensors_load(shard)["w"]) == bytes(item.frame)


def test_equal_tensors_are_left_out() -> None:
    """What does not change is not in the format."""
    assert canonical.encode_canonical(b"abc", b"abc") is None


def test_names_are_as_the_peers() -> None:
    """Deltas count shards from 0, full versions from 1; indexes are canonical JSON."""
    assert canonical.delta_shard_name(0, 3) == "model-00000-of-00003.safetensors"
    assert canonical.full_shard_name(0, 3) == "model-00001-of-00003.safetensors"
    assert canonical.render_delta_index({"w": "x.safetensors"}, version="v", base_version="b") == (
        b'{"metadata":{"base_version":"b","checksum_format":"adler32","compression_format":"zstd",'
        b'"delta_encoding":"xor","version":"v"},"weight_map":{"w":"x.safetensors"}}'
    )


@given(st.dictionaries(st.text(min_size=1, max_size=9), st.binary(max_size=40), max_size=4))
def test_full_round_trip(tensors: dict[str, bytes]) -> None:
    """Whole tensors with any names come back; a flipped content byte is refused."""
    tensors.pop("__metadata__", None)
    rows = {
        name: FullTensor(dtype="U8", shape=(len(data),), data=data)
        for name, data in tensors.items()
    }
    shard = canonical.render_full_shard(rows)
    back = canonical.parse_full_shard(memoryview(shard), tensors)
    assert {name: bytes(item.data) for name, item in back.items()} == tensors
    if any(tensors.values()):
        damaged = bytearray(shard)
        damaged[-1] ^= 1
        with pytest.raises(ParseError):
            canonical.parse_full_shard(memoryview(damaged), tensors)


def test_another_base_is_found_out() -> None:
    """The checksum is of the result, so a wrong base is refused before it is written."""
    item = canonical.encode_canonical(bytes(100), bytes(99) + b"\1")
    assert item is not None
    with pytest.raises(ParseError) as refused:
        applied(item, b"\1" + bytes(99))
    assert refused.value.reason is ParseReason.DIGEST_MISMATCH


def shard_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ROW = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
SUM = {"__metadata__": {"w": "00000001"}}
HOSTILE = {
    "short": b"abc",
    "header beyond the file": struct.pack("<Q", 99) + b"{}",
    "header beyond all reason": struct.pack("<Q", 2**63) + b"{}",
    "not JSON": shard_of(b"{"),
    "not UTF-8": shard_of(b'{"\xff":1}'),
    "a list": shard_of([]),
    "key twice": shard_of(b'{"w":1,"w":2}'),
    "row is a number": shard_of({**SUM, "w": 1}),
    "row with more": shard_of({**SUM, "w": {**ROW, "x": 1}}, b"ab"),
    "shape and offsets differ": shard_of({**SUM, "w": {**ROW, "shape": [3]}}, b"ab"),
    "negative": shard_of({**SUM, "w": {**ROW, "data_offsets": [-2, 0]}}, b"ab"),
    "hole": shard_of({**SUM, "w": {**ROW, "data_offsets": [1, 3]}}, b"abc"),
    "overlap": shard_of({**SUM, "w": ROW, "v": ROW}, b"ab"),
    "data missing": shard_of({**SUM, "w": ROW}, b"a"),
    "trailing": shard_of({**SUM, "w": ROW}, b"abc"),
    "no checksum": shard_of({"w": ROW}, b"ab"),
    "checksum of another kind": shard_of({"__metadata__": {"w": "1"}, "w": ROW}, b"ab"),
    "another dtype": shard_of({**SUM, "w": {**ROW, "dtype": "BF16", "shape": [1]}}, b"ab"),
    "two dimensions": shard_of({**SUM, "w": {**ROW, "shape": [1, 2]}}, b"ab"),
    "another name": shard_of({"__metadata__": {"x": "00000001"}, "x": ROW}, b"ab"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_shards(name: str) -> None:
    """Each way a shard can lie is refused."""
    with pytest.raises(ParseError):
        canonical.parse_delta_shard(memoryview(HOSTILE[name]), ["w"])


@pytest.mark.parametrize("shard", ["../x.safetensors", "a/b.safetensors", "x.bin", "", 3, None])
def test_shard_names_stay_in_their_folder(shard: object) -> None:
    """A weight map names plain .safetensors files only."""
    index = json.dumps({"metadata": {}, "weight_map": {"w": shard}}).encode()
    with pytest.raises(ParseError):
        canonical.parse_full_index(index)


def test_indexes_are_of_their_version() -> None:
    """Every one of the five values of a delta's metadata is compared."""
    good = canonical.render_delta_index({}, version="v", base_version="b")
    assert canonical.parse_delta_index(good, version="v", base_version="b") == {}
    metadata = json.loads(good)["metadata"]
    for key in metadata:
        bad = json.dumps({"metadata": {**metadata, key: "x"}, "weight_map": {}}).encode()
        with pytest.raises(ParseError):
            canonical.parse_delta_index(bad, version="v", base_version="b")
    with pytest.raises(ParseError):
        canonical.parse_full_index(b'{"weight_map":{}}')
    assert canonical.parse_full_index(b'{"weight_map":{"w":"a.safetensors"}}')
    with pytest.raises(ParseError):
        canonical.parse_full_index(
            b'{"metadata":{"checksum_format":"md5"},"weight_map":{"w":"a.safetensors"}}'
        )


PEER_SCRIPT = """
import sys
from pathlib import Path
import numpy as np, safetensors.numpy
from modelexpress_rl.inference import receiver
from modelexpress_rl.utils import checksum_factory, compress_delta, compute_delta
from modelexpress_rl.utils import index_checkpoint_tensors

folder = Path(sys.argv[1])
paths, locations, metadata = index_checkpoint_tensors(folder / "checkpoint")
version = receiver._S3Version("v1", "v0", None, "s3://x/y")
index, weight_map = receiver._parse_index_manifest(
    (folder / "ours" / "index.json").read_bytes(), is_delta=True, version=version)
class Local: pass
local = Local(); local.locations = locations
shards = {file: ((folder / "ours" / file).read_bytes(), names)
          for file, names in receiver._group_tensors_by_shard(weight_map).items()}
receiver._LocalCheckpoint._apply_shards(local, shards, index_metadata=index)

new = safetensors.numpy.load_file(folder / "checkpoint" / "model.safetensors")
frames, sums = {}, {}
for name, words in np.load(folder / "third.npz").items():
    delta, _ = compute_delta(words.view(np.uint8).reshape(-1), new[name].view(np.uint8).reshape(-1))
    if delta is not None:
        frames[name] = compress_delta(delta)
        checksum = checksum_factory("adler32")
        checksum.update(words)
        sums[name] = checksum.hexdigest()
(folder / "theirs.safetensors").write_bytes(safetensors.numpy.save(frames, metadata=sums))
"""


def test_exchange_with_the_peer(tmp_path: Path) -> None:
    """A stock receiver applies what we write, bit for bit, and we apply what it would write."""
    if not PEER.exists():
        pytest.skip("needs the peer; run: make peer")
    random = np.random.default_rng(3)
    states = [
        {name: random.integers(0, 2**16, 5000, dtype=np.uint16) for name in ("a", "b", "c")}
        for _ in range(3)
    ]
    states[1]["b"] = states[0]["b"].copy()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    rows = [
        {
            name: FullTensor(dtype="U16", shape=words.shape, data=words.tobytes())
            for name, words in state.items()
        }
        for state in states
    ]
    (folder / "model.safetensors").write_bytes(canonical.render_full_shard(rows[0]))
    frames = {
        name: canonical.encode_canonical(rows[0][name].data, rows[1][name].data) for name in rows[0]
    }
    changed = {name: item for name, item in frames.items() if item is not None}
    assert sorted(changed) == ["a", "c"]
    file = canonical.delta_shard_name(0, 1)
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / file).write_bytes(canonical.render_delta_shard(changed))
    index = canonical.render_delta_index(
        dict.fromkeys(changed, file), version="v1", base_version="v0"
    )
    (ours / "index.json").write_bytes(index)
    np.savez(tmp_path / "third.npz", **states[2])  # type: ignore[arg-type, unused-ignore]
    subprocess.run([PEER, "-c", PEER_SCRIPT, tmp_path], check=True, timeout=100)
    installed = safetensors_load((folder / "model.safetensors").read_bytes())
    assert all(np.array_equal(installed[name], words) for name, words in states[1].items())
    theirs = (tmp_path / "theirs.safetensors").read_bytes()
    for name, item in canonical.parse_delta_shard(memoryview(theirs), ["a", "b", "c"]).items():
        assert applied(item, states[1][name].tobytes()) == states[2][name].tobytes()
