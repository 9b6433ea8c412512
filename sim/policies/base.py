"""What a policy is: knobs with sources, and a decision that reads a view and writes a plan.

A built-in policy is *compiled*: its `advance` is a module-level function of four lines that alternates the engine's
`begin`, the policy's own plan function and the engine's `execute`; plan functions read and write plain arrays
(`sim.engine.layout`). A user's policy is any object with `plan(view) -> Plan` (`sim.engine.view`).
To add a built-in policy: one file here with a `CompiledPolicy` subclass, and one line in `sim/policies/__init__.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from sim.cost.attention import AttentionMode
from sim.engine.deployment import Deployment
from sim.engine.layout import (
    BY_ADMISSION,
    POLICY_SLOTS,
    array,
)
from sim.errors import SimctlError
from sim.suggest import nearest
from sim.workload.workload import Workload


@dataclass(frozen=True)
class Knob:
    """One named choice of a policy: default, meaning, and where the default comes from; bounds or a few words."""

    default: Any
    doc: str
    source: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] | None = None


class Policy(Protocol):
    """The one method that a policy needs; everything else has defaults in the engine."""

    def plan(self, view: Any) -> Any:
        """Return a Plan for the replica that `view` shows."""


class CompiledPolicy:
    """Base of the built-in policies: checks knobs, names itself, and declares its demands on the replica."""

    name: ClassVar[str]
    source: ClassVar[str]
    mirrors: ClassVar[str]
    knobs: ClassVar[dict[str, Knob]]
    run_order: ClassVar[int] = BY_ADMISSION
    lanes: ClassVar[int] = 1
    # what the numbers mean that a plan gives as its REASON, from 0 on: a column `split_reason` of the step log
    split_reasons: ClassVar[tuple[str, ...]] = ()
    state_slots: ClassVar[int] = POLICY_SLOTS  # integers and floats of a replica that are the policy's own
    # reads believed prices; `advance` takes them after the true ones on one lane, too
    predicts: ClassVar[bool] = False
    advance: ClassVar[Callable[..., None]]

    def __init__(self, label: str | None = None, **settings: Any) -> None:
        self.label = label or self.name
        self.settings = check_knobs(self.name, self.knobs, settings)

    def __getitem__(self, knob: str) -> Any:
        return self.settings[knob]

    @property
    def wait_order(self) -> str:
        """How requests wait: `fcfs`, or `priority` (of the request, lower first; then by arrival)."""
        return "fcfs"

    @property
    def heeds_estimator(self) -> bool:
        """Can what it believes of prices change a decision?"""
        return self.predicts

    @property
    def mixes(self) -> bool:
        """Can a step of it hold prompt chunks and decodes?"""
        return False

    @property
    def block_size(self) -> int | None:
        """Tokens per KV block if the system has its own; None leaves it to the experiment."""
        return None

    @property
    def graph_share(self) -> float:
        """Share of the engine's memory for graphs beyond one set of them, which the runtime's reserve holds."""
        return 0.0

    def max_seqs(self, deployment: Deployment) -> int:
        """Most requests that run at once."""
        return int(self["max_num_seqs"])

    def max_tokens(self, deployment: Deployment) -> int:
        """Most tokens in one step."""
        raise SimctlError(f"policy '{self.name}' does not declare its largest step")

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Integers and floats that the plan function reads as `ki` and `kf`."""
        return [], []

    def required_blocks(self, workload: Workload, deployment: Deployment) -> NDArray[np.int64]:
        """Blocks that each request must find free in an empty pool to be served to its end, shape (n,)."""
        # the last token's KV is never written
        tokens = workload.prompt_tokens.astype(np.int64) + workload.output_tokens - 1
        return np.asarray(-(-tokens // deployment.block_size), np.int64)

    def refusals(self, workload: Workload, deployment: Deployment) -> dict[int, str]:
        """Requests (row -> why) that this system turns away although they would fit."""
        return {}

    def attention(self, deployment: Deployment) -> AttentionMode | None:
        """How attention of steps with chunks and decodes runs; None: as `kernels.attention` has it."""
        return None

    def sm_sets(self, deployment: Deployment) -> list[tuple[int, int]]:
        """Two lanes: the (prefill SMs, decode SMs) pairs that may run side by side; see `Mechanism`."""
        return []

    def price_partitions(self, deployment: Deployment) -> list[int]:
        """SMs of each price partition, the whole GPU first: what the indices in a two-lane plan mean."""
        sizes = {size for pair in self.sm_sets(deployment) for size in pair}
        return [deployment.sms, *sorted(sizes - {deployment.sms})]

    def bind(self, deployment: Deployment) -> tuple[Any, Any]:
        """The parameters as arrays for the compiled code."""
        integers, floats = self.parameters(deployment)
        return array([*integers, 0], np.int64), array([*floats, 0.0], np.float64)


def check_knobs(policy: str, knobs: Mapping[str, Knob], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A value for each knob, given or default; raises SimctlError for those that are unknown or out of bounds."""
    for key, value in settings.items():
        if key not in knobs:
            hint = nearest(key, knobs) or " Knobs: " + ", ".join(knobs)
            raise SimctlError(f"policy '{policy}' has no knob '{key}'.{hint}")
        _check_knob(policy, key, value, knobs[key])
    return {key: settings.get(key, knob.default) for key, knob in knobs.items()}


def _numbers(whole: bool) -> str:
    return "a whole number" if whole else "a number"


def _check_knob(policy: str, key: str, value: Any, knob: Knob) -> None:
    wanted = type(knob.default)
    fits = isinstance(value, wanted) if wanted in (bool, str) else isinstance(value, int | float)
    if wanted is int and isinstance(value, float):
        fits = value.is_integer()
    if wanted is not bool and isinstance(value, bool):
        fits = False
    # those without a default of their own are counts, or times
    whole = not key.endswith(("_ms", "_s"))
    if knob.default is None and knob.choices is None:
        fits = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        fits = fits and not (whole and isinstance(value, float) and not value.is_integer())
    if fits and isinstance(value, float) and not math.isfinite(value):
        fits = False
    takes = _numbers(whole) if knob.default is None else f"a value like {knob.default!r}"
    if wanted is tuple:
        fits, takes = isinstance(value, list | tuple), "a list"
    if not fits:
        raise SimctlError(f"policy '{policy}': knob '{key}' is {value!r}; it takes {takes}")
    if knob.choices is not None and value not in knob.choices:
        raise SimctlError(
            f"policy '{policy}': knob '{key}' is {value!r}; it takes {' or '.join(knob.choices)}."
            f"{nearest(str(value), knob.choices)}"
        )
    if knob.minimum is not None and value is not None and not (value >= knob.minimum):
        raise SimctlError(f"policy '{policy}': knob '{key}' is {value!r}; the least is {knob.minimum}")
    if knob.maximum is not None and value is not None and value > knob.maximum:
        raise SimctlError(f"policy '{policy}': knob '{key}' is {value!r}; the most is {knob.maximum}")


@dataclass(frozen=True)
class PolicyInfo:
    """A listing entry: a policy or a preset of one."""

    name: str
    base: str
    source: str
    mirrors: str
    knobs: Mapping[str, Any]
