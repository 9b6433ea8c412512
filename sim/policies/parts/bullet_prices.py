"""What Bullet believes of a split: the decode step and the rest of the prefill, beside each other."""

from __future__ import annotations

from typing import Any

from sim.cost.pairs import pair_factor
from sim.cost.step import decode_pass_s, dense_s, overhang_s
from sim.engine.layout import IN_CHUNKS, MODEL_LAYERS, N_CHUNKS, OVERHANG, SMS, WHOLE_GPU
from sim.jit import jit
from sim.policies.parts.bullet_state import (
    ASKED,
    BATCH,
    CONTENTION,
    CONTEXT_SUM,
    D_ALPHA,
    OVERLAP,
    P_ALPHA,
    P_HISTORY,
    P_TOKENS,
    PARTITION,
    PARTS,
    PASS_S,
    REUSE,
    SPLITS,
    WHOLE,
)
from sim.policies.parts.predict import prompts_attention_s


@jit
def prefill_part(ki: Any, s: int) -> int:
    """Price partition of prefill on split s."""
    if s == WHOLE or ki[PARTITION] == 0:
        return WHOLE_GPU
    return int(ki[PARTS + s])


@jit
def decode_part(ki: Any, s: int) -> int:
    """Price partition of decode on split s beside a prefill; all SMs where its mask includes prefill's."""
    if s == WHOLE or ki[PARTITION] == 0 or ki[REUSE] == OVERLAP:
        return WHOLE_GPU
    return int(ki[PARTS + ki[SPLITS] + s])


@jit
def slowdown(r: Any, y: Any, ki: Any, table: Any, p_part: int, d_part: int) -> float:
    """Believed factor from `table` for the work at hand on these sets; 1 if contention is not believed in."""
    sms = r.policy_sms
    if ki[CONTENTION] == 0 and sms[p_part] + sms[d_part] <= r.iv[SMS]:
        return 1.0
    batch = r.policy_i[BATCH]
    config = y.config[p_part * len(y.sms) + d_part]
    mean = r.policy_i[CONTEXT_SUM] // max(1, batch)
    return float(pair_factor(y, table, config, r.policy_i[P_TOKENS], r.policy_i[P_HISTORY], batch, mean))


@jit
def decode_solo_s(r: Any, b: Any, part: int) -> float:
    """Seconds of the decode step at hand, alone on a set, without alpha and gap."""
    batch = r.policy_i[BATCH]
    gpu_s = decode_pass_s(b, part, batch, r.policy_i[CONTEXT_SUM]) + overhang_s(
        b, part, batch, r.iv[OVERHANG]
    )
    return float(max(gpu_s, b.host_graph_s[batch]))


@jit
def decode_s(r: Any, b: Any, y: Any, ki: Any, s: int) -> float:
    """Seconds of the decode step at hand on split s, beside the prefill at hand."""
    r.policy_i[ASKED] += 1
    part = decode_part(ki, s)
    slow = slowdown(r, y, ki, y.factor_decode, prefill_part(ki, s), part)
    return float(r.policy_f[D_ALPHA] * (decode_solo_s(r, b, part) * slow + b.gap_graph_s[r.policy_i[BATCH]]))


@jit
def forget_pass(r: Any) -> None:
    """The prefill at hand is another one."""
    for part in range(len(r.policy_sms)):
        r.policy_f[PASS_S + part] = -1.0


@jit
def pass_solo_s(q: Any, r: Any, a: Any, b: Any, part: int) -> float:
    """Seconds of the whole pass at hand, open or planned, alone on a set, without alpha and gap; kept once asked."""
    held: float = r.policy_f[PASS_S + part]
    if held >= 0.0:
        return held
    if r.iv[IN_CHUNKS] > 0:
        chunks = r.iv[IN_CHUNKS]
        seconds = prompts_attention_s(q, b, part, r.chunk_id, r.chunk_tokens, chunks)
    else:
        chunks = a.iv[N_CHUNKS]
        seconds = prompts_attention_s(q, b, part, a.chunk_id, a.chunk_tokens, chunks)
    seconds = max(seconds + dense_s(b, part, r.policy_i[P_TOKENS], False), b.host_eager_s[chunks])
    r.policy_f[PASS_S + part] = seconds
    return float(seconds)


@jit
def pass_gap_s(r: Any, a: Any, b: Any) -> float:
    """What cannot be hidden of the pass at hand, open or planned."""
    chunks: int = r.iv[IN_CHUNKS] if r.iv[IN_CHUNKS] > 0 else a.iv[N_CHUNKS]
    return float(b.gap_eager_s[chunks])


@jit
def prefill_s(
    q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any, layers: int, p_part: int, d_part: int
) -> float:
    """Seconds of so many layers of the pass at hand on a set; `d_part`: the decode's set beside it, -1 for none."""
    slow = 1.0 if d_part < 0 else slowdown(r, y, ki, y.factor_prefill, p_part, d_part)
    whole = pass_solo_s(q, r, a, b, p_part) * slow + pass_gap_s(r, a, b)
    return float(r.policy_f[P_ALPHA] * whole * layers / r.iv[MODEL_LAYERS])
