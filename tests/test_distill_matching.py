"""Matching: distances have their bounds, maps and projections are used, and what is matched comes closer."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foredraft.core.errors import ModelError
from foredraft.core.law import SamplingLaw
from foredraft.distill.attention_matching import AttentionMatching
from foredraft.distill.data import Group, read_groups, rows_of_tokens
from foredraft.distill.init import init_from_target
from foredraft.distill.layer_matching import cosine, mse, normalised_mse
from foredraft.distill.losses import forward_kl
from foredraft.distill.matching import Matching
from foredraft.distill.packing import pack
from foredraft.distill.seeing import Asked, look
from foredraft.distill.student import Student
from foredraft.distill.train import distill
from foredraft.models.draft import Draft
from foredraft.models.head import NO_IDS
from foredraft.steps import DistillStep
from foredraft.trace.store import Trace
from tests.distilling import tiny_target, written_trace
from tests.laws import seeded
from tests.tiny import tiny_model

ALL = rows_of_tokens(NO_IDS, 272)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return written_trace(tmp_path_factory.mktemp("trace") / "t", tiny_model(), 12, SamplingLaw())


@pytest.fixture(scope="module")
def groups(trace: Trace) -> list[Group]:
    return read_groups([trace])[:3]


def _prefix(count: int = 2) -> Draft:
    return init_from_target(tiny_model(), range(count), torch.arange(0))


def _matching(draft: Draft, **settings: object) -> Matching:
    return Matching.of(tiny_model(), draft.model, DistillStep(**settings))


def _losses(matching: Matching, draft: Draft, groups: list[Group]) -> torch.Tensor:
    packed = pack(groups, ALL)
    return matching.losses(look(draft.model, packed, matching.asks_draft), packed)


def test_distances_of_states_have_their_identities_and_bounds() -> None:
    left, right = torch.randn(2, 50, 16, generator=seeded())
    for distance in (mse, normalised_mse, cosine):
        assert distance(left, left).abs().max() < 1e-5
    assert normalised_mse(left, 3.0 * left).abs().max() < 1e-5
    assert cosine(left, -left) == pytest.approx(torch.full((50,), 2.0))
    torch.testing.assert_close(normalised_mse(left, right), 2.0 * cosine(left, right), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mse(torch.zeros_like(right), right), torch.ones(50))
    torch.testing.assert_close(mse(7.0 * left, 7.0 * right), mse(left, right))
    assert mse(3.0 * left, left) == pytest.approx(torch.full((50,), 4.0))


@pytest.mark.parametrize("distance", ["mse", "normalised_mse", "cosine"])
def test_layers_copied_from_the_target_match_at_once_and_others_do_not(distance: str, groups: list[Group]) -> None:
    draft = _prefix(3)  # behind the last of three the final norm is applied: of the target's third layer it is not
    same = _matching(draft, layer_matching={"weight": 1.0, "layers": {0: 0, 1: 1}, "distance": distance}).at(0.0)
    other = _matching(draft, layer_matching={"weight": 1.0, "layers": {0: 1, 1: 0}, "distance": distance}).at(0.0)
    assert _losses(same, draft, groups).abs().max() < 1e-4
    assert _losses(other, draft, groups).min() > 0.01


def test_layers_are_spread_evenly_when_none_are_named(groups: list[Group]) -> None:
    draft = _prefix(2)
    spread = _matching(draft, layer_matching=0.5).at(0.0)
    named = _matching(draft, layer_matching={"weight": 0.5, "layers": {0: 1, 1: 3}}).at(0.0)
    assert torch.equal(_losses(spread, draft, groups), _losses(named, draft, groups))


def test_attention_of_copied_layers_matches_at_once_and_of_others_it_does_not(groups: list[Group]) -> None:
    draft = _prefix(2)
    same = _matching(draft, attention_matching={"weight": 1.0, "layers": {0: 0, 1: 1}}).at(0.0)
    assert _losses(same, draft, groups).abs().max() < 1e-4
    last = _matching(draft, attention_matching=1.0).at(0.0)
    assert last.terms[0].term == AttentionMatching(((1, 3),))
    assert _losses(last, draft, groups).max() > 0.01
    assert _losses(last, draft, groups).min() >= -1e-6


@pytest.mark.parametrize("heads", [4, 2])
def test_attention_is_compared_with_what_stock_transformers_computes(heads: int, groups: list[Group]) -> None:
    """One text of the pack, alone, through eager attention; another number of heads is compared by their mean."""
    target, draft = tiny_model(), tiny_model(num_layers=1, seed=5)
    if heads != 4:
        draft.config.num_attention_heads = heads
        attention = draft.model.layers[0].self_attn
        attention.num_key_value_groups, attention.head_dim = 1, 8
        for name, rows in (("q_proj", 16), ("k_proj", 16), ("v_proj", 16)):
            getattr(attention, name).weight.data = getattr(attention, name).weight.data[:rows]
        attention.o_proj.weight.data = attention.o_proj.weight.data[:, :16]
    packed = pack(groups, ALL)
    matching = Matching.of(target, draft, DistillStep(attention_matching={"weight": 1.0, "layers": {0: 2}})).at(0.0)
    values = matching.losses(look(draft, packed, matching.asks_draft), packed)
    row = groups[0][0].row
    ids, start = row.answer().token_ids[None, :-1], len(row.prompt_ids) - 1
    laws = []
    for model, layer in ((draft, 0), (target, 2)):
        model.set_attn_implementation("eager")
        with torch.no_grad():
            laws.append(model.model(ids, output_attentions=True).attentions[layer][0, :, start:])
    ours, theirs = laws if heads == 4 else [law.mean(0, keepdim=True) for law in laws]
    expected = (torch.xlogy(theirs, theirs) - torch.xlogy(theirs, ours)).sum(-1).mean(0)
    torch.testing.assert_close(values[: len(expected)], expected, rtol=1e-3, atol=1e-5)


def test_a_term_fades_linearly_and_the_target_rests_afterwards() -> None:
    matching = _matching(
        _prefix(), layer_matching=2.0, attention_matching={"weight": 1.0, "until": 0.5, "layers": {0: 0}}
    )
    assert [part.weight for part in matching.at(0.0).terms] == [2.0, 1.0]
    assert [part.weight for part in matching.at(0.125).terms] == pytest.approx([1.0, 0.75])
    assert [part.weight for part in matching.at(0.25).terms] == pytest.approx([0.5])
    assert matching.at(0.5) is None
    assert _matching(_prefix()).at(0.0) is None


def test_terms_add_up_with_their_weights(groups: list[Group]) -> None:
    draft = _prefix()
    layers = _losses(_matching(draft, layer_matching=1.0).at(0.0), draft, groups)
    attention = _losses(_matching(draft, attention_matching=1.0).at(0.0), draft, groups)
    both = _losses(_matching(draft, layer_matching=0.3, attention_matching=0.2).at(0.0), draft, groups)
    torch.testing.assert_close(both, 0.3 * layers + 0.2 * attention)


@pytest.mark.parametrize("name", ["layer_matching", "attention_matching"])
@pytest.mark.parametrize(
    ("layers", "message"), [({0: 4}, "the target has layers 0 to 3, not 4"), ({2: 0}, "0 to 1, not 2")]
)
def test_layers_that_do_not_exist_are_refused(name: str, layers: dict[int, int], message: str) -> None:
    with pytest.raises(ModelError, match=f"{name}.layers: .*{message}"):
        _matching(_prefix(), **{name: {"weight": 1.0, "layers": layers}})


@pytest.mark.parametrize(
    "settings", [{"layer_matching": 0.5}, {"attention_matching": 0.5}], ids=["layers", "attention"]
)
def test_gradients_of_a_matched_step_are_slopes(settings: dict[str, object], groups: list[Group]) -> None:
    draft = _prefix()
    matching = _matching(draft, **settings).at(0.0)
    student = Student.of(draft)
    student.backward(groups, forward_kl, matching)
    # The last layer: what it asks changes no keys and values of the stem, which are constants of a step.
    weight = next(weight for name, weight in student.weights.items() if "layers.1.self_attn.q" in name)
    direction = torch.randn(weight.shape, generator=seeded())
    slope = float((weight.grad * direction).sum())
    values = []
    for sign in (1.0, -1.0):
        weight.data.add_(direction, alpha=sign * 1e-3)
        values.append(student.backward(groups, forward_kl, matching).loss)
        weight.data.add_(direction, alpha=-sign * 1e-3)
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(slope, rel=0.02, abs=1e-4)


def test_a_projection_between_widths_trains_and_is_thrown_away(trace: Trace, tmp_path: Path) -> None:
    narrow = Draft(tiny_model(num_layers=1, hidden=16))
    settings = DistillStep(
        tokens=3000, batch_tokens=120, learning_rate=1e-2, layer_matching={"weight": 10.0, "until": 1.0}
    )
    before = Matching.of(tiny_model(), narrow.model, settings).weights["matching.projection.0"].detach().clone()
    assert before.shape == (32, 16)
    result = distill(narrow, [trace], settings, tiny_target(), tmp_path / "work")
    assert set(result.draft.model.state_dict()) == set(narrow.model.state_dict())
    losses = [point.loss for point in result.curve]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    after = load_file(tmp_path / "work" / "resume.safetensors")["weight.matching.projection.0"]
    assert (after - before).abs().max() > 0.01


def test_nothing_is_kept_that_was_not_asked_for(groups: list[Group]) -> None:
    seen = look(tiny_model(), pack(groups, ALL), Asked(attention=frozenset({1})))
    assert (len(seen.states), list(seen.attention)) == (0, [1])
    assert all(
        bool((one.logprobs.exp() * ~one.blocked).sum(-1).sub(1.0).abs().max() < 1e-5) for one in seen.attention[1]
    )
