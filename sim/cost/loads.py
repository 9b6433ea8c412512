"""Many launches priced at once as arrays: what a contention surface needs to know of each side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.cost.collectives import is_collective
from sim.cost.gpu import GpuSpec
from sim.cost.launching import grid_tokens
from sim.cost.operators import calls, decode_shape, flops, hbm_bytes, layer_span, prefill_shape
from sim.cost.shapes import Floats, Ints, Launch

if TYPE_CHECKING:
    from sim.cost.profiled import ProfiledCost


@dataclass(frozen=True)
class Loads:
    """Launches alone on some SMs, one array element each, without the collectives of a group (`parallel_pairs`).

    `seconds`: first kernel to last; `flops`, `hbm_bytes`: of the whole launch; `layers`: that it runs; `prefill`:
    has it chunks? `q`: new tokens of the chunks, `h`: their mean history, `batch` and `context`: decoding sequences
    and their mean context.
    """

    gpu: GpuSpec
    seconds: Floats
    flops: Floats
    hbm_bytes: Floats
    layers: Floats
    prefill: NDArray[np.bool_]
    q: Floats
    h: Floats
    batch: Floats
    context: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def hbm(self) -> Floats:
        """Demanded share of the HBM bandwidth."""
        return np.minimum(self._rate(self.hbm_bytes) / self.gpu.hbm_bytes_per_s, 1.0)

    @property
    def tensor(self) -> Floats:
        """Demanded share of the tensor cores' peak."""
        return self._rate(self.flops) / self.gpu.peak_flops

    @property
    def busy(self) -> NDArray[np.bool_]:
        """Does the launch do anything?"""
        return (self.hbm_bytes > 0) | (self.flops > 0)

    @property
    def layer_ms(self) -> Floats:
        """Milliseconds a layer."""
        return 1e3 * self.seconds / self.layers

    def _rate(self, work: Floats) -> Floats:
        return np.divide(work, self.seconds, out=np.zeros(len(self)), where=self.seconds > 0)

    def take(self, kept: NDArray[np.bool_] | Ints) -> Loads:
        """The launches of a mask or of indices."""
        rest = (self.seconds, self.flops, self.hbm_bytes, self.layers, self.prefill)
        sizes = (self.q, self.h, self.batch, self.context)
        return Loads(self.gpu, *(x[kept] for x in rest), *(x[kept] for x in sizes))  # type: ignore[arg-type]


def launch_loads(cost: ProfiledCost, launches: Sequence[Launch], sms: int) -> Loads:
    """Loads of launches alone on `sms` SMs; seconds, FLOPs and bytes of the operators of `ProfiledCost.solo` added up.

    Contexts of a batch are taken as alike. Answers off a curve's coverage are not flagged here: `solo` prices what
    runs, and flags it.
    """
    total = np.zeros((3, len(launches)))
    groups: dict[tuple[tuple[int, int] | None, bool], list[int]] = {}
    for i, launch in enumerate(launches):
        groups.setdefault((launch.layers, launch.graph), []).append(i)
    for (layers, graph), members in groups.items():
        at = np.array(members)
        tokens = np.array([launches[i].tokens for i in members], dtype=np.int64)
        rows = np.array([launches[i].sequences for i in members], dtype=np.int64)
        total[:, at] = _linear(cost, layers, graph, tokens, rows, sms)
    total += _attention(cost, launches, sms)
    q = np.array([sum(q for q, _ in one.chunks) for one in launches], dtype=np.float64)
    history = np.array([sum(h for _, h in one.chunks) for one in launches], dtype=np.float64)
    batch = np.array([one.decode_batch for one in launches], dtype=np.float64)
    context = np.array([one.decode_context_sum for one in launches], dtype=np.float64)
    chunks = np.array([len(one.chunks) for one in launches])
    return Loads(
        gpu=cost.gpu,
        seconds=total[0],
        flops=total[1],
        hbm_bytes=total[2],
        layers=np.array([layer_span(cost.model, one.layers)[0] for one in launches], dtype=np.float64),
        prefill=chunks > 0,
        q=q,
        h=history / np.maximum(chunks, 1),
        batch=batch,
        context=context / np.maximum(batch, 1.0),
    )


def _linear(
    cost: ProfiledCost, layers: tuple[int, int] | None, graph: bool, tokens: Ints, rows: Ints, sms: int
) -> Floats:
    """(seconds, FLOPs, bytes) of all operators but attention and collectives; time is that of the padded size."""
    padded = {"tokens": grid_tokens(cost.launching.padded(tokens, graph)), "sequences": grid_tokens(rows)}
    real = {"tokens": tokens, "sequences": rows}
    total = np.zeros((3, len(tokens)))
    for operator in cost.operators:
        times = calls(operator, cost.model, layers)
        some = real[operator.rows] > 0
        if not times or not some.any() or is_collective(operator.name):
            continue
        shape = operator.shape(real[operator.rows][some])
        seconds = cost.timing(operator.name, operator.shape(padded[operator.rows][some]), sms).seconds
        total[:, some] += times * np.array([seconds, flops(shape), hbm_bytes(shape)])
    return total


def _attention(cost: ProfiledCost, launches: Sequence[Launch], sms: int) -> Floats:
    """(seconds, FLOPs, bytes) of attention; chunks of one pass share the fixed cost."""
    total = np.zeros((3, len(launches)))
    layers = np.array([layer_span(cost.model, one.layers)[0] for one in launches], dtype=np.float64)
    owner = np.array([i for i, one in enumerate(launches) for _ in one.chunks], dtype=np.int64)
    if len(owner):
        q, h = np.array([chunk for one in launches for chunk in one.chunks], dtype=np.int64).T
        shape = prefill_shape(cost.model, q, h)
        parts = (cost.prefill(q, h, sms).seconds, flops(shape), hbm_bytes(shape))
        for row, part in zip(total, parts, strict=True):
            row += np.bincount(owner, weights=part, minlength=len(launches))
        chunks = np.bincount(owner, minlength=len(launches))
        total[0] -= np.maximum(chunks - 1, 0) * cost.prefill_fixed_s()
    some = np.array([one.decode_batch > 0 for one in launches], dtype=bool)
    if some.any():
        batch = np.array([one.decode_batch for one in launches], dtype=np.int64)[some]
        context = np.array([one.decode_context_sum for one in launches], dtype=np.float64)[some]
        decode = decode_shape(cost.model, batch, context)
        total[:, some] += [cost.decode(batch, context, sms).seconds, flops(decode), hbm_bytes(decode)]
    return total * layers
