"""All weights of one worker: the mirror, the models that follow it, and what is known of both."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from paceline.refit.apply import StagedInstall, check_live, write_install
from paceline.refit.delta.codec import Tools
from paceline.refit.errors import ApplyError, RefitError, UncertainStateError, VerifyError
from paceline.refit.generators.protocol import InstalledVersion
from paceline.refit.generators.vllm.mirror import Changes, MemoryJournal, allocate, changes_of
from paceline.refit.generators.vllm.part import ModelPart
from paceline.refit.manifest.v1 import Manifest
from paceline.refit.model import TensorBuffer, TensorEntry

DRAFT = "draft."
"""Tensors of a version whose names begin so belong to the draft model."""


class WorkerWeights:
    """What one worker serves. Only ``bind`` may run beside a forward pass."""

    def __init__(self, parts: Mapping[str, ModelPart], *, tools: Tools) -> None:
        """Take the models, by the prefix of their tensors' names; "" is the model itself."""
        self._parts = dict(parts)
        self._tools = tools
        self._buffers: dict[str, TensorBuffer] = {}
        self._aliases: dict[str, str] = {}
        self._entries: dict[str, TensorEntry] | None = None
        self._journal: MemoryJournal | None = None
        self._before: dict[str, TensorEntry] | None = None
        self._root = self._root_before = ""
        """Root digests of the versions that these are of."""

    @property
    def base(self) -> Mapping[str, TensorEntry] | None:
        """What is live: the base of the next delta; None while that is not known."""
        return self._entries

    def ways(self) -> Mapping[str, str]:
        """Return how each parameter is reached: for people."""
        return {
            prefix + name: way
            for prefix, part in self._parts.items()
            for name, way in part.ways.items()
        }

    def bind(self, manifest: Manifest) -> None:
        """Make the mirror for the first version that comes.

        Raises:
            VerifyError: the version is not of this model; nothing was allocated.
        """
        if self._entries is not None:
            return
        entries = {entry.name: entry for entry in manifest.tensors}
        for prefix, part in self._parts.items():
            own = _own(entries, prefix)
            part.bind([replace(entries[whole], name=name) for name, whole in own.items()])
        self._buffers = {name: allocate(entry) for name, entry in entries.items()}
        self._aliases = dict(manifest.aliases)

    def live_tensors(self) -> Mapping[str, TensorBuffer]:
        """Return the mirror."""
        return self._buffers

    def tensor_aliases(self) -> Mapping[str, str]:
        """Return further names of tensors."""
        return self._aliases

    def at_safe_point(
        self, write: Callable[[], None], *, installed: InstalledVersion | None, timeout_s: float
    ) -> float:
        """Refuse: vLLM's calls alone write, see ``apply``."""
        del write, installed, timeout_s
        raise RefitError("a worker's weights are written by update_weights")

    def installed(self) -> InstalledVersion | None:
        """Return nothing: what is served is known to whoever drives the worker."""
        return None

    def apply(self, staged: StagedInstall, *, root: str) -> None:
        """Make a staged version live, whose root digest is ``root``, or leave what was.

        Raises:
            ApplyError: it failed and was undone.
            UncertainStateError: nobody knows what is live.
        """
        entries = {entry.key: entry for entry in staged.entries}
        if self._entries is None:
            self._load_first(staged)
        else:
            journal = MemoryJournal()
            write_install(staged, tools=self._tools, journal=journal)
            self._journal, self._before = journal, self._entries
            self._root_before = self._root
            try:
                self._push(changes_of(staged))
            except BaseException as exc:  # also when interrupted: never half of it
                self.undo()
                raise ApplyError(f"the engine did not take the version, undone: {exc}") from exc
        self._entries, self._root = entries, staged.root_digest
        if staged.root_digest != root:
            self.disown()
            raise UncertainStateError(f"what is live is not {root}; install a full version")

    def undo(self) -> bool:
        """Take the last ``apply`` back, if it has not been settled; False if there is none.

        Raises:
            UncertainStateError: it could not be taken back.
        """
        journal, self._journal = self._journal, None
        if journal is None:
            return False
        try:
            journal.restore(self._buffers)
            self._push(journal.changes())
        except BaseException as exc:
            self.disown()
            raise UncertainStateError(f"the version before could not be put back: {exc}") from exc
        self._entries, self._root = self._before, self._root_before
        return True

    def settle(self) -> None:
        """Forget what the last ``apply`` overwrote."""
        self._journal, self._before = None, None

    def disown(self) -> None:
        """Treat what is live as unknown: only a full version goes in next."""
        self._entries = None

    def prove(self) -> str:
        """Hash the mirror and return the root digest of what is live.

        Raises:
            VerifyError: it is not what it should be.
        """
        entries = self._entries
        if entries is None:
            raise VerifyError("nothing is installed")
        check_live(self._buffers, entries.values())
        return self._root

    def _load_first(self, staged: StagedInstall) -> None:
        """Load by the engine's own means, and find out which parameters can be written directly."""
        try:
            write_install(staged, tools=self._tools)
            for prefix, part in self._parts.items():
                part.load_whole(self._of(prefix))
                adopted = part.adopt(self._of(prefix))
                for name, buffer in adopted.items():
                    self._buffers[prefix + name] = buffer
        except Exception as exc:
            self.disown()
            raise UncertainStateError(f"the first version did not go in: {exc}") from exc

    def _push(self, changes: Changes) -> None:
        for prefix, part in self._parts.items():
            own = {name: changes[whole] for name, whole in _own(changes, prefix).items()}
            if own:
                part.push(own, self._of(prefix))

    def _of(self, prefix: str) -> Mapping[str, TensorBuffer]:
        return {name: self._buffers[whole] for name, whole in _own(self._buffers, prefix).items()}


def _own(names: Iterable[str], prefix: str) -> dict[str, str]:
    """Return name inside a part -> whole name, of the tensors that belong to it.

    An engine without a draft model keeps the draft's tensors in the mirror, and uses them for
    nothing: the version stays whole.
    """
    return {
        name.removeprefix(prefix): name
        for name in names
        if (DRAFT if name.startswith(DRAFT) else "") == prefix
    }
