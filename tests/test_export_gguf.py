"""Laws of a draft exported for llama.cpp: what foredraft reads back is the draft, with the target's tokenizer."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter, dequantize
from tokenizers import models, normalizers, pre_tokenizers

from foredraft.compress.quantize import quantize
from foredraft.core.errors import CheckpointError, ModelError, OutputError, UserError, VocabMismatchError
from foredraft.export import llamacpp
from foredraft.export.gguf_file import refuse_changed_file, write_gguf
from foredraft.export.gguf_tensors import TYPES, stored_tensors
from foredraft.export.gguf_vocabulary import pre_tokenizer_name, vocabulary_fields
from foredraft.export.llamacpp import export_llamacpp
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft, save_draft
from foredraft.models.loading import load_causal_lm
from foredraft.models.made_for import blank_manifest
from foredraft.models.target import LocalTarget, load_target
from tests.test_models_gguf import _write_gguf as write_by_hand
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer


def save_named(folder: Path, **options: object) -> Path:
    """A tiny target whose tokenizer cuts text as SmolLM's does, and joins two digits."""
    save_tiny(folder, **options)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    cut = {"type": "Digits", "individual_digits": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [cut, level]}
    tokenizer["model"]["vocab"]["12"] = 259
    tokenizer["model"]["merges"] = [["1", "2"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LocalTarget:
    return load_target(str(save_named(tmp_path_factory.mktemp("models") / "tiny-named")), "float32")


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", False)])
def test_what_is_written_is_what_is_read(target: LocalTarget, tmp_path: Path, family: str, tied: bool) -> None:
    model = tiny_model(num_layers=2, family=family, tied=tied, seed=3)
    write_gguf(model, tmp_path / "tiny.gguf", vocabulary_fields(target), "tiny", "mit", "f32")
    again = load_causal_lm(str(tmp_path / "tiny.gguf"), "float32")
    assert again.tokenizer_fingerprint == target.tokenizer_fingerprint or family == "qwen2"
    assert again.model.config.model_type == family
    for name, weight in model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], weight), name


def test_heads_that_are_narrowed_are_read_as_narrow(target: LocalTarget, tmp_path: Path) -> None:
    config = tiny_model(num_layers=1).config
    config.head_dim = 4
    model = type(tiny_model(num_layers=1))(config).eval()
    write_gguf(model, tmp_path / "tiny.gguf", vocabulary_fields(target), "tiny", default="f32")
    again = load_causal_lm(str(tmp_path / "tiny.gguf"), "float32").model
    text = torch.arange(5, 20)[None]
    assert torch.equal(again(text).logits, model(text).logits)


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_is_near_what_it_rounds(kind: str) -> None:
    model = tiny_model(num_layers=1)
    bound = {"f32": 0.0, "f16": 1e-3, "bf16": 8e-3, "q8_0": 1e-2}.get(kind, 0.2)
    for tensor in stored_tensors(model, kind, {}):
        values = tensor.data
        if values.dtype == np.uint8:
            values = dequantize(values, TYPES[tensor.type][0])
        assert tensor.type == (kind if tensor.weights.ndim == 2 else "f32")
        assert np.abs(values - tensor.weights).max() <= bound * np.abs(tensor.weights).max()


def test_a_map_of_types_reaches_the_matrices_it_names(target: LocalTarget, tmp_path: Path) -> None:
    types = {"model.layers.0.mlp.up_proj": "q4_0", "model.embed_tokens": "bf16"}
    stored = write_gguf(
        tiny_model(num_layers=1), tmp_path / "tiny.gguf", vocabulary_fields(target), "tiny", default="q8_0", types=types
    )
    assert (stored["blk.0.ffn_up.weight"], stored["token_embd.weight"]) == ("q4_0", "bf16")
    assert (stored["blk.0.ffn_down.weight"], stored["output_norm.weight"]) == ("q8_0", "f32")
    with pytest.raises(UserError, match="model.layers.7.mlp.up_proj is no matrix of the draft"):
        list(stored_tensors(tiny_model(num_layers=1), "f16", {"model.layers.7.mlp.up_proj": "f16"}))


