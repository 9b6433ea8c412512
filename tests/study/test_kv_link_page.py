"""The study of KV hand-over over the measured link, the data sheet's and the network: its script and its page."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from sim.cost import load_cost
from sim.engine.link import default_link

ROOT = Path(__file__).parents[2]
SCRIPT, PAGE = ROOT / "experiments" / "kv_link.py", ROOT / "docs" / "kv_link.md"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="experiments/ is part of a checkout only")


def script() -> Any:
    spec = importlib.util.spec_from_file_location("kv_link", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_of_the_link_that_the_profile_has() -> None:
    cost = load_cost("llama-3.1-8b", "h200-sxm")
    link = default_link(cost, cost, 2)
    row = f"| measured | {link.bytes_per_s / 1e9:.0f} | {1e6 * link.latency_s:.1f} | {link.source} |"
    assert row in PAGE.read_text(encoding="utf-8"), (
        "regenerate: python experiments/kv_link.py > docs/kv_link.md"
    )


def test_the_script_makes_a_row_for_every_case_link_and_rate() -> None:
    module = script()
    found = module.rows(24)
    assert len(found) == len(module.CASES) * len(module.LINKS) * 2
    text = module.page(found, "h200-sxm", "0" * 64)
    assert text.count("\n| 5 | ") == text.count("\n| 10 | ") == 9
    by = {(one["case"], one["title"], one["request_rate_per_gpu"]): one for one in found}
    for rate in (5, 10):
        fast, slow = (by["distserve", title, rate] for title in ("measured", "network"))
        assert slow["median_transfer_ms"] > 4 * fast["median_transfer_ms"]
        # layer by layer only the last layer's KV is waited for
        early = by[f"distserve, {module.LAYERS}", "measured", rate]
        assert early["median_transfer_ms"] < 0.1 * fast["median_transfer_ms"]
        # but it runs beside the prompt, and longer
        assert early["busy"] > fast["busy"]
