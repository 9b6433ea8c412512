"""Sweeps over the GPUs of one host: collectives by size, KV transfers, tensor-parallel shards, and what runs beside."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from calib.bench import Bench
from calib.collectives.sizes import COLLECTIVES, grid_sizes, random_sizes
from calib.models import ROLES
from calib.sweep import Point, Sweep

GROUP = "collectives"  # --operator name of all of them
SHARD, PREFILLER = "llama-3.1-70b-tp2", "llama-3.1-8b"
PAGE_BYTES = 64 << 10  # 16 tokens of one layer of an 8-KV-head model in bf16
HALF_PAGE_BYTES = 32 << 10  # the same of half its heads
TOKEN_BYTES = 4096
HELD_OUT = 99  # level of points that no fit sees
ROOM_S = 1 << 27  # bytes that a quick run's largest message has


class CrewSweep(Sweep):
    """Points that every rank measures."""

    crew = True
    axes = ("late",)

    def measure(self, lab: Any, point: Point) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = lab.ask(point)
        return found

    def shape(self, lab: Bench, point: Point) -> dict[str, Any]:
        names = ("message_bytes", "piece_bytes", "max_ctas", "layers", "allreduces", "attention", "sms")
        shape = {name: point[name] for name in names if name in point}
        kind = point.get("kind") or (point.get("compute") or {}).get("kind") or self.name
        label = f"{point['method']}/{point['layout']}" if "method" in point else None
        return {"kind": kind, **shape, "label": label}


class CollectiveSweep(CrewSweep):
    """One collective from 1 KiB to 1 GiB, as a graph and eagerly; random token counts are held out."""

    def __init__(self, kind: str, weight: float, random: int, seed: int) -> None:
        self.name, self.weight, self.random, self.seed = kind, weight, random, seed

    def points(self, lab: Bench, full: bool) -> list[Point]:
        sizes = grid_sizes() if full else [s for s in grid_sizes() if s[1] < 3 and s[0] <= ROOM_S]
        made: list[Point] = [{"message_bytes": size, "late": level} for size, level in sizes]
        made += [{"message_bytes": size, "late": 2} for size in random_sizes(self.random, self.seed)]
        return [{"do": "collective", "kind": self.name, **point} for point in made]


class LimitSweep(CrewSweep):
    """All-reduce with fewer CTAs, and on streams that own only some SMs."""

    name = "collective_limits"
    weight = 9.0

    def points(self, lab: Bench, full: bool) -> list[Point]:
        sizes = ((2 << 20, 0), (32 << 20, 0), (256 << 10, 1), (256 << 20, 2))
        shared = {"do": "collective", "kind": "allreduce", "launches": ["graph"], "model": SHARD}
        made: list[Point] = []
        for (size, late), sms in product(sizes, (8, 16, 24, 32, 64)):
            made.append({**shared, "message_bytes": size, "sms": sms, "late": late})
        for (size, late), ctas in product(sizes, (1, 2, 4, 8, 16)):
            made.append({**shared, "message_bytes": size, "max_ctas": ctas, "late": late})
        return made


class KernelGridSweep(CrewSweep):
    """Name and grid of NCCL's kernels: one CTA an SM is what a collective holds. Profiles, so it runs last."""

    name = "collective_kernels"
    weight = 4.0

    def points(self, lab: Bench, full: bool) -> list[Point]:
        sizes = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
        some = [256 << 10, 2 << 20, 32 << 20, 256 << 20]
        return [
            {"do": "kernels", "kinds": list(COLLECTIVES), "sizes": sizes, "limits": [0], "late": 0},
            {"do": "kernels", "kinds": ["allreduce"], "sizes": some, "limits": [4, 8, 16], "late": 1},
        ]


