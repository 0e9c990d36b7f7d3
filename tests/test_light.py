"""Light nets: read in one pass, in pieces or one token at a time they say the same, and they are drafts like others."""

from pathlib import Path

import pytest
import torch
from torch import nn

from foredraft import verbs
from foredraft.core.errors import CapabilityError, RecipeError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.protocols import Answer
from foredraft.distill.alone import refuse_what_attends
from foredraft.distill.data import read_groups
from foredraft.distill.init.build import build, require_possible
from foredraft.distill.student import Student
from foredraft.distill.train import distill
from foredraft.export.transformers import export_transformers
from foredraft.models.causal_lm import CausalLMDrafter, load_causal_lm_drafter
from foredraft.models.draft import Draft
from foredraft.models.light.model import LightConfig, LightForCausalLM
from foredraft.models.target import LocalTarget, load_target
from foredraft.steps import DistillStep, InitStep
from foredraft.trace.store import Trace
from tests.distilling import held_out_acceptance, tiny_target, written_trace
from tests.tiny import save_tiny, tiny_model

NETS = {
    "convolution": {"mixer": "convolution", "kernel_size": 5},
    "one tap": {"mixer": "convolution", "kernel_size": 1},
    "linear attention": {"mixer": "linear_attention"},
    "few channels": {"mixer": "convolution", "active_channels": 7},
}


def net(name: str) -> LightForCausalLM:
    torch.manual_seed(0)
    config = LightConfig(hidden_size=32, intermediate_size=48, initializer_range=0.3, eos_token_id=2, **NETS[name])
    return LightForCausalLM(config).eval()


