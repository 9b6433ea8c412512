"""What a policy in plain Python is shown: the same numbers by either executor, made once, when first looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stub_cost import TICK, rough_tables, stub_cost
from workloads import workload

from sim.engine import simulate
from sim.engine.decisions import Decode, Mixed, Plan
from sim.lazy import lazy

COLUMNS = (
    *("id", "arrival_s", "prompt_tokens", "max_new_tokens", "slo_class", "priority", "computed_tokens"),
    *("target_tokens", "left_tokens", "generated_tokens", "decoding"),
)


class Noting:
    """Chunks of 8 tokens beside all decodes; notes what it sees."""

    max_num_seqs = 8

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def plan(self, view: Any) -> Plan:
        """Everybody who runs goes on, and the first who waits may come."""
        for batch in (view.waiting, view.running):
            self.seen.append([getattr(batch, name).tolist() for name in COLUMNS])
            assert np.array_equal(
                batch.left_tokens, np.where(batch.decoding, 0, batch.target_tokens - batch.computed_tokens)
            )
        chunks = [
            (int(i), min(8, int(left)))
            for i, left in zip(view.running.id, view.running.left_tokens, strict=True)
            if left > 0
        ]
        if not chunks and len(view.waiting) and len(view.running) < 8:
            chunks = [(int(view.waiting.id[0]), min(8, int(view.waiting.left_tokens[0])))]
        return Plan([Mixed(chunks)] if chunks else [Decode()])


def seen(compiled: bool) -> list[list[Any]]:
    policy = Noting()
    load = workload([0.0, 0.0, 0.0001, 0.0002], [20, 3, 9, 15], [5, 9, 1, 4])
    cost = stub_cost(rough_tables(TICK))
    simulate(load, policy, cost, num_gpu_blocks=99, jitter=False, compiled=compiled)
    return policy.seen


def test_columns_are_those_of_the_requests() -> None:
    rows = seen(False)
    assert len(rows) > 20
    assert any(True in row[-1] and False in row[-1] for row in rows)  # decodes beside a prefill


@pytest.mark.slow
def test_both_executors_show_the_same() -> None:
    assert seen(True) == seen(False)


def test_a_lazy_attribute_is_made_once() -> None:
    class Thing:
        asked = 0

        @lazy
        def value(self) -> int:
            """What it is."""
            self.asked += 1
            return 7

    thing = Thing()
    assert (thing.value, thing.value, thing.asked) == (7, 7, 1)
    assert isinstance(Thing.value, lazy)
    assert Thing.value.__doc__ == "What it is."
