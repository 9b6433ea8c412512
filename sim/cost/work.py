"""Work of many passes from their totals: FLOPs, bytes and energy are linear in tokens, rows, pairs and passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.cost.energy import EnergyTerms
from sim.cost.model import ModelSpec
from sim.cost.operators import calls, expert_bytes, flops, hbm_bytes, linear_operators
from sim.cost.shapes import Experts, Shape


@dataclass(frozen=True)
class Work:
    """Floating-point operations and HBM bytes."""

    flops: float
    hbm_bytes: float


def per_row(model: ModelSpec, rows: str) -> tuple[Work, float]:
    """Work of one token (`tokens`) or head row (`sequences`) in the linear layers, and bytes once a pass.

    Without the weights of experts, which are linear in neither (`expert_weights`).
    """
    one, two = np.array([1]), np.array([2])
    total_flops = row_bytes = pass_bytes = 0.0
    for operator in linear_operators(model):
        if operator.rows == rows:
            times = calls(operator, model, None)
            at_one, at_two = (_moved(operator.shape(count)) for count in (one, two))
            total_flops += times * float(flops(operator.shape(one))[0])
            row_bytes += times * (at_two - at_one)
            pass_bytes += times * (2 * at_one - at_two)
    return Work(total_flops, row_bytes), pass_bytes


def _moved(shape: Shape) -> float:
    held = expert_bytes(shape) if isinstance(shape, Experts) else 0.0
    return float((hbm_bytes(shape) - held)[0])


def expert_weights(model: ModelSpec, tokens: float) -> float:
    """Bytes of the experts' weights that a pass of so many tokens reads, all layers; 0 for a dense model."""
    total, one = 0.0, np.array([tokens])
    for operator in linear_operators(model):
        shape = operator.shape(one)
        if isinstance(shape, Experts):
            total += calls(operator, model, None) * float(expert_bytes(shape)[0])
    return total


def total_work(model: ModelSpec, totals: Mapping[str, float]) -> Work:
    """Work of all passes that `totals` sums up, with the keys of `sim.engine.records.RunRecords.totals`:

    `dense_tokens`, `head_rows`, `prefill_pairs`, `prefill_kv_tokens`, `decode_kv_tokens`, `launches_graph`,
    `launches_eager`. Padding to captured sizes and attention windows are not counted, and the experts that are read are
    those of passes of the mean size, some more than those of uneven ones.
    """
    token, weights = per_row(model, "tokens")
    row, head_weights = per_row(model, "sequences")
    passes = totals["launches_graph"] + totals["launches_eager"]
    touched = expert_weights(model, totals["dense_tokens"] / passes) if model.experts and passes else 0.0
    pairs = totals["prefill_pairs"] + totals["decode_kv_tokens"]
    keys = totals["prefill_kv_tokens"] + totals["decode_kv_tokens"]
    query_and_output = 2.0 * model.layers * model.q_width * model.dtype_bytes
    return Work(
        flops=totals["dense_tokens"] * token.flops
        + totals["head_rows"] * row.flops
        + pairs * 4.0 * model.layers * model.q_width,
        hbm_bytes=totals["dense_tokens"] * (token.hbm_bytes + query_and_output)
        + totals["head_rows"] * row.hbm_bytes
        + passes * (weights + head_weights + touched)
        + keys * model.kv_bytes_per_token(),
    )


@dataclass(frozen=True)
class Joules:
    """Joules of the work of passes, on top of the watts of time: of a pass, a token, a head row, a query-key pair of
    prefill attention, a key that it reads and one that decode attention reads."""

    launch: float
    token: float
    row: float
    pair: float
    prefill_key: float
    decode_key: float

    def of(self, totals: Mapping[str, Any]) -> Any:
        """Joules of the work that `totals` sums up, or of an array of such sums; without the weights of experts."""
        return (
            (totals["launches_graph"] + totals["launches_eager"]) * self.launch
            + totals["dense_tokens"] * self.token
            + totals["head_rows"] * self.row
            + totals["prefill_pairs"] * self.pair
            + totals["prefill_kv_tokens"] * self.prefill_key
            + totals["decode_kv_tokens"] * self.decode_key
        )


def byte_sums(model: ModelSpec) -> Joules:
    """HBM bytes of each unit of work of a model, by terms that count a byte as a joule."""
    return joules_per(model, EnergyTerms(0.0, 0.0, 1.0, 1e300, ""))


def joules_per(model: ModelSpec, energy: EnergyTerms) -> Joules:
    """Joules of each unit of work of a model."""
    token, weights = _joules_per_row(model, energy, "tokens")
    row, head_weights = _joules_per_row(model, energy, "sequences")
    kv = float(model.kv_bytes_per_token())
    pair = 4.0 * model.layers * model.q_width
    query_and_output = 2.0 * model.layers * model.q_width * model.dtype_bytes
    return Joules(
        launch=weights + head_weights,
        token=token + energy.work_j("prefill_attention", 0.0, query_and_output),
        row=row,
        pair=energy.work_j("prefill_attention", pair, 0.0),
        prefill_key=energy.work_j("prefill_attention", 0.0, kv),
        decode_key=energy.work_j("decode_attention", pair, kv),
    )


def _joules_per_row(model: ModelSpec, energy: EnergyTerms, rows: str) -> tuple[float, float]:
    """(of one row, of a pass whatever its rows) in the operators whose size follows `rows`."""
    of_row = of_pass = 0.0
    for operator in linear_operators(model):
        if operator.rows == rows:
            times = calls(operator, model, None)
            one, two = (operator.shape(np.array([count])) for count in (1, 2))
            row_bytes = _moved(two) - _moved(one)
            of_row += times * energy.work_j(operator.name, float(flops(one)[0]), row_bytes)
            of_pass += times * energy.work_j(operator.name, 0.0, _moved(one) - row_bytes)
    return of_row, of_pass


def total_joules(model: ModelSpec, energy: EnergyTerms, totals: Mapping[str, float]) -> float:
    """Joules of the work of all passes that `totals` sums up, as `total_work` counts it."""
    passes = totals["launches_graph"] + totals["launches_eager"]
    touched = expert_weights(model, totals["dense_tokens"] / passes) if model.experts and passes else 0.0
    return float(joules_per(model, energy).of(totals)) + passes * float(energy.work_j("moe", 0.0, touched))
