"""Our own CUDA kernels: compiled at run time by NVRTC through CuPy, launched on any stream by its pointer."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

RESIDENT_CYCLES = 40_000  # ~20 us: longer than the block scheduler needs to fill every SM


def source(name: str) -> str:
    """The text of `calib/csrc/<name>.cu`."""
    return files("calib").joinpath("csrc", f"{name}.cu").read_text()


@cache
def module(name: str) -> Any:
    """The compiled `calib/csrc/<name>.cu` as a CuPy RawModule."""
    import cupy

    return cupy.RawModule(code=source(name), options=("-std=c++17",))


@cache
def function(name: str, entry: str) -> Any:
    """The kernel `entry` of `calib/csrc/<name>.cu`."""
    return module(name).get_function(entry)


def on_stream(pointer: int) -> Any:
    """A context manager that makes CuPy launch on the CUDA stream at `pointer`."""
    import cupy

    return cupy.cuda.ExternalStream(pointer)


class Probe:
    """Runs the SM-id kernels."""

    def __init__(self, sms: int) -> None:
        self.sms = sms

    def smids(self, stream: int) -> frozenset[int]:
        """Ids of the SMs that CTAs launched on the stream at pointer `stream` ran on."""
        import cupy

        ctas = 4 * self.sms
        seen = cupy.full(ctas, 0xFFFFFFFF, dtype=cupy.uint32)
        cupy.cuda.runtime.deviceSynchronize()
        external = on_stream(stream)
        with external:
            function("smid_probe", "record_smid")((ctas,), (1024,), (seen, cupy.int64(RESIDENT_CYCLES)))
        external.synchronize()
        return frozenset(int(i) for i in cupy.asnumpy(seen))

    def nsmid(self) -> int:
        """The %nsmid register: an upper bound of the SM ids."""
        import cupy

        out = cupy.zeros(1, dtype=cupy.uint32)
        function("smid_probe", "record_nsmid")((1,), (1,), (out,))
        return int(out[0])


def hold(stream: int, cycles: int) -> None:
    """Keep one warp busy on the stream for `cycles` SM clock cycles."""
    import cupy

    with on_stream(stream):
        function("smid_probe", "hold")((1,), (32,), (cupy.int64(cycles),))


def read_words(stream: int, pointer: int, words: int, sink: int, ctas: int, watched: int = 0) -> None:
    """Read `words` 16-byte words at device address `pointer`; a thread whose XOR is `watched` writes it to `sink`."""
    import cupy

    args = (cupy.uint64(pointer), cupy.uint64(words), cupy.uint32(watched), cupy.uint64(sink))
    with on_stream(stream):
        function("stream_read", "stream_read")((ctas,), (512,), args)
