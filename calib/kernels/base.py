"""What every timed operator has in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from calib.arena import Arena


class Kernel:
    """One operator at one shape. Constructing it is free; `prepare` makes its inputs out of the arena.

    `flops` and `bytes` count what must be done and moved through device memory at least (each input read once,
    each output written once); `columns()` are the shape columns of its row; `launches` is how many kernels one
    run starts, about. A kernel whose result comes from many parts of the arena has `copies` > 1, and
    `run(i)` uses the i-th.
    """

    kind: ClassVar[str]
    launches: ClassVar[int] = 1
    flops: float = 0.0
    bytes: float = 0.0
    label: str = ""
    copies: int = 1

    def columns(self) -> dict[str, Any]:
        """Shape columns of `calib.rows`."""
        raise NotImplementedError

    def prepare(self, arena: Arena, slot: int = 0, padded: bool = False) -> None:
        """Make inputs (fresh random data). `padded`: plan as a server's CUDA graphs need it."""
        raise NotImplementedError

    def run(self, i: int = 0) -> Any:
        """Launch once on the current torch stream; allocates nothing and never synchronises."""
        raise NotImplementedError

    def reference_error(self) -> float:
        """Relative error ||out - ref|| / ||ref|| of one run against float32, on the prepared inputs.

        A kernel that is also looked at inside a graph takes what a replay left behind as an argument."""
        raise NotImplementedError


def relative_error(out: Any, reference: Any) -> float:
    """||out - reference|| / ||reference|| in float32; NaN if anything is not a number."""
    return float((out.float() - reference.float()).norm() / reference.float().norm())


def joined(values: Sequence[int]) -> str:
    """A list as one cell: "512;2048"."""
    return ";".join(str(int(v)) for v in values)
