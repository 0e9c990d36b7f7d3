"""Laws of a draft exported for transformers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from foredraft.checkpoint import MANIFEST, DraftManifest, read_manifest, record_measurement, verify_draft
from foredraft.compress.quantize import quantize_int8
from foredraft.core.errors import CheckpointError, ModelError, OutputError, VocabMismatchError
from foredraft.export import folder as exporter
from foredraft.export.card import inherited_licence
from foredraft.export.reopen import refuse_changed_tensors
from foredraft.export.transformers import export_transformers
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.layers import keep_layers
from foredraft.models.loading import load_causal_lm
from foredraft.models.target import LocalTarget, load_target
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer

KEPT = torch.tensor([0, 1, 2, *range(30, 130)])
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> LocalTarget:
    return load_target(str(tiny_target_folder), "float32")


def manifest_for(target: LocalTarget, **more: object) -> DraftManifest:
    facts = {
        "kind": "causal-lm",
        "vocab_size": target.vocab_size,
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "tokenizer_fingerprint": target.tokenizer_fingerprint,
        "steps": ({"init": {"layers": "first-2"}}, {"distill": {"tokens": 1000}}),
        "training_tokens": 1234,
    }
    return DraftManifest(**{**facts, **more})


@pytest.fixture(scope="module")
def draft_folder(target: LocalTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two layers of the target, with a trimmed head."""
    folder = tmp_path_factory.mktemp("drafts") / "prefix"
    save_draft(Draft(keep_layers(target.model, [0, 1]), KEPT), folder, manifest_for(target), target.tokenizer)
    return folder


@pytest.fixture(scope="module")
def exported(draft_folder: Path, target: LocalTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exports") / "prefix"
    export_transformers(draft_folder, target, 3, out)
    return out


def greedy(model: PreTrainedModel, **more: object) -> list[int]:
    prompt = torch.tensor([[1, 40, 50, 60, 70]])
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, **more}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0].tolist()


def count_calls(model: PreTrainedModel) -> list[int]:
    """Return a list that grows by one entry, the number of positions, whenever the model runs."""
    calls: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return calls


def test_the_folder_loads_in_stock_transformers_with_its_whole_head(exported: Path, draft_folder: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(exported)
    draft = load_draft(draft_folder, "float32")
    tokens = torch.arange(3, 60)[None]
    assert stock(tokens).logits.shape[-1] == 272
    assert torch.equal(stock(tokens).logits, draft.model(tokens).logits)
    assert not (exported / "head_token_ids.safetensors").exists()
    assert (draft_folder / "head_token_ids.safetensors").exists()
    assert len(load_draft(exported, "float32").head_token_ids) == 0
    assert read_manifest(exported).options["head_rows"] == 0


def test_assisted_greedy_text_is_the_targets_own(exported: Path, tiny_target_folder: Path) -> None:
    own, assistant = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tiny_target_folder, exported))
    plain = greedy(own)
    calls = count_calls(assistant)
    assert greedy(own, assistant_model=assistant) == plain
    assert len(calls) >= 3


def test_every_call_offers_exactly_k_tokens(target: LocalTarget, tmp_path: Path) -> None:
    """A draft that is the target is never refused: each call checks k tokens and emits k + 1."""
    save_draft(Draft(target.model), tmp_path / "draft", manifest_for(target), target.tokenizer)
    export_transformers(tmp_path / "draft", target, 5, tmp_path / "out")
    own, assistant = (AutoModelForCausalLM.from_pretrained(tmp_path / "out") for _ in range(2))
    calls = count_calls(own)
    greedy(own, assistant_model=assistant)
    assert calls == [5 + 5, 1 + 5, 1 + 5, 1 + 5]


def test_generation_config_carries_the_plan_and_the_targets_stops(exported: Path, target: LocalTarget) -> None:
    settings = json.loads((exported / "generation_config.json").read_text())
    del settings["transformers_version"]
    settings.pop("_from_model_config", None)
    assert settings == {
        "eos_token_id": target.model.generation_config.eos_token_id,
        "pad_token_id": 0,
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def test_tokenizer_files_are_the_targets_byte_for_byte(target: LocalTarget, draft_folder: Path, tmp_path: Path) -> None:
    """Even where transformers itself would write them differently."""
    folder = save_tiny(tmp_path / "target")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "added_by_hand": "kept"}, indent=7))
    export_transformers(draft_folder, load_target(str(folder), "float32"), 3, tmp_path / "out")
    names = {path.name for path in folder.iterdir()} - {"config.json", "generation_config.json", "model.safetensors"}
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes(), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("hey ho").input_ids == target.tokenizer("hey ho").input_ids


