"""SLO-aware admission before any policy: who would miss the limits of their class is turned away, or held back.

Early rejection as systems in overload use it (Mooncake, arXiv:2407.00079, section 7: a request whose TTFT or TBT is
predicted to miss its SLO is refused on arrival, which saves the prefill of requests that come to nothing); here before
a policy that is left as it is. Latencies are forecast from the state of the chosen replica at the estimator's prices
(`sim.policies.parts.forecast`), corrected by what came of earlier forecasts. Without limits everybody is let in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

from sim.engine.deployment import Deployment, Target
from sim.engine.layout import N_RUN, N_WAIT
from sim.errors import SimctlError
from sim.policies.base import Knob, check_knobs
from sim.policies.parts.forecast import Forecast

LEARNED_LEAST, LEARNED_MOST = 0.25, 8.0  # a correction beyond these says that the forecast is no use
LOOKED_AT = 16  # oldest forecasts whose outcome is looked for at each arrival


class SloAdmission:
    """A gate before the policy that `policy` names."""

    name = "slo-admission"
    source = "early rejection of Mooncake, arXiv:2407.00079 section 7"
    mirrors = "no engine: a wrapper around any policy"
    heeds_estimator = True
    knobs = {  # noqa: RUF012
        "policy": Knob("vllm", "the policy behind it: a name, or a mapping with knobs", "choice"),
        "on_miss": Knob(
            "reject",
            "reject, or delay: hold until the limit can be met; a lost TTFT goes in when nobody waits",
            "arXiv:2407.00079 section 7; delay is a choice",
            choices=("reject", "delay"),
        ),
        "slack": Knob(1.0, "factor on the forecast: above 1 refuses sooner", "choice", minimum=0),
        "feedback": Knob(
            0.1,
            "weight of each outcome in the correction of later TTFT forecasts; 0: none",
            "choice",
            minimum=0,
            maximum=1,
        ),
        "ttft_ms": Knob(None, "limit on TTFT for all; default: each class's", "choice", minimum=0),
        "tpot_ms": Knob(None, "limit on TPOT for all; default: each class's", "choice", minimum=0),
    }

    def __init__(self, label: str | None = None, policy: Any = "vllm", **settings: Any) -> None:
        from sim.policies import make_policy

        self.settings = check_knobs(
            self.name, {k: v for k, v in self.knobs.items() if k != "policy"}, settings
        )
        if isinstance(policy, str | Mapping):
            policy = make_policy(policy)
        elif not (hasattr(policy, "advance") or callable(getattr(policy, "plan", None))):
            raise SimctlError(
                f"policy '{self.name}': knob 'policy' is {policy!r}; it takes a policy's name, or a mapping with `name`"
            )
        if hasattr(policy, "wrapped"):
            raise SimctlError(f"policy '{self.name}': the policy behind it is an admission of its own")
        if getattr(policy, "pools", ()):
            raise SimctlError(
                f"policy '{self.name}' cannot forecast a request that '{policy.label}' moves between pools; it takes "
                "policies whose replicas do everything"
            )
        self.settings["policy"] = self.wrapped = policy
        self.label = label or self.name

    def __getattr__(self, attribute: str) -> Any:
        """What it does not have itself is the wrapped policy's."""
        if attribute.startswith("__") or attribute == "wrapped":
            raise AttributeError(attribute)
        return getattr(self.wrapped, attribute)

    def __getitem__(self, knob: str) -> Any:
        return self.settings[knob]

    @property
    def holds(self) -> bool:
        """Are requests held back, so that the gate must hear of every completion?"""
        return bool(self["on_miss"] == "delay")

    def judge(
        self,
        q: Any,
        r: Any,
        b: Any,
        y: Any,
        deployment: Deployment,
        classes: tuple[str, ...],
        step: tuple[int, int],
    ) -> SloJudge:
        """The judge of one replica; `step`: most tokens and sequences of a step of the wrapped policy."""
        return SloJudge(
            Forecast(q, r, b, y, *step), [self._limits(t) for t in deployment.targets], classes, self
        )

    def _limits(self, target: Target) -> Target:
        """A class's limits, with those of the knobs in their place."""
        ttft, tpot = self["ttft_ms"], self["tpot_ms"]
        return Target(
            ttft_s=target.ttft_s if ttft is None else ttft / 1e3,
            ttft_per_token_s=target.ttft_per_token_s if ttft is None else math.inf,
            tpot_s=target.tpot_s if tpot is None else tpot / 1e3,
            e2el_s=target.e2el_s,
        )


