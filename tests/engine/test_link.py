"""Transfers over one link against closed forms, and the links that the GPU table gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.cost import load_cost
from sim.engine.clock import TRANSFER, Clock
from sim.engine.link import Link, Wire, default_rate
from sim.errors import SimctlError

RATE = 1e9


def arrivals(link: Link, sends: list[tuple[float, float]], floor_s: float = 0.0) -> list[float]:
    """When each of the transfers (start, bytes) has arrived."""
    clock, ends = Clock(), [float("nan")] * len(sends)

    def note(k: int) -> None:
        ends[k] = clock.now

    wire = Wire(clock, link, 0, note)
    for k, (start, size) in enumerate(sends):
        event = clock.at(start, TRANSFER)
        event.callbacks.append(lambda _event, k=k, size=size: wire.send(k, size, floor_s))
    clock.run()
    return ends


@pytest.mark.parametrize("sharing", ["fair", "fifo"])
def test_a_transfer_alone_takes_its_bytes_and_the_latency(sharing: str) -> None:
    assert arrivals(Link(RATE, 1e-3, sharing), [(2.0, 3e9)]) == [pytest.approx(2 + 3 + 1e-3, rel=1e-12)]


def test_two_at_once_share_and_both_end_when_all_bytes_are_through() -> None:
    assert arrivals(Link(RATE, 0.0), [(0.0, 1e9), (0.0, 1e9)]) == pytest.approx([2.0, 2.0], rel=1e-12)
    assert arrivals(Link(RATE, 0.0), [(0.0, 1e9), (0.0, 3e9)]) == pytest.approx([2.0, 4.0], rel=1e-12)


def test_staggered_transfers_share_while_both_are_under_way() -> None:
    # alone until 1 s, then halves: the first has 2 GB left, at 0.5 GB/s; the second then has 1 GB left, alone
    assert arrivals(Link(RATE, 0.0), [(0.0, 3e9), (1.0, 3e9)]) == pytest.approx([5.0, 6.0], rel=1e-12)
    # a short one overtakes
    assert arrivals(Link(RATE, 0.0), [(0.0, 10e9), (4.0, 1e9)]) == pytest.approx([11.0, 6.0], rel=1e-12)


def test_first_in_first_out_serves_one_after_the_other() -> None:
    fifo = Link(RATE, 0.5, "fifo")
    assert arrivals(fifo, [(0.0, 3e9), (1.0, 3e9), (20.0, 1e9)]) == pytest.approx([3.5, 6.5, 21.5], rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_a_fair_link_is_never_idle_and_never_exceeds_its_rate(seed: int) -> None:
    """Work conservation: the last byte goes when a queue of one server would be empty, whatever the sharing."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(1.0, 30))
    sizes = rng.exponential(0.8e9, 30)
    sends = list(zip(starts.tolist(), sizes.tolist(), strict=True))
    fair, fifo = (arrivals(Link(RATE, 0.0, how), sends) for how in ("fair", "fifo"))
    assert max(fair) == pytest.approx(max(fifo), rel=1e-9)
    alone = starts + sizes / RATE
    assert (np.array(fair) >= alone * (1 - 1e-12)).all()


def test_an_infinite_link_takes_the_latency() -> None:
    assert arrivals(Link(float("inf"), 0.25), [(1.0, 1e12), (1.0, 1e15)]) == [1.25, 1.25]


def test_a_floor_holds_the_last_byte_back() -> None:
    assert arrivals(Link(RATE, 0.1), [(0.0, 1e9)], floor_s=4.0) == pytest.approx([4.1])


@pytest.mark.parametrize(
    "bad", [{"bytes_per_s": 0.0}, {"latency_s": -1.0}, {"sharing": "fast"}, {"overlap": "all"}]
)
def test_a_link_that_cannot_be_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(SimctlError, match="a link"):
        Link(**{"bytes_per_s": 1e9, **bad})


def cost(gpu: str, tp: int = 1) -> Any:
    return load_cost("llama-3.1-8b", gpu, "spec", {"tp": tp})


def test_the_gpu_table_gives_nvlink_within_a_machine_and_the_network_beyond() -> None:
    h100, a100, l40s = cost("h100-sxm"), cost("a100-80gb-sxm"), cost("l40s")
    assert default_rate(h100, h100, 2) == (450e9, "GPU table: NVLink of h100-sxm, one direction")
    assert default_rate(h100, h100, 9)[0] == 50e9
    assert default_rate(h100, a100, 2) == (25e9, "GPU table: network card of a100-80gb-sxm")
    assert default_rate(l40s, l40s, 2)[0] == 25e9
    four, two = cost("h100-sxm", 4), cost("h100-sxm", 2)
    assert default_rate(four, two, 6) == (900e9, "GPU table: 2 x NVLink of h100-sxm, one direction")