def test_rows_that_fit_no_block_are_kept_in_f16() -> None:
    kinds = {tensor.name: tensor.type for tensor in stored_tensors(tiny_model(num_layers=1, hidden=24), "q8_0", {})}
    assert kinds["blk.0.ffn_up.weight"] == "f16"


def test_a_gguf_target_gives_its_own_tokenizer_fields(tmp_path: Path) -> None:
    path = write_by_hand(tmp_path / "target.gguf", tiny_model())
    theirs = load_target(str(path), "float32")
    save_tiny(tmp_path / "draft", num_layers=1)
    (tmp_path / "draft" / "tokenizer_config.json").unlink()
    export_llamacpp(tmp_path / "draft", theirs, 3, tmp_path / "out")
    given, written = (GGUFReader(file).fields for file in (path, tmp_path / "out" / "draft.gguf"))
    names = {name for name in given if name.startswith("tokenizer.")}
    assert names == {name for name in written if name.startswith("tokenizer.")}
    assert all(given[name].contents() == written[name].contents() for name in names)


def test_the_folder_says_how_it_is_served(target: LocalTarget, tmp_path: Path) -> None:
    save_tiny(tmp_path / "draft", num_layers=1)
    (tmp_path / "draft" / "tokenizer_config.json").unlink()
    export_llamacpp(tmp_path / "draft", target, 3, tmp_path / "out", type="q8_0")
    plan = json.loads((tmp_path / "out" / "foredraft-plan.json").read_text())
    card = (tmp_path / "out" / "README.md").read_text()
    assert plan["command"] in card
    assert "--spec-type draft-simple --spec-draft-n-max 3" in plan["command"]
    assert (plan["runtime"], plan["files"]["draft"]) == ("llama.cpp", "draft.gguf")
    assert load_causal_lm(str(tmp_path / "out" / "draft.gguf"), "float32").name == "draft"


def test_other_rules_of_cutting_text_are_refused(target: LocalTarget, tiny_target_folder: Path) -> None:
    backend = target.tokenizer.backend_tokenizer
    assert pre_tokenizer_name(backend) == "smollm"
    with pytest.raises(
        ModelError, match=re.escape("known are byte-level BPE cut as smollm, qwen2. Convert the target")
    ):
        vocabulary_fields(load_target(str(tiny_target_folder), "float32"))
    changed = tiny_tokenizer().backend_tokenizer
    changed.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    assert pre_tokenizer_name(changed) == "smollm"
    changed.normalizer = normalizers.NFC()
    with pytest.raises(ModelError, match="cannot be written as GGUF"):
        pre_tokenizer_name(changed)
    changed.normalizer, changed.model = None, models.WordLevel({"a": 0}, unk_token="a")
    with pytest.raises(ModelError, match="it is WordLevel behind"):
        pre_tokenizer_name(changed)


def test_what_llamacpp_does_not_hold_is_refused(target: LocalTarget, tmp_path: Path) -> None:
    def refused(**changes: object) -> str:
        model = tiny_model(num_layers=1)
        for name, value in changes.items():
            setattr(model.config, name, value)
        with pytest.raises(ModelError) as error:
            list(stored_tensors(model, "f16", {}))
        return str(error.value)

    assert "form of gpt2 is not written here, only llama and qwen2" in refused(model_type="gpt2")
    assert "positions are scaled (yarn)" in refused(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4})
    assert "activation is gelu, not silu" in refused(hidden_act="gelu")
    assert "heads are narrower" in refused(model_type="qwen2", head_dim=4)
    with pytest.raises(UserError, match="llama-quantize draft.gguf draft-q4_K_M.gguf q4_K_M"):
        export_llamacpp(tmp_path, target, 3, tmp_path / "out", type="q4_K_M")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fault", "message"), [("lost", "is missing"), ("added", "is no tensor"), ("changed", "differs")]
)
def test_a_file_that_is_not_what_was_to_be_written_is_found(
    fault: str, message: str, target: LocalTarget, tmp_path: Path
) -> None:
    model, path = tiny_model(num_layers=1), tmp_path / "tiny.gguf"
    write_gguf(model, path, vocabulary_fields(target), "tiny", default="q8_0")
    tensors = list(stored_tensors(model, "q8_0", {}))
    refuse_changed_file(path, tensors)
    match fault:
        case "lost":
            tensors.append(replace(tensors[0], name="blk.9.ffn_up.weight"))
        case "added":
            tensors.pop()
        case "changed":
            flipped = tensors[0].data.copy()
            flipped[9, 5] ^= 1
            tensors[0] = replace(tensors[0], data=flipped)
    with pytest.raises(CheckpointError, match=message):
        refuse_changed_file(path, tensors)


