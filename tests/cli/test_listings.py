"""`simctl models` and `simctl gpus` from the outside."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from sim.cli.listings import gpus, models


@pytest.mark.parametrize(("command", "first"), [(models, "yi-6b"), (gpus, "a100-40gb-sxm")])
def test_a_table_lists_everything_with_its_source(command, first):
    plain = CliRunner().invoke(command, [], catch_exceptions=False).output.splitlines()
    rows = json.loads(CliRunner().invoke(command, ["--json"], catch_exceptions=False).output)
    assert len(plain) == len(rows) + 1
    assert plain[0].endswith("SOURCE")
    for line, row in zip(plain[1:], rows, strict=True):
        assert line.split()[0] == row["name"]
        assert line.endswith(row["source"])
    assert rows[0]["name"] == first


def test_model_rows_carry_derived_sizes():
    rows = json.loads(CliRunner().invoke(models, ["--json"], catch_exceptions=False).output)
    llama = next(row for row in rows if row["name"] == "llama-3.1-8b")
    assert llama["kv_bytes_per_token"] == 131_072
    assert llama["weight_bytes"] == 2 * llama["params"] == 2 * 8_030_261_248


def test_mixtures_are_listed_with_their_experts_and_active_parameters():
    plain = CliRunner().invoke(models, [], catch_exceptions=False).output
    (line,) = [line for line in plain.splitlines() if line.startswith("qwen3-235b-a22b")]
    assert "8 of 128" in line
    assert line.split()[1:3] == ["235.1B", "22.2B"]
    rows = json.loads(CliRunner().invoke(models, ["--json"], catch_exceptions=False).output)
    assert next(row for row in rows if row["name"] == "qwen3-235b-a22b")["active_params"] < 23e9
    assert all(row["active_params"] <= row["params"] for row in rows)


@pytest.mark.parametrize("command", [models, gpus])
def test_help_has_an_example(command):
    assert "Example: simctl" in CliRunner().invoke(command, ["--help"]).output
