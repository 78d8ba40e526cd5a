"""Traces: servebook's own form and the public ones read alike, and a wrong line is one message with its number."""

from __future__ import annotations

import gzip
import json
import re

import numpy as np
import pytest
from servebook.common.errors import ServebookError
from servebook.config import request_plan, traces
from servebook.config.workloads import Workload


def read(tmp_path, text, name="t.csv", **how):
    path = tmp_path / name
    path.write_text(text)
    return traces.read(path, **how)


def columns(t):
    return [np.round(t.arrival_s, 3).tolist(), t.prompt_tokens.tolist(), t.output_tokens.tolist()]


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:00,7,1
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
MOONCAKE = "\n".join(
    json.dumps(r) for r in (
        {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3052, "input_length": 1200, "output_length": 26, "hash_ids": [0, 1, 3]},
        {"timestamp": 4000, "input_length": 600, "output_length": 3, "hash_ids": [9, 10]},
    )
)  # fmt: skip
SHAREGPT = json.dumps([
    {"id": "a", "conversations": [
        {"from": "human", "value": "one two three four five six seven eight nine ten"},
        {"from": "gpt", "value": "one two three four five six seven eight nine ten"},
        {"from": "human", "value": "and ten"}, {"from": "gpt", "value": "ten"}]},
    {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
])  # fmt: skip
CUSTOM = '{"prompt": "What is the capital of India?", "output_tokens": 10}\n{"prompt": "x", "output_tokens": 2}\n'
INFERENCE_PERF = """
load: {type: constant, stages: [{rate: 2, duration: 2}, {rate: 4, duration: 1}]}
data: {type: shared_prefix, shared_prefix: {num_groups: 2, num_prompts_per_group: 2, system_prompt_len: 100,
  question_len: 50, output_len: 20}}
"""


def test_public_forms_are_told_by_their_keys(tmp_path):
    assert columns(read(tmp_path, AZURE)) == [[0.0, 4.315, 13.319], [374, 396, 7], [44, 109, 1]]
    assert columns(read(tmp_path, AZURE_2024)) == [[0.0, 0.007], [2162, 2399], [5, 6]]
    burst = read(tmp_path, BURSTGPT)
    assert columns(burst) == [[0.0, 113.0], [472, 417], [18, 276]] and "1 requests without an answer" in burst.notes[0]
    cake = read(tmp_path, MOONCAKE, "t.jsonl")
    assert columns(cake) == [[0.0, 3.052, 4.0], [1030, 1200, 600], [5, 26, 3]]
    assert [sum(n for _, n in s) for s in cake.shared] == [1024, 1024, 0] and cake.shared[0] == cake.shared[1]
    talk = read(tmp_path, SHAREGPT, "t.json", tokens_per_word=2)
    assert columns(talk)[1:] == [[20, 44], [20, 2]] and talk.before.tolist() == [-1, 0] and not talk.times
    assert columns(read(tmp_path, CUSTOM, "t.jsonl", tokens_per_word=1))[1:] == [[6, 1], [10, 2]]
    perf = read(tmp_path, INFERENCE_PERF, "t.yaml")
    assert perf.arrival_s.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.25, 2.5, 2.75] and set(perf.prompt_tokens) == {150}
    assert perf.shared[0] == perf.shared[4] and perf.shared[0][0] == perf.shared[2][0] != perf.shared[1][0]


def test_timed_traces_of_vllm_are_named(tmp_path):
    t = read(tmp_path, MOONCAKE, "t.jsonl", form="timed")
    assert t.arrival_s.tolist() == [0.0, 3052.0, 4000.0] and sum(n for _, n in t.shared[0]) == 32