def text(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 272, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NETS)
@torch.no_grad()
def test_any_way_of_reading_gives_the_same(name: str) -> None:
    body, tokens = net(name).model, torch.stack([text(150), text(150, 1)])
    whole, _ = body.read(tokens)
    for sizes in ([1] * 150, [70, 1, 9, 64, 6]):
        states, parts = (), []
        for part in tokens.split(sizes, 1):
            hidden, states = body.read(part, states)
            parts.append(hidden)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_linear_attention_is_the_weighted_mean_of_all_values_before() -> None:
    attention = net("linear attention").model.layers[0].mixer
    x = torch.randn(1, 9, 32)
    mixed, _ = attention(x, attention.start(1))
    queries, keys, values = (part.view(9, 4, 8) for part in attention.project(x[0]).chunk(3, -1))
    expected = torch.zeros(9, 4, 8)
    for at in range(9):
        for head in range(4):
            phi = [nn.functional.elu(side[:, head]) + 1 for side in (queries, keys)]
            weights = phi[1][: at + 1] @ phi[0][at]
            expected[at, head] = weights @ values[: at + 1, head] / weights.sum()
    torch.testing.assert_close(mixed[0], attention.mix(expected.flatten(1)), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_convolution_sees_its_kernel_and_no_further() -> None:
    convolution = net("convolution").model.layers[0].mixer
    x = torch.randn(1, 12, 32)
    before, _ = convolution(x, convolution.start(1))
    changed = x.clone()
    changed[0, 4] += 1.0
    moved = (convolution(changed, convolution.start(1))[0] - before).abs().amax(-1)[0] > 1e-6
    assert moved.tolist() == [4 <= at < 9 for at in range(12)]


@torch.no_grad()
def test_only_the_strongest_channels_are_active() -> None:
    feed_forward = net("few channels").model.layers[0].feed_forward
    x = torch.randn(1, 1, 32)
    channels = (nn.functional.silu(feed_forward.gate(x)) * feed_forward.up(x))[0, 0]
    kept = channels.abs() >= channels.abs().sort(descending=True).values[6]
    assert kept.sum() == 7
    torch.testing.assert_close(feed_forward(x)[0, 0], (channels * kept) @ feed_forward.down)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("law", [GREEDY, SamplingLaw()])
def test_replay_says_what_propose_draws(name: str, law: SamplingLaw) -> None:
    drafter = CausalLMDrafter(Draft(net(name)), law, 272)
    tokens = text(40)
    (replayed,) = drafter.replay([Answer(tokens, 10)], 4)
    for context in (25, 26, 31, 12, 30):
        proposal = drafter.propose(tokens[:context], 1, torch.Generator().manual_seed(0))
        said = proposal.laws.probs(0, int(proposal.token_ids[0]))[tokens[context]]
        torch.testing.assert_close(said, replayed.probs[context - 10], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", NETS)
def test_drafting_again_after_a_rejection_says_the_same(name: str) -> None:
    model = net(name)
    used = CausalLMDrafter(Draft(model), GREEDY, 272)
    tokens = text(40)
    for end in (20, 21, 25, 19, 40):
        fresh = CausalLMDrafter(Draft(model), GREEDY, 272)
        drafts = [one.propose(tokens[:end], 5, torch.Generator()).token_ids.tolist() for one in (used, fresh)]
        assert drafts[0] == drafts[1]
        batch = used.open_batch(1).propose({0: tokens[:end]}, {0: 5}, [torch.Generator()])
        assert batch[0].token_ids.tolist() == drafts[0]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LocalTarget:
    return load_target(str(save_tiny(tmp_path_factory.mktemp("light") / "target")), "float32")


@pytest.mark.parametrize("body", ["convolution", "linear_attention"])
def test_a_new_net_starts_from_the_targets_own_ends(target: LocalTarget, body: str, tmp_path: Path) -> None:
    step = InitStep(source="scratch", body=body, layers="first-2", ffn=40, active=8)
    verbs.init_draft(target, [], step, tmp_path / "draft")
    drafter = load_causal_lm_drafter(tmp_path / "draft", "float32")
    model = drafter.draft.model
    assert isinstance(model, LightForCausalLM)
    assert (model.config.mixer, model.config.active_channels, len(model.model.layers)) == (body, 8, 2)
    assert torch.equal(model.get_input_embeddings().weight, target.model.get_input_embeddings().weight)
    assert model.generation_config.eos_token_id == target.model.generation_config.eos_token_id
    assert len(drafter.propose(text(10), 4, torch.Generator())) == 4
    with pytest.raises(CapabilityError, match="is a light net, which transformers runs only where foredraft"):
        export_transformers(tmp_path / "draft", target, 4, tmp_path / "exported")
    with pytest.raises(CapabilityError, match="it drafts, and checks no other draft"):
        drafter.target_session()


def test_settings_that_light_nets_have_nothing_for_are_refused() -> None:
    with pytest.raises(RecipeError, match="layer_matching is for drafts that attend"):
        refuse_what_attends(DistillStep(layer_matching=0.1))
    with pytest.raises(RecipeError, match="active: 99 is more than the 64 feed-forward channels"):
        step = InitStep(source="scratch", body="convolution", layers="first-1", active=99)
        require_possible(tiny_model().config, step)
    with pytest.raises(ValueError, match="body: convolution is a new net: set from: scratch"):
        InitStep(body="convolution")
    with pytest.raises(ValueError, match="kernel is about body: convolution"):
        InitStep(source="scratch", body="linear_attention", kernel=4)
    with pytest.raises(ValueError, match="active is about light nets"):
        InitStep(source="scratch", active=4)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    folder = tmp_path_factory.mktemp("light-traces")
    return [written_trace(folder / "sampled", tiny_model(), 48, SamplingLaw(), top=256)]


def new_draft(body: str) -> Draft:
    step = InitStep(source="scratch", body=body, layers="first-2", seed=1)
    return Draft(build(tiny_model(), tiny_model(), step, []).model)


@pytest.mark.parametrize("body", ["convolution", "linear_attention"])
def test_training_reads_what_scoring_reads(body: str, traces: list[Trace]) -> None:
    draft = new_draft(body)
    seen = Student.of(draft).acceptance(read_groups(traces))
    assert float(seen.mean()) == pytest.approx(held_out_acceptance(draft, tiny_model(), traces), abs=2e-3)


@pytest.mark.parametrize("body", ["convolution", pytest.param("linear_attention", marks=pytest.mark.slow)])
def test_training_teaches_a_light_net(body: str, traces: list[Trace], tmp_path: Path) -> None:
    held_out = [written_trace(tmp_path / "t", tiny_model(), 16, SamplingLaw(), seed=2, prompt_seed=9)]
    step = DistillStep(tokens=2400, batch_tokens=200, learning_rate=1e-2, validation={"prompts": 0})
    draft = new_draft(body)
    trained = distill(draft, traces, step, tiny_target(), tmp_path / "work").draft
    before, after = (held_out_acceptance(one, tiny_model(), held_out) for one in (draft, trained))
    assert after > before + 0.03
