"""The experiment that `simctl init` writes names every key of the format, and no other."""

from __future__ import annotations

import re
from importlib.resources import files

import yaml

from sim.config import parse_experiment
from sim.config.schema import Experiment, WorkloadSpec

TEXT = (files("sim") / "data" / "experiments" / "template.yaml").read_text()


def test_every_key_of_the_format_is_in_the_template() -> None:
    words = set(re.findall(r"[a-z_]+", TEXT))
    assert set(Experiment.model_fields) - {"resolved"} <= words
    rare = {"format", "time_unit", "columns", "on_zero", "subsample", "shuffle", "spread_s", "spearman"}
    rare |= {"on_s", "off_s", "minute_profile"}  # `simctl trace` and the errors of `workload:` tell of these
    assert set(WorkloadSpec.model_fields) - rare <= words


def test_commented_keys_are_valid_when_uncommented() -> None:
    data = yaml.safe_load(TEXT)
    for line in TEXT.splitlines():
        found = re.match(r"# ([a-z_]+: .+)", line)
        if not found:
            continue
        key, value = next(iter(yaml.safe_load(found[1]).items()))
        if key in Experiment.model_fields and key != "workload":
            parse_experiment({**data, key: value})