def test_a_target_without_tokenizer_files_gives_what_its_tokenizer_saves(
    tiny_target_folder: Path, draft_folder: Path, tmp_path: Path
) -> None:
    loaded = load_causal_lm(str(tiny_target_folder), "float32")
    for number, path in enumerate([Path(), tmp_path / "target.gguf"]):
        if path.suffix:
            write_licensed_gguf(path, "mit")
        out = tmp_path / f"out-{number}"
        export_transformers(draft_folder, LocalTarget(replace(loaded, path=path)), 3, out)
        loaded.tokenizer.save_pretrained(tmp_path / "saved")
        saved = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
        named = json.loads((out / "tokenizer_config.json").read_text())
        # transformers 4 does not know the class name that transformers 5 writes.
        assert (saved.pop("tokenizer_class"), named.pop("tokenizer_class")) == (
            "TokenizersBackend", "PreTrainedTokenizerFast",
        )  # fmt: skip
        assert named == saved
        assert (out / "tokenizer.json").read_bytes() == (tmp_path / "saved" / "tokenizer.json").read_bytes()
        assert ("license: mit" in (out / "README.md").read_text()) == bool(path.suffix)


def test_every_tensor_is_there_once(exported: Path, draft_folder: Path) -> None:
    written = load_file(exported / "model.safetensors")
    held = load_draft(draft_folder, "float32").model.state_dict()
    assert set(written) == set(held) - {"lm_head.weight"}
    assert all(torch.equal(tensor, held[name]) for name, tensor in written.items())
    assert verify_draft(exported).files.keys() >= {"model.safetensors", "config.json", "README.md", "tokenizer.json"}


def test_an_int8_draft_leaves_as_integers_and_assists(draft_folder: Path, target: LocalTarget, tmp_path: Path) -> None:
    draft = quantize_int8(load_draft(draft_folder, "float32"), 16)
    save_draft(draft, tmp_path / "draft", manifest_for(target), target.tokenizer)
    export_transformers(tmp_path / "draft", target, 2, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    stock, own = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), target.model
    assert greedy(own, assistant_model=stock) == greedy(own)


def test_the_stored_precision_is_kept(target: LocalTarget, tmp_path: Path) -> None:
    draft = Draft(tiny_model(num_layers=1).bfloat16())
    save_draft(draft, tmp_path / "draft", manifest_for(target), target.tokenizer)
    export_transformers(tmp_path / "draft", target, 2, tmp_path / "out")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_a_draft_made_elsewhere_leaves_too(tiny_draft_folder: Path, target: LocalTarget, tmp_path: Path) -> None:
    manifest = export_transformers(tiny_draft_folder, target, 2, tmp_path / "out")
    assert manifest.target_fingerprint == target.fingerprint
    assert "Not by foredraft." in (tmp_path / "out" / "README.md").read_text()


