"""What users get wrong: one sentence, exit code 2, nothing left behind, and nothing of theirs removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.cli import main

EXPERIMENT = """
name: small
workload: {trace: sample-conv, max_requests: 5}
model: llama-3.1-8b
gpu: h200-sxm
profile: spec
policies: [vllm, sarathi-512]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simctl(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return int(left.value.code or 0)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence on stderr of a command that ends with exit code 2."""
    before = sorted(Path().rglob("*"))
    assert simctl(*words) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("Error: ")
    assert len(told.splitlines()) == 1
    assert sorted(Path().rglob("*")) == before
    return told


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: \0", "not valid YAML"),
        ("a: &a {b: *a}", "hold themselves"),
        ("a: " + "[" * 3000 + "]" * 3000, "too deeply"),
        (
            "a: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(
                f"{n}: &{n} [{','.join([f'*{m}'] * 9)}]\n" for m, n in zip("abcdefg", "bcdefgh", strict=True)
            ),
            "keys and items",
        ),
        (EXPERIMENT + "5: 3\n", "the key `[5]` is not text"),
    ],
    ids=["nul", "recursive", "deep", "aliases of aliases", "number as a key"],
)
def test_files_that_are_no_experiments(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    (folder / "x.yaml").write_text(text)
    assert sentence in refused(capsys, "run", "x.yaml", "-o", "o")


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ('policies=[":"]', "policy ':' cannot be loaded"),
        ("policies=3", "must be a policy's name or a mapping with `name`"),
        ("policies.1.watermark=.inf", "knob 'watermark' is inf"),
        ("policies.1.watermark=1.5", "the most is 1"),
        ("seed=99999999999999999999", "less than or equal to 9007199254740992"),
        ("workload.prompt_tokens={uniformm: [1, 2]}", "Did you mean 'uniform'?"),
        ("workload.prompt_tokens={xyz: 1}", "Valid here: lognormal, uniform, quantiles."),
        ("workload.subsample=1.5", "neither a share below 1 nor a whole number"),
        ("workload.trace=.", "is a folder"),
        ("router=rr", "Known: round-robin, least-outstanding"),
    ],
)
def test_values_that_cannot_be(
    folder: Path, capsys: pytest.CaptureFixture[str], assignment: str, sentence: str
) -> None:
    assert sentence in refused(capsys, "run", "e.yaml", "-o", "o", "--set", assignment)


@pytest.mark.parametrize(
    ("assignment", "where"),
    [
        ("name.x=1", "--set name.x=1"),
        ("sweep.request_rate=[1, 1.0]", "--set sweep.request_rate=[1, 1.0]"),
        ("policies.1.token_budget=0", "--set policies.1.token_budget=0"),
        ("gpu=h2000", "--set gpu=h2000"),
        ("kernels.scale={decode: 2}", "--set kernels.scale={decode: 2}"),
        ("workload.trace=nosuch", "--set workload.trace=nosuch"),
    ],
)
def test_a_fault_of_an_option_is_told_with_the_option(
    folder: Path, capsys: pytest.CaptureFixture[str], assignment: str, where: str
) -> None:
    assert refused(capsys, "run", "e.yaml", "-o", "o", "--set", assignment).startswith(f"Error: {where}: ")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [("llama-3.1-8b", "lama", 4), ("h200-sxm", "h2000", 5), ("sample-conv", "nosuch", 3)],
)
def test_unknown_names_are_told_with_their_line(
    folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, line: int
) -> None:
    (folder / "e.yaml").write_text(EXPERIMENT.replace(old, new))
    assert f"e.yaml, line {line}: " in refused(capsys, "run", "e.yaml", "-o", "o")


@pytest.mark.parametrize("target", ["/", "e.yaml/x", "n" * 300, "."])
def test_folders_that_cannot_hold_results(
    folder: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    refused(capsys, "run", "e.yaml", "-o", target)


def test_force_does_not_remove_files_that_are_not_results(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "not results" in refused(capsys, "run", "e.yaml", "-o", ".", "--force")
    assert "not results" in refused(capsys, "run", "e.yaml", "-o", "../" + folder.name, "--force")


def test_resume_from_a_damaged_marker_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "o.partial").mkdir()
    (folder / "o.partial" / "study.json").write_text("{")
    (folder / "o.partial" / "lock").touch()
    assert "remove it" in refused(capsys, "run", "e.yaml", "-o", "o", "--resume")


@pytest.mark.parametrize("name", ["..", "/", "../../x"])
def test_a_name_does_not_lead_out_of_the_default_folder(folder: Path, name: str) -> None:
    (folder / "e.yaml").write_text(EXPERIMENT.replace("name: small", f'name: "{name}"'))
    assert simctl("run", "e.yaml", "--no-report", "-q") == 0
    assert len(list((folder / "out").glob("*/summary.json"))) == 1


def test_a_home_folder_is_the_users(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert simctl("run", "e.yaml", "--no-report", "-q", "-o", "~/x") == 0
    assert (folder / "home" / "x" / "summary.json").is_file()


def test_goodput_takes_an_equals_sign_and_wants_a_limit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simctl("run", "e.yaml", "--dry-run", "--goodput=ttft:500", "tpot:40") == 0
    assert "limit in ms is missing" in refused(capsys, "run", "e.yaml", "-o", "o", "--goodput", "ttft:")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("arrival_s,prompt_tokens,output_tokens", "has a header but no rows"),
        ("arrival_s;prompt_tokens;output_tokens\n0;1;1\n", "separate its fields by ';'"),
        ("arrival_s,prompt_tokens,output_tokens,priority\n0,1,5,99999\n", "line 2"),
    ],
)
def test_traces_that_are_not_quite_right(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    (folder / "t.csv").write_text(text)
    assert sentence in refused(capsys, "trace", "show", "t.csv")


@pytest.mark.parametrize(
    "words",
    [
        ("trace", "show", "sample-conv", "-o", "."),
        ("trace", "convert", "sample-conv", "-o", "x.csv", "--request-rate", "inf"),
        ("init", "e.yaml/x"),
        ("report", "e.yaml", "-o", "."),
    ],
)
def test_outputs_that_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    (folder / "t").mkdir()
    assert simctl(*words) == 2
    assert "Error: " in capsys.readouterr().err
    assert not (folder / "x.csv").exists()


def test_a_seed_below_zero_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simctl("trace", "convert", "sample-conv", "-o", "x.csv", "--seed", "-1") == 2
    assert "--seed" in capsys.readouterr().err


def test_clients_may_ask_for_more_than_a_column_holds(folder: Path) -> None:
    words = ("run", "e.yaml", "--no-report", "-q", "-o", "o", "--set")
    assert simctl(*words, "workload.max_new_tokens={factor: 1e300}") == 0
