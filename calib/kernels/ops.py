"""The small operators of a layer, by FlashInfer where its modules load and by PyTorch otherwise.

`Ops.source` says per operator which library answers; it goes into the run's record and each row's label.
"""

from __future__ import annotations

from typing import Any

from calib.arena import PAGE, Arena, Pages

EPS = 1e-5


class TorchOps:
    """PyTorch versions; also the references, in whatever type the inputs have."""

    source = "torch"

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def norm(self, x: Any, weight: Any, out: Any) -> None:
        out.copy_(self.torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS))

    def add_norm(self, x: Any, residual: Any, weight: Any) -> None:
        """residual += x; x = norm(residual)."""
        residual.add_(x)
        self.norm(residual, weight, x)

    def rope(self, positions: Any, q: Any, k: Any, table: Any) -> None:
        """Rotate q [m, heads, d] and k in place, halves against halves (NeoX style)."""
        half = q.shape[-1] // 2
        cos, sin = (t[:, None] for t in table[positions].split(half, dim=1))
        for x in (q, k):
            a, b = (t.float() for t in x.split(half, dim=-1))
            x.copy_(self.torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1))

    def silu_mul(self, gate_up: Any, out: Any) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        self.torch.mul(self.torch.nn.functional.silu(gate), up, out=out)

    def append(self, k: Any, v: Any, where: Append, cache: Any) -> None:
        page = where.indices[(where.indptr[where.sequence] + where.positions // PAGE).long()].long()
        slot = (where.positions % PAGE).long()
        cache[page, 0, slot] = k
        cache[page, 1, slot] = v


class FlashInferOps:
    """FlashInfer's fused kernels; programmatic dependent launch off, as everywhere in the protocol."""

    source = "flashinfer"

    def __init__(self, flashinfer: Any) -> None:
        self.lib = flashinfer

    def norm(self, x: Any, weight: Any, out: Any) -> None:
        self.lib.norm.rmsnorm(x, weight, EPS, out=out, enable_pdl=False)

    def add_norm(self, x: Any, residual: Any, weight: Any) -> None:
        self.lib.norm.fused_add_rmsnorm(x, residual, weight, EPS, enable_pdl=False)

    def rope(self, positions: Any, q: Any, k: Any, table: Any) -> None:
        d = q.shape[-1]
        self.lib.rope.apply_rope_with_cos_sin_cache_inplace(
            positions, q.view(q.shape[0], -1), k.view(k.shape[0], -1), d, table
        )

    def silu_mul(self, gate_up: Any, out: Any) -> None:
        self.lib.activation.silu_and_mul(gate_up, out, enable_pdl=False)

    def append(self, k: Any, v: Any, where: Append, cache: Any) -> None:
        self.lib.page.append_paged_kv_cache(
            k,
            v,
            where.sequence,
            where.positions,
            cache,
            where.indices,
            where.indptr,
            where.last_page_len,
            "NHD",
        )


class Append:
    """Where a step's new keys and values go: per token its sequence and position, with the page table (device)."""

    def __init__(self, arena: Arena, pages: Pages, q_lens: list[int], contexts: list[int]) -> None:
        torch, to = arena.torch, {"device": arena.device, "dtype": arena.torch.int32}
        lens = torch.tensor(q_lens)
        start = torch.repeat_interleave(torch.tensor(contexts) - lens, lens)
        first = torch.repeat_interleave(torch.cumsum(lens, 0) - lens, lens)
        self.positions = (start + torch.arange(int(lens.sum())) - first).to(**to)
        self.sequence = torch.repeat_interleave(torch.arange(len(q_lens)), lens).to(**to)
        self.indptr = pages.indptr.to(**to)
        self.last_page_len = pages.last_page_len.to(**to)
        self.indices = pages.indices


class Ops:
    """Each operator from the first library whose kernel runs; tried once, at a tiny shape."""

    def __init__(self, arena: Arena) -> None:
        self._torch_ops = TorchOps(arena.torch)
        self.source: dict[str, str] = {}
        fast = FlashInferOps(arena.flashinfer) if arena.flashinfer is not None else None
        for name in ("norm", "add_norm", "rope", "silu_mul", "append"):
            usable = fast is not None and self._works(arena, fast, name)
            chosen = fast if usable and fast is not None else self._torch_ops
            self.source[name] = chosen.source
            setattr(self, name, getattr(chosen, name))

    @staticmethod
    def _works(arena: Arena, ops: FlashInferOps, name: str) -> bool:
        torch, model = arena.torch, arena.model
        x = arena.draw((2, model.hidden))
        q = arena.draw((2, model.heads, model.head_dim))
        k = arena.draw((2, model.kv_heads, model.head_dim))
        weight, positions = arena.final_norm, torch.arange(2, device=arena.device, dtype=torch.int32)
        pages = arena.pages([2])
        calls = {
            "norm": lambda: ops.norm(x, weight, torch.empty_like(x)),
            "add_norm": lambda: ops.add_norm(x, x.clone(), weight),
            "rope": lambda: ops.rope(positions, q, k, arena.rope_cache),
            "silu_mul": lambda: ops.silu_mul(x, x[:, : model.hidden // 2].contiguous()),
            "append": lambda: ops.append(k, k, Append(arena, pages, [2], [2]), arena.cache(0, 0, pages)),
        }
        try:
            calls[name]()
            torch.cuda.synchronize()
        except Exception:  # module not prebuilt and no compiler, or a GPU that it does not support
            return False
        return True


def ops_of(arena: Arena) -> Ops:
    """The operators of `arena`, chosen once."""
    held = arena.__dict__.get("_ops")
    if held is None:
        held = arena.__dict__["_ops"] = Ops(arena)
    return held
