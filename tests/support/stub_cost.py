"""Cost models with made-up price tables: simple enough to know every step's time by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from sim.cost import load_cost
from sim.cost.prices import Prices
from sim.cost.profiled import ProfiledCost

TICK = 2.0**-20  # a second in binary fractions: sums of ticks are exact in any order
PRE_SHIFT = DEC_SHIFT = 4
SLOTS = 4  # pieces of contexts that a decode step of these tables has room for


@lru_cache(maxsize=1)
def real_cost() -> ProfiledCost:
    """A built-in model on a built-in GPU, priced by its data sheet: refitting a profile changes no test."""
    return load_cost("llama-3.1-8b", "h200-sxm", "spec")


class StubCost(ProfiledCost):
    """A real model and GPU whose price tables are replaced by `tables(max_tokens, max_seqs, replica)`."""

    tables: Callable[[int, int, int], dict[str, Any]]

    def compile(self, *, max_tokens: int, max_seqs: int, max_context: int, **options: Any) -> Prices:
        """Tables of the stub in the type that the engine runs on."""
        real = super().compile(max_tokens=max_tokens, max_seqs=max_seqs, max_context=max_context, **options)
        made = self.tables(max_tokens, max_seqs, options.get("replica", 0))
        as_lists = isinstance(real.noise, list)
        return real._replace(
            **{k: v.tolist() if as_lists and hasattr(v, "tolist") else v for k, v in made.items()}
        )


def stub_cost(tables: Callable[[int, int, int], dict[str, Any]], max_context: int = 4096) -> StubCost:
    """A stub on one partition."""
    real = real_cost()
    model = replace(real.model, max_context=max_context)
    made = StubCost(model, real.profile, real.launching, real.scale)
    object.__setattr__(made, "tables", tables)
    return made


def rough_tables(unit: float, wobble: bool = False) -> Callable[[int, int, int], dict[str, Any]]:
    """Tables in which every term differs from every other and nothing is linear, in multiples of `unit`.

    With `wobble` a step's time also depends on its number and on the replica.
    """

    def tables(max_tokens: int, max_seqs: int, replica: int) -> dict[str, Any]:
        m = np.arange(max_tokens + 1, dtype=np.int64)
        n = np.arange(max_seqs + 1, dtype=np.int64)
        segments = 3
        base = n[:, None] * np.array([3, 5, 11]) + np.array([20, 7, 2])
        slope = np.broadcast_to(np.array([4, 6, 9]), base.shape)
        q_knots = np.array([0, 4, 64, 64 + 2 ** max(6, int(max_tokens).bit_length())], np.float64)
        h_knots = np.array([0, 16, 128, 8320], np.float64)
        surface = 64 * (
            2 * np.arange(4)[:, None] ** 2 + 3 * np.arange(4)[None, :] + 5 * np.outer(range(4), range(4))
        )
        factors = np.array([1.0, 1.25, 0.75, 1.5]) + 0.125 * (replica % 2)
        return {
            "segments": segments,
            "q_knots": 4,
            "h_knots": 4,
            "dec_shift": DEC_SHIFT,
            "pre_shift": PRE_SHIFT,
            "dense_graph_s": unit * (200 + 8 * (-(-m // 4)) + m),
            "dense_eager_s": unit * (260 + 16 * (-(-m // 8)) + 2 * m),
            "dense_graph_sm": unit * (m + 1.0),
            "dense_eager_sm": unit * (m + 2.0),
            "head_s": unit * (10.0 + 3 * n),
            "head_sm": unit * n.astype(np.float64),
            "dec_seg": np.array([0, 1, 1, 2], np.int64),
            "dec_a": unit * np.where(n[:, None] > 0, base, 0).ravel().astype(np.float64),
            "dec_b": unit * slope.ravel().astype(np.float64),
            "dec_sm_a": unit * np.where(n[:, None] > 0, base, 0).ravel().astype(np.float64),
            "dec_sm_b": unit * slope.ravel().astype(np.float64),
            "over_on": 1,
            "over_s": unit * (1.0 + n % 3),
            "over_sm": unit * (n > 0),
            "spare_graph": np.where(n < 2, -1, np.maximum(SLOTS - 2 * (-(-n // 2)), 0)),
            "spare_eager": np.where(n < 2, -1, np.maximum(SLOTS - n, 0)),
            "pre_qi": np.clip(np.searchsorted(q_knots, m, side="right") - 1, 0, 2).astype(np.int64),
            "pre_hi": np.array([0] + [1] * 7 + [2], np.int64),
            "pre_q": q_knots,
            "pre_h": h_knots,
            "pre_dq": 1.0 / np.diff(q_knots),
            "pre_dh": 1.0 / np.diff(h_knots),
            "pre_s": unit * surface.ravel().astype(np.float64),
            "pre_sm": unit * surface.ravel().astype(np.float64),
            "pre_fixed_s": np.array([unit * 6.0]),
            "host_graph_s": unit * (215.0 + 5 * n),
            "host_eager_s": unit * (300.0 + 9 * n),
            "gap_graph_s": unit * (13.0 + 2 * n),
            "gap_eager_s": unit * (29.0 + 3 * n),
            "noise": factors if wobble else np.ones(1),
        }

    return tables


def plain_tables(
    fixed_s: float = 0.0, prompt_token_s: float = 0.0, decode_token_s: float = 0.0
) -> Callable[[int, int, int], dict[str, Any]]:
    """Step time = fixed + prompt tokens x (per prompt token) + decodes x (per decode); no host, no history.

    Prompt tokens are told from decodes by the launch: a pure decode step is a graph. A mixed step charges its
    decodes as prompt tokens, so use it where steps are not mixed or both prices are equal.
    """

    def tables(max_tokens: int, max_seqs: int, replica: int) -> dict[str, Any]:
        made = rough_tables(0.0)(max_tokens, max_seqs, replica)
        m = np.arange(max_tokens + 1)
        return {
            **made,
            "dense_graph_s": fixed_s + decode_token_s * m,
            "dense_eager_s": fixed_s + prompt_token_s * m,
        }

    return tables