class SloJudge:
    """Verdicts on the requests of one replica, and what became of those that were let in."""

    def __init__(
        self, forecast: Forecast, limits: list[Target], classes: tuple[str, ...], policy: SloAdmission
    ) -> None:
        self.forecast, self.limits, self.classes = forecast, limits, classes
        self.delays = policy.holds
        self.slack, self.feedback = policy["slack"], policy["feedback"]
        self.learned = 1.0  # observed over forecast TTFT
        self._open: dict[int, tuple[float, float]] = {}  # request -> when it went in, TTFT forecast

    def refusal(self, i: int, now: float) -> str:
        """The first limit that request i would miss, in words; "" if none, or if holding it helps nobody."""
        self._learn()
        q, iv = self.forecast.q, self.forecast.r.iv
        limit = self.limits[q.slo_class[i]]
        ttft = now - q.arrival_s[i] + self._ttft_s(i, now)
        first = min(limit.ttft_s, limit.ttft_per_token_s * int(q.prompt[i]))
        missed = []
        if ttft > first:
            missed.append(f"TTFT over {_ms(limit.ttft_s, limit.ttft_per_token_s)}")
        if limit.tpot_s < math.inf or limit.e2el_s < math.inf:
            tpot = self.forecast.tpot_s(i, now) * self.slack
            later = int(q.max_new[i]) - 1
            if tpot > limit.tpot_s and later > 0:
                missed.append(f"TPOT over {1e3 * limit.tpot_s:g} ms")
            if ttft + tpot * later > limit.e2el_s:
                missed.append(f"E2E latency over {1e3 * limit.e2el_s:g} ms")
        if not missed or (self.delays and self._harmless(iv, missed)):
            return ""
        group = f" of class {self.classes[q.slo_class[i]]}" if len(self.classes) > 1 else ""
        return f"slo-admission: forecast of {missed[0]}{group}"

    def admit(self, i: int, now: float) -> None:
        """Request i goes in: remember what was forecast."""
        if self.feedback > 0:
            self._open[i] = now, self.forecast.ttft_s(i, now)
        self.forecast.admit(i, now)

    def _ttft_s(self, i: int, now: float) -> float:
        return self.forecast.ttft_s(i, now) * self.learned * self.slack

    def _harmless(self, iv: Any, missed: list[str]) -> bool:
        """A held request that has lost its TTFT may go in when nobody waits, any other when nobody is there."""
        lost = not any(reason.startswith("TPOT") for reason in missed)
        return bool(iv[N_WAIT] == 0 and (lost or iv[N_RUN] == 0))

    def _learn(self) -> None:
        """Compare the oldest forecasts with what has come of them."""
        q = self.forecast.q
        done = [i for i in islice(self._open, LOOKED_AT) if q.first_token_s[i] == q.first_token_s[i]]
        for i in done:
            began, expected = self._open.pop(i)
            ratio = (q.first_token_s[i] - began) / expected
            learned = self.learned + self.feedback * (ratio - self.learned)
            self.learned = min(max(learned, LEARNED_LEAST), LEARNED_MOST)


def _ms(whole_s: float, per_token_s: float) -> str:
    parts = [] if whole_s == math.inf else [f"{1e3 * whole_s:g} ms"]
    return " or ".join([*parts, *([] if per_token_s == math.inf else [f"{1e3 * per_token_s:g} ms a token"])])
