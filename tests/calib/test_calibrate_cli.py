"""`simctl calibrate` with a fake GPU and with none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from calib import fake
from calib.partition import LeakError
from sim.cli.calibrate import calibrate
from sim.errors import CalibrationError, SimctlError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(calibrate, [*arguments], catch_exceptions=False, standalone_mode=False)
    return result.output


def test_a_fake_run_prints_what_was_measured(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    text = run("--fake", "-o", str(folder), "--operator", "stream_read", "--operator", "host", "-q")
    assert "stream_read" in text
    assert "host" in text
    assert text.strip().endswith(str(folder))
    assert sorted(p.name for p in (folder / "measurements").iterdir()) == [
        "host.csv.gz",
        "stream_read.csv.gz",
    ]


def test_quick_stays_inside_its_default_limit_and_resumes(tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    assert "--resume goes on" in run("--fake", "-o", folder, "--time-limit", "1", "-q")
    text = run("--fake", "-o", folder, "--operator", "norm", "--resume", "-q")
    assert "norm                  189 of    189 points" in text


def test_smoke_writes_nothing_and_touches_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(calibrate, ["--smoke", "--fake"], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []
    assert result.return_value == 0
    for word in (
        "pair disjoint",
        "pair whole",
        "pair streams",
        "stagger",
        "host plan_decode",
        "sustained",
        "fa2",
    ):
        assert word in result.output
    assert "FAILED" not in result.output


def test_a_leaking_partition_refuses_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fake.FakeLab
    monkeypatch.setattr(
        fake, "FakeLab", lambda model, protocol, seed: real(model, protocol, seed, leaks=True)
    )
    with pytest.raises(LeakError, match="promised 64 SMs"):
        run("--fake", "-o", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_one_sentence(tmp_path: Path) -> None:
    try:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    except ImportError:
        pass
    with pytest.raises(CalibrationError, match=r"calibration needs one|needs PyTorch") as error:
        run("-o", str(tmp_path / "out"))
    assert str(error.value).count(". ") == 0
    assert not (tmp_path / "out").exists()


def test_without_torch_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CalibrationError, match=r"pip install 'lanesim\[gpu-cu13\]'"):
        run("-o", str(tmp_path / "out"))


def test_unknown_model() -> None:
    with pytest.raises(SimctlError, match=r"Did you mean 'llama-3\.1-8b'"):
        run("--fake", "--model", "llama-3.1-8")


def test_a_seed_below_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match="-5 is not in the range"):
        run("--fake", "--seed", "-5", "-o", str(tmp_path / "out"))


def test_the_exit_code_of_a_refusal_is_two(tmp_path: Path) -> None:
    code = "from sim.cli import main; main(['calibrate', '--fake', '--operator', 'gem', '-o', 'out'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("Error: There is no operator 'gem'")
    assert "Traceback" not in done.stderr


def test_calibrating_needs_no_simulator_package(tmp_path: Path) -> None:
    # a GPU machine may have torch and no pydantic or simpy
    code = (
        "import sys\n"
        "for name in ('pydantic', 'simpy', 'plotly', 'numba'): sys.modules[name] = None\n"
        "from sim.cli import main\n"
        "main(['calibrate', '--fake', '--operator', 'host', '-o', 'out', '-q'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "run.yaml").exists()
