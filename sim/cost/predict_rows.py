"""Cells of a row of `simctl profile predict`: the shape and the launch that they describe, numbers, words.

SimctlError names `where` and the cell that cannot be read.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sim.cost.model import ModelSpec
from sim.cost.operators import decode_shape, effective_longest, prefill_shape
from sim.cost.profiled import ProfiledCost
from sim.cost.shapes import Gemm, Launch, Shape
from sim.errors import SimctlError
from sim.suggest import nearest


def product_of(model: ModelSpec, n: int, k: int) -> str:
    """The operator that a product of these widths is: the LM head and the router are never quantised."""
    if (n, k) == (model.vocab, model.hidden):
        return "lm_head"
    return "gemm/router" if model.experts and (n, k) == (model.experts, model.hidden) else "gemm"


def shape_of(cost: ProfiledCost, kind: str, row: Mapping[str, str], where: str) -> Shape:
    """Shape of a row of one operator; `kind`: gemm, prefill_attention or decode_attention."""
    if kind == "gemm":
        m, n, k = (whole(row, name, where) for name in ("m", "n", "k"))
        if not (m and n and k):
            raise SimctlError(f"{where}: a gemm needs m, n and k above 0.")
        wide = product_of(cost.model, n, k) != "gemm"
        return Gemm(np.array([m]), n, k, cost.model.dtype_bytes if wide else cost.model.linear_bytes)
    if kind == "prefill_attention":
        chunks = _chunks(row, "", where)
        if not chunks:
            raise SimctlError(f"{where}: prefill_attention needs prefill_tokens.")
        q, h = (np.array(column, dtype=np.int64) for column in zip(*chunks, strict=True))
        return prefill_shape(cost.model, q, h)
    contexts = numbers(row, "decode_contexts", where)
    if not contexts:
        raise SimctlError(f"{where}: decode_attention needs decode_contexts.")
    return decode_shape(
        cost.model,
        np.array([len(contexts)]),
        np.array([float(sum(contexts))]),
        np.array([effective_longest(contexts)]),
    )


def launch_of(row: Mapping[str, str], prefix: str, where: str) -> Launch:
    """The launch of a row, or with a prefix that of its neighbour."""
    contexts = numbers(row, f"{prefix}decode_contexts", where)
    longest = round(effective_longest(contexts)) if contexts else 0
    return Launch(_chunks(row, prefix, where), len(contexts), sum(contexts), longest)


def _chunks(row: Mapping[str, str], prefix: str, where: str) -> tuple[tuple[int, int], ...]:
    q = [one for one in numbers(row, f"{prefix}prefill_tokens", where) if one]
    h = numbers(row, f"{prefix}history_tokens", where) or [0] * len(q)
    if q and len(h) != len(q):
        raise SimctlError(f"{where}: {len(q)} prefill_tokens and {len(h)} history_tokens.")
    return tuple(zip(q, h, strict=True)) if q else ()


def numbers(row: Mapping[str, str], name: str, where: str) -> list[int]:
    """Whole numbers of a cell such as 512;2048, none below 0; nothing for an empty one."""
    cell = row.get(name) or ""
    unreadable = SimctlError(f"{where}: {name} '{cell}' is no list of whole numbers such as 512;2048.")
    try:
        given = [float(part) for part in cell.split(";") if part.strip()]
        values = [int(value) for value in given]
    except (ValueError, OverflowError):
        raise unreadable from None
    if values != given:
        raise unreadable
    if any(value < 0 for value in values):
        raise SimctlError(f"{where}: {name} '{cell}' has a negative number.")
    return values


def whole(row: Mapping[str, str], name: str, where: str) -> int:
    """The one whole number of a cell, 0 for an empty one."""
    values = numbers(row, name, where)
    if len(values) > 1:
        raise SimctlError(f"{where}: {name} '{row[name]}' must be one number.")
    return values[0] if values else 0


def one_of(row: Mapping[str, str], name: str, valid: tuple[str, ...], where: str) -> str:
    """A cell that holds one of these words, or nothing."""
    value = row.get(name) or ""
    if value and value not in valid:
        raise SimctlError(f"{where}: {name} '{value}' is none of {', '.join(valid)}.{nearest(value, valid)}")
    return value
