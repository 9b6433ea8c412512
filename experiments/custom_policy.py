"""A policy of your own in 30 lines: shortest prompt first, with decodes never delayed by more than one chunk.

Run it:  simctl run experiments/custom_policy.yaml -o out/custom
"""

import numpy as np

from sim.engine import Decode, Mixed, Plan, View


class ShortestFirst:
    """Chunked prefill like Sarathi's, but the queue is served by prompt length.

    `patience_s`: a request that has waited so long goes before shorter ones. At 0 that is first come first served; the
    larger, the better the mean TTFT and the worse the longest prompt's.
    """

    max_num_seqs = 128
    max_num_batched_tokens = 512

    def __init__(self, patience_s: float = 1.0) -> None:
        self.patience_s = patience_s

    def plan(self, view: View) -> Plan:
        running, waiting = view.running, view.waiting
        free = view.free_blocks - view.decode_blocks
        if free < 0:  # not even the decodes fit: the youngest request starts over
            return Plan(preempt=[running.id[-1]])
        budget = self.max_num_batched_tokens - int(running.decoding.sum())
        late = waiting.arrival_s + self.patience_s < view.now_s
        length = np.where(late, 0, waiting.left_tokens)  # the late go as they came
        order = np.lexsort((length, ~late))
        unfinished = running.left_tokens > 0
        queue = [*zip(running.id[unfinished], running.left_tokens[unfinished], strict=True)]
        queue += [(waiting.id[k], waiting.left_tokens[k]) for k in order[: self.max_num_seqs - len(running)]]
        chunks = []
        for i, left in queue:
            size = min(int(left), budget)
            if size <= 0 or view.blocks_for(size) > free:
                break
            chunks.append((int(i), size))
            budget, free = budget - size, free - view.blocks_for(size)
        if chunks:
            return Plan([Mixed(chunks)])
        unasked = 1 if len(waiting) else 100  # steps, unless somebody comes or finishes before
        return Plan([Decode()], repeat_for=unasked)
