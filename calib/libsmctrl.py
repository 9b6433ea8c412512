"""SM partitions by libsmctrl (https://www.cs.unc.edu/~jbakita/rtas23/): per-stream masks of TPCs, a set bit disables.

The library is loaded by path and only works on the driver versions that its offset table knows.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from calib.partition import HIGH, Partition, check
from sim.errors import CalibrationError

SMS_PER_TPC = 2
NEWEST_DRIVER = 12080  # the highest offset in libsmctrl's table (Bullet's copy); it aborts on others
WORD = (1 << 64) - 1


class U128(ctypes.Structure):
    """The library's 128-bit mask, passed by value."""

    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))


def disabled_mask(first: int, last: int, tpcs: int) -> int:
    """Mask that leaves TPCs first..last-1 of `tpcs` enabled; the bits above `tpcs` are set (disabled)."""
    enabled = ((1 << (last - first)) - 1) << first
    return ~enabled & ((1 << 128) - 1) if tpcs > 64 else ~enabled & WORD


class LibSmctrl:
    """Side A is the first TPCs, side B the rest. Raises CalibrationError if the library cannot serve."""

    name = "libsmctrl"
    minimum = SMS_PER_TPC
    alignment = SMS_PER_TPC

    def __init__(
        self, path: str | Path, total: int, driver_version: int, library: Any = None, new_stream: Any = None
    ) -> None:
        """`driver_version` as cuDriverGetVersion gives it, e.g. 12080 for CUDA 12.8."""
        if driver_version > NEWEST_DRIVER and "MASK_OFF" not in os.environ:
            raise CalibrationError(
                f"libsmctrl knows no stream-mask offset for driver {driver_version // 1000}."
                f"{driver_version % 1000 // 10} (newest: {NEWEST_DRIVER // 1000}."
                f"{NEWEST_DRIVER % 1000 // 10}) and would abort the process; use green contexts or set MASK_OFF."
            )
        self.total = total
        self._tpcs = total // SMS_PER_TPC
        if library is None:
            try:
                library = ctypes.CDLL(str(path))
            except OSError as error:
                raise CalibrationError(f"libsmctrl could not be loaded from {path}: {error}.") from error
        wide = self._tpcs > 64
        name = "libsmctrl_set_stream_mask_ext" if wide else "libsmctrl_set_stream_mask"
        self._set = getattr(library, name, None)
        if self._set is None:
            raise CalibrationError(
                f"The library at {path} has no {name}, which a GPU of {self._tpcs} TPCs needs; "
                "build a newer libsmctrl or use green contexts."
            )
        if isinstance(library, ctypes.CDLL):
            self._set.argtypes = [ctypes.c_void_p, U128 if wide else ctypes.c_uint64]
            self._set.restype = None
        self._wide = wide
        self._new_stream = new_stream or _torch_stream
        self._splits: dict[int, tuple[Partition, Partition]] = {}

    def split(self, sms: int) -> tuple[Partition, Partition]:
        tpcs = -(-sms // SMS_PER_TPC)
        if not 0 < tpcs < self._tpcs:
            raise CalibrationError(
                f"A partition of {sms} SMs is impossible: between {self.minimum} and "
                f"{self.total - SMS_PER_TPC} are."
            )
        if tpcs not in self._splits:
            self._splits[tpcs] = (
                self._partition(f"a{tpcs * SMS_PER_TPC}", 0, tpcs),
                self._partition(f"b{tpcs * SMS_PER_TPC}", tpcs, self._tpcs),
            )
        return self._splits[tpcs]

    def _partition(self, name: str, first: int, last: int) -> Partition:
        mask = disabled_mask(first, last, self._tpcs)

        def make_stream(priority: str) -> Any:
            stream = self._new_stream(priority)
            self._set(stream.cuda_stream, U128(mask & WORD, mask >> 64) if self._wide else mask)
            return stream

        return Partition(name, (last - first) * SMS_PER_TPC, make_stream)


def _torch_stream(priority: str) -> Any:
    # a stream of its own: torch.cuda.Stream() hands out pooled streams, and a mask would leak to other users
    import torch
    from cuda.bindings import driver

    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    level = -5 if priority == HIGH else 0
    pointer = check(driver.cuStreamCreateWithPriority(flags, level), "cuStreamCreateWithPriority")
    return torch.cuda.ExternalStream(int(pointer))
