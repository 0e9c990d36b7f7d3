"""Drafts whose matrices are kept as two thin ones: what their folders hold, what a step reads, who takes them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from foredraft import trainings, verbs
from foredraft.checkpoint import FACTORS, MANIFEST, read_manifest, record_measurement
from foredraft.core.errors import ModelError, RecipeError
from foredraft.core.law import SamplingLaw
from foredraft.core.pair import PairFacts
from foredraft.core.runtimes import RUNTIMES, verdict
from foredraft.drafters import load_drafter
from foredraft.export.transformers import export_transformers
from foredraft.factoring import low_rank_draft
from foredraft.models.beside import hold_once
from foredraft.models.causal_lm import load_causal_lm_drafter
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.factored import FactoredLinear
from foredraft.models.facts import read_side
from foredraft.models.made_for import blank_manifest
from foredraft.models.target import LocalTarget, load_target
from foredraft.steps import DistillStep, InitStep, LowRankStep
from foredraft.trace.store import Trace
from tests.test_compress_probe import made_trace
from tests.tiny import save_tiny, tiny_model

TOKENS = torch.arange(3, 40)[None]
UNITS = "layers.*.[dg]*"  # down and gate_up
MATRICES = 2 * 3


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LocalTarget, Trace]:
    """Return a folder with draft, dense and factored in it: a draft, and twins of rank 8 in two forms."""
    root = tmp_path_factory.mktemp("factored")
    target = load_target(str(save_tiny(root / "target", family="qwen2")), "float32")
    draft = Draft(tiny_model(family="qwen2", num_layers=2, seed=1))
    save_draft(draft, root / "draft", blank_manifest(target, "causal-lm"), target.tokenizer)
    facts = {"tokenizer_fingerprint": target.tokenizer_fingerprint, "target_fingerprint": target.fingerprint}
    trace = made_trace(root / "trace", **facts)
    for form in ("dense", "factored"):
        step = LowRankStep(units=UNITS, rank=8, by="weights", form=form)
        low_rank_draft(root / "draft", target, [], step, root / form)
    return root, target, trace


def factors(draft: Draft) -> dict[str, FactoredLinear]:
    return {name: module for name, module in draft.model.named_modules() if isinstance(module, FactoredLinear)}


@torch.no_grad()
def test_a_folder_holds_the_factors_bit_for_bit_and_says_what_the_dense_one_says(workshop: tuple) -> None:
    root, _, _ = workshop
    stored, draft = load_file(root / "factored" / FACTORS), load_draft(root / "factored", "float32")
    held = draft.model.state_dict()
    assert all(torch.equal(tensor, held[name]) for name, tensor in stored.items())
    assert len(factors(draft)) == MATRICES
    assert all(module.inner.weight.shape[0] == 8 for module in factors(draft).values())
    assert not {f"{name}.weight" for name in factors(draft)} & set(stored)
    assert draft.model.lm_head.weight is draft.model.model.embed_tokens.weight
    dense = load_draft(root / "dense", "float32").model(TOKENS).logits
    torch.testing.assert_close(draft.model(TOKENS).logits, dense, rtol=1e-4, atol=1e-4)


def test_a_step_reads_the_factors_and_not_the_matrices(workshop: tuple) -> None:
    root, _, _ = workshop
    thin, dense = (load_causal_lm_drafter(root / form, "float32") for form in ("factored", "dense"))
    cuts = read_manifest(root / "factored").options["low_rank"]
    spared = sum(cut["dense"] - cut["parameters"] for cut in cuts)
    assert spared == MATRICES * (64 * 32 - 8 * (64 + 32))
    assert dense.num_parameters - thin.num_parameters == spared
    assert dense.num_bytes - thin.num_bytes == 4 * spared
    assert dense.passes.weight_bytes - thin.passes.weight_bytes == 4 * spared
    assert dense.passes.flops_per_token - thin.passes.flops_per_token == 2 * spared


def test_it_drafts_and_replays_as_its_dense_twin(workshop: tuple) -> None:
    root, _, trace = workshop
    thin, dense = (load_causal_lm_drafter(root / form, "float32") for form in ("factored", "dense"))
    answers = [row.answer() for row in trace.rows(tops=False)][:3]
    for one, other in zip(thin.replay(answers, 3), dense.replay(answers, 3), strict=True):
        torch.testing.assert_close(one.probs, other.probs, rtol=1e-3, atol=1e-5)
    greedy = SamplingLaw(temperature=0.0)
    proposals = [
        drafter.bind(greedy).propose(TOKENS[0], 6, torch.Generator().manual_seed(0)) for drafter in (thin, dense)
    ]
    assert proposals[0].token_ids.tolist() == proposals[1].token_ids.tolist()
    drawn = thin.propose(TOKENS[0], 4, torch.Generator().manual_seed(0))
    assert len(drawn.token_ids) == 4


@pytest.mark.slow
def test_training_moves_both_factors_and_keeps_their_rank(workshop: tuple, tmp_path: Path) -> None:
    root, target, trace = workshop
    step = DistillStep(loss={"tvd_plus_plus": 1.0}, tokens=60, batch_tokens=30, learning_rate=1e-2)
    trainings.distill_draft(root / "factored", target, [trace], step, tmp_path / "healed")
    before, after = (factors(load_draft(path, "float32")) for path in (root / "factored", tmp_path / "healed"))
    assert set(before) == set(after)
    for name, module in after.items():
        assert module.inner.weight.shape == before[name].inner.weight.shape
        assert not torch.equal(module.inner.weight, before[name].inner.weight)
        assert not torch.equal(module.outer.weight, before[name].outer.weight)


@pytest.mark.slow
@torch.no_grad()
def test_an_export_is_dense_and_says_what_that_costs(workshop: tuple, tmp_path: Path) -> None:
    root, target, _ = workshop
    source = root / "factored"
    measured = read_manifest(source).measured
    record_measurement(source, {"T=0": {"best_k": 3}})
    export_transformers(source, target, 3, tmp_path / "plain")
    record_measurement(source, measured)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / FACTORS).exists()
    thin = load_draft(source, "float32").model(TOKENS).logits
    torch.testing.assert_close(stock(TOKENS).logits, thin, rtol=1e-4, atol=1e-4)
    before, after = (load_causal_lm_drafter(root / form, "float32").passes for form in ("factored", "dense"))
    card = (tmp_path / "plain" / "README.md").read_text()
    bytes_ = f"reads {after.weight_bytes / 1e6:.1f} MB instead of {before.weight_bytes / 1e6:.1f} and is no faster"
    assert f"{MATRICES} matrices that foredraft keeps as two thin ones" in card
    assert bytes_ in card
    assert read_manifest(tmp_path / "plain").measured == {}, "a step costs more there than where it was measured"


def test_no_other_program_takes_the_folder_for_a_model_that_lacks_weights(workshop: tuple) -> None:
    root, target, _ = workshop
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(root / "factored")
    sides = [read_side(str(path)).facts for path in (target.path, root / "factored")]
    pair = PairFacts.of(*sides, 1.0, True, "")
    refused = {name for name in RUNTIMES if verdict(name, pair).outcome == "refused"}
    assert refused == set(RUNTIMES) - {"foredraft"}
    findings = [finding for name in refused for finding in verdict(name, pair).findings if finding.refuses]
    assert all("The draft holds factors in the place of matrices" in finding.reason for finding in findings)
    assert all("foredraft export DRAFT" in finding.fix for finding in findings)


def test_factors_that_hold_more_than_their_matrix_are_refused(workshop: tuple, tmp_path: Path) -> None:
    root, target, _ = workshop
    step = LowRankStep(units="layers.*.o", rank=16, by="weights", form="factored")
    with pytest.raises(RecipeError, match=r"two factors of rank 16 hold 1,024 weights, .*o_proj itself 1,024"):
        low_rank_draft(root / "draft", target, [], step, tmp_path / "out")


def test_layers_are_not_taken_from_factors(workshop: tuple, tmp_path: Path) -> None:
    root, target, trace = workshop
    step = InitStep(source=str(root / "factored"), layers="first-2")
    with pytest.raises(ModelError, match="holds factors: start from the draft that they were cut from"):
        verbs.init_draft(target, [trace], step, tmp_path / "out")


@pytest.mark.slow
def test_a_factor_that_is_missing_or_of_another_model_is_named(workshop: tuple, tmp_path: Path) -> None:
    root, target, _ = workshop
    draft = load_draft(root / "factored", "float32")

    def damaged(change: object) -> Path:
        folder = tmp_path / change.__name__
        save_draft(draft, folder, blank_manifest(target, "causal-lm"), target.tokenizer)
        weights = load_file(folder / FACTORS)
        change(weights)
        save_file(weights, folder / FACTORS, {"format": "pt"})
        return folder

    def lost(weights: dict) -> None:
        del weights["model.layers.1.mlp.down_proj.outer.weight"]

    def foreign(weights: dict) -> None:
        weights["model.layers.9.mlp.down_proj.inner.weight"] = torch.zeros(8, 64)

    with pytest.raises(
        ModelError, match=r"lacks model\.layers\.1\.mlp\.down_proj\.outer\.weight.*Make the draft again"
    ):
        load_draft(damaged(lost))
    with pytest.raises(ModelError, match=r"holds model\.layers\.9\.mlp\.down_proj\.inner\.weight, which config"):
        load_draft(damaged(foreign))
    assert (tmp_path / "lost" / MANIFEST).is_file()


@pytest.mark.slow
def test_what_a_draft_has_in_common_with_its_target_is_held_once(workshop: tuple, tmp_path: Path) -> None:
    root, target, _ = workshop
    draft = load_draft(root / "factored", "float32")
    ends = [target.model.get_input_embeddings().weight, draft.model.get_input_embeddings().weight]
    assert ends[0].data_ptr() != ends[1].data_ptr()
    draft.model.get_input_embeddings().weight.data = ends[0].data.clone()
    save_draft(draft, tmp_path / "near", blank_manifest(target, "causal-lm"), target.tokenizer)
    near, other = (load_drafter(str(path), target) for path in (tmp_path / "near", root / "factored"))
    alone = load_causal_lm_drafter(tmp_path / "near", "float32")
    assert near.draft.model.lm_head.weight.data_ptr() == ends[0].data_ptr()
    assert other.draft.model.lm_head.weight.data_ptr() != ends[0].data_ptr()
    assert near.passes == alone.passes
    with torch.no_grad():
        assert torch.equal(near.draft.model(TOKENS).logits, alone.draft.model(TOKENS).logits)
    assert hold_once(alone.draft.model, target.model) == ends[0].numel() * 4
    assert hold_once(alone.draft.model, target.model) == 0
