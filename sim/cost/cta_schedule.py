"""A list schedule of thread blocks (CTAs) of two kinds on a GPU's SMs: what a fused prefill and decode kernel does.

Fluid and event-driven: between two completions every CTA goes on at a constant rate, and CTAs that started together on
SMs in the same state are one group, so that a launch of thousands of CTAs is some tens of events. Rates:

- an SM's arithmetic is shared by its residents; one CTA alone cannot use all of it (`Ctas.alone_s`);
- HBM bandwidth is shared by all CTAs of the chip that read, each with the same number of requests in flight and so at
  the same rate, up to what one CTA or one SM can draw; it saturates smoothly as they want more;
- where arithmetic and bandwidth are both near their limits they hide each other only as far as `Machine.overlap_p`.

The ticket rule (`Tickets`) is that of POD-Attention (arXiv:2410.18038 section 4.1; microsoft/vattention
pod_attn/pod_attn/fused_fwd_kernel.h): each CTA takes the next ticket of its SM, which says what kind it is to be, and
takes the other kind where that one has run out.
"""

from __future__ import annotations

from dataclasses import dataclass

PREFILL, DECODE = 0, 1
NEVER = 1e30
DONE = 1e-9  # share of a CTA's work that counts as nothing left


@dataclass(frozen=True)
class Ctas:
    """CTAs of one kind, all alike: `flops` (tile padding included) and `hbm_bytes` of each, `rate` in FLOP/s of an SM
    that is full of them, `alone_s` of one that has an SM and the memory to itself."""

    count: int
    flops: float
    hbm_bytes: float
    rate: float
    alone_s: float