def test_an_export_that_fails_leaves_nothing(
    target: LocalTarget, tiny_draft_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: GGUFWriter, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    save_named(tmp_path / "draft", num_layers=1)
    monkeypatch.setattr(GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(OutputError, match="No space left on the disk"):
        export_llamacpp(tmp_path / "draft", target, 3, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept.txt").write_text("kept")
    with pytest.raises(OutputError, match="never overwritten"):
        export_llamacpp(tmp_path / "draft", target, 3, tmp_path / "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "mine"]
    assert llamacpp.FILE not in [path.name for path in (tmp_path / "mine").iterdir()]


def test_a_draft_of_other_tokens_is_refused(target: LocalTarget, tiny_draft_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(VocabMismatchError, match="token 259 is nothing here and '12' there"):
        export_llamacpp(tiny_draft_folder, target, 3, tmp_path / "out")


ROUNDED = {
    "layers.0.qkv": WeightFormat(4, 32),
    "layers.0.down": WeightFormat(4, 64),
    "layers.1.gate_up": WeightFormat(8, 0),
}


def test_a_rounded_draft_keeps_its_very_integers(target: LocalTarget, tmp_path: Path) -> None:
    draft = quantize(Draft(tiny_model(num_layers=2, seed=3)), ROUNDED)
    save_draft(draft, tmp_path / "draft", blank_manifest(target, "causal-lm"), target.tokenizer)
    export_llamacpp(tmp_path / "draft", target, 3, tmp_path / "out", "stored")
    read = load_causal_lm(str(tmp_path / "out" / "draft.gguf"), "float32").model
    types = {str(one.name): one.tensor_type.name for one in GGUFReader(tmp_path / "out" / "draft.gguf").tensors}
    assert (types["blk.0.attn_k.weight"], types["blk.1.ffn_up.weight"], types["blk.1.attn_q.weight"]) == (
        "Q4_0",
        "Q8_0",
        "F16",
    )
    for name in ("0.self_attn.q_proj", "0.self_attn.k_proj", "0.mlp.down_proj"):
        rounded = draft.model.get_submodule(f"model.layers.{name}").unpacked(torch.float32)
        assert torch.equal(read.get_submodule(f"model.layers.{name}").weight, rounded)
    eight = draft.model.model.layers[1].mlp.up_proj
    assert torch.equal(read.model.layers[1].mlp.up_proj.weight, eight.weight.float() * eight.weight_scale.float())


def test_types_by_unit_and_a_head_of_its_own(target: LocalTarget, tmp_path: Path) -> None:
    save_draft(
        Draft(tiny_model(num_layers=2)), tmp_path / "draft", blank_manifest(target, "causal-lm"), target.tokenizer
    )
    export_llamacpp(
        tmp_path / "draft", target, 3, tmp_path / "out", "q8_0", "layers.1.down=q4_1;layers.*.down=q5_0;head=q4_0"
    )
    types = {str(one.name): one.tensor_type.name for one in GGUFReader(tmp_path / "out" / "draft.gguf").tensors}
    assert [types[f"blk.{layer}.ffn_down.weight"] for layer in (0, 1)] == ["Q5_0", "Q4_1"]
    assert (types["token_embd.weight"], types["output.weight"], types["blk.0.attn_q.weight"]) == (
        "Q8_0",
        "Q4_0",
        "Q8_0",
    )
    export_llamacpp(tmp_path / "draft", target, 3, tmp_path / "tied", "q8_0", "layers.1.down=q4_1")
    assert not any(str(one.name) == "output.weight" for one in GGUFReader(tmp_path / "tied" / "draft.gguf").tensors)
    with pytest.raises(UserError, match="matches no unit"):
        export_llamacpp(tmp_path / "draft", target, 3, tmp_path / "no", "q8_0", "layers.7.*=q4_0")
