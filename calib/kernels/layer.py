"""Whole layers and whole steps of a model with random weights, as a server runs them: fused QKV and gate/up
projections, paged attention, in-place norms; prefill rows first, then one row for each decoding sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calib.arena import Arena
from calib.kernels.attention import DecodeAttention, PrefillAttention, _Paged, context_columns
from calib.kernels.base import Kernel, joined, relative_error
from calib.kernels.elementwise import qkv_buffer, split_qkv
from calib.kernels.ops import EPS, Append, TorchOps, ops_of
from calib.models import ModelShape


class Step(Kernel):
    """`layers` layers over chunks of `q_lens` tokens on `histories` and one token for each of `contexts`.

    With `head`, a whole forward pass: embedding first, final norm, LM head and greedy sampling last (one row a
    chunk and a sequence). Without, bare layers, and run(i) goes on to the next `layers` layers of the model.
    Kinds: prefill_layer, decode_layer, mixed_layer, prefill_step, decode_step, mixed_step.
    """

    def __init__(
        self,
        model: ModelShape,
        q_lens: Sequence[int] = (),
        histories: Sequence[int] = (),
        contexts: Sequence[int] = (),
        layers: int = 1,
        backend: str = "fa3",
        head: bool = False,
    ) -> None:
        self.model, self.layers, self.head, self.backend = model, layers, head, backend
        self.q_lens, self.histories, self.contexts = list(q_lens), list(histories), list(contexts)
        phase = "mixed" if q_lens and contexts else "prefill" if q_lens else "decode"
        self.kind = f"{phase}_{'step' if head else 'layer'}"  # type: ignore[misc]
        self.label = backend
        self._parts: list[_Paged] = []
        if q_lens:
            self._parts.append(PrefillAttention(model, q_lens, histories, backend))
        if contexts:
            self._parts.append(DecodeAttention(model, contexts, "sdpa" if backend == "sdpa" else "fa2"))
        self.m = sum(part.tokens for part in self._parts)
        self.rows = len(q_lens) + len(contexts)
        self.launches = layers * (9 + len(self._parts)) + (5 if head else 0)
        self._count()

    def _count(self) -> None:
        model, m = self.model, self.m
        attention = self._parts
        self.flops = self.layers * (2.0 * m * model.layer_weights + sum(p.flops for p in attention))
        activations = 2.0 * m * (8 * model.hidden + 2 * model.linear("qkv")[0] + 6 * model.intermediate)
        self.bytes = self.layers * (2.0 * model.layer_weights + activations + sum(p.bytes for p in attention))
        if self.head:
            self.flops += 2.0 * self.rows * model.vocab * model.hidden
            self.bytes += 2.0 * model.vocab * (model.hidden + 2 * self.rows)

    def columns(self) -> dict[str, Any]:
        shape: dict[str, Any] = {"m": self.m, "attention": self.backend, "layers": self.layers}
        if self.q_lens:
            shape |= {"q_tokens": joined(self.q_lens), "history_tokens": joined(self.histories)}
        if self.contexts:
            shape |= context_columns(self.contexts)
        return shape

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        model, m, self._arena = self.model, self.m, arena
        self._ops, self._torch = ops_of(arena), arena.torch
        self._hidden = arena.refresh(arena.scratch(slot, "hidden", (m, model.hidden)))
        self._residual = arena.refresh(arena.scratch(slot, "residual", (m, model.hidden)))
        self._qkv = qkv_buffer(arena, slot, m)
        self._q, self._k, self._v = split_qkv(model, self._qkv)
        self._attention = arena.scratch(slot, "attention", (m, model.heads, model.head_dim))
        self._gate_up = arena.scratch(slot, "gate-up", (m, 2 * model.intermediate))
        self._act = arena.scratch(slot, "act", (m, model.intermediate))
        self.plan(arena, slot, padded)
        start = 0
        for part in self._parts:
            rows = slice(start, start + part.tokens)
            part.bind(arena, slot, self._q[rows], self._attention[rows])
            start += part.tokens
        self.copies = 1 if self.head else max(1, arena.layers // self.layers)
        if self.head:
            self._prepare_head(arena, slot)

    def plan(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        """Lay out pages and plan attention: what a server does on the host before each step."""
        prefill = [q + h for q, h in zip(self.q_lens, self.histories, strict=True)]
        contexts = prefill + self.contexts
        pages = arena.pages(contexts)
        first = 0
        for part in self._parts:
            last = first + len(part.contexts)
            part.plan(arena, slot, padded, pages.part(first, last))
            first = last
        self._where = Append(arena, pages, self.q_lens + [1] * len(self.contexts), contexts)
        self._caches = [arena.cache(slot, i, pages) for i in range(pages.copies)]

    def _prepare_head(self, arena: Arena, slot: int) -> None:
        torch, model = arena.torch, self.model
        self._ids = torch.randint(
            model.vocab, (self.m,), generator=arena.generator, device=arena.device, dtype=torch.int32
        )
        ends = torch.cumsum(torch.tensor(self.q_lens + [1] * len(self.contexts)), 0) - 1
        self._ends = ends.to(device=arena.device, dtype=torch.int32)
        self._last = arena.scratch(slot, "last", (self.rows, model.hidden))
        self._logits = arena.scratch(slot, "logits", (self.rows, model.vocab))
        self._tokens = arena.scratch(slot, "tokens", (self.rows,), torch.int64)

    def run(self, i: int = 0) -> Any:
        torch, ops = self._torch, self._ops
        if not self.head:
            for layer in range(i * self.layers, (i + 1) * self.layers):
                ops.add_norm(
                    self._hidden, self._residual, self._arena.weights[layer % self._arena.layers].norm1
                )
                self._layer(layer)
            return self._hidden
        torch.index_select(self._arena.embedding, 0, self._ids, out=self._residual)
        self._summed(self._residual)
        ops.norm(self._residual, self._arena.weights[0].norm1, self._hidden)
        for layer in range(self.layers):
            if layer:
                ops.add_norm(
                    self._hidden, self._residual, self._arena.weights[layer % self._arena.layers].norm1
                )
            self._layer(layer)
        ops.add_norm(self._hidden, self._residual, self._arena.final_norm)
        torch.index_select(self._hidden, 0, self._ends, out=self._last)
        torch.mm(self._last, self._arena.lm_head.t(), out=self._logits)
        return torch.argmax(self._gathered(self._logits), dim=-1, out=self._tokens)

    def _summed(self, partial: Any) -> Any:
        """The sum of `partial` over the GPUs that share the layers, in place: here there is one."""
        return partial

    def _gathered(self, logits: Any) -> Any:
        """The logits [rows, vocabulary] of all those GPUs."""
        return logits

    def _layer(self, layer: int) -> None:
        # everything behind the first norm: hidden holds its output, and the MLP's output at the end
        torch, ops, weights = self._torch, self._ops, self._arena.weights[layer % self._arena.layers]
        torch.mm(self._hidden, weights.qkv.t(), out=self._qkv)
        ops.rope(self._where.positions, self._q, self._k, self._arena.rope_cache)
        ops.append(self._k, self._v, self._where, self._caches[layer % len(self._caches)])
        for part in self._parts:
            part.run(layer)
        torch.mm(self._attention.view(self.m, -1), weights.o.t(), out=self._hidden)
        self._summed(self._hidden)
        ops.add_norm(self._hidden, self._residual, weights.norm2)
        torch.mm(self._hidden, weights.gate_up.t(), out=self._gate_up)
        ops.silu_mul(self._gate_up, self._act)
        torch.mm(self._act, weights.down.t(), out=self._hidden)
        self._summed(self._hidden)

    def reference_error(self) -> float:
        """Hidden states after the layers against float32; needs bare layers with caches of their own."""
        hidden, residual = self._hidden.float(), self._residual.float()
        self._attention.fill_(float("nan"))
        out = self.run(0)
        for layer in range(self.layers):
            hidden, residual = self._expected_layer(layer, hidden, residual)
        return relative_error(out, hidden)

    def _expected_layer(self, layer: int, hidden: Any, residual: Any) -> tuple[Any, Any]:
        torch, weights = self._torch, self._arena.weights[layer % self._arena.layers]
        f32 = {name: getattr(weights, name).float() for name in weights.__dataclass_fields__}
        residual = residual + hidden
        norm = torch.nn.functional.rms_norm
        hidden = norm(residual, (self.model.hidden,), f32["norm1"], EPS)
        q, k, _ = split_qkv(self.model, hidden @ f32["qkv"].t())
        TorchOps(torch).rope(self._where.positions, q, k, self._arena.rope_cache)
        start, parts = 0, []
        for part in self._parts:
            parts.append(part.expected(q[start : start + part.tokens], layer))
            start += part.tokens
        residual = residual + self._summed(torch.cat(parts).reshape(self.m, -1) @ f32["o"].t())
        hidden = norm(residual, (self.model.hidden,), f32["norm2"], EPS)
        gate, up = (hidden @ f32["gate_up"].t()).chunk(2, dim=-1)
        return self._summed((torch.nn.functional.silu(gate) * up) @ f32["down"].t()), residual
