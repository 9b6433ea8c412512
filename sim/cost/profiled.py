"""The cost model: operators of a model, priced by the curves of a profile; `sim.cost.solo` composes whole steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from sim.cost.attention import SERIAL, AttentionMode
from sim.cost.base import Curve, EnergyTerms
from sim.cost.collectives import Transfer, is_collective
from sim.cost.contention import LABEL, slowdown_arrays
from sim.cost.fused import fused_label
from sim.cost.gpu import GpuSpec
from sim.cost.keyed import Keyed
from sim.cost.launching import Launching
from sim.cost.loads import Loads, launch_loads
from sim.cost.measured import MeasuredCurve
from sim.cost.memory import MemoryPlan, plan_memory
from sim.cost.model import ModelSpec
from sim.cost.operators import Operator, calls, decode_shape, prefill_shape
from sim.cost.parallel import GroupCurve, parallel_operators
from sim.cost.parallel_pairs import Side, Waits, beside_collectives, beside_label, waits
from sim.cost.power import CappedCurve
from sim.cost.prices import Prices
from sim.cost.profile import CurveProfile, digest
from sim.cost.shapes import DecodeAttention, Floats, Ints, Launch, Shape, StepCost, Timing
from sim.cost.solo import price_alone
from sim.cost.work import total_joules
from sim.errors import SimctlError


@dataclass(frozen=True)
class ProfiledCost:
    """Prices of one (model, GPU, profile); `scale` multiplies the time of operators by name (what-if).

    With `tp` GPUs to a replica, `model` is the shard that one of them holds, and work, memory and energy are one GPU's.
    """

    model: ModelSpec
    profile: CurveProfile
    launching: Launching
    scale: Mapping[str, float]
    tp: int = 1
    whole_kv_bytes: int | None = None
    attention: AttentionMode = SERIAL  # of steps with chunks and decodes, unless a policy brings its own

    @property
    def gpu(self) -> GpuSpec:
        """The GPU of the profile."""
        return self.profile.gpu

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, on all GPUs of a replica together, each once."""
        return self.whole_kv_bytes or self.model.kv_bytes_per_token()

    @property
    def kv_transfer(self) -> Transfer | None:
        """What was measured of KV transfers between two GPUs of a machine."""
        return self.profile.collectives.default if self.profile.collectives else None

    @property
    def energy(self) -> EnergyTerms:
        """Coefficients of the linear energy model."""
        return self.profile.energy

    @cached_property
    def profile_hash(self) -> str:
        """Hash of everything that decides a price: curves, GPU, model, launch mode, scale."""
        return digest(
            [
                self.profile.content_hash,
                asdict(self.model),
                self.launching.mode,
                asdict(self.launching.terms),
                dict(self.scale),
                self.tp,
                *([] if self.launching.pads else ["unpadded"]),
            ]
        )

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        """Linear and element-wise operators of a pass, and the all-reduces between GPUs."""
        return parallel_operators(self.model, self.tp)

    def factor(self, operator: str) -> float:
        """The what-if factor of an operator: that of its full name, else of its family, else 1."""
        return self.scale.get(operator, self.scale.get(operator.split("/")[0], 1.0))

    def timing(self, operator: str, shape: Shape, sms: int, clock: float = 1.0) -> Timing:
        """One call of an operator, what-if factor included."""
        curve, factor = self.profile.curve(operator), self.factor(operator)
        if isinstance(curve, GroupCurve):
            timing = curve.launched(shape, sms, self.launching.captured)
        else:
            timing = self._counted(operator, curve, shape, sms, clock)
        return timing if factor == 1.0 else Timing(timing.seconds * factor, timing.sm_s * factor)

    def _counted(self, operator: str, curve: Curve, shape: Shape, sms: int, clock: float) -> Timing:
        """The curve's timing, SM-seconds as counters had them where the profile holds that."""
        found, activity = curve.timing(shape, sms, clock), self.profile.activity
        if activity is None or is_collective(operator):
            return found
        bare = None
        if isinstance(shape, DecodeAttention) and shape.context_max is not None:
            bare = curve.timing(replace(shape, context_max=None), sms, clock)
        return activity.timing(operator, shape, found, sms, bare)

    def chunked_factor(self, tokens: Any, sms: int) -> Floats | float:
        """Factor on linear layers and prefill attention in a step with a chunk: whole steps against their parts."""
        found = self.profile.composition
        return 1.0 if found is None else found.factor(tokens, sms)

    def linear_factor(self, tokens: Any, sms: int) -> Floats | float:
        """Factor on the linear layers of a step with a chunk: the same, and what this model's own sizes are off by."""
        found = self.profile.composition
        return 1.0 if found is None else found.linear_factor(tokens, sms, self._shapes)

    @property
    def _shapes(self) -> str:
        """Whose shapes a GPU runs: the model's, or slices of them."""
        return self.model.name if self.tp == 1 else f"{self.model.name} in {self.tp} slices"

    def gap_s(self, tokens: Any, sms: int) -> Floats | float:
        """Seconds a layer that decode-only steps take beyond their operators."""
        found = self.profile.composition
        return 0.0 if found is None else found.gap_s(tokens, sms, self._shapes)

    def linear(self, rows: str, count: Ints, sms: int) -> Timing:
        """Whole-pass cost of the operators whose size follows `tokens` or `sequences`, for an array of counts."""
        return self._summed([one for one in self.operators if not is_collective(one.name)], rows, count, sms)

    def collective(self, rows: str, count: Ints, sms: int) -> Timing:
        """Whole-pass cost of the collectives between GPUs, likewise; no time without a group."""
        return self._summed([one for one in self.operators if is_collective(one.name)], rows, count, sms)

    def in_step_s(self, operator: str, count: Ints) -> Floats:
        """Seconds that a call of a collective for so many tokens takes longer within a decode-only step."""
        curve = self.profile.curve(operator)
        more = curve.measured.in_step_s if isinstance(curve, GroupCurve) else 0.0
        return np.asarray(self.factor(operator) * more * self.launching.captured(count))

    def joints_s(self, count: Ints) -> Floats:
        """`in_step_s` of all collectives between the layers of a pass."""
        seconds = np.zeros(len(count))
        for operator in self.operators:
            if is_collective(operator.name) and operator.rows == "tokens":
                seconds += calls(operator, self.model, None) * self.in_step_s(operator.name, count)
        return seconds

    def _summed(self, operators: Sequence[Operator], rows: str, count: Ints, sms: int) -> Timing:
        seconds, sm_s = np.zeros(len(count)), np.zeros(len(count))
        for operator in operators:
            if operator.rows == rows:
                one = self.timing(operator.name, operator.shape(count), sms)
                times = calls(operator, self.model, None)
                seconds += times * one.seconds
                sm_s += times * one.sm_s
        return Timing(seconds, sm_s)

    def prefill(self, q: Ints, h: Ints, sms: int, clock: float = 1.0) -> Timing:
        """One layer's prefill attention; SM-seconds leave out the fixed cost, which chunks of a pass share."""
        timing = self.timing("prefill_attention", prefill_shape(self.model, q, h), sms, clock)
        factor = self.chunked_factor(q, sms)
        timing = Timing(timing.seconds * factor, timing.sm_s * factor)
        return replace(timing, sm_s=np.minimum(timing.sm_s, (timing.seconds - self.prefill_fixed_s()) * sms))

    def prefill_fixed_s(self) -> float:
        """Fixed cost of one layer's prefill attention call."""
        one = np.ones(1, dtype=np.int64)
        curve = self.profile.curve("prefill_attention")
        return curve.fixed_s(prefill_shape(self.model, one, one)) * self.factor("prefill_attention")

    def decode(self, batch: Ints, context_sum: Floats, sms: int, clock: float = 1.0) -> Timing:
        """One layer's decode attention."""
        return self.timing("decode_attention", decode_shape(self.model, batch, context_sum), sms, clock)

    def overhang_s(self, batch: Ints, sms: int) -> Floats:
        """Seconds of one layer's decode attention for each token by which the longest piece of context exceeds the
        mean; 0 where the curve tells nothing of ragged batches."""
        curve = self.profile.curve("decode_attention")
        if isinstance(curve, CappedCurve):
            curve = curve.curve  # a few SMs wait for one context: no draw that a cap would hold back
        if not isinstance(curve, MeasuredCurve) or self.model.window is not None:
            return np.zeros(len(batch))
        shape = decode_shape(self.model, batch, batch.astype(np.float64))
        return self.factor("decode_attention") * curve.overhang_s(shape, sms)

    def solo(self, launch: Launch, sms: int | None = None, sm_mhz: float | None = None) -> StepCost:
        """Price of a launch alone on `sms` SMs (None: all) at an SM clock (None: the profile's own)."""
        width = self.gpu.sms if sms is None else sms
        if not 0 < width <= self.gpu.sms:
            raise SimctlError(f"{width} SMs were asked for, but {self.gpu.name} has 1 to {self.gpu.sms}.")
        return price_alone(self, launch, width, 1.0 if sm_mhz is None else sm_mhz / self.gpu.boost_mhz)

    def energy_j(self, totals: Mapping[str, float], seconds: float) -> float:
        """Joules of a GPU that did the work of `totals` (see `sim.cost.work.total_joules`) within `seconds`, if it had
        done it evenly: the power limit holds their mean."""
        on_s = min(totals.get("gpu_s", 0.0), seconds)
        return seconds * self.energy.board_w(seconds, on_s, total_joules(self.model, self.energy, totals))

    def slowdown(self, a: Launch, b: Launch, split: tuple[int, int], overlap: int = 0) -> tuple[float, float]:
        """Factors >= 1 on the solo times of two launches side by side; see `slowdowns`."""
        of_a, of_b = self.slowdowns([a], [b], split, overlap)
        return float(of_a[0, 0]), float(of_b[0, 0])

    def slowdowns(
        self,
        a: Sequence[Launch],
        b: Sequence[Launch],
        split: tuple[int, int],
        overlap: int = 0,
        priority: str = "normal",
    ) -> tuple[Floats, Floats]:
        """Factors of every a beside every b, shape (len(a), len(b)) each: measured (`sim.cost.measured_contention`)
        if the profile has a surface, else an analytic guess (`sim.cost.contention`), which knows no `priority` of the
        decode side's stream."""
        held = Keyed(self, self.profile_hash)
        one, other = (_loads(held, tuple(side), sms) for side, sms in zip((a, b), split, strict=True))
        if self.profile.contention is not None:
            found = self.profile.contention.slowdowns(one, other, split, overlap, self.model.name, priority)
        else:
            found = slowdown_arrays((one.hbm, one.busy), (other.hbm, other.busy), split, overlap)
        if self.tp == 1:
            return found
        mine, theirs = (
            Side(_waits(held, tuple(launches), sms), loads.seconds, sms, factors)
            for launches, loads, sms, factors in zip((a, b), (one, other), split, found, strict=True)
        )
        return beside_collectives(self, mine, theirs, overlap)

    def compile(
        self,
        *,
        max_tokens: int,
        max_seqs: int,
        max_context: int,
        partitions: Sequence[int] = (),
        seed: int = 0,
        replica: int = 0,
        jitter: bool = False,
        compiled: bool = True,
        attention: AttentionMode | None = None,
        page_size: int = 16,
    ) -> Prices:
        """Price tables; see `sim.cost.compile.compile_prices`. `attention`: None for the cost model's own mode."""
        from sim.cost.compile import Limits, compile_prices

        return compile_prices(
            self,
            Limits(max_tokens, max_seqs, max_context, tuple(partitions)),
            seed=seed,
            replica=replica,
            jitter=jitter,
            compiled=compiled,
            attention=self.attention if attention is None else attention,
            page_size=page_size,
        )

    def fused_label(self, attention: AttentionMode | None = None) -> str:
        """Label of the prices of a mode of attention (None: the cost model's own); empty for separate kernels."""
        return fused_label(self, self.attention if attention is None else attention)

    def memory(self, **knobs: Any) -> MemoryPlan:
        """KV blocks that fit; knobs as `sim.cost.memory.plan_memory` takes them."""
        return plan_memory(self.model, self.gpu, gpus=self.tp, **knobs)

    def provenance(self) -> dict[str, str]:
        """Label of each operator's curve, and of the host, energy and contention terms."""
        surface = self.profile.contention
        one = np.ones(1, dtype=np.int64)
        shapes: dict[str, Shape] = {operator.name: operator.shape(one) for operator in self.operators}
        shapes["prefill_attention"] = prefill_shape(self.model, one, one)
        shapes["decode_attention"] = decode_shape(self.model, one, one.astype(np.float64))
        labels = {name: self.profile.curve(name).label_for(shape) for name, shape in shapes.items()}
        scaled = {
            name: f"{label}, scaled by {self.factor(name):g}"
            for name, label in labels.items()
            if self.factor(name) != 1.0
        }
        fused = {"fused_attention": self.fused_label()} if self.attention.mode != "serial" else {}
        return {
            **labels,
            **scaled,
            **fused,
            "host": self.launching.terms.label,
            "energy": self.energy.label,
            "contention": LABEL if surface is None else surface.label_for(self.model.name),
            **({"contention/collectives": beside_label(self)} if self.tp > 1 else {}),
        }


