"""What one GPU of a tensor-parallel group computes, with the collectives that join the shards.

As Megatron-LM cuts (arXiv:1909.08053 section 3): partial sums are added up behind the attention's output projection
and behind the MLP's, the vocabulary is divided, so that embeddings are added up and logits gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calib.arena import Arena
from calib.collectives.team import Team
from calib.kernels.layer import Step
from calib.models import ModelShape


class ShardStep(Step):
    """A step or layers of a shard; with `allreduces` 0 the same without anything between the GPUs."""

    def __init__(self, team: Team, model: ModelShape, point: Mapping[str, Any]) -> None:
        head = point["kind"].endswith("_step")
        shape = (point.get("q", ()), point.get("h", ()), point.get("contexts", ()))
        super().__init__(model, *shape, point.get("layers", 1), point["attention"], head)
        self.team, self.joins = team, bool(point["allreduces"])
        self.calls = 1

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        super().prepare(arena, slot, padded)
        # what a group shares is the same on all its GPUs
        for held in (self._hidden, self._residual, *((self._ids,) if self.head else ())):
            self.team.dist.broadcast(held, 0)
        if self.head:
            shape = (self.team.size, self.rows, self.model.vocab)
            self._parts_of_logits = arena.scratch(slot, "logits-parts", shape)
            self._whole = arena.scratch(slot, "logits-whole", (self.rows, shape[0] * shape[2]))

    def refresh(self) -> None:
        pass

    def _summed(self, partial: Any) -> Any:
        if self.joins:
            self.team.dist.all_reduce(partial)
        return partial

    def _gathered(self, logits: Any) -> Any:
        if not self.joins:
            return logits
        self.team.dist.all_gather_into_tensor(self._parts_of_logits.view(-1), logits.view(-1))
        rows, vocab = logits.shape
        self._whole.view(rows, self.team.size, vocab).copy_(self._parts_of_logits.transpose(0, 1))
        return self._whole

    def columns(self) -> dict[str, Any]:
        return {**super().columns(), "gpus": self.team.size, "allreduces": int(self.joins)}


def share_norms(team: Team, arena: Arena) -> None:
    """Norm weights are whole on every GPU: take rank 0's."""
    for layer in arena.weights:
        team.dist.broadcast(layer.norm1, 0)
        team.dist.broadcast(layer.norm2, 0)
    team.dist.broadcast(arena.final_norm, 0)
