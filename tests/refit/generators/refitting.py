"""A run with a real model: states of it, a trainer that publishes them, engines that follow.

Everything is the real thing but the machines between: the ledger, the receiver, the transformers
engine, and bytes that go through memory.
"""

import itertools
from pathlib import Path
from typing import Any

import torch

from paceline.refit.control.ledger import ControlLedger
from paceline.refit.generators.protocol import EngineConfig, Generation, Sampling
from paceline.refit.generators.transformers.engine import TransformersEngine
from paceline.refit.generators.transformers.sets import Models, WeightSets, view_named
from paceline.refit.manifest.parse import parse_manifest
from paceline.refit.model import TensorBuffer
from paceline.refit.receiver.loop import Receiver, ReceiverConfig
from paceline.refit.receiver.policy import UpdatePolicy
from paceline.refit.receiver.updating import UpdateGate
from paceline.refit.transports.memory import MemoryObjectReader, MemoryObjectServer
from paceline.store.memory import MemoryStore
from paceline.system import system_clock
from paceline.testing.fakes.trainer import FakeTrainer, State
from paceline.testing.tiny_model import tiny_model

MODEL_NAME = "m"


class Model:
    """A model whose weights take steps; what it is at each step can be published and built anew."""

    def __init__(self, model_dir: Path, *, seed: int = 1, names: str = "memory") -> None:
        """Begin at step 0 with weights that the seed decides."""
        self._names = names
        self.model_dir = model_dir
        self.module = tiny_model(model_dir, seed=seed)
        self._random = torch.Generator().manual_seed(seed)
        self.aliases = tuple(sorted(view_named(self.module, names).aliases.items()))

    def step(self, *, share: float = 0.02) -> None:
        """Change a share of every parameter, loud enough for other tokens."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                flat = parameter.view(-1)
                picked = torch.rand(flat.shape, generator=self._random) < share
                noise = torch.randn(flat.shape, generator=self._random)
                flat[picked] += 0.3 * noise[picked].to(flat.dtype)

    def state(self) -> State:
        """Return a copy of the bytes."""
        return {
            name: TensorBuffer(
                name=name, dtype=each.dtype, shape=each.shape, data=memoryview(bytes(each.data))
            )
            for name, each in view_named(self.module, self._names).buffers.items()
        }

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Continue by the library's own loop, on weights loaded anew: the judge."""
        fresh = tiny_model(self.model_dir, seed=0)
        fresh.load_state_dict(self.module.state_dict())
        ids = torch.tensor([prompt])
        out = fresh.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
        )
        return [int(token_id) for token_id in out[0, len(prompt) :]]


class Follower:
    """An engine behind its gate and the receiver that keeps it up to date."""

    def __init__(
        self,
        run: "MemoryRun",
        worker_id: str,
        *,
        policy: UpdatePolicy = UpdatePolicy.IMMEDIATE,
        reproducible: bool = True,
        **options: Any,
    ) -> None:
        """Join the run, with options of EngineConfig; nothing is installed before ``step``."""
        clock = system_clock()
        config = EngineConfig(model_dir=run.model.model_dir, reproducible=reproducible, **options)
        self.engine = TransformersEngine(config, clock=clock, new_seed=lambda: 7)
        self.gate = UpdateGate(self.engine, policy=policy, drain_s=30, clock=clock)
        self.receiver = Receiver(
            ReceiverConfig(worker_id=worker_id, model_name=MODEL_NAME, run_id="r", endpoint="x"),
            control=run.ledger,
            engine=self.gate,
            reader=MemoryObjectReader(),
            clock=clock,
            chance=lambda: 0.0,
        )

    @property
    def models(self) -> Models:
        """The models whose weights are live."""
        sets = self.engine._sets
        assert isinstance(sets, WeightSets)
        return sets._sets[0].models

    def settle(self) -> None:
        """Install whatever there is."""
        while self.receiver.step():
            pass

    def generate(self, prompt: list[int], sampling: Sampling) -> Generation:
        """Return the finished generation."""
        return self.gate.submit(prompt, sampling).result(60)

    def close(self) -> None:
        """End the engine."""
        self.gate.close(timeout_s=30)


class MemoryRun:
    """A ledger, a trainer and a model."""

    def __init__(self, model_dir: Path, *, names: str = "memory") -> None:
        """Begin with nothing published."""
        nonces = (f"n{at}" for at in itertools.count())
        self.ledger = ControlLedger(MemoryStore(clock=system_clock()), nonce=lambda: next(nonces))
        self.model = Model(model_dir, names=names)
        self.server = MemoryObjectServer()
        self.trainer = FakeTrainer(self.ledger, self.server, aliases=self.model.aliases)
        self.sequence = -1
        self._state: State = {}

    def publish(self, *, is_full: bool = False) -> str:
        """Publish the model as it is now: whole at first, then as the change since before."""
        before, self._state = self._state, self.model.state()
        self.sequence += 1
        uid = f"v{self.sequence}"
        if is_full or not before:
            self.trainer.publish_full(uid, self.sequence, self._state)
        else:
            base = f"v{self.sequence - 1}"
            self.trainer.publish_delta(uid, self.sequence, before, self._state, base_uid=base)
        return uid

    def retire(self, uid: str) -> None:
        """Forget a version and its bytes, as a publisher does in time."""
        self.ledger.delete_version(uid)
        for shard in self.ledger.list_shards(uid):
            key = (uid, shard.source_slot_id)
            for item in parse_manifest(self.server.find_manifest(key)).objects:
                self.server.withdraw_object(item.object_id)
            self.server.release_manifest(version_id=uid, source_slot_id=shard.source_slot_id)
            self.ledger.delete_shard(
                version_id=uid, source_slot_id=shard.source_slot_id, worker_id=shard.worker_id
            )
