"""Each format by a few rows with its known quirks, and each way in which a file can be bad."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from sim.errors import SimctlError
from sim.workload import formats
from sim.workload.formats.base import TraceFormat
from sim.workload.trace import Trace, load_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes, name: str = "t.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def rows(trace: Trace) -> list[tuple[float, int, int]]:
    assert trace.arrival_s is not None
    columns = (trace.arrival_s, trace.prompt_tokens, trace.output_tokens)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def said(trace: Trace, text: str) -> bool:
    return any(text in note for note in trace.notes)


def jsonl(*lines: dict) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_azure_2023_with_crlf_seven_digits_and_no_last_newline(write):
    text = f"{AZURE}\r\n2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319600,3180,8"
    trace = load_trace(write(text))
    assert rows(trace) == [(0.0, 4808, 10), (0.052, 3180, 8)]
    assert trace.format == "azure"
    assert said(trace, "CRLF")
    assert said(trace, "no newline after the last row")
    assert said(trace, "taken as UTC; origin: the first request at 2023-11-16 18:17:03.97996")
    assert said(trace, "2 requests over 0.052 s, mean rate 19.23 requests/s")


def test_azure_2024_mixes_stamps_with_and_without_a_fraction(write):
    text = f"{AZURE}\n2024-05-10 00:00:00.500000+00:00,5,6\n2024-05-10 00:00:01+00:00,7,8\n"
    assert rows(load_trace(write(text))) == [(0.0, 5, 6), (0.5, 7, 8)]


def test_offsets_are_honoured_and_rows_without_one_are_said_to_be_utc(write):
    text = f"{AZURE}\n2024-05-10 00:00:00Z,5,6\n2024-05-10 02:00:01+02:00,7,8\n2024-05-10 00:00:02,9,9\n"
    trace = load_trace(write(text))
    assert rows(trace) == [(0.0, 5, 6), (1.0, 7, 8), (2.0, 9, 9)]
    assert said(trace, "2 rows with offset, 1 without, which are taken as UTC")


def test_more_digits_than_nanoseconds_are_cut(write):
    text = f"{AZURE}\n2024-05-10T00:00:00.000000000999,5,6\n2024-05-10T00:00:00.250000000123,7,8\n"
    assert rows(load_trace(write(text))) == [(0.0, 5, 6), (0.25, 7, 8)]


def test_vidur_with_arrivals(write):
    trace = load_trace(
        write("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n")
    )
    assert rows(trace) == [(0.0, 374, 44), (4.314579, 396, 109)]
    assert trace.format == "vidur"


def test_vidur_lengths_only_with_integers_written_as_floats(write):
    text = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n7564.0,192.0,7756.0,39.395833333333336\n"
    trace = load_trace(write(text))
    assert trace.arrival_s is None
    assert (trace.prompt_tokens[0], trace.output_tokens[0]) == (7564, 192)
    assert said(trace, "lengths only")
    assert said(trace, "columns not used: num_total_tokens, pd_ratio")


def test_mooncake_in_milliseconds_with_prefix_hashes(write):
    text = jsonl(
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 6000, "input_length": 500, "output_length": 1, "hash_ids": [0]},
    )
    trace = load_trace(write(text, "m.jsonl"))
    assert rows(trace) == [(0.0, 600, 5), (3.0, 500, 1)]
    assert trace.prefix_hashes == ((0, 1), (0,))
    assert said(
        trace, "time unit ms (the usual unit of this format), relative; origin: the first request at 3000 ms"
    )
    assert said(trace, "512-token blocks")


def test_the_unit_can_be_overruled(write):
    text = jsonl(*({"timestamp": t, "input_length": 9, "output_length": 9} for t in (0, 2)))
    assert rows(load_trace(write(text), time_unit="s"))[1][0] == 2.0


def test_mooncake_names_with_nanoseconds_as_text(write):
    stamps = ("1718000000000000123", "1718000001500000123")
    text = jsonl(*({"timestamp": t, "input_length": 9, "output_length": 9} for t in stamps))
    trace = load_trace(write(text))
    assert rows(trace)[1][0] == 1.5
    assert said(trace, "time unit ns (guessed from the size of the numbers), since the epoch")


def test_bailian_is_told_from_mooncake_and_counts_seconds(write):
    base = {"input_length": 30, "output_length": 3, "parent_chat_id": -1, "type": "text", "turn": 1}
    text = jsonl(
        {**base, "chat_id": 7, "timestamp": 0.0, "hash_ids": [1, 2]},
        {**base, "chat_id": 8, "timestamp": 0.25, "hash_ids": [1, 3]},
    )
    trace = load_trace(write(text))
    assert trace.format == "bailian"
    assert rows(trace)[1][0] == 0.25
    assert trace.session_id.tolist() == [7, 8]


def test_llmservingsim_nanoseconds_by_name(write):
    text = jsonl(
        {"input_toks": 5, "output_toks": 6, "arrival_time_ns": 100_000_000, "input_tok_ids": [1, 2]},
        {"input_toks": 7, "output_toks": 8, "arrival_time_ns": 350_000_000, "input_tok_ids": [3]},
    )
    assert rows(load_trace(write(text))) == [(0.0, 5, 6), (0.25, 7, 8)]


def test_llmservingsim_sessions_are_refused(write):
    text = jsonl(
        {"session_id": "a", "arrival_time_ns": 0, "sub_requests": [{"input_toks": 1, "output_toks": 1}]}
    )
    with pytest.raises(SimctlError, match=r"'sub_requests'.*cannot express"):
        load_trace(write(text))


BURST_1 = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
BURST_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,s1,1.5,ChatGPT,472,18,490,Conversation log
45,,0.1,ChatGPT,1087,0,1087,API log
118,,2.5,GPT-4,417,276,693,API log
"""


