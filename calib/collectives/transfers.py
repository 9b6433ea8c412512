"""KV caches from rank 0 to rank 1: copy engines, NCCL, or a kernel that writes peer memory; whole or in pages.

A message is one layer's keys and values of a prompt; a call moves `layers` of them, one after the other. Pages are
scattered at random on both sides, as a paged cache leaves them.
"""

from __future__ import annotations

from typing import Any

from calib.collectives.sizes import GIB
from calib.collectives.team import Team
from sim.errors import CalibrationError

METHODS = ("copy", "sendrecv", "kernel")
LAYOUTS = ("contiguous", "blocks")
REGION_BYTES = 2 * GIB
PUSH_CTAS = 32
MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the addresses say which GPUs


class Transfer:
    """`calls` calls of `layers` messages of `message_bytes`, in pieces of `piece_bytes` where the layout is blocks."""

    def __init__(
        self,
        team: Team,
        method: str,
        layout: str,
        message_bytes: int,
        piece_bytes: int = 0,
        layers: int = 1,
        calls: int = 1,
    ) -> None:
        if method not in METHODS or layout not in LAYOUTS:
            raise CalibrationError(f"There is no KV transfer '{method}' of '{layout}' caches.")
        self.team, self.method, self.layout, self.layers, self.calls = team, method, layout, layers, calls
        self.message_bytes = message_bytes
        self.piece_bytes = piece_bytes if layout == "blocks" else message_bytes
        self.pieces = message_bytes // self.piece_bytes
        self.together = method == "sendrecv"
        self.sends, self.receives = team.rank == 0, team.rank == 1
        self.active = self.sends or (self.together and self.receives)
        memory = _memory(team)
        if self.active:
            self._lay_out(memory)

    def _lay_out(self, memory: Memory) -> None:
        team, torch = self.team, self.team.torch
        pages = memory.region_bytes // self.piece_bytes
        self._slots = max(1, pages // self.pieces)
        self.source = memory.source()[: pages * self.piece_bytes].view(pages, self.piece_bytes)
        self.target = memory.target(self.together)[: pages * self.piece_bytes].view(pages, self.piece_bytes)
        if self.layout == "blocks":
            generator = torch.Generator().manual_seed(team.seed)
            tables = [torch.randperm(pages, generator=generator).int() for _ in range(2)]
        else:
            tables = [torch.arange(pages, dtype=torch.int32)] * 2
        self._from, self._to = tables
        if self.layout == "blocks" or self.method == "kernel":
            self._device_from = self._from.to(team.stage.device)
            self._device_to = self._to.to(team.stage.device)
        if self.together and self.layout == "blocks":
            self._staged = memory.staging(message_bytes=self.message_bytes).view(
                self.pieces, self.piece_bytes
            )
        self._pairs = list(zip(self._from.tolist(), self._to.tolist(), strict=True))

    def refresh(self) -> None:
        pass

    def run(self, i: int = 0) -> None:
        if self.active:
            for layer in range(self.layers):
                self._message((i * self.layers + layer) % self._slots)

    def _message(self, slot: int) -> None:
        first, last = slot * self.pieces, (slot + 1) * self.pieces
        if self.method == "copy":
            self._copy(first, last)
        elif self.method == "kernel":
            self._push(first, last)
        elif self.layout == "contiguous":
            self._send(self.source[slot], self.target[slot])
        else:
            self._send_blocks(first, last)

    def _copy(self, first: int, last: int) -> None:
        if self.team.stage.device == "cpu":
            for a, b in self._pairs[first:last]:
                self.target[b].copy_(self.source[a])
            return
        from cupy.cuda import runtime

        stream = self.team.torch.cuda.current_stream().cuda_stream
        source, target, size = self.source.data_ptr(), self.target.data_ptr(), self.piece_bytes
        for a, b in self._pairs[first:last]:
            runtime.memcpyAsync(target + b * size, source + a * size, size, MEMCPY_DEFAULT, stream)

    def _push(self, first: int, last: int) -> None:
        import cupy

        from calib import cuda

        # a contiguous message is cut too, so that every CTA has a part
        size, count = self.piece_bytes, last - first
        tables = [t[first:last].data_ptr() for t in (self._device_to, self._device_from)]
        args = (
            *(cupy.uint64(p) for p in (self.target.data_ptr(), self.source.data_ptr(), *tables)),
            cupy.int32(count),
            cupy.int64(size // 16),
        )
        with cuda.on_stream(self.team.torch.cuda.current_stream().cuda_stream):
            cuda.function("kv_push", "kv_push")((min(PUSH_CTAS, count),), (512,), args)

    def _send(self, source: Any, target: Any) -> None:
        dist = self.team.dist
        op = dist.P2POp(dist.isend, source, 1) if self.sends else dist.P2POp(dist.irecv, target, 0)
        for work in dist.batch_isend_irecv([op]):
            work.wait()

    def _send_blocks(self, first: int, last: int) -> None:
        torch = self.team.torch
        if self.sends:
            torch.index_select(self.source, 0, self._device_from[first:last], out=self._staged)
        self._send(self._staged, self._staged)
        if self.receives:
            self.target.index_copy_(0, self._device_to[first:last].long(), self._staged)

    def error(self) -> float:
        """0 if the first message arrived whole, NaN otherwise; poisons, runs once and looks."""
        if self.active and (self.receives or not self.together):
            self.target.zero_()
            if self.target.device != self.source.device:
                self.team.torch.cuda.synchronize(self.target.device)
        self.team.stage.sync()
        if self.together:
            self.team.agree(0.0)
        self.run(0)
        self.team.stage.sync()
        if not self.active or (self.together and self.sends):
            return 0.0
        rows = range(self.pieces)
        for a, b in (self._pairs[i] for i in rows[:: max(1, self.pieces // 64)]):
            if not self.team.torch.equal(self.target[b].to(self.source.device), self.source[a]):
                return float("nan")
        return 0.0


class Memory:
    """The cache of the sending GPU, that of the receiving one as the caller sees it, and a staging buffer."""

    def __init__(self, team: Team, region_bytes: int) -> None:
        self.team, self.region_bytes = team, region_bytes
        self._held: dict[str, Any] = {}

    def _bytes(self, name: str, count: int, device: str) -> Any:
        held = self._held.get(name)
        if held is None or held.numel() < count:
            held = self.team.torch.empty(count, dtype=self.team.torch.uint8, device=device)
            self._held[name] = held
        return held[:count]

    def source(self) -> Any:
        """Random bytes, the same on every rank."""
        torch, device = self.team.torch, self.team.stage.device
        if "source" not in self._held:
            generator = torch.Generator(device=device).manual_seed(self.team.seed + 5)
            held = self._bytes("source", self.region_bytes, device).view(torch.int64)
            held.random_(generator=generator)
        return self._held["source"]

    def target(self, own: bool) -> Any:
        """The receiving cache: on this GPU (`own`), or on the next one, which this process may write to."""
        if own or self.team.stage.device == "cpu":
            return self._bytes("target", self.region_bytes, self.team.stage.device)
        if not self.team.torch.cuda.can_device_access_peer(0, 1):
            raise CalibrationError("This GPU cannot write to the next one's memory.")
        held = self._bytes("peer", self.region_bytes, "cuda:1")
        if "enabled" not in self._held:
            held[:1024].copy_(self.source()[:1024])  # PyTorch opens the link to the peer with its first copy
            _enable_peer()
            self._held["enabled"] = True
        return held

    def staging(self, message_bytes: int) -> Any:
        return self._bytes("staging", message_bytes, self.team.stage.device)


def _enable_peer() -> None:
    """Let kernels of device 0 write to device 1."""
    from cupy.cuda import runtime

    try:
        runtime.deviceEnablePeerAccess(1)
    except runtime.CUDARuntimeError as error:
        if "AlreadyEnabled" not in str(error):
            raise


def _memory(team: Team) -> Memory:
    held: Memory | None = team.__dict__.get("_memory")
    if held is None:
        held = team.__dict__["_memory"] = Memory(team, min(REGION_BYTES, 2 * team.pool_bytes))
    return held
