"""Which request belongs to which SLO class, and with what priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.errors import SimctlError
from sim.suggest import nearest
from sim.workload.trace import Trace

Classes = tuple[NDArray[np.int16], tuple[str, ...], NDArray[np.int16], tuple[str, ...]]


def assign_classes(
    trace: Trace, wish: Any, slo_classes: Mapping[str, Any] | None, rng: np.random.Generator
) -> Classes:
    """(class index, class names, priority, notes) for every request.

    `wish` is the block's `slo_class`: a name for all, shares by name (drawn by `rng`), or None for the
    trace's own column. With `slo_classes` every name must be one of them, and its `priority` applies unless
    the trace has a priority column of its own.
    """
    code, names, notes = _codes(trace, wish, slo_classes, rng)
    if slo_classes is not None:
        for name in names:
            if name not in slo_classes:
                raise SimctlError(
                    f"workload: SLO class '{name}' is not under slo.classes ({', '.join(slo_classes)})."
                    f"{nearest(name, slo_classes)}"
                )
        order = {name: index for index, name in enumerate(slo_classes)}
        code = np.array([order[name] for name in names])[code]
        names = tuple(slo_classes)
    if trace.priority is not None:
        return code.astype(np.int16), names, trace.priority.astype(np.int16), notes
    by_class = np.array([_priority(slo_classes, name) for name in names], np.int16)
    return code.astype(np.int16), names, by_class[code], notes


def _codes(
    trace: Trace, wish: Any, slo_classes: Mapping[str, Any] | None, rng: np.random.Generator
) -> tuple[NDArray[np.int64], tuple[str, ...], tuple[str, ...]]:
    everyone = np.zeros(len(trace), np.int64)
    if isinstance(wish, str):
        return everyone, (wish,), ()
    if isinstance(wish, Mapping):
        return _drawn(wish, len(trace), rng)
    if wish is not None:
        raise SimctlError(
            f"workload.slo_class: {wish!r} is neither a name nor shares such as {{chat: 0.7, batch: 0.3}}"
        )
    if trace.slo_class is not None:
        return trace.slo_class, trace.slo_classes, ()
    if slo_classes is None or "default" in slo_classes:
        return everyone, ("default",), ()
    if len(slo_classes) == 1:
        return everyone, tuple(slo_classes), ()
    raise SimctlError(
        f"workload.slo_class is missing: there are the SLO classes {', '.join(slo_classes)}, and workload "
        f"'{trace.name}' has no column slo_class; give a name or shares such as "
        f"{{{next(iter(slo_classes))}: 0.7, ...}}"
    )


def _drawn(
    shares: Mapping[str, Any], n: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], tuple[str, ...], tuple[str, ...]]:
    weights = list(shares.values())
    good = all(isinstance(w, int | float) and not isinstance(w, bool) and w >= 0 for w in weights)
    if not good or abs(sum(weights) - 1) > 1e-6:
        raise SimctlError(f"workload.slo_class: the shares {dict(shares)!r} are not numbers that sum to 1")
    edges = np.cumsum(weights)[:-1]
    code = np.searchsorted(edges, rng.random(n), side="right")
    note = "SLO classes drawn by share: " + ", ".join(f"{name} {share:g}" for name, share in shares.items())
    return code.astype(np.int64), tuple(map(str, shares)), (note,)


def _priority(slo_classes: Mapping[str, Any] | None, name: str) -> int:
    block = (slo_classes or {}).get(name)
    value = block.get("priority") if isinstance(block, Mapping) else getattr(block, "priority", None)
    return int(value or 0)
