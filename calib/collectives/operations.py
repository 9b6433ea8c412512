"""The collectives: buffers, one call, and its result against what it must be."""

from __future__ import annotations

from typing import Any

from calib.collectives.sizes import COLLECTIVES
from calib.collectives.team import Team
from calib.kernels.base import relative_error
from sim.errors import CalibrationError

ERROR_LIMIT = 1e-2  # bf16 sums of two to eight terms lie near 3e-3; what only moves data is exact


class Collective:
    """`calls` calls in a row of one collective, each on a part of its own of the buffers where there is room.

    `run(i)` makes the i-th call on the current stream; `refresh()` puts the inputs back. `mean`: all-reduces divide,
    so that numbers stay in range however often they go round without a refresh.
    """

    def __init__(
        self,
        team: Team,
        kind: str,
        message_bytes: int,
        calls: int = 1,
        max_ctas: int = 0,
        mean: bool = False,
    ) -> None:
        if kind not in COLLECTIVES:
            raise CalibrationError(f"There is no collective '{kind}'; there are {', '.join(COLLECTIVES)}.")
        self.team, self.kind, self.message_bytes = team, kind, message_bytes
        self.group = team.group(max_ctas)
        kinds = team.dist.ReduceOp
        self.reduction = kinds.AVG if mean and team.stage.backend == "nccl" else kinds.SUM
        self.numel = message_bytes // 2
        self.part = self.numel // team.size
        if self.numel % team.size and kind in ("allgather", "reduce_scatter", "alltoall"):
            raise CalibrationError(
                f"{message_bytes} bytes are not {team.size} equal parts of two-byte numbers."
            )
        self.calls = max(1, min(calls, team.pool_bytes // message_bytes))
        self.sent = team.random(team.rank)
        self.inside = self.calls * self.numel
        self.out = team.buffer("collective", self.inside)
        self.sends = kind != "sendrecv" or team.rank == 0
        self.receives = kind != "sendrecv" or team.rank == 1

    def refresh(self) -> None:
        if self.kind == "allreduce":  # works in place
            self.out.copy_(self.sent[: self.inside])

    def run(self, i: int = 0) -> None:
        dist, start = self.team.dist, (i % self.calls) * self.numel
        out, sent = self.out[start : start + self.numel], self.sent[start : start + self.numel]
        if self.kind == "allreduce":
            dist.all_reduce(out, self.reduction, group=self.group)
        elif self.kind == "allgather":
            dist.all_gather_into_tensor(out, sent[: self.part], group=self.group)
        elif self.kind == "reduce_scatter":
            dist.reduce_scatter_tensor(out[: self.part], sent, group=self.group)
        elif self.kind == "alltoall":
            dist.all_to_all_single(out, sent, group=self.group)
        else:
            self._exchange(out, sent)

    def _exchange(self, out: Any, sent: Any) -> None:
        dist, rank, size = self.team.dist, self.team.rank, self.team.size
        after, before = (rank + 1) % size, (rank - 1) % size
        ops = [dist.P2POp(dist.isend, sent, after, self.group)] if self.sends else []
        ops += [dist.P2POp(dist.irecv, out, before, self.group)] if self.receives else []
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()

    def error(self) -> float:
        """Relative error of the last call's part against float32; call after every part was run once since
        `poison` and `refresh`. NaN where something was not written."""
        expected = self.expected((self.calls - 1) * self.numel)
        if expected is None:
            return 0.0
        start = (self.calls - 1) * self.numel
        return relative_error(self.out[start : start + expected.numel()], expected)

    def poison(self) -> None:
        """Make unwritten results show."""
        self.out.fill_(float("nan"))

    def expected(self, start: int) -> Any:
        """What this rank must hold of the call whose buffers begin at element `start`; None if it receives nothing."""
        team, torch = self.team, self.team.torch
        rank, part = team.rank, self.part

        def from_rank(other: int, first: int, count: int) -> Any:
            return team.random(other)[start + first : start + first + count].float()

        if self.kind == "allreduce":
            return sum(from_rank(r, 0, self.numel) for r in range(team.size))
        if self.kind == "allgather":
            return torch.cat([from_rank(r, 0, part) for r in range(team.size)])
        if self.kind == "reduce_scatter":
            return sum(from_rank(r, rank * part, part) for r in range(team.size))
        if self.kind == "alltoall":
            return torch.cat([from_rank(r, rank * part, part) for r in range(team.size)])
        return from_rank((rank - 1) % team.size, 0, self.numel) if self.receives else None


def check(error: float, what: str) -> float:
    """`error`, or CalibrationError if it is out of bounds or not a number."""
    if not error <= ERROR_LIMIT:
        raise CalibrationError(f"{what} is wrong: its relative error against float32 is {error:.3g}.")
    return error
