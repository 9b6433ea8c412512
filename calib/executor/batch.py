"""The tables of one forward pass: which row is whose, at which position, and where its keys and values go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calib.arena import PAGE
from calib.executor.pages import PagePool
from calib.executor.work import Work

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """Prompt rows first, then one row a decode, then padding. All int32.

    ids, positions, sequence: [rows]; indptr [sequences + 1], last_page_len [sequences], indices: the page table, whose
    last sequence (or one a padded row) is the padding's own (page 0) if there is padding; ends [outputs]: rows that
    yield a token, of requests `yields`; q_lens and contexts: of the sequences, chunks first.
    """

    ids: Ints
    positions: Ints
    sequence: Ints
    indptr: Ints
    indices: Ints
    last_page_len: Ints
    ends: Ints
    q_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: int
    rows: int
    yields: tuple[int, ...]


def lay_out(
    work: Work, pool: PagePool, last_token: Mapping[int, int], vocab: int, rows: int = 0, each: bool = False
) -> Batch:
    """Tables of `work`, padded to `rows` rows: by one sequence, or with `each` by sequences of one token.

    Prompt tokens are drawn from the request's number, so that a recomputed prompt has the same ones; a decode's input
    is the token sampled last.
    """
    chunks = [(i, tokens, history) for i, tokens, history in work.chunks]
    parts = [*chunks, *((i, 1, context - 1) for i, context in work.decodes)]
    q_lens = [tokens for _, tokens, _ in parts]
    contexts = [tokens + history for _, tokens, history in parts]
    pages = [pool.hold(i, context) for (i, _, _), context in zip(parts, contexts, strict=True)]
    ids = [prompt_tokens(i, history, tokens, vocab) for i, tokens, history in chunks]
    ids.append(np.array([last_token.get(i, i % vocab) for i, _ in work.decodes], np.int32))
    positions = [np.arange(history, history + tokens, dtype=np.int32) for _, tokens, history in chunks]
    positions.append(np.array([context - 1 for _, context in work.decodes], np.int32))
    used = sum(q_lens)
    padding = max(0, rows - used)
    spare = [1] * padding if each else [padding] if padding else []  # rows of the padding's sequences
    if padding:
        ids.append(np.zeros(padding, np.int32))
        positions.append(np.zeros(padding, np.int32))
        pages += [np.zeros(1, np.int32)] * len(spare)
    lens = [*q_lens, *spare]
    counts = np.array([len(p) for p in pages])
    last = [(context - 1) % PAGE + 1 for context in contexts] + [1] * len(spare)
    ends = np.cumsum(q_lens) - 1
    return Batch(
        ids=np.concatenate(ids),
        positions=np.concatenate(positions),
        sequence=np.repeat(np.arange(len(lens), dtype=np.int32), lens),
        indptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        indices=np.concatenate(pages).astype(np.int32),
        last_page_len=np.array(last, np.int32),
        ends=ends.astype(np.int32),
        q_lens=tuple(q_lens),
        contexts=tuple(contexts),
        chunks=len(chunks),
        rows=used + padding,
        yields=tuple(i for i, _, _ in parts),
    )


def prompt_tokens(request: int, first: int, count: int, vocab: int) -> Ints:
    """Tokens first..first+count-1 of a request's prompt, a fixed pseudo-random sequence."""
    at = np.arange(first, first + count, dtype=np.uint64) + np.uint64(request) * np.uint64(1_000_003)
    mixed = (at * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)
    return (mixed % np.uint64(vocab)).astype(np.int32)