class TransferSweep(CrewSweep):
    """KV caches from one GPU to the next: methods, layouts, sizes of one message, and layer after layer."""

    name = "kv_transfer"
    weight = 20.0
    ways = (
        ("copy", "contiguous", 0),
        ("sendrecv", "contiguous", 0),
        ("copy", "blocks", PAGE_BYTES),
        ("kernel", "blocks", PAGE_BYTES),
        ("sendrecv", "blocks", PAGE_BYTES),
        ("copy", "blocks", HALF_PAGE_BYTES),
        ("kernel", "blocks", HALF_PAGE_BYTES),
    )

    def __init__(self, random: int, seed: int) -> None:
        self.random, self.seed = random, seed

    def points(self, lab: Bench, full: bool) -> list[Point]:
        rng = np.random.default_rng([self.seed, 11])
        drawn = np.exp(rng.uniform(np.log(32), np.log(16384), self.random)).astype(int) // 16 * 16
        made: list[Point] = []
        for turn, (method, layout, piece) in enumerate(self.ways):
            way = {"do": "transfer", "method": method, "layout": layout, "piece_bytes": piece}
            later = 3 if piece == HALF_PAGE_BYTES else 0
            grid = [(16, 0), (256, 0), (4096, 0), (64, 1), (1024, 1), (16384, 1), (32, 2), (128, 2)]
            grid += [(512, 2), (2048, 2), (8192, 2)]
            for tokens, level in grid:
                made.append({**way, "message_bytes": tokens * TOKEN_BYTES, "late": level + later})
            if turn < 5:
                made += [{**way, "message_bytes": int(t) * TOKEN_BYTES, "late": 2} for t in drawn]
            for tokens in (256, 2048):
                layered = {"message_bytes": tokens * TOKEN_BYTES, "layers": 32, "late": 1 + later}
                made.append({**way, **layered})
        for method in ("copy", "sendrecv"):
            for size in (256 << 20, 1 << 30):
                way = {"do": "transfer", "method": method, "layout": "contiguous", "piece_bytes": 0}
                made.append({**way, "message_bytes": size, "late": 1})
        return made


class ShardSweep(CrewSweep):
    """Layers and whole steps of a 70B's half, with and without what joins the halves."""

    name = "tp_steps"
    weight = 60.0

    def points(self, lab: Bench, full: bool) -> list[Point]:
        shared = {"model": SHARD, "attention": "fa3"}
        made: list[Point] = [
            {"do": "shard_error", "kind": "prefill_layer", "q": [96], "h": [64], "allreduces": 1, "late": 0},
            {"do": "shard_error", "kind": "decode_layer", "contexts": [300] * 16, "allreduces": 1, "late": 0},
        ]
        prefills = ((512, 0, 0), (2048, 0, 0), (8192, 0, 3), (1024, 0, 2), (2048, 4096, 3))
        decodes = [(b, c, 0) for b, c in ((1, 1024), (32, 1024), (128, 1024), (32, 8192))]
        decodes += [(b, c, 1) for b, c in ((8, 1024), (64, 1024), (128, 8192), (1, 8192), (8, 8192))]
        decodes += [(b, c, 3) for b, c in product((1, 8, 32, 64, 128), (512, 4096))]
        for (q, h, late), joined in product(prefills, (1, 0)):
            shape = {"q": [q], "h": [h], "allreduces": joined}
            made.append(
                {"do": "shard", "kind": "prefill_step", **shape, "layers": 80, "late": late + 2 - joined}
            )
            made.append(
                {"do": "shard", "kind": "prefill_layer", **shape, "layers": 1, "late": late + 3 - joined}
            )
        for (batch, context, late), joined in product(decodes, (1, 0)):
            shape = {"contexts": [context] * batch, "allreduces": joined}
            made.append(
                {"do": "shard", "kind": "decode_step", **shape, "layers": 80, "late": late + 2 - joined}
            )
            if context in (1024, 8192):
                made.append(
                    {"do": "shard", "kind": "decode_layer", **shape, "layers": 1, "late": late + 3 - joined}
                )
        return [{**point, **shared} for point in made]


class ShardOperatorSweep(CrewSweep):
    """Every operator of the shard alone, at the sizes of the steps."""

    name = "tp_operators"
    weight = 8.0

    def points(self, lab: Bench, full: bool) -> list[Point]:
        made: list[Point] = []
        for m in (1, 8, 32, 64, 128, 512, 1024, 2048, 8192):
            made += [{"kind": "gemm", "role": role, "m": m, "late": 0} for role in ROLES[:4]]
            made += [{"kind": k, "m": m, "late": 1} for k in ("norm", "rope", "activation", "kv_write")]
        for q, h in ((512, 0), (1024, 0), (2048, 0), (8192, 0), (2048, 4096)):
            made.append({"kind": "prefill_attention", "q": [q], "h": [h], "attention": "fa3", "late": 0})
        for b, c in product((1, 8, 32, 64, 128), (512, 1024, 4096, 8192)):
            made.append({"kind": "decode_attention", "contexts": [c] * b, "attention": "fa2", "late": 1})
        for rows in (1, 8, 32, 64, 128):
            made += [{"kind": "lm_head", "m": rows, "late": 2}, {"kind": "sampling", "m": rows, "late": 2}]
        return [{"do": "operator", **point, "model": SHARD, "launches": ["graph"]} for point in made]