def test_the_card_says_what_was_measured_and_its_three_lines_run(
    draft_folder: Path, target: LocalTarget, tiny_target_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "draft"
    save_draft(load_draft(draft_folder, "float32"), folder, manifest_for(target), target.tokenizer)
    entry = {
        "expected_acceptance": 0.6123,
        "mean_tokens_per_call": {"3": 2.25},
        "predicted_speedup": {"3": 1.4142},
        "prompts": 48,
    }
    record_measurement(folder, {"T=0": entry})
    manifest = export_transformers(folder, target, 3, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| T=0 | 0.612 | 2.25 | 1.41x | 48 |" in card
    assert f"computes only {len(KEPT)} rows of the head" in card
    assert '1. init: `{"layers": "first-2"}`' in card
    assert "Trained on 1,234 tokens" in card
    assert manifest.measured == {}
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    assert len(code.strip().splitlines()) == 3
    own = AutoModelForCausalLM.from_pretrained(tiny_target_folder)
    plain, calls = greedy(own), count_calls(own)
    inputs = {"input_ids": torch.tensor([plain[:5]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    inputs |= {"max_new_tokens": 6, "do_sample": False}
    exec(code.replace("path/to/this/folder", str(tmp_path / "out")), {"target": own, "inputs": inputs})
    assert calls


def test_the_licence_is_the_targets(tmp_path: Path) -> None:
    write_licensed_gguf(tmp_path / "model.gguf", "apache-2.0")
    assert inherited_licence(tmp_path / "model.gguf") == "apache-2.0"
    assert inherited_licence(tmp_path) == ""
    (tmp_path / "README.md").write_text("---\nlicense: llama3.2\ntags: [a]\n---\n# A model\n")
    assert inherited_licence(tmp_path) == "llama3.2"
    (tmp_path / "README.md").write_text("# A model without any front matter\n")
    assert inherited_licence(tmp_path) == ""
    assert inherited_licence(Path()) == ""


def write_licensed_gguf(path: Path, licence: str) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_license(licence)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_an_existing_folder_is_refused_and_kept(draft_folder: Path, target: LocalTarget, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="never overwritten"):
        export_transformers(draft_folder, target, 3, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("stage", ["write_tokenizer", "model_card", "refuse_changed_step"])
def test_an_export_that_fails_leaves_nothing(
    stage: str, draft_folder: Path, target: LocalTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporter, stage, fail)
    with pytest.raises(OutputError, match="No space left"):
        export_transformers(draft_folder, target, 3, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("lost", "model.layers.1.mlp.up_proj.weight is stored 0 times"),
        ("added", "model.extra is no tensor of the model"),
        ("changed", "model.norm.weight differs"),
        ("narrowed", "model.norm.weight differs"),
        ("doubled", "is stored 2 times"),
    ],
)
def test_a_tensor_that_is_not_what_is_in_memory_is_found(fault: str, message: str, tmp_path: Path) -> None:
    model = tiny_model(num_layers=2)
    model.save_pretrained(tmp_path)
    refuse_changed_tensors(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    match fault:
        case "lost":
            del tensors["model.layers.1.mlp.up_proj.weight"]
        case "added":
            tensors["model.extra"] = torch.zeros(1)
        case "changed":
            tensors["model.norm.weight"][3] += 1e-6
        case "narrowed":
            tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
        case "doubled":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        refuse_changed_tensors(tmp_path, model)


def test_a_tokenizer_that_cuts_differently_is_found(
    draft_folder: Path, target: LocalTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        exporter, "write_tokenizer", lambda folder, _: tiny_tokenizer(("extra",)).save_pretrained(folder)
    )
    with pytest.raises(CheckpointError, match="its tokenizer is not that of tiny-target"):
        export_transformers(draft_folder, target, 3, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_transformers_cannot_take_is_refused(target: LocalTarget, tmp_path: Path) -> None:
    save_tiny(tmp_path / "narrow", vocab_size=256)
    with pytest.raises(VocabMismatchError, match="has 256 rows, 272 are asked for, and the tokenizer has 259 tokens"):
        export_transformers(tmp_path / "narrow", target, 3, tmp_path / "out")
    other = manifest_for(target, tokenizer_fingerprint="0" * 16)
    save_draft(Draft(tiny_model(num_layers=1)), tmp_path / "other", other, target.tokenizer)
    with pytest.raises(VocabMismatchError, match="was made for tiny-target .* tokenizer 00000000.*, not for"):
        export_transformers(tmp_path / "other", target, 3, tmp_path / "out")
    (tmp_path / "table").mkdir()
    text = (tmp_path / "other" / MANIFEST).read_text().replace("0" * 16, target.tokenizer_fingerprint)
    (tmp_path / "table" / MANIFEST).write_text(text.replace('"causal-lm"', '"ngram"'))
    with pytest.raises(ModelError, match="drafter of kind ngram"):
        export_transformers(tmp_path / "table", target, 3, tmp_path / "out")
    with pytest.raises(ModelError, match=r"neither foredraft\.json nor config\.json"):
        export_transformers(tmp_path, target, 3, tmp_path / "out")
    assert not (tmp_path / "out").exists()
