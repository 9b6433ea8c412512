"""One rank's view of its group: collectives' group, agreed numbers, a barrier on the device, buffers of random data."""

from __future__ import annotations

from typing import Any

from calib.collectives.sizes import GIB

POOL_BYTES = GIB


class Team:
    """A rank of `size`; `stage` is where it works. Every rank must make the same calls in the same order."""

    def __init__(self, rank: int, size: int, stage: Any, seed: int, pool_bytes: int = POOL_BYTES) -> None:
        import torch.distributed as dist

        self.rank, self.size, self.stage, self.seed = rank, size, stage, seed
        self.torch, self.dist = stage.torch, dist
        self.pool_bytes = pool_bytes
        self._token = self.torch.zeros(1, device=stage.device)
        self._random: dict[int, Any] = {}
        self._buffers: dict[str, Any] = {}
        self._groups: dict[int, Any] = {}

    def barrier(self) -> None:
        """On the current stream: what follows starts when every rank's stream has come here, to a few microseconds."""
        self.dist.all_reduce(self._token)

    def agree(self, *values: float) -> list[float]:
        """The greatest of each value over the ranks, on the host."""
        held = self.torch.tensor(values, device=self.stage.device, dtype=self.torch.float64)
        with self.stage.on():
            self.dist.all_reduce(held, op=self.dist.ReduceOp.MAX)
            found: list[float] = held.tolist()
        return found

    def random(self, rank: int) -> Any:
        """The random bf16 numbers that `rank` sends, as many as the pool holds; every rank can draw each other's."""
        if rank not in self._random:
            generator = self.torch.Generator(device=self.stage.device).manual_seed(977 * self.seed + rank)
            held = self.torch.empty(self.pool_bytes // 2, dtype=self.torch.bfloat16, device=self.stage.device)
            self._random[rank] = held.normal_(generator=generator)
        return self._random[rank]

    def buffer(self, name: str, numel: int) -> Any:
        """A bf16 buffer by name, grown where needed; its content is whatever was there."""
        held = self._buffers.get(name)
        if held is None or held.numel() < numel:
            self._buffers.pop(name, None)
            held = self.torch.empty(numel, dtype=self.torch.bfloat16, device=self.stage.device)
            self._buffers[name] = held
        return held[:numel]

    def group(self, max_ctas: int = 0) -> Any:
        """The group of all ranks, whose communicator may use `max_ctas` CTAs (0: as many as NCCL likes)."""
        if max_ctas not in self._groups:
            options = None
            if max_ctas and self.stage.backend == "nccl":
                options = self.dist.ProcessGroupNCCL.Options()
                options.config.max_ctas = max_ctas
            self._groups[max_ctas] = (
                self.dist.new_group(list(range(self.size)), pg_options=options)
                if max_ctas
                else self.dist.group.WORLD
            )
        return self._groups[max_ctas]

    def forget(self) -> None:
        """Give the buffers back."""
        self._buffers.clear()
        self._random = {rank: held for rank, held in self._random.items() if rank == self.rank}
