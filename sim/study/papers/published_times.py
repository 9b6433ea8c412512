"""Step times as others published them, in place of a profile's: by coefficients, or by a few measured points.

Memory and model stay those of the cost model that is replaced; there is no host time and no jitter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.prices import Prices
from sim.cost.profiled import ProfiledCost

LARGE_BATCH = 95  # decode steps from here on have coefficients of their own
KNOT_TOKENS = 32  # distance of the knots between which the square is a line


@dataclass(frozen=True)
class Coefficients:
    """Milliseconds: of a prompt batch, fixed, a token, and a token squared of each prompt; of a decode step, fixed, a
    context token, and a request; the same from `LARGE_BATCH` requests on."""

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    large: tuple[float, float, float]

    def prompt_ms(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of a batch without its squares."""
        return self.prefill[0] + self.prefill[1] * tokens

    def token_ms(self, batch: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of a decode step without its contexts."""
        few, many = self.decode, self.large
        return np.asarray(np.where(batch < LARGE_BATCH, few[0] + few[2] * batch, many[0] + many[2] * batch))

    def context_ms(self, batch: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of each token of context."""
        return np.asarray(np.where(batch < LARGE_BATCH, self.decode[1], self.large[1]))


# distserve:simdistserve, profiler-a100-80g.*.json; of vLLM's large batches nothing was read: as the small ones
OPT_66B = Coefficients((29.44, 0.1514, 8e-6), (30.76, 4.52e-4, 0.0633), (27.47, 4.05e-4, 0.1248))
OPT_13B = Coefficients((18.10, 0.1019, 7e-6), (19.93, 6.27e-4, 0.0385), (7.17, 5.80e-4, 0.1583))
OPT_13B_VLLM = Coefficients((22.05, 0.1405, 8e-6), (23.48, 5.93e-4, 0.0607), (23.48, 5.93e-4, 0.0607))


@dataclass(frozen=True)
class Points:
    """Milliseconds of prompt batches by tokens and of decode steps by requests; straight lines between and beyond."""

    prompts: tuple[tuple[int, float], ...]
    tokens: tuple[tuple[int, float], ...]
    prefill: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @classmethod
    def of(cls, prompts: Mapping[int, float], tokens: Mapping[int, float]) -> Points:
        """From {tokens: ms} and {requests: ms}."""
        return cls(tuple(sorted(prompts.items())), tuple(sorted(tokens.items())))

    def prompt_ms(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of a batch."""
        return _line(tokens, self.prompts)

    def token_ms(self, batch: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of a decode step."""
        return _line(batch, self.tokens)

    def context_ms(self, batch: NDArray[np.float64]) -> NDArray[np.float64]:
        """Contexts do not count."""
        return np.zeros(len(batch))


def _line(x: NDArray[np.float64], points: tuple[tuple[int, float], ...]) -> NDArray[np.float64]:
    at, value = np.array(points, np.float64).T
    slope = (value[-1] - value[-2]) / (at[-1] - at[-2])
    return np.asarray(np.interp(x, at, value) + np.maximum(x - at[-1], 0.0) * slope)


class PublishedCost(ProfiledCost):
    """A model and GPU whose steps take `times`."""

    times: Coefficients | Points

    def compile(self, *, max_tokens: int, max_seqs: int, max_context: int, **options: Any) -> Prices:
        """Tables of the published times in the type that the engine runs on."""
        real = super().compile(max_tokens=max_tokens, max_seqs=max_seqs, max_context=max_context, **options)
        as_lists = isinstance(real.noise, list)
        made = _tables(self.times, max_tokens, max_seqs)
        return real._replace(
            **{k: v.tolist() if as_lists and hasattr(v, "tolist") else v for k, v in made.items()}
        )


def published_cost(like: ProfiledCost, times: Coefficients | Points) -> PublishedCost:
    """The memory and model of `like` at published times."""
    made = PublishedCost(like.model, like.profile, like.launching, like.scale, like.tp, like.whole_kv_bytes)
    object.__setattr__(made, "times", times)
    return made


def _tables(times: Coefficients | Points, max_tokens: int, max_seqs: int) -> dict[str, Any]:
    m, n = np.arange(max_tokens + 1.0), np.arange(max_seqs + 1.0)
    q = np.arange(0, max_tokens + KNOT_TOKENS + 1, KNOT_TOKENS, dtype=np.float64)
    step, zero = times.token_ms(n) * (n > 0), np.zeros(max_seqs + 1)
    return {
        "segments": 1,
        "q_knots": len(q),
        "h_knots": 2,
        "dense_eager_s": 1e-3 * times.prompt_ms(m) * (m > 0),
        # a step of decodes has as many tokens as requests
        "dense_graph_s": 1e-3 * np.interp(m, n, step),
        "dec_seg": np.zeros(1, np.int64),
        "dec_b": 1e-3 * times.context_ms(n),
        **dict.fromkeys(("head_s", "dec_a", "dec_sm_a", "dec_sm_b", "over_s", "over_sm"), zero),
        "over_on": 0,
        "pre_qi": (np.arange(max_tokens + 1) // KNOT_TOKENS).astype(np.int64),
        "pre_hi": np.zeros(1, np.int64),
        "pre_q": q,
        "pre_h": np.array([0.0, 1.0]),
        "pre_dq": np.full(len(q) - 1, 1.0 / KNOT_TOKENS),
        "pre_dh": np.ones(1),
        "pre_s": 1e-3 * np.repeat(times.prefill[2] * q * q, 2),
        "pre_sm": np.zeros(2 * len(q)),
        "pre_fixed_s": np.zeros(1),
        **dict.fromkeys(("host_graph_s", "host_eager_s", "gap_graph_s", "gap_eager_s"), zero),
        "noise": np.ones(1),
    }
