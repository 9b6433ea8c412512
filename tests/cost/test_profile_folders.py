"""Profile folders: the schema, what is refused, and that their curves take the place of the spec profile's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from sim.cost import load_cost
from sim.cost.gpu import load_gpu
from sim.cost.profile import folder_hash, load_folder, load_profile, spec_profile
from sim.cost.shapes import Gemm
from sim.errors import SimctlError

H200 = load_gpu("h200-sxm")
GOOD = {
    "schema_version": 1,
    "name": "mine",
    "gpu": "h200-sxm",
    "about": {"driver": "580.1"},
    "curves": [
        {"operator": "gemm/qkv", "form": "roofline", "file": "qkv.yaml", "label": "fitted from own table"}
    ],
}


def folder(tmp_path: Path, content=GOOD, curve="efficiency: 0.4\n") -> Path:
    made = tmp_path / "mine"
    made.mkdir(exist_ok=True)
    (made / "profile.yaml").write_text(yaml.safe_dump(content))
    if curve is not None:
        (made / "qkv.yaml").write_text(curve)
    return made


def test_a_folders_curve_replaces_one_operator_and_carries_its_label(tmp_path):
    cost = load_cost("llama-3.1-8b", "h200-sxm", profile=str(folder(tmp_path)))
    spec = load_cost("llama-3.1-8b", "h200-sxm", profile="spec")
    shape = Gemm(np.array([4096]), 6144, 4096, 2)
    ours, theirs = (c.profile.curve("gemm/qkv").timing(shape, 132).seconds[0] for c in (cost, spec))
    assert ours > 1.8 * theirs
    assert cost.provenance()["gemm/qkv"] == "fitted from own table"
    assert cost.provenance()["gemm/o"] == spec.provenance()["gemm/o"]
    assert cost.profile.name == "mine"
    small = {"max_tokens": 4096, "max_seqs": 4, "max_context": 256}
    assert cost.compile(**small).dense_eager_s[4096] > spec.compile(**small).dense_eager_s[4096]


def test_the_hash_follows_the_content(tmp_path):
    path = folder(tmp_path)
    first = load_folder(path, H200).content_hash
    assert first == load_folder(path, H200).content_hash != spec_profile(H200).content_hash
    before = folder_hash(path)
    folder(tmp_path, curve="efficiency: 0.5\n")
    assert load_folder(path, H200).content_hash != first
    assert folder_hash(path) != before


def test_host_and_energy_terms_can_be_replaced_with_a_label(tmp_path):
    path = folder(tmp_path, {**GOOD, "host": {"gap_graph_s": 0.002, "label": "measured"}})
    profile = load_folder(path, H200)
    assert (profile.host.gap_graph_s, profile.host.label) == (0.002, "measured")
    assert profile.host.gap_eager_s == spec_profile(H200).host.gap_eager_s
    with pytest.raises(SimctlError, match="host: key 'label' is missing"):
        load_folder(folder(tmp_path, {**GOOD, "host": {"gap_graph_s": 0.002}}), H200)
    with pytest.raises(SimctlError, match="Did you mean 'idle_w'"):
        load_folder(folder(tmp_path, {**GOOD, "energy": {"idle_W": 9, "label": "measured"}}), H200)


def test_a_profile_of_another_gpu_is_refused(tmp_path):
    with pytest.raises(SimctlError, match="is for h200-sxm, not for a100-80gb-sxm"):
        load_cost("llama-3.1-8b", "a100-80gb-sxm", profile=str(folder(tmp_path)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version is 2"),
        ({"curve": []}, "unknown key 'curve'. Did you mean 'curves'"),
        ({"gpu": None}, "key 'gpu' is missing"),
        ({"curves": [{**GOOD["curves"][0], "operator": "gem"}]}, "Did you mean 'gemm'"),
        ({"curves": [{**GOOD["curves"][0], "form": "spline"}]}, "unknown form 'spline'"),
        ({"curves": [{**GOOD["curves"][0], "label": "trust me"}]}, "label 'trust me'"),
        ({"curves": [{**GOOD["curves"][0], "extrapolation": "hope"}]}, "extrapolation 'hope'"),
        ({"curves": [{**GOOD["curves"][0], "file": "gone.yaml"}]}, "'gone.yaml' does not exist"),
        ({"curves": ["gemm"]}, r"curves\[0\] must be a mapping"),
    ],
)
def test_mistakes_in_a_folder_are_named_with_their_place(tmp_path, change, message):
    with pytest.raises(SimctlError, match=message):
        load_folder(folder(tmp_path, {**GOOD, **change}), H200)


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        ("efficiency: 1.5\n", "qkv.yaml: 'efficiency' is a share"),
        ("eficiency: 0.5\n", "Did you mean 'efficiency'"),
        ("launch_s: -1\n", "'launch_s' must not be negative"),
        ("idle_launch_s: 1\n", "'idle_launch_s' must lie within"),
        ("efficiency: fast\n", "could not convert"),
        ("- 1\n", "mapping of the roofline's parameters"),
    ],
)
def test_mistakes_in_a_curve_file_are_named(tmp_path, curve, message):
    with pytest.raises(SimctlError, match=message):
        load_folder(folder(tmp_path, curve=curve), H200)


def test_an_unknown_profile_names_the_choices():
    with pytest.raises(SimctlError, match=r"Unknown profile 'sepc'\. Did you mean 'spec'"):
        load_profile("sepc", H200)


def test_spec_says_of_every_operator_that_it_is_an_extrapolation():
    cost = load_cost("qwen3-8b", "l40s", profile="spec")
    labels = cost.provenance()
    assert {"gemm/gate_up", "norm/qk", "prefill_attention", "decode_attention", "host", "energy"} <= set(
        labels
    )
    assert all(label.startswith("extrapolated from ") for label in labels.values())


def test_spec_profiles_of_two_gpus_differ_in_hash():
    hashes = {spec_profile(load_gpu(name)).content_hash for name in ("h100-sxm", "h800-sxm", "h200-sxm")}
    assert len(hashes) == 3
