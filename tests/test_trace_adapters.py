"""What others publish: question files are known by what they hold, reports say what they measured."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from foredraft.core.errors import PromptError, UserError
from foredraft.settings import PromptSource
from foredraft.trace.adapters import read_published
from foredraft.trace.prompts import NO_DOMAIN, Prompt, read_prompts

SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write of the sea.", "Now in one line."], "reference": ["a"]},
    {"question_id": 161, "category": "translation", "turns": ["Translate: the owl sleeps."]},
]  # fmt: skip
HUMANEVAL = [
    {
        "task_id": f"HumanEval/{index}",
        "prompt": f"def add_{index}(a, b):\n",
        "entry_point": f"add_{index}",
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    }
    for index in range(2)
]
GSM8K = [
    {"question": "An owl eats two mice a night. How many in a week?", "answer": "7 * 2 = <<7*2=14>>14\n#### 14"},
    {"question": "Three oaks have four birds each. How many birds?", "answer": "3 * 4 = <<3*4=12>>12\n#### 12"},
]
VLLM = {
    "date": "20260101-000000", "backend": "vllm", "model_id": "models/target", "num_prompts": 8, "duration": 3.5,
    "completed": 8, "total_input_tokens": 100, "total_output_tokens": 800, "request_throughput": 2.3,
    "spec_decode_acceptance_rate": 45.0, "spec_decode_acceptance_length": 2.8, "spec_decode_num_drafts": 100,
    "spec_decode_draft_tokens": 400, "spec_decode_accepted_tokens": 180,
    "spec_decode_per_position_acceptance_rates": [0.7, 0.5, 0.35, 0.25],
}  # fmt: skip
SGLANG = {
    "backend": "sglang", "dataset_name": "random", "request_rate": 1.0, "max_concurrency": None, "duration": 4.0,
    "completed": 6, "total_input_tokens": 90, "total_output_tokens": 600, "request_throughput": 1.5,
    "accept_length": 2.4,
}  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path) -> list[Prompt]:
    return read_prompts(PromptSource(file=str(path)))


def test_spec_bench_and_mt_bench_keep_ids_categories_and_turns(tmp_path: Path) -> None:
    first, second = read(write(tmp_path / "anything.txt", SPEC_BENCH))
    assert (first.id, first.domain, first.later_turns) == ("81", "writing", ("Now in one line.",))
    assert (second.id, second.domain, second.num_turns) == ("161", "translation", 1)


def test_a_bench_question_without_category_has_no_domain(tmp_path: Path) -> None:
    (only,) = read(write(tmp_path / "q.jsonl", [{"question_id": 1, "turns": ["Say owl."]}]))
    assert (only.id, only.domain) == ("1", NO_DOMAIN)


@pytest.mark.parametrize("packed", [False, True])
def test_humaneval_is_read_packed_or_not(tmp_path: Path, packed: bool) -> None:
    path = write(tmp_path / "h.jsonl", HUMANEVAL)
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    prompts = read(path)
    assert [prompt.id for prompt in prompts] == ["HumanEval/0", "HumanEval/1"]
    assert {prompt.domain for prompt in prompts} == {"humaneval"}
    assert prompts[0].text == "def add_0(a, b):\n"
    assert "return a + b" not in prompts[0].text


def test_gsm8k_asks_the_question_and_keeps_the_answer_out(tmp_path: Path) -> None:
    prompts = read(write(tmp_path / "g.jsonl", GSM8K))
    assert [prompt.text for prompt in prompts] == [row["question"] for row in GSM8K]
    assert {prompt.domain for prompt in prompts} == {"gsm8k"}
    assert len({prompt.id for prompt in prompts}) == 2


def test_rows_of_our_own_form_stay_as_they_are(tmp_path: Path) -> None:
    rows = [{"id": "mine", "domain": "code", "prompt": "hello", "task_id": "x"}, {"prompt": "again", "answer": "no"}]
    prompts = read(write(tmp_path / "p.jsonl", rows))
    assert (prompts[0].id, prompts[0].domain) == ("mine", "code")
    assert prompts[1].domain == NO_DOMAIN


def test_own_ids_and_domains_count_before_those_of_a_benchmark(tmp_path: Path) -> None:
    (prompt,) = read(write(tmp_path / "p.jsonl", [{**SPEC_BENCH[0], "id": "mine", "domain": "prose"}]))
    assert (prompt.id, prompt.domain) == ("mine", "prose")


def test_an_id_given_twice_is_still_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="'81' was given before"):
        read(write(tmp_path / "p.jsonl", [SPEC_BENCH[0], SPEC_BENCH[0]]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Why?"}, "exactly one of prompt, messages, turns, not none"),
        ({"question_id": 1, "category": "x", "turns": []}, "not empty"),
        ({"question": "", "answer": "4"}, "the prompt is empty"),
        (VLLM, "a benchmark's report, which holds no prompts"),
        (SGLANG, "a benchmark's report, which holds no prompts"),
    ],
)
def test_what_has_neither_shape_is_refused_by_file_and_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "p.jsonl", [row])
    with pytest.raises(PromptError, match=message) as refused:
        read(path)
    assert f"{path}:1" in str(refused.value)


def test_a_broken_packed_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(PromptError, match="cannot be unpacked"):
        read(tmp_path / "p.jsonl.gz")


@pytest.mark.parametrize("indent", [None, 2])
def test_a_vllm_report_gives_its_figures_in_our_units(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(VLLM, indent=indent))
    found = read_published(path)
    assert found is not None
    assert (found.runtime, found.model, found.k, found.requests) == ("vllm", "models/target", 4, 8)
    assert found.mean_tokens_per_call == 2.8
    assert found.accepted_of_drafted == pytest.approx(0.45)
    # What it calls acceptance by position is P(i and all before it accepted): they add up to the tokens per call.
    assert 1 + sum(found.reached) == pytest.approx(found.mean_tokens_per_call)


def test_the_last_run_of_an_sglang_file_counts(tmp_path: Path) -> None:
    found = read_published(write(tmp_path / "out.jsonl", [{**SGLANG, "accept_length": 1.1}, SGLANG]))
    assert found is not None
    assert (found.runtime, found.mean_tokens_per_call, found.requests) == ("sglang", 2.4, 6)
    assert math.isnan(found.accepted_of_drafted)
    assert found.k == 0


def test_a_server_that_did_not_speculate_is_named(tmp_path: Path) -> None:
    plain = {name: value for name, value in VLLM.items() if not name.startswith("spec_decode")}
    with pytest.raises(UserError, match="without figures on speculation"):
        read_published(write(tmp_path / "r.json", [plain]))


@pytest.mark.parametrize("text", ["", "no json", "[1, 2]", '{"schema": 1, "laws": []}', '{"accept_length": 2.0}'])
def test_other_files_are_no_reports(tmp_path: Path, text: str) -> None:
    (tmp_path / "f.json").write_text(text)
    assert read_published(tmp_path / "f.json") is None
