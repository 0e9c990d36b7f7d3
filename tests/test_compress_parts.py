"""Laws of parts smaller than units, of masks, and of going on where memory ends."""

from collections.abc import Callable

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from foredraft.acceptance.evaluate import score_rows
from foredraft.acceptance.report import AcceptanceReport
from foredraft.compress import probe as probe_module
from foredraft.compress import sensitivity as sensitivity_module
from foredraft.compress.gptq import GptqRounder
from foredraft.compress.masks import kept_weights, masked, read_mask
from foredraft.compress.parts import GateFisher, parts_of, probe_without, probed_parts
from foredraft.compress.probe import Bench, Probe, measure
from foredraft.compress.sensitivity import sensitivities
from foredraft.compressing import _rounded_widths, _warn_of_small_groups
from foredraft.core.errors import ModelError, RecipeError
from foredraft.core.memory import is_out_of_memory
from foredraft.models.calibration import calibration_batches
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft
from foredraft.models.units import search_units
from foredraft.searching import _reach
from foredraft.steps import CompressStep, PruneStep
from tests.test_compress_gptq import answers
from tests.test_compress_probe import bench, figures, made_trace
from tests.tiny import tiny_model

FOUR = WeightFormat(4, 32)


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench(made_trace(tmp_path_factory.mktemp("parts") / "trace"))


def test_parts_fill_every_layer() -> None:
    """Two key-value groups of two heads, and 64 channels in groups of 24: 24, 24 and 16."""
    parts = [part for part in parts_of(tiny_model(), 24) if part.layer == 1]
    assert [part.name for part in parts] == [
        "layers.1.heads.0",
        "layers.1.heads.1",
        "layers.1.ffn.0-23",
        "layers.1.ffn.24-47",
        "layers.1.ffn.48-63",
    ]
    assert [(part.first, part.end) for part in parts] == [(0, 16), (16, 32), (0, 24), (24, 48), (48, 64)]


def test_the_fisher_information_is_that_of_a_factor_on_the_part() -> None:
    """The derivative by a factor on the columns of a part, by differences."""
    model, sample = tiny_model(num_layers=2).double(), answers(1)
    parts = parts_of(model, 64)
    gates = GateFisher(parts)
    sensitivities(Draft(model), sample, FOUR, gates=gates)
    part = gates.parts()[1]
    weight = model.get_submodule(part.module).weight
    said = sample[0].token_ids

    def log_likelihood(factor: float) -> float:
        kept = weight.data.clone()
        weight.data[:, part.first : part.end] *= factor
        with torch.no_grad():
            logits = model(said[None, :-1]).logits[0, sample[0].start - 1 :].log_softmax(-1)
        weight.data = kept
        return float(logits.gather(-1, said[sample[0].start :, None]).sum())

    slope = (log_likelihood(1 + 1e-3) - log_likelihood(1 - 1e-3)) / 2e-3
    assert part.fisher == pytest.approx(slope**2, rel=1e-2)
    assert part.fisher > 0


def test_a_part_that_is_cut_is_not_there(on: Bench) -> None:
    """Without its columns of o_proj a group of heads adds nothing, whatever its queries are."""
    draft = Draft(tiny_model(num_layers=3))
    before = {name: weight.clone() for name, weight in draft.model.state_dict().items()}
    probe, parts = Probe(draft, on), parts_of(draft.model, 32)
    heads = next(part for part in parts if part.name == "layers.1.heads.1")
    cut = figures(probe_without(draft, probe, heads))
    other = Draft(tiny_model(num_layers=3))
    other.model.model.layers[1].self_attn.v_proj.weight.data[8:] = 0.0
    assert cut == pytest.approx(figures(measure(other, on)), abs=1e-5)
    assert cut != pytest.approx(figures(probe.baseline), abs=1e-4)
    found = probed_parts(draft, probe, parts, 3, 2)
    assert sum(part.measured is not None for part in found) == 3
    assert all(torch.equal(weight, before[name]) for name, weight in draft.model.state_dict().items())


