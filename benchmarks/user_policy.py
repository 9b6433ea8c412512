"""A policy as a user writes it, in plain Python: chunked prefill beside all decodes, first come first served."""

from __future__ import annotations

from typing import Any

from sim.engine import Decode, Mixed, Plan


class Chunked:
    """Every running decode, then prompts in order of admission, up to a budget of tokens."""

    def __init__(self, token_budget: int = 512, max_num_seqs: int = 128) -> None:
        self.token_budget, self.max_num_seqs = token_budget, max_num_seqs
        self.max_num_batched_tokens = token_budget + max_num_seqs

    def plan(self, view: Any) -> Plan:
        """One decision."""
        running, waiting = view.running, view.waiting
        budget = self.token_budget - int(running.decoding.sum())
        free = view.free_blocks - int(running.decoding.sum()) - 1
        chunks = []
        for at in (~running.decoding).nonzero()[0].tolist():
            tokens = min(int(running.target_tokens[at] - running.computed_tokens[at]), budget)
            if tokens > 0:
                chunks.append((int(running.id[at]), tokens))
                budget -= tokens
                free -= view.blocks_for(tokens)
        room = self.max_num_seqs - len(running)
        for at in range(min(room, len(waiting))):
            need = view.blocks_for(int(waiting.target_tokens[at]))
            if budget <= 0 or need > free:
                break
            tokens = min(int(waiting.target_tokens[at]), budget)
            chunks.append((int(waiting.id[at]), tokens))
            budget -= tokens
            free -= need
        if chunks:
            return Plan([Mixed(chunks)])
        return Plan([Decode()], repeat_for=64)