def test_burstgpt_versions_agree_and_failures_are_dropped(write):
    first, third = load_trace(write(BURST_1)), load_trace(write(BURST_3, "v3.csv"))
    assert rows(first) == rows(third) == [(0.0, 472, 18), (113.0, 417, 276)]
    assert said(first, "1 of 3 rows with zero tokens (failed requests) dropped")
    assert third.session_id.tolist() == [0, -1]


def test_zero_rows_can_be_clamped(write):
    assert load_trace(write(BURST_1), on_zero="clamp").output_tokens.tolist() == [18, 1, 276]


PLAIN = """prompt_tokens,arrival_s,output_tokens,slo_class,priority,max_new_tokens,session_id
10,2.5,20,chat,1,40,4
11,1.5,21,batch,0,21,9
"""


def test_plain_columns_in_any_order_are_sorted_by_arrival(write):
    trace = load_trace(write(PLAIN))
    assert rows(trace) == [(0.0, 11, 21), (1.0, 10, 20)]
    assert [trace.slo_classes[code] for code in trace.slo_class] == ["batch", "chat"]
    assert trace.priority.tolist() == [0, 1]
    assert trace.max_new_tokens.tolist() == [21, 40]
    assert trace.session_id.tolist() == [9, 4]
    assert said(trace, "1 rows out of order; sorted by arrival")
    assert said(trace, "columns in another order than usual")


def test_gzip_and_byte_order_mark(write):
    plain = write("\ufeffarrival_s,prompt_tokens,output_tokens\n0,1,2\n1,3,4\n")
    packed = write(gzip.compress(plain.read_bytes()), "t.csv.gz")
    assert rows(load_trace(packed)) == rows(load_trace(plain)) == [(0.0, 1, 2), (1.0, 3, 4)]
    assert said(load_trace(packed), "byte-order mark")
    assert load_trace(packed).name == "t"


def test_names_of_columns_can_be_given(write):
    path = write("t0,isl,osl\n0,1,2\n500,3,4\n")
    names = (("arrival_s", "t0"), ("prompt_tokens", "isl"), ("output_tokens", "osl"))
    assert rows(load_trace(path, time_unit="ms", rename=names)) == [(0.0, 1, 2), (0.5, 3, 4)]


