"""Chunks beside decodes by what they ask of the GPU: candidates, and classes by which combinations are told apart."""

from __future__ import annotations

from sim.cost.attention_facts import AttentionFacts
from sim.cost.cta_terms import LARGE
from sim.jit import jit

KEY_CLASSES, CTA_CLASSES, BYTE_CLASSES = 10, 8, 24
KEY_UNIT, CONTEXT_UNIT = 256, 512  # tokens of the first class
WAVES = (0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
COMBINATIONS = len(WAVES) * KEY_CLASSES * CTA_CLASSES * BYTE_CLASSES


@jit
def octave(x: int) -> int:
    """Whole part of the binary logarithm of x, 0 up to 1."""
    n = 0
    while x > 1:
        x >>= 1
        n += 1
    return n


@jit
def combination(candidate: int, keys: int, ctas: int, slots: int, context: int) -> int:
    """Where a candidate that reads `keys` keys stands in the table, beside `ctas` decode CTAs on a GPU of so many slots
    with `context` keys to read."""
    of_keys = min(octave(keys // KEY_UNIT), KEY_CLASSES - 1)
    of_ctas = min(octave(8 * ctas // slots), CTA_CLASSES - 1)
    units = max(1, context // CONTEXT_UNIT)
    whole = octave(units)
    of_bytes = min(2 * whole + (1 if 2 * units >= 3 << whole else 0), BYTE_CLASSES - 1)
    return ((candidate * KEY_CLASSES + of_keys) * CTA_CLASSES + of_ctas) * BYTE_CLASSES + of_bytes


def candidates(facts: AttentionFacts, sms: int, budget: int) -> list[int]:
    """Chunk sizes in tokens whose CTAs fill a share of the GPU's slots (two an SM), shortest first; only the shortest
    where such a CTA leaves no room for decode's."""
    rows = LARGE.rows
    tiles = [max(1, int(waves * 2 * sms) // facts.q_heads) for waves in WAVES]
    sizes = sorted({count * rows for count in tiles if count * rows <= budget}) or [min(budget, rows)]
    return sizes if facts.both_fit else sizes[:1]
