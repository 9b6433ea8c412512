"""What a prefill pass and a decode step cost each other on one GPU: a fitted physics base times measured residuals.

Three regimes. Disjoint SM sets meet in the memory system: the excess grows with what the neighbour draws and with
how much of it a side's own SMs pull. Overlapping sets wait for each other's kernels as well, and two plain streams
do nothing else: a layer waits for a share of the other's layer. Fitted by `calib.fit.contention`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sim.cost.contention import slowdown_arrays
from sim.cost.gpu import GpuSpec
from sim.cost.loads import Loads
from sim.cost.shapes import Floats
from sim.errors import SimctlError

SIDES = ("prefill", "decode")
REGIMES = ("disjoint", "overlapped", "streams")
OVERLAPPING = REGIMES[1:]
PRIORITIES = ("normal", "high")  # of the decode side's stream
OTHER_RULE = "demanded bandwidth"
KEPT_KERNELS = 64
PIECE = 32
FADE = 3.0  # doublings beyond the measured range over which a residual goes to zero


@dataclass(frozen=True)
class Beside:
    """Excess of a side next to another in the memory system:
    k (hbm' + other_tensor tensor')^other_power (hbm + own_tensor tensor)^own_power / share^share_power.

    Primes mark the neighbour; demands are shares of the whole GPU's, `share` is the side's share of the SMs. What
    tensor cores do stands for the traffic between L2 and SMs.
    """

    k: float
    other_tensor: float
    other_power: float
    own_tensor: float
    own_power: float
    share_power: float

    def excess(self, own: Loads, other: Loads, share: Any, cross: bool = False) -> Floats:
        """0 or more; elementwise, or with `cross` every own beside every other, shape (own, other)."""
        draw = (other.hbm + self.other_tensor * other.tensor) ** self.other_power
        pull = (own.hbm + self.own_tensor * own.tensor) ** self.own_power / share**self.share_power
        return np.asarray(self.k * (np.outer(pull, draw) if cross else pull * draw))


@dataclass(frozen=True)
class Waiting:
    """Excess of a side by kernels of the other on the same SMs:
    k ms'^other_power / ms^own_power tensor^tensor_power shared^shared_power.

    `ms`: solo milliseconds a layer; `tensor`: of the decode side, since larger batches fill more SMs; `shared`: the
    share of the side's SMs that the other may use too.
    """

    k: float
    other_power: float
    own_power: float
    tensor_power: float
    shared_power: float

    def excess(self, own: Loads, other: Loads, shared: Any, cross: bool = False) -> Floats:
        """As `Beside.excess`."""
        mine, theirs = own.layer_ms**-self.own_power, other.layer_ms**self.other_power
        if len(own) and own.prefill[0]:
            theirs = theirs * other.tensor**self.tensor_power
        else:
            mine = mine * own.tensor**self.tensor_power
        both = np.outer(mine, theirs) if cross else mine * theirs
        return np.asarray(self.k * shared**self.shared_power * both)


@dataclass(frozen=True)
class Residual:
    """Log residuals at measured sites, by a product of Gaussians along six axes: log2 of the SMs of prefill and
    decode, q, h + 512, batch and mean context. `sites`, shape (n, 6), in these units; `lengths` of the Gaussians;
    `weights`, shape (n, 2), for prefill and decode. Off the sites' range it fades to zero over `FADE` doublings."""

    sites: Floats
    lengths: Floats
    weights: Floats

    def at(self, prefill: Loads, decode: Loads, split: tuple[float, float]) -> tuple[Floats, Floats]:
        """Log residuals of the two sides, shape (prefill, decode) each."""
        (of_split, near), (of_a, near_a), (of_b, near_b) = (
            self._kernel(coordinates, columns)
            for coordinates, columns in (
                (split_axes(np.array([split[0]]), np.array([split[1]])), slice(0, 2)),
                (prefill_axes(prefill), slice(2, 4)),
                (decode_axes(decode), slice(4, 6)),
            )
        )
        fade = near * np.outer(near_a, near_b)
        first, second = (_product(of_a * (of_split[0] * w), of_b.T) * fade for w in self.weights.T)
        return first, second

    @cached_property
    def _kernels(self) -> dict[tuple[int, bytes], tuple[Floats, Floats]]:
        """Gaussians of the last few grids: a surface asks for the same passes and steps at every split."""
        return {}

    def _kernel(self, at: Floats, columns: slice) -> tuple[Floats, Floats]:
        """(values of the Gaussians, shape (points, n); what is left of the residual at that distance)."""
        key = (columns.start, at.tobytes())
        if key not in self._kernels:
            if len(self._kernels) >= KEPT_KERNELS:
                self._kernels.clear()
            self._kernels[key] = self._gaussians(at, columns)
        return self._kernels[key]

    def _gaussians(self, at: Floats, columns: slice) -> tuple[Floats, Floats]:
        sites = self.sites[:, columns]
        inside = np.clip(at, sites.min(axis=0), sites.max(axis=0))
        near = np.prod(np.maximum(0.0, 1.0 - np.abs(at - inside) / FADE), axis=1)
        away = (inside[:, None, :] - sites[None, :, :]) / self.lengths[columns]
        return np.exp(-0.5 * np.sum(away**2, axis=2)), near


