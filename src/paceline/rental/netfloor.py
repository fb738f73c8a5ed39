"""How fast a fresh machine must download, how that is measured there, and what it means. Pure.

Paceline has no server of its own to measure against and names none. A machine measures what it has
to fetch from anyway: the package index that pip there is set to, whatever that is, and a file of
it that GPU machines need. It costs less than three seconds, beside the other checks. An index
that does not answer is no verdict: the machine may have no way out, and no need of one.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.rental.model import Offer

CLAIM_SHARE: Final = 0.1
"""Of what an offer claims must be seen."""
AUTO_MBPS_MAX: Final = 200.0
"""What is asked at most of four connections to one server, however fast the line is said to be."""
AUTO_MBPS: Final = 50.0
"""Where nothing is claimed: 3 GB of packages in eight minutes."""

PROBE_TIMEOUT_S: Final = 3
_WHY_CHARS_MAX = 100
_PROBE: Final = r"""
import html, re, subprocess, sys, threading, time
from urllib.parse import urljoin, urlsplit
from urllib.request import Request, urlopen

BEGUN_S, PACKAGES, PIECE = time.monotonic(), ("nvidia-cublas-cu12", "numpy"), 16 << 20
ENOUGH, SPAN_S = 1 << 20, 0.3
BUDGET_S = 0.9 * float(sys.argv[1])
total, first_s, lock = 0, None, threading.Lock()

def end(text):
    print(text, flush=True)
    raise SystemExit

def left_s():
    return max(0.05, BUDGET_S - (time.monotonic() - BEGUN_S))

def index():
    argv = [sys.executable, "-m", "pip", "install", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=left_s())
    text = done.stdout.partition("--index-url")[2]
    found = re.search(r"\(default:?\s+(https?://[^\s)]+)\)", text)
    return found.group(1) if found else end("net=untested: pip there names no index")

def wheel(base):
    for name in PACKAGES:
        page = urljoin(base.rstrip("/") + "/", name + "/")
        try:
            asked = Request(page, headers={"Accept": "text/html"})
            with urlopen(asked, timeout=left_s()) as answer:
                text = answer.read(4 << 20).decode("utf-8", "replace")
                page = answer.geturl()
        except OSError:
            continue
        links = re.findall(r"href=[\"']([^\"'#]+[.]whl[^\"'#]*)", text)
        if links:
            return urljoin(page, html.unescape(links[-1]))
    end("net=untested: the index of pip there does not answer")

def load(url, place):
    global total, first_s
    try:
        span = "bytes=%d-%d" % (place * PIECE, (place + 1) * PIECE - 1)
        with urlopen(Request(url, headers={"Range": span}), timeout=left_s()) as answer:
            while True:
                got = len(answer.read1(65536))
                if not got:
                    return
                with lock:
                    first_s = first_s or time.monotonic()
                    total += got
    except (OSError, ValueError):
        return

try:
    url = sys.argv[2] if len(sys.argv) > 2 else wheel(index())
    if urlsplit(url).scheme not in ("http", "https"):
        end("net=untested: the index of pip there is none of the web")
    begun_s = time.monotonic()
    threads = [threading.Thread(target=load, args=(url, place), daemon=True) for place in range(4)]
    for thread in threads:
        thread.start()
    until_s = begun_s + min(0.45 * BUDGET_S, left_s())
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    with lock:
        if not total:
            end("net=untested: nothing came from where pip there fetches")
        span_s = time.monotonic() - first_s
        if total < ENOUGH and not any(thread.is_alive() for thread in threads):
            end("net=untested: too little came to tell, %d bytes" % total)
        if total < ENOUGH and span_s < SPAN_S:
            end("net=untested: it came too late to tell")
        end("net_bytes_s=%d" % (total / max(1e-3, span_s)))
except (OSError, ValueError, subprocess.TimeoutExpired):
    end("net=untested: pip there does not answer")
"""
"""Python's standard library and the machine's own pip; prints one line, without any address."""

_BEGIN: Final = r"""
if [ -n "$python" ]; then
  timeout -k 1 {timeout_s} "$python" - {timeout_s} {url} \
    >{folder}/net 2>/dev/null <<'PACELINE_NET' &
{probe}
PACELINE_NET
else
  echo 'net=untested: there is no Python' >{folder}/net
fi
"""
_END: Final = r"""
wait
cat {folder}/net
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a machine measured."""

    mbps: float | None
    why_not: str = ""
    """Where nothing was measured."""

    def __str__(self) -> str:
        return self.why_not if self.mbps is None else f"{self.mbps:.0f} Mbit/s"


UNSEEN: Final = Seen(mbps=None, why_not="network not measured")


def begin(folder: str, *, url: str = "", timeout_s: int = PROBE_TIMEOUT_S) -> str:
    """Return the lines of a shell script that begin to measure; ``$python`` is set before."""
    quoted = shlex.quote(url) if url else ""
    return _BEGIN.format(folder=folder, url=quoted, probe=_PROBE.strip(), timeout_s=timeout_s)


def end(folder: str) -> str:
    """Return the lines that wait for the measurement and print it."""
    return _END.format(folder=folder)


def seen(bytes_s: float | None, word: str) -> Seen:
    """Return what a report says of the network."""
    if bytes_s is not None:
        return Seen(mbps=bytes_s * 8 / 1e6)
    why = "".join(filter(str.isprintable, word.removeprefix("untested: ")))[:_WHY_CHARS_MAX]
    why = why or f"no answer within {PROBE_TIMEOUT_S} s"
    return Seen(mbps=None, why_not=f"network not measured: {why}")


def floor_mbps(offer: Offer, wanted: float | None) -> float:
    """Return what a machine must reach; ``wanted`` None: by what its offer claims. Zero: nothing.

    What a backend itself made up for its offers is no claim; what costs nothing is somebody's own,
    and is not sent back for a slow line.
    """
    if wanted is not None:
        return wanted
    if offer.dph <= 0:
        return 0.0
    raw: Mapping[str, Any] = offer.raw
    made_up = raw.get("synthetic") or ()
    if "inet_down_mbps" in made_up or not (offer.inet_down_mbps or 0.0) > 0.0:  # NaN, too
        return AUTO_MBPS
    return min(AUTO_MBPS_MAX, CLAIM_SHARE * offer.inet_down_mbps)


def objection(found: Seen, floor: float) -> str | None:
    """Return why a machine is too slow; None where it is not, or where nobody can say."""
    if found.mbps is None or found.mbps >= floor:
        return None
    return f"downloads at {found.mbps:.0f} Mbit/s, {floor:.0f} are needed"