def replayed(draft: Draft, on: Bench) -> AcceptanceReport:
    drafter = CausalLMDrafter(draft, on.law, on.vocab_size).bind(on.law)
    return AcceptanceReport.of(on.ks, score_rows("the draft", drafter, on.rows, on.ks))


SIZES = {
    "vocab_size": 272,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def tiny_opt() -> OPTForCausalLM:
    return OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, init_std=0.25))


def tiny_neox() -> GPTNeoXForCausalLM:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, intermediate_size=64, initializer_range=0.25))


@pytest.mark.parametrize("make", [tiny_opt, tiny_neox])
def test_other_families_have_parts_and_probes_of_them(make: Callable[[], PreTrainedModel], on: Bench) -> None:
    """OPT flattens its feed-forward part, GPT-NeoX computes both parts side by side; neither has Llama's names."""
    torch.manual_seed(0)
    draft, batches = Draft(make().eval()), calibration_batches(answers())
    gates = GateFisher(parts_of(draft.model, 32))
    sensitivities(draft, answers(1), WeightFormat(8, 0), gates=gates)
    assert [part.name for part in gates.parts() if part.layer == 1] == [
        *(f"layers.1.heads.{head}" for head in range(4)),
        "layers.1.ffn.0-31",
        "layers.1.ffn.32-63",
    ]
    assert all(part.fisher > 0 for part in gates.parts())
    probe = Probe(draft, on)
    assert figures(probe.report_from(0)) == pytest.approx(figures(replayed(draft, on)), abs=1e-6)
    (cut,) = [part for part in probed_parts(draft, probe, gates.parts(), 1, 2) if part.measured is not None]
    weight = draft.model.get_submodule(cut.module).weight
    weight.data[:, cut.first : cut.end] = 0.0
    changed = replayed(draft, on).mean_tokens_per_call(2)
    assert cut.measured == pytest.approx(probe.baseline.mean_tokens_per_call(2) - changed, abs=1e-6)
    assert float((masked(draft, (2, 4), batches).model.get_submodule(cut.module).weight == 0).float().mean()) >= 0.5


@pytest.mark.parametrize("make", [tiny_opt, tiny_neox])
def test_other_families_are_rounded_and_searched_without_narrower_layers(make: Callable[[], PreTrainedModel]) -> None:
    draft = Draft(make().eval())
    rounder = GptqRounder(draft.model, answers(2))
    units = [unit for unit in search_units(draft.model) if unit.layer == 0]
    for module in (module for unit in units for module in unit.modules):
        rounder(module, draft.model.get_submodule(module).weight.detach(), WeightFormat(4, 16))
    assert "ffn" not in _reach(draft, CompressStep()).kinds
    with pytest.raises(ModelError, match="is not built as Llama and Qwen2 are"):
        _reach(draft, CompressStep(moves=["ffn"]))
    with pytest.raises(ModelError, match="is not built as Llama and Qwen2 are"):
        _rounded_widths(draft, PruneStep(ffn=32))
    assert not _rounded_widths(draft, PruneStep(layers=1)).given


