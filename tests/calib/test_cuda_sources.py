"""The CUDA sources compile for Ampere and Hopper with NVRTC, which needs no GPU."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import pytest

from calib import cuda

OPTIONS = ("-std=c++17",)


def nvrtc() -> ctypes.CDLL:
    spec = find_spec("nvidia.cuda_nvrtc") if find_spec("nvidia") else None
    found = [
        path
        for folder in (spec.submodule_search_locations or [] if spec else [])
        for path in Path(folder).glob("lib/libnvrtc.so.*")
    ]
    if not found:
        pytest.skip("no NVRTC on this platform (pip install nvidia-cuda-nvrtc-cu12)")
    return ctypes.CDLL(str(found[0]))


def compile_ptx(source: str, arch: str) -> str:
    lib, program = nvrtc(), ctypes.c_void_p()
    assert lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"test.cu", 0, None, None) == 0
    options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture={arch}")]
    code = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if code:
        size = ctypes.c_size_t()
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.value.decode())
    size = ctypes.c_size_t()
    lib.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetPTX(program, ptx)
    return ptx.value.decode()


@pytest.mark.parametrize("arch", ["compute_80", "compute_90"])
@pytest.mark.parametrize(
    ("name", "entries", "must_contain"),
    [
        ("smid_probe", ["record_smid", "record_nsmid", "hold"], "%smid"),
        ("stream_read", ["stream_read"], ".v4."),
        ("tickets", ["tickets", "intra_thread", "horizontal"], "%globaltimer"),
    ],
)
def test_compiles(name: str, entries: list[str], must_contain: str, arch: str) -> None:
    ptx = compile_ptx(cuda.source(name), arch)
    for entry in entries:
        assert f".entry {entry}(" in ptx
    assert must_contain in ptx


def test_a_broken_source_is_seen() -> None:
    with pytest.raises(AssertionError, match="error"):
        compile_ptx("__global__ void f( {", "compute_80")
