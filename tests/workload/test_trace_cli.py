"""`simctl trace` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from sim.cli import main
from sim.cli.trace import trace
from sim.workload.build import build_workload
from sim.workload.bundled import list_bundled
from sim.workload.trace import load_trace


def call(*args: str):
    return CliRunner().invoke(trace, args, catch_exceptions=False)


def test_show_prints_statistics_and_the_readers_notes():
    result = call("show", "sample-conv")
    assert result.exit_code == 0
    for text in (
        "sample-conv: 500 requests",
        "format plain",
        "gap_cv",
        "spearman",
        "over a context limit of",
        "sha256",
    ):
        assert text in result.stdout


def test_show_json():
    facts = json.loads(call("show", "sample-conv", "--json").stdout)
    assert facts["requests"] == 500
    assert facts["arrivals"]["request_rate"] == pytest.approx(5.53, rel=0.05)
    assert facts["arrivals"]["gap_cv"] == pytest.approx(1.09, abs=0.08)
    assert facts["prompt_tokens"]["p50"] == pytest.approx(1020, rel=0.1)
    assert set(facts["over_context_limit"]) == {"2048", "4096", "8192", "16384", "32768", "131072"}


def test_show_without_a_file_lists_the_bundled_names():
    names = [entry.name for entry in list_bundled()]
    listed = call("show").stdout
    assert all(name in listed for name in names)
    assert [entry["name"] for entry in json.loads(call("show", "--json").stdout)] == names


@pytest.mark.parametrize("columns", ["arrival_s,", ""])
def test_show_writes_an_offline_page(tmp_path, columns):
    path = tmp_path / "t.csv"
    path.write_text(
        f"{columns}prompt_tokens,output_tokens\n"
        + "".join(f"{'1.5,' if columns else ''}{n},7\n" for n in (5, 6))
    )
    page = tmp_path / "t.html"
    assert call("show", str(path), "-o", str(page)).exit_code == 0
    html = page.read_text()
    assert "Plotly.newPlot" in html
    assert "cdn.plot.ly/plotly" not in html.split("</head>")[0]
    assert "format plain" in html
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".part"] == []
    assert page.read_bytes() == (call("show", str(path), "-o", str(page)), page.read_bytes())[1]


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_convert_there_and_back(tmp_path, ending):
    source = next(entry.path for entry in list_bundled() if entry.name == "sample-conv")
    out = tmp_path / f"o.{ending}"
    result = call("convert", "sample-conv", "-o", str(out))
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "500 requests" in result.stderr
    a, b = load_trace(source), load_trace(out)
    np.testing.assert_array_equal(a.arrival_s, b.arrival_s)
    np.testing.assert_array_equal(a.prompt_tokens, b.prompt_tokens)
    np.testing.assert_array_equal(a.output_tokens, b.output_tokens)


def test_convert_with_overrides_and_transforms(tmp_path):
    path, out = tmp_path / "t.csv", tmp_path / "o.csv"
    path.write_text("t,isl,osl\n0,1,2\n500,3,4\n900,0,6\n1000,5,6\n")
    columns = ["--column", "arrival_s=t", "--column", "prompt_tokens=isl", "--column", "output_tokens=osl"]
    call("convert", str(path), "-o", str(out), *columns, "--time-unit", "ms", "--on-zero", "clamp")
    assert out.read_text().splitlines()[1:] == ["0,1,2", "0.5,3,4", "0.9,1,6", "1,5,6"]
    call(
        "convert",
        str(path),
        "-o",
        str(out),
        *columns,
        "--time-unit",
        "ms",
        "--window",
        "0",
        "0.9",
        "--request-rate",
        "4",
    )
    assert out.read_text().splitlines()[1:] == ["0,1,2", "0.25,3,4"]


def test_synth_makes_the_bundled_sample_again(tmp_path):
    sample = next(entry for entry in list_bundled() if entry.name == "sample-conv")
    command = sample.source.split()[2:]
    out = tmp_path / command[-1]
    assert call(*command[:-1], str(out)).exit_code == 0
    a, b = load_trace(sample.path), load_trace(out)
    np.testing.assert_allclose(a.arrival_s, b.arrival_s, rtol=1e-9)
    np.testing.assert_array_equal(a.prompt_tokens, b.prompt_tokens)
    np.testing.assert_array_equal(a.output_tokens, b.output_tokens)
    assert sample.source in (Path(__file__).parents[2] / "traces" / "README.md").read_text()


def test_synth_is_the_workload_block_on_the_command_line(tmp_path):
    out = tmp_path / "s.parquet"
    lengths = "{lognormal: {median: 900, sigma: 0.6, max: 4000}}"
    call(
        "synth", "--request-rate", "3", "--num-prompts", "80", "--burstiness", "0.5", "--seed", "9",
        "--prompt-tokens", lengths, "--output-tokens", "50", "-o", str(out),
    )  # fmt: skip
    spec = {
        "arrivals": "gamma",
        "burstiness": 0.5,
        "num_prompts": 80,
        "prompt_tokens": {"lognormal": {"median": 900, "sigma": 0.6, "max": 4000}},
        "output_tokens": 50,
    }
    expected = build_workload(spec, seed=9, request_rate=3.0, context_limit=None, base_dirs=[])
    np.testing.assert_array_equal(load_trace(out).arrival_s, expected.arrival_s)
    np.testing.assert_array_equal(load_trace(out).prompt_tokens, expected.prompt_tokens)


def test_synth_bursts(tmp_path):
    out = tmp_path / "s.csv"
    table = ["--quantiles", "azure-code-2023", "--minute-profile", "azure-code-2023"]
    result = call("synth", "--request-rate", "2.5", "--num-prompts", "50", *table, "-o", str(out))
    assert "follow the minutes of azure-code-2023" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show", "nope.csv"], "was not found in"),
        (["show", "sample-conv", "--format", "azuer"], "Did you mean 'azure'"),
        (["show", "sample-conv", "--column", "prompt_tokens"], "is not OURS=THEIRS"),
        (["convert", "sample-conv", "-o", "o.txt"], "ending must be one of"),
        (["convert", "sample-conv", "-o", "no/such/folder/o.csv"], "cannot write no/such/folder/o.csv"),
        (["synth", "--request-rate", "1", "-o", "o.csv"], "--prompt-tokens is missing"),
        (
            ["synth", "--request-rate", "1", "--prompt-tokens", "{a", "--output-tokens", "1", "-o", "o.csv"],
            "nor YAML",
        ),
        (["synth", "--request-rate", "-1", "--quantiles", "bwb", "-o", "o.csv"], "not a positive number"),
    ],
)
def test_user_errors_are_one_sentence_and_exit_code_2(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["trace", *args])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["show", "convert", "synth"])
def test_help_has_an_example(verb):
    assert "Example: simctl trace" in call(verb, "--help").stdout