class CollectiveCorunSweep(CrewSweep):
    """All-reduces beside the compute of other layers, on all SMs or on the rest of them."""

    name = "collective_corun"
    weight = 35.0

    def points(self, lab: Bench, full: bool) -> list[Point]:
        total = lab.facts.sms
        computes: list[tuple[Point, int]] = [
            ({"kind": "prefill_layer", "q": [2048], "h": [0], "attention": "fa3"}, 0),
            (decode_layers(64, 2048), 0),
            ({"kind": "gemm", "role": "gate_up", "m": 2048}, 1),
            ({"kind": "decode_attention", "contexts": [4096] * 64, "attention": "fa2"}, 1),
            ({"kind": "prefill_attention", "q": [2048], "h": [4096], "attention": "fa3"}, 1),
            ({"kind": "stream_read", "size": 256 << 20}, 1),
            ({"kind": "gemm", "role": "gate_up", "m": 64}, 3),
            ({"kind": "prefill_layer", "q": [512], "h": [0], "attention": "fa3"}, 3),
            (decode_layers(128, 1024), 3),
        ]
        sides = [(total, 0), (total - 16, 0), (total - 32, 1), (total - 8, 2), (total - 64, 2)]
        made: list[Point] = []
        for (compute, late), (size, later), (sms, last) in product(
            computes, ((2 << 20, 0), (32 << 20, 1), (256 << 10, 3), (128 << 20, 3)), sides
        ):
            made.append({"compute": compute, "message_bytes": size, "sms": sms, "late": late + later + last})
        for (compute, late), size, ctas in product(computes[:2], (2 << 20, 32 << 20), (4, 8)):
            limited = {"message_bytes": size, "max_ctas": ctas, "sms": total, "late": late + 2}
            made.append({"compute": compute, **limited})
        return [{"do": "beside", "kind": "allreduce", "model": SHARD, **point} for point in made]


class TransferCorunSweep(CrewSweep):
    """KV transfers while the sending GPU prefills, or the receiving one decodes."""

    name = "kv_corun"
    weight = 15.0

    def points(self, lab: Bench, full: bool) -> list[Point]:
        ways = TransferSweep.ways[:5]
        prefills: list[tuple[Point, int]] = [
            ({"kind": "prefill_layer", "q": [q], "h": [0], "attention": "fa3"}, late)
            for q, late in ((2048, 0), (8192, 2), (512, 1))
        ]
        made: list[Point] = []
        for method, layout, piece in ways:
            way = {"method": method, "layout": layout, "piece_bytes": piece}
            way |= {"message_bytes": 2048 * TOKEN_BYTES, "layers": 4}
            made += [{**way, "compute": c, "compute_ranks": [0], "late": late} for c, late in prefills]
            for (batch, context), late in (((64, 1024), 0), ((16, 4096), 1), ((128, 1024), 2)):
                compute = decode_layers(batch, context, 4)
                made.append({**way, "compute": compute, "compute_ranks": [1], "late": late})
        shared = {"do": "beside", "model": PREFILLER, "sms": lab.facts.sms}
        return [{**shared, **point} for point in made]


def decode_layers(batch: int, context: int, layers: int = 8) -> Point:
    """Bare layers of a decode step."""
    return {
        "kind": "decode_layer",
        "contexts": [context] * batch,
        "layers": layers,
        "attention": "fa3",
    }


def crew_sweeps(random: int, seed: int) -> Sequence[CrewSweep]:
    """The sweeps of this module, most wanted first; `random` held-out sizes of each collective."""
    held = min(random, 16)
    first, *others = COLLECTIVES
    weights = {"allgather": 7.0, "sendrecv": 7.0}
    return [
        CollectiveSweep(first, 20.0, 2 * held, seed),
        TransferSweep(held // 2, seed),
        ShardSweep(),
        CollectiveCorunSweep(),
        *(CollectiveSweep(kind, weights.get(kind, 5.0), held, seed) for kind in others),
        ShardOperatorSweep(),
        LimitSweep(),
        TransferCorunSweep(),
        KernelGridSweep(),
    ]
