"""What is written is read back unchanged, in all three containers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.errors import SimctlError
from sim.workload.build import build_workload
from sim.workload.export import ENDINGS, encode
from sim.workload.workload import Workload

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "max_new_tokens", "priority")

_request = st.tuples(
    st.floats(0, 1e6, allow_subnormal=False),
    st.integers(1, 2**31 - 1),
    st.integers(1, 2**31 - 1),
    st.integers(0, 100),
    st.sampled_from(["chat", "batch", "a,b", 'say "hi"']),
    st.integers(-32768, 32767),
    st.integers(-1, 2**62),
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3),
)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    rows = sorted(draw(st.lists(_request, min_size=1, max_size=12)))
    arrival, prompt, output, extra, classes, priority, session, prefix = zip(*rows, strict=True)
    stamps = np.array(arrival)
    names = tuple(dict.fromkeys(classes))
    rich = draw(st.booleans())
    asked = np.minimum(np.array(output, np.int64) + (np.array(extra) if rich else 0), 2**31 - 1)
    return Workload(
        name="w",
        arrival_s=stamps - stamps[0],
        prompt_tokens=np.array(prompt, np.int32),
        output_tokens=np.array(output, np.int32),
        max_new_tokens=asked.astype(np.int32),
        slo_class=np.array([names.index(c) for c in classes] if rich else [0] * len(rows), np.int16),
        priority=np.array(priority if rich else [0] * len(rows), np.int16),
        slo_classes=names if rich else ("default",),
        session_id=np.array(session, np.int64) if rich else None,
        prefix_hashes=tuple(map(tuple, prefix)) if rich else None,
    )


def read(path: Path) -> Workload:
    return build_workload(
        {"trace": path.name, "time_unit": "s"},
        seed=0,
        request_rate=None,
        context_limit=None,
        base_dirs=[path.parent],
    )


@pytest.mark.parametrize("ending", ENDINGS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(workload=workloads())
def test_writing_and_reading_is_the_identity(tmp_path, ending, workload):
    path = tmp_path / f"w{ending}"
    path.write_bytes(encode(workload, path))
    back = read(path)
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(back, column), getattr(workload, column), err_msg=column)
    assert [back.slo_classes[c] for c in back.slo_class] == [
        workload.slo_classes[c] for c in workload.slo_class
    ]
    assert back.prefix_hashes == workload.prefix_hashes
    if workload.session_id is None or np.all(workload.session_id == -1):
        assert back.session_id is None or np.all(back.session_id == -1)
    else:
        np.testing.assert_array_equal(back.session_id, workload.session_id)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_generated_workload_can_be_frozen_in_a_file(tmp_path, ending):
    spec = {
        "arrivals": "gamma",
        "burstiness": 0.5,
        "num_prompts": 300,
        "prompt_tokens": 9,
        "output_tokens": 9,
    }
    made = build_workload(spec, seed=4, request_rate=7.0, context_limit=None, base_dirs=[])
    path = tmp_path / f"w{ending}"
    path.write_bytes(encode(made, path))
    np.testing.assert_array_equal(read(path).arrival_s, made.arrival_s)


def test_plain_workloads_have_three_columns():
    spec = {"num_prompts": 2, "prompt_tokens": 9, "output_tokens": 8}
    made = build_workload(spec, seed=0, request_rate=1.0, context_limit=None, base_dirs=[])
    lines = encode(made, Path("w.csv")).decode().splitlines()
    assert lines[:2] == ["arrival_s,prompt_tokens,output_tokens", "0,9,8"]


def test_other_endings_are_refused():
    spec = {"num_prompts": 2, "prompt_tokens": 9, "output_tokens": 8}
    made = build_workload(spec, seed=0, request_rate=1.0, context_limit=None, base_dirs=[])
    with pytest.raises(
        SimctlError, match=r"ending must be one of \.csv, \.parquet, \.jsonl\. Did you mean '.jsonl'"
    ):
        encode(made, Path("w.json"))
