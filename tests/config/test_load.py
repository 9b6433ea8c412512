"""Faults in an experiment file: one sentence with the file, the line, the key and what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.config import load_experiment, parse_experiment
from sim.config.resolve import content_hash, plain
from sim.errors import SimctlError

BASE = """workload: {trace: a.csv}
model: llama-3.1-8b
gpu: h200-sxm
policies: [vllm, {name: sarathi, token_budget: 512}]
"""
GENERATED = BASE.replace(
    "trace: a.csv", "arrivals: poisson, num_prompts: 3, prompt_tokens: 5, output_tokens: 5"
)


def load(tmp_path: Path, text: str, *sets: str) -> Any:
    path = tmp_path / "e.yaml"
    path.write_text(text)
    return load_experiment(path, [("--set", s) for s in sets])[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            BASE + "memory: {blok_size: 3}",
            "line 5: unknown key `memory.blok_size`. Did you mean 'block_size'?",
        ),
        (
            BASE + "memory:\n  block_size: '16'",
            "line 6: `memory.block_size` is the text '16', but must be a whole",
        ),
        (
            BASE + "sweep: {request_rate: [1, -2]}",
            "line 5: `sweep.request_rate[1]` is -2, but must be greater",
        ),
        (BASE + "sweep: {request_rate: .nan}", "line 5: `sweep.request_rate` is not a number (NaN)"),
        (BASE + "sweep: {request_rate: [1, 1]}", "lists a rate twice"),
        (
            BASE + "estimator: {noisy: {sigma: 0.1, bias: 50}}",
            "line 5: `estimator.noisy.bias` is 50, but must be less than or equal to 5",
        ),
        (
            BASE + "estimator: {noisy: {sigma: 100}}",
            "line 5: `estimator.noisy.sigma` is 100, but must be less than or equal to 5",
        ),
        (BASE + "slo: {classes: {}}", "line 5: slo: `classes` names no class"),
        (
            BASE.replace("trace: a.csv", "trace: a.csv, slo_class: {chat: -0.5, batch: 1.5}"),
            "line 1: `workload.slo_class.chat` is -0.5, but must be greater than or equal to 0",
        ),
        (
            BASE.replace("trace: a.csv", "trace: a.csv, slo_class: [chat]"),
            "line 1: `workload.slo_class` is a list, but must be text",
        ),
        (BASE + "model: other", "line 5: `model` is there twice, first on line 2"),
        (BASE + "a: [1,\n", "line 6: not valid YAML"),
        (BASE + "\tb: 1", "line 5: not valid YAML"),
        ("[1]", "is a mapping of keys"),
        ("", "the file is empty"),
        (BASE.replace("model:", "modl:"), "line 2: unknown key `modl`. Did you mean 'model'?"),
        (BASE.replace("gpu: h200-sxm\n", ""), "`gpu` is missing"),
        (
            BASE.replace("trace: a.csv", "trce: a.csv"),
            "line 1: unknown key `workload.trce`. Did you mean 'trace'?",
        ),
        (BASE.replace("trace: a.csv", "trace: a.csv, num_prompts: 3"), "max_requests limits a trace"),
        (
            BASE.replace("trace: a.csv", "arrivals: poisson"),
            "line 1: workload: generated requests need a rate",
        ),
        (GENERATED, "line 1: workload: generated requests need a rate: add `sweep"),
        (GENERATED.replace("poisson", "poison"), "Did you mean 'poisson'?"),
        (
            GENERATED.replace("prompt_tokens: 5", "prompt_tokens: {lognormal: {medan: 3}}"),
            "`workload.prompt_tokens",
        ),
        (GENERATED.replace("prompt_tokens: 5", "prompt_tokens: {uniform: [9, 3]}"), "[smallest, largest]"),
        (BASE.replace("[vllm,", "[vllm, vllm,"), "line 4: policies: two entries are called 'vllm'"),
        (
            BASE + "slo: {classes: {chat: {ttft_mss: 3}}}",
            "`slo.classes.chat.ttft_mss`. Did you mean 'ttft_ms'?",
        ),
        (BASE.replace("a.csv", "a.csv, burstiness: 2"), "line 1: workload.burstiness: has no effect"),
        (GENERATED.replace("poisson", "closed-loop"), "line 1: workload.max_concurrency is missing"),
        (BASE + "measure: {warmup_s: 10, horizon_s: 5}", "`horizon_s` must lie after `warmup_s`"),
    ],
)
def test_fault_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(SimctlError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert sentence in message
    assert message.startswith(str(tmp_path / "e.yaml"))
    assert "\n" not in message


@pytest.mark.parametrize(
    "assignment",
    [
        "parallel.pp=2",
        "parallel.ep=2",
        "parallel.dp=2",
        "memory.prefix_caching=true",
    ],
)
def test_feature_that_does_not_exist_is_refused_not_ignored(tmp_path: Path, assignment: str) -> None:
    with pytest.raises(SimctlError, match="this version does not simulate") as caught:
        load(tmp_path, BASE, assignment)
    assert assignment in str(caught.value)  # names the option that asked for it


def test_set_is_yaml_typed_and_reaches_lists_and_bare_policies(tmp_path: Path) -> None:
    experiment = load(
        tmp_path,
        BASE,
        "sweep.request_rate=[1, 2e1]",
        "policies.0.max_num_seqs=8",
        "slo.ttft_ms=250",
        "seed=7",
    )
    assert experiment.rates() == [1.0, 20.0]
    assert experiment.policies[0].plain() == {"name": "vllm", "max_num_seqs": 8}
    assert (experiment.slo.ttft_ms, experiment.seed, experiment.name) == (250, 7, "e")


@pytest.mark.parametrize(
    ("assignment", "match"),
    [
        ("seed", "write key.sub=value"),
        ("seed=[", "is not a YAML value"),
        ("policies.9.x=1", "is a list of 2"),
        ("seed=-1", "--set seed=-1: `seed` is -1"),
        ("seed=true", "must be a whole number"),
    ],
)
def test_bad_override_names_the_option(tmp_path: Path, assignment: str, match: str) -> None:
    with pytest.raises(SimctlError, match=match):
        load(tmp_path, BASE, assignment)


def test_equal_policies_with_labels_are_fine(tmp_path: Path) -> None:
    text = BASE.replace("[vllm,", "[vllm, {name: vllm, label: small, max_num_seqs: 8},")
    assert [entry.title for entry in load(tmp_path, text).policies] == ["vllm", "small", "sarathi"]


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_unreadable_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(SimctlError, match=r"no such experiment|is a folder"):
        load_experiment(tmp_path / name)


def test_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(SimctlError, match="UTF-8"):
        load_experiment(tmp_path / "x.yaml")


def test_plain_form_loads_back_to_itself_and_hash_ignores_key_order() -> None:
    data = {"workload": {"trace": "a"}, "model": "m", "gpu": "g", "policies": ["vllm", {"name": "a", "k": 1}]}
    first = plain(parse_experiment(data)[0])
    assert plain(parse_experiment(dict(first))[0]) == first
    assert first["policies"] == ["vllm", {"name": "a", "k": 1}]
    assert content_hash(first) == content_hash(dict(reversed(first.items())))
    assert content_hash(first) != content_hash({**first, "seed": 1})
