"""The executor's forward pass: prompts in chunks, decodes, padded rows, against the whole sequence at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calib.executor.batch import lay_out, prompt_tokens
from calib.executor.pages import PagePool
from calib.executor.work import Work
from calib.models import ModelShape
from sim.errors import CalibrationError

TINY = ModelShape("tiny", 3, 128, 4, 2, 32, 256, 500)


def work(chunks: Any = (), decodes: Any = ()) -> Work:
    return Work(0, 132, (0, TINY.layers), tuple(chunks), tuple(decodes), 0.0, 0.0, True)


def test_pages_go_back_and_are_never_shared() -> None:
    pool = PagePool(6)
    first, second = pool.hold(1, 33), pool.hold(2, 16)
    assert len(first) == 3
    assert not set(first) & set(second)
    assert 0 not in {*first, *second}
    assert list(pool.hold(1, 34)) == list(first)
    with pytest.raises(CalibrationError, match="3 KV pages more and 2 are free"):
        pool.hold(3, 48)
    pool.release(1)
    pool.release(1)
    assert pool.free == 5


def test_tables_of_a_mixed_batch_with_padding() -> None:
    pool = PagePool(10)
    pool.hold(7, 20)
    batch = lay_out(work([(7, 3, 18)], [(9, 5)]), pool, {9: 42}, 500, rows=8)
    assert batch.rows == 8
    assert batch.positions.tolist() == [18, 19, 20, 4, 0, 0, 0, 0]
    assert batch.sequence.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert batch.ids.tolist()[:3] == prompt_tokens(7, 18, 3, 500).tolist()
    assert batch.ids[3] == 42
    assert batch.indptr.tolist() == [0, 2, 3, 4]
    assert batch.last_page_len.tolist() == [5, 5, 1]
    assert batch.indices[-1] == 0
    assert batch.ends.tolist() == [2, 3]
    assert batch.yields == (7, 9)


def test_a_prompt_has_the_same_tokens_in_one_chunk_and_in_three() -> None:
    whole = prompt_tokens(3, 0, 50, 500)
    parts = [prompt_tokens(3, 0, 20, 500), prompt_tokens(3, 20, 1, 500), prompt_tokens(3, 21, 29, 500)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert whole.min() >= 0
    assert len(set(whole.tolist())) > 20


@pytest.fixture
def forward() -> Any:
    pytest.importorskip("torch", reason="the executor's kernels need torch")
    from calib.arena import Arena
    from calib.executor.attention import GatheredAttention
    from calib.executor.forward import Forward

    arena = Arena(TINY, 1, device="cpu", kv_bytes=8 << 20)
    arena.fill()
    made = Forward(arena, 0, 64, 8, 64)
    return made, GatheredAttention(made), PagePool(40)


def run(forward: Any, job: Work, tokens: dict[int, int], rows: int = 0) -> Any:
    """Logits [sequences, vocab] of one pass; sampled tokens go into `tokens`."""
    made, attention, pool = forward
    batch = lay_out(job, pool, tokens, TINY.vocab, rows)
    made.tables.send(batch)
    attention.plan(batch)
    made.piece(0, batch.rows)
    for layer in range(TINY.layers):
        attention.run(layer, made.q(batch.rows), made.attention[: batch.rows])
        made.piece(layer + 1, batch.rows)
    made.head(len(batch.yields))
    sampled = made.tokens[: len(batch.yields)].tolist()
    tokens.update(zip(batch.yields, sampled, strict=True))
    return made.logits[: len(batch.yields)].float().clone()


def test_chunks_decodes_and_padding_give_what_the_whole_prompt_gives(forward: Any) -> None:
    import torch

    tokens: dict[int, int] = {}
    run(forward, work([(1, 20, 0)]), tokens, rows=24)
    run(forward, work([(2, 17, 0), (1, 9, 20)]), tokens)
    chunked = run(forward, work([(1, 11, 29)], [(2, 18)]), tokens, rows=16)[0]
    forward[2].release(1)
    whole = run(forward, work([(1, 40, 0)]), tokens)[0]
    # bf16 sums in another order
    assert torch.nn.functional.cosine_similarity(chunked, whole, dim=0) > 0.999
    other = run(forward, work([(5, 40, 0)]), tokens)[0]
    assert torch.nn.functional.cosine_similarity(other, whole, dim=0) < 0.9


def test_a_decode_continues_its_own_sequence(forward: Any) -> None:
    import torch

    tokens: dict[int, int] = {}
    run(forward, work([(1, 21, 0)]), tokens)
    step = run(forward, work([], [(1, 22)]), tokens, rows=4)[0]
    made, _, pool = forward
    batch = lay_out(work([(1, 21, 0)]), pool, {}, TINY.vocab)
    assert made.caches[0][batch.indices[0]].float().abs().sum() > 0
    pool.release(1)
    tokens.clear()
    run(forward, work([(1, 21, 0)]), tokens)
    again = run(forward, work([], [(1, 22)]), tokens)[0]
    assert torch.nn.functional.cosine_similarity(step, again, dim=0) > 0.999


def test_a_product_that_the_sm_set_cannot_hold_is_made_in_halves(forward: Any) -> None:
    import torch

    made, _, _ = forward
    tokens: dict[int, int] = {}
    expected = run(forward, work([(1, 21, 0)]), tokens)
    forward[2].clear()
    refused: list[int] = []

    class Refusing:
        cuda = SimpleNamespace(current_stream=lambda: SimpleNamespace(cuda_stream=7))

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def mm(a: Any, b: Any, out: Any) -> None:
            if len(a) > 6:
                refused.append(len(a))
                raise RuntimeError(
                    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"
                )
            torch.mm(a, b, out=out)

    made.torch = Refusing()
    found = run(forward, work([(1, 21, 0)]), tokens)
    assert torch.nn.functional.cosine_similarity(found[0], expected[0], dim=0) > 0.999
    # each shape is refused once, and then known
    assert set(refused) == {21, 10, 11}
    often = len(refused)
    forward[2].clear()
    run(forward, work([(1, 21, 0)]), tokens)
    assert len(refused) == often
