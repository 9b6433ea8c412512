"""Studies: expansion, equal bytes with any number of jobs, resuming, and the rules of the result folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import sim.study.run as study_run
from sim.engine.cluster import Cluster
from sim.errors import SimctlError
from sim.study.execute import execute
from sim.study.folder import ResultFolder
from sim.study.plan import Study, memory_plans, prepare
from sim.study.pool import map_runs
from sim.study.run import run_in_memory, run_study

FILES = ("experiment.yaml", "summary.json", "runs.parquet", "requests.parquet")


def experiment(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "workload": {"trace": "sample-conv", "max_requests": 30},
        "model": "llama-3.1-8b",
        "gpu": "h200-sxm",
        "policies": ["vllm", "sarathi-512"],
        "sweep": {"request_rate": [4, 8]},
        "slo": {"ttft_ms": 1000, "tpot_ms": 50},
    }
    return {**base, **changes}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("done") / "out"
    run_study(prepare(experiment()), target)
    return target


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def test_runs_are_policies_by_rates_by_replicates_with_common_seeds() -> None:
    runs = prepare(experiment(seed=5, num_runs=2)).runs
    assert [run.index for run in runs] == list(range(8))
    assert [(r.label, r.request_rate, r.seed) for r in runs[:4]] == [
        ("vllm", 4, 5),
        ("vllm", 4, 6),
        ("vllm", 8, 5),
        ("vllm", 8, 6),
    ]
    assert [(r.request_rate, r.seed) for r in runs[:4]] == [(r.request_rate, r.seed) for r in runs[4:]]


def test_without_a_sweep_a_trace_runs_at_its_own_stamps() -> None:
    (run,) = prepare(experiment(sweep=None, policies=["vllm"])).runs
    assert run.request_rate is None


def test_files_and_their_rows(finished: Path) -> None:
    assert sorted(p.name for p in finished.iterdir()) == sorted([*FILES, "timing.json"])
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["schema_version"] == 1
    assert [run["run"] for run in summary["runs"]] == [0, 1, 2, 3]
    assert {"name", "sha256", "provenance"} <= set(summary["profile"])
    assert summary["experiment"]["resolved"]["trace_sha256"]
    runs, requests = (pd.read_parquet(finished / f"{name}.parquet") for name in ("runs", "requests"))
    assert len(runs) == 4
    assert len(requests) == 4 * 30
    assert {"stalled_request_pct.200", "slo_attainment_by_metric.ttft"} <= set(runs.columns)
    assert requests["good"].mean() == pytest.approx(
        np.mean([run["slo_attainment"] for run in summary["runs"]])
    )
    timing = json.loads((finished / "timing.json").read_text())
    assert set(timing) == {"iterations", "decisions", "loop_s", "startup_s", "write_s"}
    assert timing["iterations"] == sum(run["iterations"] for run in summary["runs"])


def test_one_job_and_four_give_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    run_study(prepare(experiment()), tmp_path / "out", jobs=4)
    assert contents(tmp_path / "out") == contents(finished)


def test_the_written_experiment_gives_the_same_results_again(finished: Path, tmp_path: Path) -> None:
    run_study(prepare(finished / "experiment.yaml"), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(finished)


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[int]:
    """Let `count` runs finish, then fail; returns the list that notes which runs were executed."""
    executed: list[int] = []

    def limited(setting: Any, run: Any, *rest: bool) -> Any:
        if len(executed) == count:
            raise error
        executed.append(run.index)
        return execute(setting, run, *rest)

    monkeypatch.setattr(study_run, "execute", limited)
    return executed


def interrupt(target: Path, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """Run the experiment and interrupt it after two runs."""
    study = prepare(experiment())
    with monkeypatch.context() as patch:
        stop_after(2, patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt) as caught:
            run_study(study, target)
    return caught.value


def test_an_interrupted_study_resumes_to_the_same_bytes(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    assert "2 finished runs are kept" in interrupt(target, monkeypatch).__notes__[0]
    assert not target.exists()
    executed = stop_after(99, monkeypatch, KeyboardInterrupt())
    run_study(prepare(experiment()), target, resume=True)
    assert executed == [2, 3]
    assert contents(target) == contents(finished)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_without_resume_an_interrupted_study_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(tmp_path / "out", monkeypatch)
    executed = stop_after(99, monkeypatch, KeyboardInterrupt())
    run_study(prepare(experiment()), tmp_path / "out")
    assert executed == [0, 1, 2, 3]


def test_resume_refuses_the_runs_of_another_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(tmp_path / "out", monkeypatch)
    with pytest.raises(SimctlError, match="interrupted run of another experiment"):
        run_study(prepare(experiment(seed=1)), tmp_path / "out", resume=True)


def test_a_failure_before_the_first_result_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(0, monkeypatch, SimctlError("no"))
    with pytest.raises(SimctlError):
        run_study(prepare(experiment()), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_another_experiment_is_refused_and_kept(finished: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    shutil.copytree(finished, target)
    other = prepare(experiment(seed=1))
    with pytest.raises(SimctlError, match="another experiment"):
        run_study(other, target)
    assert contents(target) == contents(finished)
    run_study(prepare(experiment()), target)  # the same experiment may be run again
    run_study(other, target, force=True)
    assert "seed: 1" in (target / "experiment.yaml").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_two_studies_do_not_write_one_folder_at_a_time(tmp_path: Path) -> None:
    study = prepare(experiment())
    first = ResultFolder(tmp_path / "out", study)
    first.open()
    with pytest.raises(SimctlError, match="another simctl is writing"):
        run_study(study, tmp_path / "out")
    assert first.parts.is_dir()


def test_a_partial_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(SimctlError, match="is in the way"):
        run_study(prepare(experiment()), tmp_path / "out")


@pytest.mark.parametrize("inside", ["notes.txt", "experiment.yaml"])
def test_a_folder_of_foreign_files_is_refused(tmp_path: Path, inside: str) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / inside).write_text("mine")
    with pytest.raises(SimctlError, match=r"give another folder with -o"):
        run_study(prepare(experiment()), target)
    assert (target / inside).read_text() == "mine"


def test_an_empty_folder_is_filled_and_a_file_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    run_study(prepare(experiment(sweep=None, policies=["vllm"])), tmp_path / "out")
    assert (tmp_path / "out" / "summary.json").is_file()
    (tmp_path / "file").touch()
    with pytest.raises(SimctlError, match="is a file"):
        run_study(prepare(experiment()), tmp_path / "file")


def test_steps_are_written_on_request(tmp_path: Path) -> None:
    runs = run_study(prepare(experiment()), tmp_path / "out", steps=True)
    steps = pd.read_parquet(tmp_path / "out" / "steps.parquet")
    assert steps.groupby("run").size().tolist() == [run["iterations"] for run in runs]


def test_replicates_differ_and_bring_intervals(tmp_path: Path) -> None:
    generated = {"arrivals": "poisson", "num_prompts": 30, "prompt_tokens": 500, "output_tokens": 20}
    run_study(prepare(experiment(workload=generated, num_runs=3, policies=["vllm"])), tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert len({run["mean_ttft_ms"] for run in summary["runs"][:3]}) == 3
    row = summary["intervals"][0]
    assert row["replicates"] == 3
    assert row["mean_ttft_ms"]["low"] < row["mean_ttft_ms"]["mean"] < row["mean_ttft_ms"]["high"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"policies": ["vlm"]}, "unknown policy 'vlm'. Did you mean 'vllm'?"),
        ({"policies": [{"name": "vllm", "max_num_seq": 3}]}, "Did you mean 'max_num_seqs'?"),
        ({"gpu": "h200-sxn"}, "Did you mean 'h200-sxm'?"),
        ({"model": "llama-3-8"}, "Unknown model"),
        ({"router": "round-robbin"}, "Did you mean 'round-robin'?"),
        ({"workload": {"trace": "absent.csv"}}, "was not found"),
        ({"gpu": "l40s", "model": "llama-3.1-70b"}, "does not fit"),
        ({"mechanism": "mps"}, "`mechanism` has no effect"),
        (
            {
                "slo": {"classes": {"chat": {"priority": 1}}},
                "workload": {"trace": "sample-conv", "max_requests": 30, "slo_class": "chat"},
            },
            "`slo.classes.chat.priority` has no effect, since none of the policies orders requests by priority",
        ),
        ({"estimator": "oracle"}, "`estimator` has no effect"),
    ],
)
def test_what_cannot_run_is_refused_before_it_runs(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SimctlError) as caught:
        prepare(experiment(**changes))
    assert sentence in str(caught.value)


def test_a_strict_run_refuses_steps_outside_the_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    study = prepare(experiment(strict=True))
    close = Cluster.close

    def flagging(cluster: Cluster, end_s: float) -> Any:
        records = close(cluster, end_s)
        records.totals["flagged"] = 3
        return records

    monkeypatch.setattr(Cluster, "close", flagging)
    with pytest.raises(SimctlError, match="strict: 3 steps of vllm at 4 req/s"):
        execute(study.setting, study.runs[0])


def numbers(study: Study) -> list[float]:
    return [outcome.summary["mean_e2el_ms"] for outcome in run_in_memory(study)]


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": {"num_gpu_blocks": 200}},
        {"memory": {"gpu_memory_utilization": 0.135}},
        {"kernels": {"launch": "eager"}},
        {"kernels": {"scale": {"decode_attention": 3.0}}},
        {"replicas": 2},
        {"jitter": False},
        {"seed": 1},
        {"model": "yi-6b"},
        {"gpu": "a100-80gb-sxm"},
    ],
)
def test_every_key_changes_the_outcome(changes: dict[str, Any]) -> None:
    one = {"policies": ["vllm"], "sweep": {"request_rate": [16]}}
    assert numbers(prepare(experiment(**one))) != numbers(prepare(experiment(**one, **changes)))


def test_measuring_changes_the_window_and_the_horizon_what_finishes() -> None:
    def first(**measure: Any) -> dict[str, Any]:
        return run_in_memory(prepare(experiment(measure=measure)))[0].summary

    whole, warmed, cut, undrained = first(), first(warmup_s=2), first(horizon_s=3), first(drain=False)
    assert warmed["window_start"] == 2
    assert warmed["slo_requests"] < whole["slo_requests"]
    assert cut["unfinished"] > 0
    assert cut["duration"] == 3
    assert whole["unfinished"] == 0
    assert undrained["unfinished"] > 0


def test_slo_classes_have_their_own_limits() -> None:
    slo = {"classes": {"fast": {"ttft_ms": 0.001}, "slow": {"ttft_ms": 1e6}}}
    workload = {"trace": "sample-conv", "max_requests": 30, "slo_class": {"fast": 0.5, "slow": 0.5}}
    by_class = run_in_memory(prepare(experiment(slo=slo, workload=workload)))[0].summary[
        "slo_attainment_by_class"
    ]
    assert by_class == {"fast": 0.0, "slow": 1.0}


def test_memory_plans_show_the_blocks_that_runs_have() -> None:
    study = prepare(experiment(policies=["vllm", "sarathi-512", "muxwise"]))
    plans = {row["policy"]: row["plan"].num_blocks for row in memory_plans(study)}
    assert plans == {o.summary["policy"]: o.summary["kv_blocks"] for o in run_in_memory(study)}


@pytest.mark.parametrize("backend", ["ray", "dask"])
def test_a_missing_backend_is_told_with_its_install_line(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("sim.study.pool.import_module", missing)
    with pytest.raises(SimctlError, match=rf"pip install 'lanesim\[{backend}\]'"):
        list(map_runs(len, [([],)], backend=backend))


def test_tasks_come_back_from_processes() -> None:
    assert sorted(map_runs(divmod, [(7, 2), (9, 4)], jobs=2)) == [(2, 1), (3, 1)]


def test_step_logs_of_runs_with_and_without_fused_attention_share_a_file(tmp_path: Path) -> None:
    study = prepare(experiment(policies=["vllm", "pod"], sweep={"request_rate": [8]}))
    run_study(study, tmp_path / "out", steps=True)
    steps = pd.read_parquet(tmp_path / "out" / "steps.parquet")
    assert set(steps["policy"]) == {"vllm", "pod"}
    fused = steps["policy"] == "pod"
    assert steps.loc[fused, "occupancy"].notna().all()
    assert steps.loc[~fused, ["virtual_ctas", "tile", "occupancy"]].isna().all(axis=None)
