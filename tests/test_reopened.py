"""A draft that was written gives, in a new process, the logits that were measured; else it is not kept."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft import compressing, factoring
from foredraft.compress.quantize import quantize
from foredraft.core.errors import CheckpointError
from foredraft.models import reopened
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.made_for import blank_manifest
from foredraft.models.target import LocalTarget, load_target
from foredraft.steps import LowRankStep, PruneStep, QuantizeStep
from foredraft.trace.store import Trace
from tests.test_compress_probe import made_trace
from tests.tiny import save_tiny, tiny_model


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LocalTarget, Trace]:
    root = tmp_path_factory.mktemp("reopened")
    target = load_target(str(save_tiny(root / "target")), "float32")
    save_draft(Draft(tiny_model()), root / "draft", blank_manifest(target, "causal-lm"), target.tokenizer)
    return root / "draft", target, made_trace(root / "trace", tokenizer_fingerprint=target.tokenizer_fingerprint)


@pytest.mark.slow
def test_every_operation_is_reloaded_in_a_process_of_its_own(
    workshop: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(reopened.HERE)
    source, target, trace = workshop
    plan = QuantizeStep(bits={"layers.0.*": 8, "layers.*": 4, "head": 4}, plain="bfloat16")
    compressing.quantize_draft(source, target, [trace], plan, tmp_path / "rounded")
    compressing.prune_draft(source, target, [trace], PruneStep(layers=1, ffn=32), tmp_path / "cut")
    factoring.low_rank_draft(source, target, [trace], LowRankStep(rank=8), tmp_path / "thin")
    factors = LowRankStep(rank=8, form="factored")
    factoring.low_rank_draft(source, target, [trace], factors, tmp_path / "thinner")
    token_ids = torch.arange(3, 20)[None]
    for name in ("rounded", "cut", "thin", "thinner"):
        here = reopened.logits_of(tmp_path / name, token_ids)
        assert torch.allclose(reopened.logits_in_new_process(tmp_path / name, token_ids), here, atol=1e-5)
    (tmp_path / "cut" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded in a new process: .*no model folder"):
        reopened.logits_in_new_process(tmp_path / "cut", token_ids)


@pytest.mark.parametrize("formats", [{}, {"layers.0.down": WeightFormat(4, 32), "layers.1.o": WeightFormat(8, 0)}])
def test_a_file_that_is_not_what_was_in_memory_is_not_kept(formats: dict, workshop: tuple, tmp_path: Path) -> None:
    source, target, _ = workshop
    draft = load_draft(source, "float32")
    draft = quantize(draft, formats) if formats else draft
    manifest = blank_manifest(target, "causal-lm")

    def damage(folder: Path, model: torch.nn.Module) -> None:
        reopened.refuse_changed_logits(folder, model)
        file = folder / "model.safetensors"
        weights = load_file(file)
        weights["model.layers.2.mlp.up_proj.weight"] *= 1.05
        save_file(weights, file, {"format": "pt"})
        reopened.refuse_changed_logits(folder, model)

    with pytest.raises(CheckpointError, match=r"other logits once it is loaded from disk: .* Nothing was kept"):
        save_draft(draft, tmp_path / "out", manifest, target.tokenizer, damage)
    assert not (tmp_path / "out").exists()


def test_a_draft_in_bfloat16_is_compared_in_float32_and_left_as_it_was(tmp_path: Path) -> None:
    model = tiny_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "draft")
    loaded = load_draft(tmp_path / "draft", "bfloat16").model
    reopened.refuse_changed_logits(tmp_path / "draft", loaded)
    assert loaded.dtype == torch.bfloat16
