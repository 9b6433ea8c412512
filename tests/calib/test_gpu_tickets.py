"""Synthetic CTAs on a real GPU: whatever the rule, the imbalance and the SMs that there are, every job runs once.

`run_mix` raises if a job ran twice or not at all, and a grid that locked would never come back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from calib.kernels.tickets import RULES, Mix

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def lab() -> Any:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU")
    from calib.lab import GpuLab
    from calib.measure import SMOKE
    from calib.models import MODELS

    return GpuLab(MODELS["llama-3.2-1b"], SMOKE, 0)


@pytest.mark.parametrize("rule", RULES)
def test_no_imbalance_and_no_partition_locks_the_tickets(lab: Any, rule: str) -> None:
    rng = np.random.default_rng(17)
    sizes = sorted({lab.sizes()[0], lab.sizes()[len(lab.sizes()) // 2], lab.facts.sms})
    for draw in range(6):
        jobs = (int(rng.integers(1, 900)), int(rng.integers(1, 900)))
        # loops spread over more than a decade, on fewer SMs than the rule expects as well as on all
        mix = Mix(rule, *jobs, 20, 10, ctas_per_sm=4, spread=1.5, seed=100 + draw)
        for sms in sizes:
            ran = lab.mix(mix, sms)
            assert ran.span_s > 0
            assert len({int(sm) for sm in ran.log[:, 2]}) <= sms


@pytest.mark.parametrize("jobs", [(1, 500), (500, 1), (700, 700)])
def test_one_kind_may_run_out_long_before_the_other(lab: Any, jobs: tuple[int, int]) -> None:
    for rule in RULES:
        ran = lab.mix(Mix(rule, *jobs, 30, 15, seed=5), lab.facts.sms)
        assert len(ran.log) <= sum(jobs)
