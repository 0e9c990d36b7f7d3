"""Laws of drafts in the formats of bitsandbytes; those that run it need the package, and are skipped without."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from foredraft import compressing
from foredraft.compress.bnb import quantize_bnb
from foredraft.core.errors import CheckpointError, MissingExtraError, ModelError
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.kept_packing import keep_packing
from foredraft.models.made_for import blank_manifest
from foredraft.models.reopened import logits_of, refuse_changed_logits
from foredraft.models.target import load_target
from foredraft.steps import QuantizeStep
from tests.tiny import save_tiny, tiny_model

TOKENS = torch.arange(3, 40)[None]
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


def test_the_package_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError, match=r"nf4 and llm-int8 need the package bitsandbytes: pip install"):
        quantize_bnb(tmp_path, Draft(tiny_model()), "nf4")


def test_what_bitsandbytes_chooses_itself_cannot_be_set() -> None:
    assert QuantizeStep(format="nf4").format == "nf4"
    with pytest.raises(ValidationError, match="nf4 rounds the whole body its own way: leave out bits"):
        QuantizeStep(format="nf4", bits=4)


@needs_bitsandbytes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["nf4", "llm-int8"])
def test_a_draft_reloads_as_it_was_and_is_not_written_twice(kind: str, tmp_path: Path) -> None:
    target = load_target(str(save_tiny(tmp_path / "target", hidden=64)), "float32")
    save_draft(Draft(tiny_model(hidden=64)), tmp_path / "draft", blank_manifest(target, "causal-lm"), target.tokenizer)
    manifest = compressing.quantize_draft(tmp_path / "draft", target, [], QuantizeStep(format=kind), tmp_path / "out")
    assert {unit["format"] for unit in manifest.options["units"]} == {kind, "float32"}
    before, after = logits_of(tmp_path / "draft", TOKENS), logits_of(tmp_path / "out", TOKENS)
    assert not torch.equal(before, after)
    assert float(torch.corrcoef(torch.stack([before.flatten(), after.flatten()]))[0, 1]) > 0.4
    again = load_draft(tmp_path / "out", "float32")
    with torch.no_grad():
        again.model(TOKENS)
    facts = (blank_manifest(target, "causal-lm"), target.tokenizer, refuse_changed_logits)
    with pytest.raises(ModelError, match=r"go on from the draft that they were made from"):
        save_draft(again, tmp_path / "again", *facts)
    assert torch.allclose(logits_of(tmp_path / "out", TOKENS), after, atol=1e-4)
    with pytest.raises(ModelError, match="quantized already"):
        compressing.quantize_draft(tmp_path / "out", target, [], QuantizeStep(), tmp_path / "other")


@needs_bitsandbytes
@pytest.mark.filterwarnings("ignore")
def test_what_a_pass_damages_is_found_before_it_is_kept(tmp_path: Path) -> None:
    """What bitsandbytes 0.50 saves behind a pass on a processor with AVX512-BF16, where nothing keeps it from that."""
    target = load_target(str(save_tiny(tmp_path / "target", hidden=64)), "float32")
    draft = quantize_bnb(tmp_path / "target", Draft(tiny_model(hidden=64)), "nf4")
    packs = [module for module in draft.model.modules() if type(module).__name__ == "Linear4bit"]
    assert not any(module.support_avx512bf16_for_cpu for module in packs)
    for module in packs:
        module.support_avx512bf16_for_cpu = True
    with torch.no_grad():
        draft.model(TOKENS)
    if not any(
        getattr(module.weight, "quant_state", None) and module.weight.quant_state.packing_format_for_cpu
        for module in packs
    ):
        pytest.skip("this processor packs nothing anew")
    with pytest.raises(CheckpointError, match="other logits once it is loaded from disk"):
        save_draft(
            draft, tmp_path / "out", blank_manifest(target, "causal-lm"), target.tokenizer, refuse_changed_logits
        )
    keep_packing(draft.model)


def test_widths_without_kernels_say_where_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.compress.bnb._require_package", lambda: None)
    model = tiny_model(hidden=40)
    with pytest.raises(ModelError, match=r"outputs in multiples of 32, and .*q_proj has 40: .*a GPU"):
        quantize_bnb(tmp_path, Draft(model), "nf4")
