"""A cost model for two lanes: made-up tables on every SM set, and one slowdown for each side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from stub_cost import StubCost, plain_tables, real_cost

from sim.cost.prices import Prices
from sim.cost.shapes import Floats, Launch

PER_PARTITION = (
    *("dense_graph_s", "dense_eager_s", "head_s", "dec_a", "dec_b", "pre_s", "pre_fixed_s", "over_s"),
    *("dense_graph_sm", "dense_eager_sm", "head_sm", "dec_sm_a", "dec_sm_b", "pre_sm", "over_sm"),
)


class LaneCost(StubCost):
    """The same tables on every SM set; prefill beside decode is `factors[0]` times slower, decode `factors[1]`."""

    factors: tuple[float, float]

    def __repr__(self) -> str:
        return f"LaneCost{self.factors}"

    @property
    def profile_hash(self) -> str:
        """Surfaces are kept by it."""
        return f"lanes {self.factors}"

    def compile(self, *, max_tokens: int, max_seqs: int, max_context: int, **options: Any) -> Prices:
        """Tables of the stub, once a partition."""
        one = super().compile(max_tokens=max_tokens, max_seqs=max_seqs, max_context=max_context, **options)
        times = 1 + len(options.get("partitions", ()))
        return one._replace(
            **{
                name: made * times if isinstance(made := getattr(one, name), list) else np.tile(made, times)
                for name in PER_PARTITION
            }
        )

    def slowdowns(
        self,
        a: Sequence[Launch],
        b: Sequence[Launch],
        split: tuple[int, int],
        overlap: int = 0,
        priority: str = "normal",
    ) -> tuple[Floats, Floats]:
        """The two factors, whatever runs."""
        of_a, of_b = (np.full((len(a), len(b)), factor) for factor in self.factors)
        return of_a, of_b


def lane_cost(
    tables: Callable[[int, int, int], dict[str, Any]],
    factors: tuple[float, float] = (1.0, 1.0),
    max_context: int = 4096,
) -> LaneCost:
    """A stub on as many partitions as the policy asks for."""
    real = real_cost()
    made = LaneCost(replace(real.model, max_context=max_context), real.profile, real.launching, real.scale)
    object.__setattr__(made, "tables", tables)
    object.__setattr__(made, "factors", factors)
    return made


def lane_tables(
    token_s: float, step_s: float, *, host_s: float = 0.0, gap_s: float = 0.0
) -> Callable[[int, int, int], dict[str, Any]]:
    """A prefill pass takes `token_s` a token and a decode step `step_s`; so much host time and gap for each."""

    def tables(max_tokens: int, max_seqs: int, replica: int) -> dict[str, Any]:
        return {
            **plain_tables(prompt_token_s=token_s)(max_tokens, max_seqs, replica),
            "dense_graph_s": np.full(max_tokens + 1, step_s),
            "host_graph_s": np.full(max_seqs + 1, host_s),
            "host_eager_s": np.full(max_seqs + 1, host_s),
            "gap_graph_s": np.full(max_seqs + 1, gap_s),
            "gap_eager_s": np.full(max_seqs + 1, gap_s),
        }

    return tables