NO_CTAS = Ctas(0, 0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Machine:
    """What CTAs share: `bandwidth` in bytes/s that the whole GPU draws from HBM, `sm_bandwidth` the most that one SM
    can; `bandwidth_p`: how sharply bandwidth saturates, `overlap_p`: how well arithmetic and memory time hide each
    other (exponents, as in `sim.cost.spec.Roofline`)."""

    sms: int
    bandwidth: float
    sm_bandwidth: float
    bandwidth_p: float
    overlap_p: float

    def drawn(self, wanted: float) -> float:
        """Bytes/s that come for `wanted` ones: all SMs at their most draw `bandwidth`."""
        whole = _saturating(self.sms * self.sm_bandwidth / self.bandwidth, self.bandwidth_p)
        share = _saturating(wanted / self.bandwidth, self.bandwidth_p)
        return min(wanted, self.bandwidth * share / whole)


def _saturating(x: float, p: float) -> float:
    """x where it is small, 1 where it is large."""
    small, large = (x, 1.0) if x <= 1.0 else (1.0, x)
    found: float = x / large * (1.0 + (small / large) ** p) ** (-1.0 / p)
    return found


@dataclass(frozen=True)
class Tickets:
    """Of each `period` tickets of an SM the first `prefill` are prefill's. A period of 0: all prefill CTAs come before
    all decode CTAs. `gang`: one CTA of each kind together, and the next two when both are done (horizontal fusion)."""

    period: int = 0
    prefill: int = 0
    gang: bool = False


PREFILL_FIRST = Tickets()
HALF = Tickets(2, 1)
PAIRS = Tickets(gang=True)


def proportional(prefill: int, decode: int) -> Tickets:
    """Tickets in proportion to the CTAs of both kinds, with the integer division of the source."""
    if prefill == 0 or decode == 0:
        return PREFILL_FIRST
    if prefill <= decode:
        return Tickets(decode // prefill + 1, 1)
    return Tickets(prefill // decode + 1, prefill // decode)


@dataclass(frozen=True)
class Schedule:
    """`seconds` to the last CTA's end, `prefill_s` and `decode_s` to the last of each kind; `busy`: share of SM time
    with a resident CTA, `resident`: CTAs resident on an SM on average."""

    seconds: float
    prefill_s: float
    decode_s: float
    busy: float
    resident: float


class _Group:
    """`sms` SMs in the same state: tickets drawn, and work left (share of a CTA's) of each resident by kind."""

    __slots__ = ("decode", "prefill", "sms", "tickets")

    def __init__(self, sms: int, tickets: int, prefill: list[float], decode: list[float]) -> None:
        self.sms, self.tickets, self.prefill, self.decode = sms, tickets, prefill, decode

    def with_more(self, sms: int, kind: int) -> _Group:
        """`sms` of them after each has started one CTA of that kind (-1: none was left)."""
        prefill, decode = self.prefill[:], self.decode[:]
        if kind >= 0:
            (decode if kind else prefill).append(1.0)
        return _Group(sms, self.tickets + (kind >= 0), prefill, decode)


class _Queue:
    """CTAs that have not started, handed out by the ticket rule."""

    def __init__(self, prefill: int, decode: int, tickets: Tickets) -> None:
        self.left = [prefill, decode]
        self.rule = tickets

    def draw(self, sms: int, tickets: int) -> list[tuple[int, int]]:
        """(SMs, kind) of what that many SMs at that ticket start; kind -1 for those that get nothing."""
        period, left = self.rule.period, self.left
        wanted = PREFILL if period == 0 or tickets % period < self.rule.prefill else DECODE
        drawn = []
        for kind in (wanted, 1 - wanted):
            taken = min(sms, left[kind])
            if taken > 0:
                left[kind] -= taken
                sms -= taken
                drawn.append((taken, kind))
        return [*drawn, (sms, -1)] if sms > 0 else drawn

    def fill(self, groups: list[_Group], slots: int) -> list[_Group]:
        """Start CTAs wherever there is room, one to an SM and round after round."""
        if self.rule.gang:
            return self._fill_pairs(groups)
        full: list[_Group] = []
        while groups:
            again: list[_Group] = []
            for group in groups:
                if len(group.prefill) + len(group.decode) >= slots or self.left[0] + self.left[1] == 0:
                    full.append(group)
                    continue
                for sms, kind in self.draw(group.sms, group.tickets):
                    (again if kind >= 0 else full).append(group.with_more(sms, kind))
            groups = again
        return full

    def _fill_pairs(self, groups: list[_Group]) -> list[_Group]:
        full, left = [], self.left
        for group in groups:
            sms = group.sms
            empty = not group.prefill and not group.decode
            while sms > 0 and empty and left[0] + left[1] > 0:
                taken = min(sms, *(count for count in left if count > 0))
                full.append(_Group(taken, 0, [1.0] * (left[0] > 0), [1.0] * (left[1] > 0)))
                for kind in (PREFILL, DECODE):
                    left[kind] -= min(taken, left[kind])
                sms -= taken
            if sms > 0:
                full.append(_Group(sms, 0, group.prefill, group.decode))
        return full


def run_schedule(machine: Machine, prefill: Ctas, decode: Ctas, slots: int, tickets: Tickets) -> Schedule:
    """Run all CTAs with at most `slots` of them on an SM."""
    queue = _Queue(prefill.count, decode.count, tickets)
    groups = queue.fill([_Group(machine.sms, 0, [], [])], slots)
    now, busy, resident = 0.0, 0.0, 0.0
    ends = [0.0, 0.0]
    while True:
        live = [group for group in groups if group.prefill or group.decode]
        if not live:
            break
        rates = _rates(machine, prefill, decode, live)
        step = NEVER
        for group, (p_rate, d_rate) in zip(live, rates, strict=True):
            for rate, left in ((p_rate, group.prefill), (d_rate, group.decode)):
                if left:
                    step = min(step, min(left) / rate)
        now += step
        for group, by_kind in zip(live, rates, strict=True):
            busy += group.sms * step
            resident += group.sms * (len(group.prefill) + len(group.decode)) * step
            for kind, left in ((PREFILL, group.prefill), (DECODE, group.decode)):
                if left:
                    gone = step * by_kind[kind]
                    kept = [share - gone for share in left if share - gone > DONE]
                    if len(kept) < len(left):
                        ends[kind] = now
                    left[:] = kept
        if queue.left[0] + queue.left[1] > 0:
            groups = _merged(queue.fill(groups, slots), tickets.period)
    whole = machine.sms * now
    return Schedule(now, ends[0], ends[1], busy / whole if whole else 0.0, resident / whole if whole else 0.0)


def _merged(groups: list[_Group], period: int) -> list[_Group]:
    """Groups in the same state as one."""
    found: dict[tuple[object, ...], _Group] = {}
    for group in groups:
        state = (
            group.tickets % period if period else 0,
            tuple(round(share, 9) for share in group.prefill),
            tuple(round(share, 9) for share in group.decode),
        )
        if state in found:
            found[state].sms += group.sms
        else:
            found[state] = group
    return list(found.values())


def _rates(machine: Machine, p: Ctas, d: Ctas, groups: list[_Group]) -> list[tuple[float, float]]:
    """Progress per second of one prefill and one decode CTA in each group."""
    p_need, d_need = p.flops / p.rate, d.flops / d.rate  # SM-seconds of arithmetic of a CTA
    p_most, d_most = 1.0 / p.alone_s, 1.0 / d.alone_s
    caps = []
    prefill_bytes = wanted = 0.0
    for group in groups:
        np, nd = len(group.prefill), len(group.decode)
        rate = 0.0
        if nd:
            rate = min(d_most, machine.sm_bandwidth / (nd * d.hbm_bytes), 1.0 / (nd * d_need))
            # arithmetic: decode takes what it needs up to its fair share, or more where prefill cannot use the rest
            if np and np * p_most * p_need + nd * rate * d_need > 1.0:
                fair = max(1.0 / (np + nd), (1.0 - np * p_most * p_need) / nd)
                rate = min(rate, fair / d_need)
            wanted += group.sms * nd * rate * d.hbm_bytes
        caps.append((np, nd, rate))
        if np:
            prefill_bytes += (
                group.sms * np * _prefill_rate(p_most, p_need, np, nd * rate * d_need) * p.hbm_bytes
            )
    level = NEVER
    if wanted > 0.0:
        limit = machine.drawn(wanted + prefill_bytes)
        level = _water_level(groups, caps, max(limit - prefill_bytes, 0.1 * limit) / d.hbm_bytes)
    rates = []
    arithmetic = traffic = 0.0
    for group, (np, nd, rate) in zip(groups, caps, strict=True):
        d_rate = min(rate, level)
        p_rate = _prefill_rate(p_most, p_need, np, nd * d_rate * d_need) if np else 0.0
        rates.append((p_rate, d_rate))
        arithmetic += group.sms * (np * p_rate * p_need + nd * d_rate * d_need)
        traffic += group.sms * (np * p_rate * p.hbm_bytes + nd * d_rate * d.hbm_bytes)
    used = (arithmetic / machine.sms, traffic / machine.bandwidth)
    power = machine.overlap_p
    strain = (used[0] ** power + used[1] ** power) ** (1.0 / power)
    return rates if strain <= 1.0 else [(a / strain, b / strain) for a, b in rates]


def _prefill_rate(most: float, need: float, residents: int, taken: float) -> float:
    """Rate of one of the prefill CTAs on an SM of whose arithmetic the share `taken` is gone."""
    return min(most, (1.0 - taken) / (residents * need))


def _water_level(groups: list[_Group], caps: list[tuple[int, int, float]], limit: float) -> float:
    """The rate that each decode CTA gets, up to its own cap, if together they may make `limit` CTAs per second."""
    wanting = sorted((rate, group.sms * nd) for group, (_, nd, rate) in zip(groups, caps, strict=True) if nd)
    if sum(rate * count for rate, count in wanting) <= limit:
        return NEVER
    rest = sum(count for _, count in wanting)
    level = limit / rest
    for rate, count in wanting:
        level = limit / rest
        if rate >= level:
            break
        limit -= rate * count
        rest -= count
    return level
