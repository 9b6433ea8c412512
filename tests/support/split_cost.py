"""Two lanes on SM sets of different worth: prefill falls as 1 / SMs, decode only below a knee."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from lane_cost import PER_PARTITION, LaneCost
from stub_cost import real_cost

from sim.cost.prices import Prices

PREFILL = ("dense_eager_s", "pre_s")
DECODE = ("dense_graph_s", "dec_a", "dec_b")


class SplitCost(LaneCost):
    """`LaneCost` whose prefill takes total / SMs as long, and whose decode takes max(1, knee / SMs) as long."""

    knee: int

    def __repr__(self) -> str:
        return f"SplitCost(knee={self.knee}, {self.factors})"

    @property
    def profile_hash(self) -> str:
        """Surfaces are kept by it."""
        return f"splits {self.factors}"

    def compile(self, *, max_tokens: int, max_seqs: int, max_context: int, **options: Any) -> Prices:
        """Tables of `LaneCost`, stretched partition by partition."""
        made = super().compile(max_tokens=max_tokens, max_seqs=max_seqs, max_context=max_context, **options)
        sms = np.array([self.gpu.sms, *options.get("partitions", ())], np.float64)
        stretch = {
            **dict.fromkeys(PREFILL, sms[0] / sms),
            **dict.fromkeys(DECODE, np.maximum(1.0, self.knee / sms)),
        }
        changed = {}
        for name in PER_PARTITION:
            if name in stretch:
                table = np.reshape(getattr(made, name), (len(sms), -1)) * stretch[name][:, None]
                changed[name] = table.ravel() if options.get("compiled") else table.ravel().tolist()
        return made._replace(**changed)


def split_cost(
    tables: Callable[[int, int, int], dict[str, Any]],
    knee: int,
    factors: tuple[float, float] = (1.0, 1.0),
    max_context: int = 4096,
) -> SplitCost:
    """A stub whose SM sets differ; slowdowns of the two sides as in `lane_cost`."""
    real = real_cost()
    made = SplitCost(replace(real.model, max_context=max_context), real.profile, real.launching, real.scale)
    for name, value in {"tables": tables, "factors": factors, "knee": knee}.items():
        object.__setattr__(made, name, value)
    return made
