"""When a study compiles the hot loops, and that it does so once."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from sim import jit
from sim.native import store
from sim.policies import make_policy

SARATHI, VLLM = (type(make_policy(name)).advance for name in ("sarathi", "vllm"))
needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(jit.SETTING, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return store._folder()


@needs_numba
def test_small_studies_use_what_is_cached_and_large_ones_compile(empty_cache: Path) -> None:
    assert not jit.should_compile(jit.WORTH_LOADING, [SARATHI])
    assert jit.should_compile(jit.WORTH_COMPILING, [SARATHI])
    (empty_cache / f"{store._name(SARATHI)}-arguments-{store._machine()}.o").touch()
    assert jit.should_compile(jit.WORTH_LOADING, [SARATHI])
    assert not jit.should_compile(jit.WORTH_LOADING, [VLLM])
    assert not jit.should_compile(jit.WORTH_LOADING - 1, [SARATHI])


@pytest.mark.parametrize("setting", ["0", "1"])
def test_the_setting_decides(setting: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(jit.SETTING, setting)
    assert jit.should_compile(1, [SARATHI]) == jit.should_compile(10**9, [SARATHI]) == (setting == "1")


def callee(x: int) -> int:
    return x + 1


def caller(x: int) -> int:
    return callee(x) * FACTOR


FACTOR = 2


def test_a_change_in_a_callee_or_a_constant_is_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.reaches(caller)
    assert store.reaches(caller) == before
    monkeypatch.setitem(globals(), "FACTOR", 3)
    other_constant = store.reaches(caller)
    monkeypatch.setitem(globals(), "callee", lambda x: x + 2)
    assert len({before, other_constant, store.reaches(caller)}) == 3