def test_groups_whose_scales_take_what_rounding_saves_are_named(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_small_groups([WeightFormat(4, 8), WeightFormat(4, 32), WeightFormat(8, 0), WeightFormat(8, 4)])
    assert not caplog.records
    _warn_of_small_groups([WeightFormat(4, 1), WeightFormat(4, 1), WeightFormat(8, 2)])
    assert [record.getMessage() for record in caplog.records] == [
        "16 bits of scale for each group of 1 makes 20 bits a weight of 4: 8 bits without groups take no more.",
        "16 bits of scale for each group of 2 makes 16 bits a weight of 8: 16 bits without groups take no more.",
    ]


@pytest.mark.parametrize(("text", "share"), [("2:4", 0.5), ("1:4", 0.25), ("0.25", 0.75)])
def test_a_mask_keeps_its_share_and_the_largest(text: str, share: float) -> None:
    importance = torch.rand(6, 32, generator=torch.Generator().manual_seed(0))
    kept = kept_weights(importance, read_mask(text))
    assert float(kept.float().mean()) == pytest.approx(share)
    if ":" in text:
        assert bool((kept.view(-1, 4).sum(1) == int(text[0])).all())
        assert bool((importance.view(-1, 4).argmax(1) == (importance * kept).view(-1, 4).argmax(1)).all())
    else:
        assert float(importance[kept].min()) > 0.0
        assert all(row[mask].min() > row[~mask].max() for row, mask in zip(importance, kept, strict=True))


def test_inputs_decide_what_a_mask_keeps_and_the_draft_is_left_alone(on: Bench) -> None:
    draft, batches = Draft(tiny_model()), calibration_batches(answers())
    before = figures(measure(draft, on))
    cut = masked(draft, (2, 4), batches)
    zeros = [float((layer.mlp.up_proj.weight == 0).float().mean()) for layer in cut.model.model.layers]
    assert zeros == [0.5] * 4
    assert figures(measure(draft, on)) == before
    errors = []
    for one in (cut, masked(draft, (2, 4), [])):
        with torch.no_grad():
            errors.append(
                float(
                    (one.model(batches[0].token_ids).logits - draft.model(batches[0].token_ids).logits)[batches[0].read]
                    .square()
                    .mean()
                )
            )
    assert errors[0] != errors[1]


@pytest.mark.parametrize("text", ["4:4", "0:4", "half", "1.5"])
def test_what_is_no_mask_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="write 2:4 for two of each four"):
        read_mask(text)
    with pytest.raises(RecipeError, match="3 does not divide the 32 inputs"):
        kept_weights(torch.rand(2, 32), (1, 3))


def fails_once(function: Callable, when: Callable[..., bool]) -> Callable:
    def call(*words: object, **options: object) -> object:
        if when(*words, **options):
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory: 8 bytes")
        return function(*words, **options)

    return call


def test_where_the_states_do_not_fit_probes_run_every_layer_and_say_so(
    on: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draft = Draft(tiny_model())
    kept = Probe(draft, on)
    few = fails_once(probe_module.read_prefix, lambda *_, last=True: last)
    monkeypatch.setattr(probe_module, "read_prefix", few)
    whole = Probe(draft, on)
    assert "do not fit into memory: each probe runs all layers" in caplog.text
    assert figures(whole.baseline) == pytest.approx(figures(kept.baseline), abs=1e-6)
    for layer in (1, 2):
        expected = figures(kept.report_without(layer))
        assert figures(whole.report_without(layer)) == pytest.approx(expected, abs=1e-6)
    assert (whole.passes, kept.passes) == pytest.approx((2 * 0.75, 0.75))
    assert figures(whole.report_from(2)) == pytest.approx(figures(whole.baseline), abs=1e-6)


def test_where_gradients_do_not_fit_they_are_taken_layer_by_layer_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draft, sample = Draft(tiny_model()), answers(2)
    gates = [GateFisher(parts_of(draft.model, 32)) for _ in range(2)]
    expected = sensitivities(draft, sample, FOUR, gates=gates[0])
    few = fails_once(
        sensitivity_module._backward, lambda *_: sum(w.requires_grad for w in draft.model.parameters()) > 8
    )
    monkeypatch.setattr(sensitivity_module, "_backward", few)
    found = sensitivities(draft, sample, FOUR, gates=gates[1])
    assert "taken layer by layer, a pass for each" in caplog.text
    for one, other in zip(found, expected, strict=True):
        assert one.unit == other.unit
        assert (one.fisher, one.grad_over_weight) == pytest.approx((other.fisher, other.grad_over_weight), rel=1e-4)
    for one, other in zip(*(gate.parts() for gate in gates), strict=True):
        assert one.fisher == pytest.approx(other.fisher, rel=1e-4)


def test_other_errors_are_not_taken_for_a_lack_of_memory(on: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(probe_module, "read_prefix", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        Probe(Draft(tiny_model()), on)