@lru_cache(maxsize=128)
def _loads(held: Keyed[ProfiledCost], launches: tuple[Launch, ...], sms: int) -> Loads:
    """`launch_loads`: a contention surface asks for the same launches beside every neighbour."""
    return launch_loads(held.value, launches, sms)


@lru_cache(maxsize=128)
def _waits(held: Keyed[ProfiledCost], launches: tuple[Launch, ...], sms: int) -> Waits:
    return waits(held.value, launches, sms)


def checked_scale(scale: Mapping[str, Any] | None, model: ModelSpec, tp: int = 1) -> dict[str, float]:
    """`kernels.scale` as floats; SimctlError for operators that this model does not run."""
    from sim.suggest import nearest

    names = [
        *(operator.name for operator in parallel_operators(model, tp)),
        "prefill_attention",
        "decode_attention",
        "fused_attention",
    ]
    valid = {*names, *(name.split("/")[0] for name in names)}
    checked = {}
    for name, factor in (scale or {}).items():
        if name not in valid:
            raise SimctlError(f"kernels.scale: unknown operator '{name}'.{nearest(name, sorted(valid))}")
        if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 <= factor < float("inf"):
            raise SimctlError(f"kernels.scale.{name} must be a factor of 0 or more, not {factor!r}.")
        checked[name] = float(factor)
    return checked
