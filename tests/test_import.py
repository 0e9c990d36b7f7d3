"""Drafts made elsewhere: folders and GGUF files are scored beside ours, heads of other trainers are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.check import check_pair
from foredraft.core.errors import CapabilityError, ModelError, VocabMismatchError
from foredraft.core.law import GREEDY
from foredraft.core.pair import CUT_OTHERWISE
from foredraft.drafters import load_drafter
from foredraft.export.llamacpp import FILE, export_llamacpp
from foredraft.export.transformers import export_transformers
from foredraft.lineage import manifest_for
from foredraft.models.foreign import foreign_head
from foredraft.models.target import load_target
from tests.test_export_gguf import save_named
from tests.tiny import save_tiny

SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "their/target"}},
    "draft_vocab_size": 64,
}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (SPECULATORS, "eagle3 (speculators)"),
        ({"speculators_config": {"algorithm": "dflash"}}, "dflash (speculators)"),
        ({"model_type": "medusa"}, "medusa"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "LlamaForCausalLMEagle3"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": 64}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, ""),
    ],
)
def test_heads_of_other_trainers_are_recognised(config: dict[str, Any], kind: str) -> None:
    assert foreign_head(config) == kind


def test_a_head_is_named_by_check_and_refused_by_scoring(tiny_target_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SPECULATORS))
    found = check_pair(str(tiny_target_folder), str(folder))
    assert not found.is_usable
    message = "draft head of kind eagle3 (speculators), which reads hidden states of its target their/target"
    assert message in found.pair.draft.fault
    with pytest.raises(CapabilityError, match="it is recognised, but only drafts that run alone are scored here"):
        load_drafter(str(folder), load_target(str(tiny_target_folder), "float32"))


@pytest.mark.parametrize("broken", ['{"speculators_config": "eagle3"}', '{"architectures": 3}', "[]", "{"])
def test_a_config_of_other_contents_is_named(broken: str, tiny_target_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(broken)
    with pytest.raises(ModelError, match="is no model folder|cannot be loaded"):
        load_drafter(str(tmp_path), load_target(str(tiny_target_folder), "float32"))


def test_the_same_tokens_cut_otherwise_are_named_alike_everywhere(tiny_target_folder: Path, tmp_path: Path) -> None:
    """By scoring, by what makes drafts of drafts, by export, and by check."""
    save_tiny(tmp_path / "draft", num_layers=1)
    file = tmp_path / "draft" / "tokenizer.json"
    rules = json.loads(file.read_text())
    file.write_text(json.dumps({**rules, "pre_tokenizer": {**rules["pre_tokenizer"], "use_regex": True}}))
    target, draft = load_target(str(tiny_target_folder), "float32"), tmp_path / "draft"
    for refuse in (
        lambda: load_drafter(str(draft), target),
        lambda: manifest_for(draft, target),
        lambda: export_transformers(draft, target, 3, tmp_path / "out"),
    ):
        with pytest.raises(VocabMismatchError, match=f"the tokens of tiny-target: {CUT_OTHERWISE.reason}"):
            refuse()
    found = check_pair(str(tiny_target_folder), str(draft), ["vllm"])
    assert CUT_OTHERWISE in found.findings
    (here,) = (one for one in found.verdicts if one.runtime == "foredraft")
    assert [(finding.reason, finding.refuses) for finding in here.findings] == [(CUT_OTHERWISE.reason, True)]


def test_a_folder_and_its_gguf_file_guess_alike(tmp_path: Path) -> None:
    target = load_target(str(save_named(tmp_path / "target")), "float32")
    folder = save_named(tmp_path / "draft", num_layers=1, seed=1)
    export_llamacpp(folder, target, 3, tmp_path / "gguf", type="f32")
    one, other = (load_drafter(str(path), target).bind(GREEDY) for path in (folder, tmp_path / "gguf" / FILE))
    text = torch.arange(20, 60)
    guesses = [drafter.propose(text, 5, torch.Generator()).token_ids for drafter in (one, other)]
    assert torch.equal(*guesses)
