"""What a training step reads: every text sees what it would see alone, and the law is the trace's."""

import math
from pathlib import Path

import pytest
import torch

from foredraft.core.errors import ModelError, TraceError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.distill.data import (
    Example,
    event_law,
    num_positions,
    pack,
    plan_steps,
    read_groups,
    rows_of_tokens,
)
from foredraft.distill.losses import UNSAYABLE
from foredraft.distill.packed import run_body
from foredraft.models.head import NO_IDS
from tests.distilling import written_trace
from tests.tiny import tiny_model
from tests.traces import build_trace, trace_row

ALL = rows_of_tokens(NO_IDS, 272)


def _groups(texts: list[list[tuple[list[int], list[int]]]]) -> list[tuple[Example, ...]]:
    return [
        tuple(Example(trace_row(f"{g}-{r}", *text, prompt_id=str(g)), 1.0) for r, text in enumerate(group))
        for g, group in enumerate(texts)
    ]


SHARED = _groups(
    [
        # One prompt, two answers with a common beginning, and a second turn behind the first answer.
        [([9, 8, 7], [20, 21, 22]), ([9, 8, 7], [20, 31, 32, 33]), ([9, 8, 7, 20, 21, 22, 5, 6], [40, 41])],
        [([100], [50, 51])],
        [([9, 8, 7, 3], [60])],
    ]
)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_packed_text_sees_exactly_what_it_would_see_alone(family: str) -> None:
    model = tiny_model(family=family)
    packed = pack(SHARED, ALL)
    with torch.no_grad():
        hidden = run_body(model, packed, model.get_input_embeddings()(packed.token_ids[None])).last_hidden_state[0]
    alone = []
    for example in (example for group in SHARED for example in group):
        answer = example.row.answer()
        with torch.no_grad():
            states = model.base_model(answer.token_ids[None]).last_hidden_state[0]
        alone.append(states[answer.start - 1 : -1])
    torch.testing.assert_close(hidden[packed.read], torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == "sdpa"


def test_common_beginnings_are_run_once() -> None:
    packed = pack(SHARED[:1], ALL)
    # 3 prompt tokens, 20 21 22 and 5 6 40 of the two turns, 31 32 of the other answer; last tokens predict nothing.
    assert sorted(packed.token_ids.tolist()) == sorted([9, 8, 7, 20, 21, 22, 5, 6, 40, 31, 32])
    assert len(packed.read) == num_positions(SHARED[0]) == 9


def test_a_window_shorter_than_a_text_is_refused() -> None:
    model = tiny_model(family="qwen2")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 4
    packed = pack(SHARED, ALL)
    with (
        packed_attention(model),
        pytest.raises(ModelError, match="tokens is longer than the model's attention window, 4"),
    ):
        run_body(model, packed, model.get_input_embeddings()(packed.token_ids[None]))


def test_the_stored_law_comes_back_with_its_tail(tmp_path: Path) -> None:
    trace = written_trace(tmp_path / "trace", tiny_model(), 3, SamplingLaw(), top=16)
    for row in trace.rows():
        law = event_law(row, ALL)
        torch.testing.assert_close(law.probs.sum(-1), torch.ones(len(law)), rtol=0.0, atol=2e-3)
        emitted = law.rows.gather(1, law.emitted[:, None]).squeeze(1)
        assert emitted.tolist() == row.answer_ids.tolist()
        torch.testing.assert_close(
            law.probs.gather(1, law.emitted[:, None]).squeeze(1), row.logprobs.exp(), rtol=2e-3, atol=1e-6
        )


def test_an_emitted_token_outside_the_stored_ones_takes_the_place_of_the_last() -> None:
    probs = torch.full((1, 272), 0.1 / 268)
    probs[0, :4] = torch.tensor([0.4, 0.3, 0.15, 0.05])
    row = trace_row("a", [1], [100], probs, top=4, greedy=False)
    law = event_law(row, ALL)
    assert law.rows.tolist() == [[0, 1, 2, 100]]
    emitted = 0.1 / 268
    assert law.probs[0].tolist() == pytest.approx([0.4, 0.3, 0.15, emitted, 0.15 - emitted], rel=1e-3)
    assert law.emitted.tolist() == [3]


def test_greedy_text_keeps_the_plain_law_even_where_two_tokens_tie() -> None:
    probs = torch.full((1, 272), 0.2 / 270)
    probs[0, [5, 6]] = 0.4
    row = trace_row("a", [1], [6], probs, top=1, greedy=True)
    law = event_law(row, ALL)
    assert law.rows.tolist() == [[6]]
    assert law.probs[0].tolist() == pytest.approx([0.4, 0.6], rel=1e-3)


def test_tokens_cut_from_the_head_are_unsayable() -> None:
    rows = rows_of_tokens(torch.tensor([2, 5, 9]), 12)
    assert rows.tolist() == [UNSAYABLE, UNSAYABLE, 0, UNSAYABLE, UNSAYABLE, 1, *[UNSAYABLE] * 3, 2, *[UNSAYABLE] * 2]
    law = event_law(trace_row("a", [1], [20, 21]), rows_of_tokens(torch.tensor([20]), 272))
    assert law.rows.gather(1, law.emitted[:, None]).tolist() == [[0], [UNSAYABLE]]


def test_laws_of_different_width_stand_in_one_pack() -> None:
    narrow, wide = trace_row("a", [1], [20, 21], top=2), trace_row("b", [1], [22], top=6)
    packed = pack([(Example(narrow, 1.0), Example(wide, 0.5))], ALL)
    assert packed.law.rows.shape == (3, 6)
    assert packed.law.probs[:2, 2:6].abs().sum() == 0.0
    assert packed.law.probs[0, -1] == pytest.approx(float(narrow.tail_mass[0]))
    assert packed.temperatures.tolist() == [1.0, 1.0, 0.5]


def test_steps_go_through_all_groups_before_any_comes_again() -> None:
    groups = _groups([[([1], [20] * size)] for size in (3, 5, 2, 7, 4, 6, 1, 8)])
    total = sum(map(num_positions, groups))
    steps = plan_steps(groups, tokens=3 * total, batch_tokens=10, seed=0)
    order = [index for step in steps for index in step]
    for epoch in range(3):
        assert sorted(order[8 * epoch : 8 * epoch + 8]) == list(range(8))
    assert all(sum(num_positions(groups[index]) for index in step) >= 10 for step in steps[:-1])
    assert order == [index for step in plan_steps(groups, 3 * total, 10, seed=0) for index in step]
    assert order != [index for step in plan_steps(groups, 3 * total, 10, seed=1) for index in step]
    assert sum(num_positions(groups[index]) for index in order) == 3 * total


def test_answers_to_one_prompt_are_grouped_over_all_traces(tmp_path: Path) -> None:
    model = tiny_model()
    traces = [
        written_trace(tmp_path / "greedy", model, 3, GREEDY),
        written_trace(tmp_path / "sampled", model, 3, SamplingLaw(), seed=1),
    ]
    groups = read_groups(traces)
    assert [len(group) for group in groups] == [2, 2, 2]
    packed = pack(groups, ALL)
    assert len(packed.token_ids) < sum(len(example.row.answer().token_ids) - 1 for group in groups for example in group)


def test_a_trace_without_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="There is no answer to learn from in"):
        read_groups([build_trace(tmp_path / "trace", [])])


def test_a_draft_is_taught_the_temperature_of_the_law(tmp_path: Path) -> None:
    trace = written_trace(tmp_path / "trace", tiny_model(), 2, SamplingLaw(0.7))
    packed = pack(read_groups([trace]), ALL)
    assert packed.temperatures.tolist() == pytest.approx([0.7] * len(packed.read))
    assert math.isclose(float(packed.law.probs.sum()), len(packed.read), rel_tol=1e-2)
