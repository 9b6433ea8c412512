"""Names, presets and knobs: bad ones are named with what would be right, and each one does what it says."""

from __future__ import annotations

from typing import Any

import pytest
from knob_frame import DOWN, UP, Moves, check_move

from sim.errors import SimctlError
from sim.policies import PRESETS, list_policies, make_policy

BASE: dict[str, dict[str, Any]] = {
    "static-batch": {"max_batch_size": 8, "max_prefill_tokens": 160},
    "vllm-v0": {"max_num_batched_tokens": 160, "max_num_seqs": 8},
    "vllm": {"max_num_batched_tokens": 64, "max_num_seqs": 8},
    "sarathi": {"token_budget": 64, "max_num_seqs": 8},
    "sglang": {
        "chunked_prefill_size": 64,
        "max_running_requests": 8,
        "new_token_ratio_decay_steps": 40,
        "clip_max_new_tokens": 60,
    },
}
BOLD = {"clip_max_new_tokens": 1}  # SGLang admits until it must retract
MOVES = [
    Moves("static-batch", "max_batch_size", 2, "largest_batch", DOWN),
    Moves("static-batch", "max_prefill_tokens", 60, "tokens_of_several", DOWN),
    Moves("static-batch", "continuous", True, "mean_ttft", DOWN),
    Moves("vllm-v0", "max_num_batched_tokens", 320, "largest_prefill", UP),
    Moves("vllm-v0", "max_num_seqs", 4, "largest_batch", DOWN),
    Moves("vllm-v0", "watermark", 0.2, "preemptions", DOWN),
    Moves("vllm-v0", "preemption_mode", "swap", "prefilled", DOWN),
    Moves("vllm-v0", "swap_space_gib", 0.01, "prefilled", UP, {"preemption_mode": "swap"}),
    Moves("vllm-v0", "swap_gb_s", 1, "makespan", UP, {"preemption_mode": "swap"}),
    Moves("vllm", "max_num_batched_tokens", 32, "largest_step", DOWN),
    Moves("vllm", "max_num_seqs", 4, "largest_batch", DOWN),
    Moves("vllm", "long_prefill_token_threshold", 16, "longest_chunk", DOWN),
    Moves("vllm", "watermark", 0.2, "preemptions", DOWN),
    Moves("vllm", "whole_prompt_gate", True, "preemptions", DOWN),
    Moves("vllm", "scheduling_policy", "priority", "urgent_ttft", DOWN),
    Moves("sarathi", "token_budget", 32, "largest_step", DOWN),
    Moves("sarathi", "max_num_seqs", 4, "largest_batch", DOWN),
    Moves("sarathi", "watermark", 0.2, "preemptions", DOWN),
    Moves("sarathi", "one_prefill", True, "most_chunks", DOWN),
    Moves("sglang", "chunked_prefill_size", 32, "largest_prefill", DOWN),
    Moves("sglang", "mixed_chunk", True, "mixed_steps", UP),
    Moves("sglang", "max_prefill_tokens", 16, "tokens_of_several", DOWN),
    Moves("sglang", "max_running_requests", 4, "largest_batch", DOWN),
    Moves("sglang", "schedule_conservativeness", 0.25, "preemptions", UP),
    Moves("sglang", "init_new_token_ratio", 0.1, "preemptions", UP),
    Moves("sglang", "min_new_token_ratio_factor", 0.9, "preemptions", DOWN),
    Moves("sglang", "new_token_ratio_decay_steps", 4, "preemptions", UP),
    Moves("sglang", "retract_decode_steps", 1, "kv_tokens_held", UP, BOLD),
    Moves("sglang", "clip_max_new_tokens", 1, "preemptions", UP),
    Moves("sglang", "page_size", 16, "mean_decode_batch", DOWN),
]


@pytest.mark.parametrize("row", MOVES, ids=str)
def test_every_knob_moves_what_it_is_about(row: Moves) -> None:
    check_move(row, BASE[row.policy])


def test_the_list_of_knobs_is_complete() -> None:
    listed = {(info.name, knob) for info in list_policies() if not info.base for knob in info.knobs}
    mine = {(row.policy, row.knob) for row in MOVES}
    assert mine == {(name, knob) for name, knob in listed if name in BASE}


