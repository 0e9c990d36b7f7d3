"""Packing: every text sees what it would see alone, beginnings are run once, and prompts cost no gradient."""

import math
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from foredraft.core.errors import ModelError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.distill.data import Example, num_positions, read_groups, rows_of_tokens
from foredraft.distill.packed import run_body
from foredraft.distill.packing import pack
from foredraft.models.head import NO_IDS
from tests.distilling import written_trace
from tests.tiny import tiny_model
from tests.traces import trace_row

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
        hidden = run_body(model, packed).last_hidden_state[0]
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
    # The prompt's last token is scored. The last tokens of answers predict nothing, but 22 is read by the second turn.
    assert packed.stems.token_ids.tolist() == [9, 8]
    assert sorted(packed.branches.token_ids.tolist()) == sorted([7, 20, 21, 22, 5, 6, 40, 31, 32])
    assert len(packed.read) == num_positions(SHARED[0]) == 9


def test_gradients_are_those_of_answers_behind_a_constant_prompt() -> None:
    """The reference is stock transformers: the prompt goes through its cache, without a gradient."""
    model, reference = tiny_model(), tiny_model()
    model.get_input_embeddings().requires_grad_(False)
    groups = SHARED[1:] + _groups([[([4, 5, 6], [7, 8, 9]), ([4, 5, 6], [30, 31])]])
    packed = pack(groups, ALL)
    run_body(model, packed).last_hidden_state[0, packed.read].square().sum().backward()
    for row in (example.row for group in groups for example in group):
        ids, start = row.answer().token_ids[None, :-1], len(row.prompt_ids) - 1
        cache = DynamicCache()
        if start:
            with torch.no_grad():
                reference.base_model(ids[:, :start], cache=cache)
        reference.base_model(ids[:, start:], cache=cache).last_hidden_state.square().sum().backward()
    expected = dict(reference.named_parameters())
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            assert weight.grad is None
        else:
            torch.testing.assert_close(weight.grad, expected[name].grad, rtol=1e-3, atol=1e-4)


def test_a_window_shorter_than_a_text_is_refused() -> None:
    model = tiny_model(family="qwen2")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 4
    packed = pack(SHARED, ALL)
    with pytest.raises(ModelError, match="tokens is longer than the model's attention window, 4"):
        run_body(model, packed)


def test_common_beginnings_of_all_traces_are_run_once(tmp_path: Path) -> None:
    model = tiny_model()
    traces = [
        written_trace(tmp_path / "greedy", model, 3, GREEDY),
        written_trace(tmp_path / "sampled", model, 3, SamplingLaw(), seed=1),
    ]
    groups = read_groups(traces)
    packed = pack(groups, ALL)
    alone = sum(len(example.row.answer().token_ids) - 1 for group in groups for example in group)
    assert len(packed.stems) == 3 * 5
    assert len(packed.stems) + len(packed.branches) <= alone - 3 * 6


def test_laws_of_different_width_stand_in_one_pack() -> None:
    narrow, wide = trace_row("a", [1], [20, 21], top=2), trace_row("b", [1], [22], top=6)
    packed = pack([(Example(narrow, 1.0), Example(wide, 0.5))], ALL)
    assert packed.law.rows.shape == (3, 6)
    assert packed.law.probs[:2, 2:6].abs().sum() == 0.0
    assert packed.law.probs[0, -1] == pytest.approx(float(narrow.tail_mass[0]))
    assert packed.temperatures.tolist() == [1.0, 1.0, 0.5]


def test_a_draft_is_taught_the_temperature_of_the_law(tmp_path: Path) -> None:
    trace = written_trace(tmp_path / "trace", tiny_model(), 2, SamplingLaw(0.7))
    packed = pack(read_groups([trace]), ALL)
    assert packed.temperatures.tolist() == pytest.approx([0.7] * len(packed.read))
    assert math.isclose(float(packed.law.probs.sum()), len(packed.read), rel_tol=1e-2)