def test_columns_that_come_late_in_a_json_file_are_read(write):
    text = jsonl(
        {"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 2},
        {"arrival_s": 1.5, "prompt_tokens": 3, "output_tokens": 4, "session_id": 5},
    )
    assert load_trace(write(text)).session_id.tolist() == [-1, 5]


HEAD = "arrival_s,prompt_tokens,output_tokens\n"
BAD = {
    "negative": (HEAD + "0,5,5\n1,-5,5\n", r"line 3 \('1,-5,5'\): column 'prompt_tokens' is negative"),
    "nan": (HEAD + "0,5,5\n\n1,5,nan\n", r"line 4 .*column 'output_tokens' is not a finite number"),
    "text": (HEAD + "0,5,5\n1,many,5\n", r"line 3 .*column 'prompt_tokens' is missing or not a number"),
    "fraction": (HEAD + "0,5,5.5\n", r"line 2 .*column 'output_tokens' is not a whole number"),
    "infinite": (HEAD + "0,5,5\ninf,5,5\n", r"line 3 .*column 'arrival_s' is not a finite number"),
    "too long": (HEAD + "0,5,5\n1,3000000000,5\n", r"line 3 .*'prompt_tokens' is above 2,147,483,647"),
    "no stamp": (HEAD + "0,5,5\n,5,5\n", r"line 3 .*column 'arrival_s' is missing"),
    "no date": (f"{AZURE}\n2024-05-10 00:00:00,5,6\n,7,8\n", r"line 3 .*'TIMESTAMP' is missing"),
    "bad date": (
        f"{AZURE}\n2024-05-10 00:00:00,5,6\n2024-15-10 00:00:00,7,8\n",
        r"line 3 .*neither a date nor a number",
    ),
    "word for a date": (
        f"{AZURE}\n2024-05-10 00:00:00,5,6\nyesterday,7,8\n",
        r"line 3 .*neither a date nor a number",
    ),
    "negative stamp": (HEAD + "-1,5,5\n1,5,5\n", r"line 2 .*column 'arrival_s' is negative"),
    "ragged": (HEAD + "0,5,5\n1,5\n", r"line 3 \('1,5'\) has 2 fields, the header 3"),
    "only a header": (HEAD, "has a header but no rows"),
    "empty": ("", "is empty"),
    "unknown columns": ("a,b\n1,2\n", r"has the columns a, b, which no format has .*azure: TIMESTAMP"),
    "twice": (
        "arrival_s,prompt_tokens,prompt_tokens,output_tokens\n0,1,1,1\n",
        "column 'prompt_tokens' twice",
    ),
    "json array": ("[1]", "one JSON array"),
    "bad json": (
        '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n{"arr\n',
        "line 2 .*not valid JSON",
    ),
    "lfs": ("version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "all zero": (HEAD + "0,0,5\n1,5,0\n", "every row has zero"),
    "damaged gzip": (b"\x1f\x8b\x08\x00rubbish", "damaged gzip"),
    "archive": (b"PK\x03\x04rubbish", "archives are not"),
    "damaged parquet": (b"PAR1rubbish", "damaged Parquet"),
    "latin 1": (
        HEAD.encode() + b"0,5,\xe9\n",
        r"line 2 .*'output_tokens' is missing or not a number|not UTF-8",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_with_the_place(write, case):
    text, message = BAD[case]
    with pytest.raises(SimctlError, match=message) as caught:
        load_trace(write(text))
    assert "\n" not in str(caught.value)


def test_missing_file_and_wrong_overrides(write, tmp_path):
    path = write(HEAD + "0,5,5\n1,5,5\n")
    with pytest.raises(SimctlError, match="cannot read trace"):
        load_trace(tmp_path / "none.csv")
    with pytest.raises(SimctlError, match="time_unit 'sec' is not one of"):
        load_trace(path, time_unit="sec")
    with pytest.raises(SimctlError, match=r"no trace format 'azur'.*Did you mean 'azure'"):
        load_trace(path, format="azur")
    with pytest.raises(SimctlError, match="no column 'ContextTokens', which the format azure needs"):
        load_trace(path, format="azure")
    with pytest.raises(SimctlError, match="on_zero"):
        load_trace(path, on_zero="keep")
    with pytest.raises(SimctlError, match="has no column 'x'"):
        load_trace(path, rename=(("prompt_tokens", "x"),))
    with pytest.raises(SimctlError, match="time_unit: iso"):
        load_trace(path, time_unit="iso")


def test_a_guessed_unit_that_gives_an_absurd_rate_is_refused_and_a_stated_one_is_not(write):
    # 5 requests/s in seconds, under names that usually mean milliseconds
    text = jsonl(*({"timestamp": t * 0.2, "input_length": 9, "output_length": 9} for t in range(50)))
    path = write(text)
    with pytest.raises(SimctlError, match=r"5e\+03 requests/s and hardly meant; say the unit with time_unit"):
        load_trace(path)
    assert rows(load_trace(path, time_unit="ms"))[-1][0] == pytest.approx(0.0098)
    assert rows(load_trace(path, time_unit="s"))[-1][0] == pytest.approx(9.8)


def test_dates_do_not_take_a_unit(write):
    with pytest.raises(SimctlError, match="holds dates"):
        load_trace(write(f"{AZURE}\n2024-05-10 00:00:00,5,6\n"), time_unit="ms")


def test_an_unchanged_file_is_parsed_once_and_a_changed_one_again(write):
    path = write(HEAD + "0,5,5\n")
    assert load_trace(path) is load_trace(path)
    write(HEAD + "0,55,5\n")
    assert load_trace(path).prompt_tokens.tolist() == [55]


def test_cached_columns_cannot_be_written(write):
    with pytest.raises(ValueError, match="read-only"):
        load_trace(write(HEAD + "0,5,5\n")).prompt_tokens[0] = 1


OUTSIDE = TraceFormat(
    "mine", "mine", "here", prompt="p", output="o", arrival="t", time_unit="ms", unit_stated=True
)


def test_a_format_from_elsewhere_is_used_only_when_asked_for(write):
    path = write("t,p,o\n0,1,2\n1500,3,4\n")
    with pytest.raises(SimctlError, match="which no format has"):
        load_trace(path)
    assert rows(load_trace(path, format=f"{__name__}:OUTSIDE"))[1] == (1.5, 3, 4)
    with pytest.raises(SimctlError, match="cannot be loaded"):
        load_trace(path, format="no_such_module:X")
    with pytest.raises(SimctlError, match="not a TraceFormat"):
        load_trace(path, format="math:pi")


def test_no_two_built_in_formats_fit_the_same_columns():
    for form in formats.built_in().values():
        names = [form.prompt, form.output, *([form.arrival] if form.arrival else []), *form.needs]
        fits = [f.name for f in formats.built_in().values() if f.fits({formats.fold(n) for n in names})]
        assert fits == [form.name]


def test_integers_beyond_float_precision_keep_their_differences(write):
    text = jsonl(
        *({"timestamp": 1718000000000000000 + d, "input_length": 9, "output_length": 9} for d in (0, 1))
    )
    trace = load_trace(write(text), time_unit="ns")
    assert np.diff(trace.arrival_s)[0] == 1e-9
