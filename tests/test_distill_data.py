"""What a training step reads: the law is the trace's, and every answer comes before any comes again."""

from pathlib import Path

import pytest
import torch

from foredraft.core.errors import TraceError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.distill.data import (
    Example,
    event_law,
    num_positions,
    plan_steps,
    read_groups,
    rows_of_tokens,
)
from foredraft.distill.losses import UNSAYABLE
from foredraft.models.head import NO_IDS
from tests.distilling import written_trace
from tests.tiny import tiny_model
from tests.traces import build_trace, trace_row

ALL = rows_of_tokens(NO_IDS, 272)


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


def test_steps_go_through_all_groups_before_any_comes_again() -> None:
    groups = [(Example(trace_row("a", [1], [20] * size), 1.0),) for size in (3, 5, 2, 7, 4, 6, 1, 8)]
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
    assert [[example.row.id for example in group] for group in groups[:1]] == [["greedy-0", "sampled-0"]]


def test_a_trace_without_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="There is no answer to learn from in"):
        read_groups([build_trace(tmp_path / "trace", [])])
