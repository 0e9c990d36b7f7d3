"""A draft folder: saved and loaded it is the same draft, and stock transformers reads it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from foredraft.checkpoint import DraftManifest, verify_draft
from foredraft.core.errors import CheckpointError, ModelError, OutputError
from foredraft.core.law import GREEDY
from foredraft.models.causal_lm import load_causal_lm_drafter
from foredraft.models.draft import HEAD_FILE, Draft, load_draft, save_draft
from foredraft.models.head import NO_IDS
from tests.tiny import tiny_model, tiny_tokenizer

MANIFEST = DraftManifest("causal-lm", 272, "tiny", "target-digest", "tokenizer-digest", law=GREEDY)
KEPT = torch.tensor([0, 1, 2, 10, 200])


def _save(path: Path, kept: torch.Tensor = NO_IDS, **options: object) -> Draft:
    draft = Draft(tiny_model(num_layers=1, **options), kept)
    save_draft(draft, path, MANIFEST, tiny_tokenizer())
    return draft


@pytest.mark.parametrize("kept", [NO_IDS, KEPT], ids=["full head", "trimmed head"])
@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load_is_the_identity(tmp_path: Path, kept: torch.Tensor, tied: bool) -> None:
    draft = _save(tmp_path / "draft", kept, tied=tied)
    back = load_draft(tmp_path / "draft", "float32")
    assert back.head_token_ids.tolist() == kept.tolist()
    for name, weight in draft.model.state_dict().items():
        assert torch.equal(back.model.state_dict()[name], weight)
    shared = back.model.get_output_embeddings().weight is back.model.get_input_embeddings().weight
    assert shared == tied
    assert ("lm_head.weight" in load_file(tmp_path / "draft" / "model.safetensors")) == (not tied)


def test_the_manifest_is_complete_and_names_the_head(tmp_path: Path) -> None:
    _save(tmp_path / "draft", KEPT)
    manifest = verify_draft(tmp_path / "draft")
    assert manifest.options == {"head_rows": len(KEPT)}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", HEAD_FILE} <= set(
        manifest.files
    )
    drafter = load_causal_lm_drafter(tmp_path / "draft")
    assert (drafter.law, drafter.vocab_size) == (GREEDY, 272)


def test_stock_transformers_loads_the_folder(tmp_path: Path) -> None:
    draft = _save(tmp_path / "draft", KEPT)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    text = torch.arange(5, 20)[None]
    with torch.no_grad():
        assert torch.equal(model(text).logits, draft.model(text).logits)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "draft")("ab12")["input_ids"] == tiny_tokenizer()("ab12")["input_ids"]
    )


def test_an_ordinary_folder_loads_with_its_full_head(tiny_draft_folder: Path) -> None:
    assert len(load_draft(tiny_draft_folder).head_token_ids) == 0


def test_a_draft_is_never_written_over_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="exists already and is never overwritten"):
        _save(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "rows", [torch.tensor([3, 1]), torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]])], ids=["order", "kind", "shape"]
)
def test_head_rows_that_make_no_sense_are_refused(tmp_path: Path, rows: torch.Tensor) -> None:
    _save(tmp_path / "draft", KEPT)
    save_file({"head_token_ids": rows}, tmp_path / "draft" / HEAD_FILE)
    with pytest.raises(CheckpointError, match=r"does not hold increasing token ids\. Make the draft again"):
        load_draft(tmp_path / "draft")


def test_head_rows_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    _save(tmp_path / "draft", KEPT)
    (tmp_path / "draft" / HEAD_FILE).write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_draft(tmp_path / "draft")


def test_head_rows_of_another_draft_are_refused(tmp_path: Path) -> None:
    _save(tmp_path / "draft", KEPT)
    save_file({"head_token_ids": torch.tensor([1, 999])}, tmp_path / "draft" / HEAD_FILE)
    with pytest.raises(ModelError, match="keeps token 999, the model has 272 rows"):
        load_causal_lm_drafter(tmp_path / "draft")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_finite_numbers_are_refused(tmp_path: Path, value: float) -> None:
    draft = Draft(tiny_model(num_layers=1))
    draft.model.model.layers[0].mlp.up_proj.weight.data[3, 5] = value
    save_draft(draft, tmp_path / "draft", MANIFEST, tiny_tokenizer())
    with pytest.raises(CheckpointError, match=r"no finite numbers, in model.layers.0.mlp.up_proj.weight. Make the"):
        load_draft(tmp_path / "draft", "float32")