def test_sessions_and_prefixes_of_our_own_form(tmp_path):
    rows = [
        {"arrival_s": 0, "prompt_tokens": 300, "output_tokens": 10, "session": "a", "prefix": "s", "prefix_tokens": 64},
        {"arrival_s": 1, "prompt_tokens": 200, "output_tokens": 10, "prefix": "s", "prefix_tokens": 64},
        {"arrival_s": 2, "prompt_tokens": 400, "output_tokens": 10, "session": "a"},
        {"arrival_s": 3, "prompt_tokens": 100, "output_tokens": 10, "session": "a"},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    w = Workload(trace="t.jsonl").at(tmp_path)
    assert w.rows().before.tolist() == [-1, -1, 0, -1] and "1 prompts of a session" in w.rows().notes[0]
    p = request_plan.RequestPlan(w, 1)
    assert p[0].shared == p[1].shared == p[2].shared == ((0, 64),) and p[3].shared == ()
    assert (p[2].conversation, p[2].turn, p[2].adds) == (0, 1, 90) and p.follows(0) == 2 and not p.starts(2)
    assert len(Workload(trace="t.jsonl", requests=2).at(tmp_path).rows()) == 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "contains no request"),
        ("arrival_s,prompt_tokens,output_tokens\n", "contains no request"),
        ("arrival_s,prompt_tokens,output_tokens\n1,5,5\n0.5,5,5\n", "line 3.*arrives at 0.5 s, before the line above"),
        ("arrival_s,prompt_tokens,output_tokens\n1,5,5\n2,-5,5\n", "line 3.*prompt_tokens is '-5'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,5,5\n2,5,1.5\n", "line 3.*output_tokens is '1.5'"),
        ("arrival_s,prompt_tokens,output_tokens\nsoon,5,5\n", "line 2.*arrival_s is 'soon'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,5,5\n,5,5\n", "line 3.*missing on some lines"),
        ("when,how_long\n1,5\n", "not a known format"),
        ('{"prompt_tokens": 5, "output_tokens": 5}\n{"prompt_tokens": 5,\n', "line 2.*is not valid JSON"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5\n", "TIMESTAMP is 'yesterday'"),
        ("prompt_tokens,output_tokens,prefix,prefix_tokens\n5,5,a,9\n", "prefix_tokens is 9"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_told_with_its_number(tmp_path, text, what):
    with pytest.raises(ServebookError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert re.search(what.split(".*")[-1], message) and "\n" not in message
    if ".*" in what:
        assert what.split(".*")[0] in message


# --- files as other people's tools save them ---------------------------------------------------------------------

OWN = "arrival_s,prompt_tokens,output_tokens\n0,100,10\n0.5,200,20\n1.25,300,30\n"
ROWS = [(0.0, 100, 10), (0.5, 200, 20), (1.25, 300, 30)]
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def rows_of(folder, content, name="t.csv"):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    trace = traces.read(folder / name)
    columns = (trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
    return [(round(at, 3), prompt, output) for at, prompt, output in zip(*columns, strict=True)]


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"\xef\xbb\xbf" + OWN.encode(), "t.csv"),
        (OWN.encode("utf-16"), "t.csv"),
        (OWN.replace("\n", "\r\n"), "t.csv"),
        (OWN.replace("\n", "\r"), "t.csv"),
        (OWN.replace("\n", "\n\n"), "t.csv"),
        (OWN.replace(",", "\t"), "t.tsv"),
        (OWN.replace(",", ";"), "t.csv"),
        (OWN.replace(",", " , "), "t.csv"),
        ("# made by a tool\n" + OWN, "t.csv"),
        (OWN.replace("200", "200.0"), "t.csv"),
        (gzip.compress(OWN.encode(), mtime=0), "t.csv.gz"),
        (gzip.compress(OWN.encode(), mtime=0), "t.csv"),
        (
            '{"arrival_s": 0, "prompt_tokens": 100, "output_tokens": 10, "note": "a\u2028b"}\r\n'
            '{"arrival_s": 0.5, "prompt_tokens": 200, "output_tokens": 20}\r\n'
            '{"arrival_s": 1.25, "prompt_tokens": 300, "output_tokens": 30}',
            "t.jsonl",
        ),
        (
            f"{HEAD}2024-05-10 02:00:00+02:00,100,10\n2024-05-10T00:00:00.5Z,200,20\n"
            "2024-05-09 19:00:01.2500000-05:00,300,30\n",
            "t.csv",
        ),
        (f"{HEAD}2023-11-16 18:15:46,100,10\n2023-11-16 18:15:46.5,200,20\n2023-11-16 18:15:47.25,300,30\n", "t.csv"),
    ],
)  # fmt: skip
def test_the_same_trace_in_any_wrapping(tmp_path, content, name):
    assert rows_of(tmp_path, content, name) == ROWS


@pytest.mark.parametrize("key", ["conversations", "conversation", "messages"])
@pytest.mark.parametrize(
    "said",
    [
        [{"from": "human", "value": "a b c d"}, {"from": "gpt", "value": "e f"}],
        [{"from": "user", "value": "a b c d"}, {"from": "model", "value": "e f"}],
        [{"role": "user", "content": "a b c d"}, {"role": "assistant", "content": "e f"}],
        [{"role": "user", "content": [{"type": "text", "text": "a b c d"}]}, {"role": "Assistant", "text": "e f"}],
    ],
)
def test_conversations_whoever_wrote_them(tmp_path, key, said):
    assert rows_of(tmp_path, json.dumps([{key: []}, {key: said}]), "t.json") == [(0.0, 5, 3)]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("arrival_s,prompt_tokens,prompt_tokens,output_tokens\n0,1,9,1\n", "has the column prompt_tokens twice"),
        (OWN + "2,3,4,5\n", "line 5: has 4 cells, and the header 3"),
        (OWN + "2,3\n", "line 5: has no output_tokens"),
        (OWN.replace("arrival_s", "arrival_ms"), "line 2: has arrival_ms, and no arrival_s"),
        (OWN.replace("arrival_s", "Arrival_S"), "line 2: has Arrival_S, and no arrival_s"),
        (OWN.replace("0,100", "1700000000000,100"), "which is in milliseconds"),
        (OWN.replace("200", "9" * 30), "prompt_tokens is '9999"),
        (OWN.replace("200", "2_00"), "prompt_tokens is '2_00'"),
        (OWN.replace("200", "٣"), "prompt_tokens is '٣'"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "prompt_tokens": 900}\n', "the key 'prompt_tokens' is there twice"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\n'
         '{"timestamp": 0.5, "input_length": 5, "output_length": 5}\n', "line 2: timestamp is 0.5: of a second, or of"),
        ('{"arrival_s": 0, "prompt_tokens": true, "output_tokens": 1}\n', "prompt_tokens is True"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "session": [1]}\n', "session is [1]"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "prefix": {}, "prefix_tokens": 1}\n', "prefix is {}"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "hash_ids": [[1]]}\n', "hash_ids is [[1]]"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "hash_ids": [1], "hash_tokens": "x"}\n', "hash_tokens is 'x'"),
        ('{"prompt": "a b"}\n', "line 1: has no output_tokens"),
        ("[" * 100_000, "nested too deep"),
        (gzip.compress(OWN.encode(), mtime=0)[:-9], "its gzip is broken"),
        ('a,"b\n' + "x" * 200_000, "is not a table"),
    ],
)  # fmt: skip
def test_what_would_be_taken_for_something_else_is_refused(tmp_path, content, what):
    with pytest.raises(ServebookError) as caught:
        rows_of(tmp_path, content)
    assert what in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("load", "what"),
    [
        ("{stages: 7}", "is not a list of rate and duration"),
        ("{stages: [{rate: 1.0e+9, duration: 1.0e+9}]}", "asks for 1e+18 requests"),
    ],
)
def test_a_configuration_that_asks_for_no_load(tmp_path, load, what):
    shared = "{num_groups: 2, num_prompts_per_group: 2, system_prompt_len: 9, question_len: 5, output_len: 3}"
    with pytest.raises(ServebookError, match=re.escape(what)):
        rows_of(tmp_path, f"data: {{shared_prefix: {shared}}}\nload: {load}\n", "t.yaml")
    assert len(rows_of(tmp_path, f"data: {{shared_prefix: {shared}}}\nload: [1]\n", "t.yaml")) == 4
