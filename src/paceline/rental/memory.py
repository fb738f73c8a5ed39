"""What is remembered of hosts and what is passed over, in the store; for every later run too."""

from collections.abc import Callable
from urllib.parse import quote

from paceline.core.errors import PacelineError
from paceline.rental.failover import Block, FailureKind, Scope, bad_place, block_for
from paceline.rental.hosts import (
    HostRecord,
    Outcome,
    host_name,
    parse_block,
    parse_host,
    render_block,
    render_host,
)
from paceline.rental.model import Offer
from paceline.rental.records import Machine, offer_of
from paceline.store.protocol import ABSENT, ConflictError, Store

_HOSTS = "host/"
_BLOCKS = "block/"
_NUM_WRITES_MAX = 20


class HostMemory:
    """Outcomes by host, and blocks with an expiry; several threads and processes may use it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def hosts(self) -> dict[tuple[str, str], HostRecord]:
        """Return what is remembered, by backend and host."""
        found = [parse_host(record.value) for record in self._store.list(_HOSTS)]
        return {(one.backend, one.host): one for one in found}

    def blocks(self, *, now_s: float) -> list[Block]:
        """Return what is passed over now."""
        found = [parse_block(record.value) for record in self._store.list(_BLOCKS)]
        return [block for block in found if now_s < block.until_s]

    def remember_use(self, offer: Offer, *, now_s: float, boot_s: float) -> None:
        """Put on record that a machine became usable."""
        self._add(offer, Outcome(at_s=now_s, failure=None, boot_s=boot_s))

    def remember_failure(
        self, offer: Offer, kind: FailureKind, *, reason: str, now_s: float
    ) -> None:
        """Put on record what went wrong with an offer, and pass over what that speaks against."""
        new = block_for(kind, offer, reason=reason, now_s=now_s)
        if new.scope in (Scope.HOST, Scope.OFFER):
            self._add(offer, Outcome(at_s=now_s, failure=kind, reason=reason))
        if new.until_s > now_s:
            place = bad_place(self.blocks(now_s=now_s), new, now_s=now_s)
            for block in filter(None, (new, place)):
                self.block(block)

    def remember_death(
        self, machine: Machine, kind: FailureKind, *, reason: str, now_s: float
    ) -> None:
        """Put on record that a machine in use was lost with its host."""
        self.remember_failure(offer_of(machine), kind, reason=reason, now_s=now_s)

    def block(self, block: Block) -> None:
        """Pass something over until its time has come; the later of two times stands."""

        def longer(old: bytes | None) -> bytes | None:
            is_shorter = old is not None and parse_block(old).until_s >= block.until_s
            return old if is_shorter else render_block(block)

        self._change(_block_key(block.scope, block.backend, block.name), longer)

    def forget(self, *, backend: str | None = None, host: str | None = None) -> int:
        """Forget a host, a backend, or everything, and what is passed over for it; return how much.

        Reads keys alone, so that what cannot be parsed can be forgotten.
        """
        ending = "" if host is None else f"/{quote(host, safe='')}"
        prefixes = [f"{_HOSTS}{_part(backend)}"]
        prefixes += [f"{_BLOCKS}{scope}/{_part(backend)}" for scope in Scope]
        keys = [
            record.key
            for prefix in prefixes
            for record in self._store.list(prefix)
            if record.key.endswith(ending)
        ]
        if keys:
            self._store.commit(expect={}, writes=dict.fromkeys(keys))
        return len(keys)

    def _add(self, offer: Offer, outcome: Outcome) -> None:
        host = host_name(offer)
        empty = HostRecord(backend=offer.backend, host=host)

        def longer(old: bytes | None) -> bytes:
            record = empty if old is None else parse_host(old)
            return render_host(record.with_outcome(outcome))

        self._change(f"{_HOSTS}{_part(offer.backend)}{quote(host, safe='')}", longer)

    def _change(self, key: str, change: Callable[[bytes | None], bytes | None]) -> None:
        for _ in range(_NUM_WRITES_MAX):
            record = self._store.get(key)
            revision = ABSENT if record is None else record.revision
            new = change(None if record is None else record.value)
            try:
                self._store.commit(expect={key: revision}, writes={key: new})
            except ConflictError:
                continue
            return
        raise PacelineError(f"the record {key} changes too fast to be written; try again")


def _block_key(scope: Scope, backend: str, name: str) -> str:
    return f"{_BLOCKS}{scope}/{_part(backend)}{quote(name, safe='')}"


def _part(backend: str | None) -> str:
    return "" if backend is None else f"{quote(backend, safe='')}/"