def _product(a: Floats, b: Floats) -> Floats:
    """a @ b in pieces too small for BLAS to start threads on, which would wait longer than they work."""
    total = np.zeros((len(a), b.shape[1]))
    for at in range(0, len(b), PIECE):
        total += a[:, at : at + PIECE] @ b[at : at + PIECE]
    return total


def split_axes(prefill_sms: Floats, decode_sms: Floats) -> Floats:
    """Coordinates of a split on the axes of `Residual`, shape (points, 2)."""
    return np.log2(np.stack([prefill_sms, decode_sms], axis=1).astype(np.float64))


def prefill_axes(loads: Loads) -> Floats:
    """Coordinates of prefill passes, shape (passes, 2)."""
    return np.stack([np.log2(np.maximum(loads.q, 1.0)), np.log2(loads.h + 512.0)], axis=1)


def decode_axes(loads: Loads) -> Floats:
    """Coordinates of decode steps, shape (steps, 2)."""
    return np.log2(np.maximum(np.stack([loads.batch, loads.context], axis=1), 1.0))


def regime_of(split: tuple[int, int], overlap: int, total: int) -> str:
    """Disjoint sets, overlapping ones, or two streams that both may use the whole GPU."""
    if overlap <= 0:
        return "disjoint"
    return "streams" if min(split) >= total else "overlapped"