def test_names_are_checked() -> None:
    with pytest.raises(SimctlError, match=r"unknown policy 'sarathy'.*sarathi"):
        make_policy("sarathy")
    with pytest.raises(SimctlError, match="needs a `name`"):
        make_policy({"token_budget": 3})
    with pytest.raises(SimctlError, match=r"policy 'sarathi' has no knob 'token_bugdet'.*token_budget"):
        make_policy({"name": "sarathi", "token_bugdet": 3})


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"name": "sarathi", "token_budget": 0}, "knob 'token_budget' is 0; the least is 1"),
        (
            {"name": "sarathi", "token_budget": "many"},
            "knob 'token_budget' is 'many'; it takes a value like 512",
        ),
        ({"name": "sarathi", "token_budget": 2.5}, "knob 'token_budget' is 2.5; it takes a value like 512"),
        ({"name": "sarathi", "token_budget": True}, "knob 'token_budget' is True; it takes a value like 512"),
        ({"name": "sarathi", "one_prefill": 1}, "knob 'one_prefill' is 1; it takes a value like False"),
        ({"name": "vllm", "max_num_seqs": "256"}, "knob 'max_num_seqs' is '256'; it takes a whole number"),
        ({"name": "vllm", "max_num_seqs": 0}, "knob 'max_num_seqs' is 0; the least is 1"),
        ({"name": "vllm", "max_num_seqs": 1.5}, "knob 'max_num_seqs' is 1.5"),
        (
            {"name": "vllm", "scheduling_policy": "prio"},
            "knob 'scheduling_policy' is 'prio'; it takes fcfs or priority. Did you mean 'priority'",
        ),
        (
            {"name": "sglang", "init_new_token_ratio": -0.1},
            "knob 'init_new_token_ratio' is -0.1; the least is 0",
        ),
    ],
)
def test_values_are_checked(entry: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SimctlError, match=sentence):
        make_policy(entry)


def test_presets_are_their_policies_with_other_defaults() -> None:
    for preset, (name, knobs) in PRESETS.items():
        policy = make_policy(preset)
        assert (policy.name, policy.label) == (name, preset)
        for knob, value in knobs.items():
            assert policy[knob] == value
        first, value = next(iter(knobs.items()))
        others = policy.knobs[first].choices or ([not value] if isinstance(value, bool) else [1])
        other = next(option for option in others if option != value)
        assert make_policy({"name": preset, first: other})[first] == other
    assert make_policy({"name": "sarathi-512", "label": "mine"}).label == "mine"


def test_vllms_defaults_follow_the_gpu() -> None:
    from sim.cost import load_cost
    from sim.engine.deploying import largest_step
    from sim.engine.deployment import Deployment

    assert load_cost("llama-3.1-8b", "h200-sxm").gpu.name == "h200-sxm"
    sizes = {
        gpu: largest_step(make_policy("vllm"), Deployment(1000, 16, 4096, gpu))
        for gpu in ("a100-80gb-sxm", "h100-sxm", "h200-sxm", "l40s")
    }
    assert sizes["h100-sxm"] == sizes["h200-sxm"] == (8192, 1024)
    assert sizes["a100-80gb-sxm"] == sizes["l40s"] == (2048, 256)


def test_listings_carry_sources() -> None:
    for info in list_policies():
        assert info.source
        assert info.mirrors
        for knob in info.knobs.values():
            assert knob.doc
            assert knob.source


class Plain:
    """A plug-in."""

    def __init__(self, size: int = 3) -> None:
        self.size = size

    def plan(self, view: Any) -> Any:
        raise AssertionError


class WithoutPlan:
    """Not a policy."""


def test_a_class_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("plugin_under_test")
    module.Plain, module.WithoutPlan = Plain, WithoutPlan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plugin_under_test", module)
    made = make_policy({"name": "plugin_under_test:Plain", "size": 5})
    assert (made.size, made.label) == (5, "Plain")
    with pytest.raises(SimctlError, match="does not take these settings"):
        make_policy({"name": "plugin_under_test:Plain", "sise": 5})
    with pytest.raises(SimctlError, match="has no method plan"):
        make_policy("plugin_under_test:WithoutPlan")
    with pytest.raises(SimctlError, match="cannot be loaded"):
        make_policy("plugin_under_test:Missing")
    with pytest.raises(SimctlError, match="cannot be loaded"):
        make_policy("no_such_module_here:Policy")


class Point:
    """An installed entry point."""

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value = name, value


def test_a_plug_in_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("installed_plug_in")
    module.Plain = Plain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "installed_plug_in", module)
    points = [
        Point("mine", "installed_plug_in:Plain"),
        Point("broken", "installed_plug_in:Gone"),
        Point("vllm", "installed_plug_in:Plain"),
    ]
    monkeypatch.setattr("sim.policies.entry_points", lambda group: points)
    made = make_policy({"name": "mine", "size": 4, "label": "four"})
    assert (made.size, made.label) == (4, "four")
    # a requested one that breaks is an error, and none takes the place of a built-in
    with pytest.raises(SimctlError, match="policy 'broken' cannot be loaded"):
        make_policy("broken")
    assert make_policy("vllm").mirrors.startswith("vLLM v1")
    with pytest.raises(SimctlError, match=r"unknown policy 'mime'. Did you mean 'mine'"):
        make_policy("mime")
