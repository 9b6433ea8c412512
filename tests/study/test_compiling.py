"""When a study compiles the hot loops."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from sim import jit

MODULES = ["sim.policies.vllm", "sim.policies.sarathi"]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(jit.SETTING, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return jit._cache_base() / jit._source_hash() / "policies"


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_small_studies_compile_only_what_is_cached(empty_cache: Path) -> None:
    assert not jit.should_compile(1000, MODULES)
    assert jit.should_compile(jit.WORTH_COMPILING, MODULES)
    empty_cache.mkdir(parents=True)
    (empty_cache / "vllm.advance-1.py311.nbi").touch()
    assert not jit.should_compile(1000, MODULES)
    assert jit.should_compile(1000, MODULES[:1])
    (empty_cache / "sarathi.advance-1.py311.nbi").touch()
    assert jit.should_compile(1000, MODULES)


@pytest.mark.parametrize("setting", ["0", "1"])
def test_the_setting_decides(setting: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(jit.SETTING, setting)
    wanted = setting == "1" and find_spec("numba") is not None
    assert jit.should_compile(1, MODULES) == jit.should_compile(10**9, MODULES) == wanted