@dataclass(frozen=True)
class MeasuredContention:
    """The surface of one GPU, measured with one model. Keys of `beside`: `SIDES`; of `waiting`: (regime, priority),
    then side; of `residuals`: (regime, priority), only where they lower the held-out error."""

    gpu: GpuSpec
    model: str
    label: str
    coverage: str
    beside: Mapping[str, Beside]
    waiting: Mapping[tuple[str, str], Mapping[str, Waiting]]
    residuals: Mapping[tuple[str, str], Residual]

    def label_for(self, model: str) -> str:
        """The label, or that of an extrapolation for a model that was not measured."""
        if model == self.model:
            return self.label
        return f"extrapolated from {self.gpu.name} by {OTHER_RULE}"

    def base(
        self,
        prefill: Loads,
        decode: Loads,
        sms: tuple[Any, Any],
        overlap: Any,
        regime: str,
        priority: str = "normal",
        cross: bool = False,
    ) -> tuple[Floats, Floats]:
        """Factors of the two sides without residuals; elementwise, or every pass beside every step with `cross`."""
        found = []
        for side, own, other, width in zip(SIDES, (prefill, decode), (decode, prefill), sms, strict=True):
            factor: Any = 1.0
            if regime != "streams":
                factor = 1.0 + self.beside[side].excess(own, other, width / self.gpu.sms, cross)
            if regime != "disjoint":
                waiting = self.waiting[regime, priority][side]
                factor = factor * (1.0 + waiting.excess(own, other, overlap / width, cross))
            found.append(np.asarray(factor))
        # every pass is a row, every step a column, whichever side is slowed
        return found[0], found[1].T if cross else found[1]

    def factors(
        self,
        prefill: Loads,
        decode: Loads,
        split: tuple[int, int],
        overlap: int = 0,
        model: str | None = None,
        priority: str = "normal",
    ) -> tuple[Floats, Floats]:
        """Factors >= 1 of each prefill pass and of each decode step beside each other, shape (passes, steps) each.

        `model`: who runs (None: the measured one); residuals belong to the measured model alone. `priority` of the
        decode side's stream matters where SMs are shared.
        """
        if not len(prefill) or not len(decode):
            return np.ones((len(prefill), len(decode))), np.ones((len(prefill), len(decode)))
        regime = regime_of(split, overlap, self.gpu.sms)
        priority = "normal" if regime == "disjoint" else priority
        # an idle side has no time a layer; its factor is set to 1 below
        with np.errstate(divide="ignore", invalid="ignore"):
            found = self.base(prefill, decode, split, overlap, regime, priority, cross=True)
        residual = self.residuals.get((regime, priority)) if model in (None, self.model) else None
        if residual is not None:
            logs = residual.at(prefill, decode, split)
            found = found[0] * np.exp(logs[0]), found[1] * np.exp(logs[1])
        both = np.outer(prefill.busy, decode.busy)
        first, second = (np.where(both, np.maximum(1.0, one), 1.0) for one in found)
        return first, second

    def slowdowns(
        self,
        a: Loads,
        b: Loads,
        split: tuple[int, int],
        overlap: int,
        model: str,
        priority: str = "normal",
    ) -> tuple[Floats, Floats]:
        """Factors of every a beside every b, whichever is the prefill; two launches of one kind, which were not
        measured, get the analytic guess."""
        of_a, of_b = slowdown_arrays((a.hbm, a.busy), (b.hbm, b.busy), split, overlap)
        for first in (True, False):
            rows, columns = np.flatnonzero(a.prefill == first), np.flatnonzero(b.prefill != first)
            at = np.ix_(rows, columns)
            if first:
                of_a[at], of_b[at] = self.factors(
                    a.take(rows), b.take(columns), split, overlap, model, priority
                )
            else:
                other = split[1], split[0]
                found = self.factors(b.take(columns), a.take(rows), other, overlap, model, priority)
                of_b[at], of_a[at] = found[0].T, found[1].T
        return of_a, of_b

    def as_data(self) -> dict[str, Any]:
        """A JSON-like mapping that `from_data` reads."""
        return {
            "gpu": self.gpu.name,
            "model": self.model,
            "beside": {side: _rounded(asdict(terms)) for side, terms in self.beside.items()},
            "waiting": [
                {
                    "regime": regime,
                    "priority": priority,
                    **{side: _rounded(asdict(terms)) for side, terms in of_side.items()},
                }
                for (regime, priority), of_side in self.waiting.items()
            ],
            "residuals": [
                {
                    "regime": regime,
                    "priority": priority,
                    "lengths": one.lengths.tolist(),
                    "sites": np.round(one.sites, 5).tolist(),
                    "weights": np.round(one.weights, 6).tolist(),
                }
                for (regime, priority), one in self.residuals.items()
            ],
        }

    @classmethod
    def from_data(
        cls, data: Mapping[str, Any], gpu: GpuSpec, label: str, coverage: str, where: str
    ) -> MeasuredContention:
        """A surface of a mapping; SimctlError names `where` and what is wrong."""
        try:
            if data["gpu"] != gpu.name:
                raise SimctlError(f"{where}: contention was measured on {data['gpu']}, not on {gpu.name}.")
            surface = cls(
                gpu=gpu,
                model=data["model"],
                label=label,
                coverage=coverage,
                beside={side: _terms(Beside, data["beside"][side]) for side in SIDES},
                waiting={
                    (one["regime"], one["priority"]): {side: _terms(Waiting, one[side]) for side in SIDES}
                    for one in data["waiting"]
                },
                residuals={
                    (one["regime"], one["priority"]): Residual(
                        np.array(one["sites"], dtype=np.float64).reshape(-1, 6),
                        np.array(one["lengths"], dtype=np.float64).reshape(6),
                        np.array(one["weights"], dtype=np.float64).reshape(-1, 2),
                    )
                    for one in data["residuals"]
                },
            )
        except KeyError as error:
            raise SimctlError(f"{where}: key {error} is missing.") from error
        except (TypeError, ValueError) as error:
            raise SimctlError(f"{where}: contention is not readable: {error}.") from error
        for regime, priority in product(OVERLAPPING, PRIORITIES):
            if (regime, priority) not in surface.waiting:
                raise SimctlError(f"{where}: no terms for '{regime}', '{priority}' under 'waiting'.")
        return surface


def _terms(kind: Any, values: Mapping[str, Any]) -> Any:
    return kind(**{field.name: float(values[field.name]) for field in fields(kind)})


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in values.items()}


def load_contention(path: Path, gpu: GpuSpec, label: str, coverage: str = "") -> MeasuredContention:
    """The surface of a profile's file; SimctlError if it is not readable or belongs to another GPU."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SimctlError(f"Contention file '{path}' is not readable: {error}.") from error
    if not isinstance(data, dict):
        raise SimctlError(f"{path} must hold a mapping.")
    return MeasuredContention.from_data(data, gpu, label, coverage, str(path))
