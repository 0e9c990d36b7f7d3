"""Targets as they are served: already quantized, or with a LoRA adapter."""

import json
import logging
import shutil
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.cli import main
from foredraft.compress.quantize import quantize_int8
from foredraft.core.errors import ModelError
from foredraft.core.law import GREEDY
from foredraft.models.draft import Draft
from foredraft.models.int8 import Int8Linear
from foredraft.models.loading import load_causal_lm
from foredraft.models.quantized import missing_package
from foredraft.models.target import load_target
from foredraft.trace.store import open_trace
from tests.made_up_costs import costs_as_said
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer

TEXT = torch.arange(3, 40)[None]


def save_adapter(folder: Path, base: Path, seed: int = 0, **options: object) -> Path:
    """Write a LoRA adapter with random weights as peft does."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base)
        settings = {
            "r": 4,
            "target_modules": ["q_proj", "v_proj"],
            "init_lora_weights": False,
            "task_type": "CAUSAL_LM",
        }
        peft.get_peft_model(model, peft.LoraConfig(**(settings | options))).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapters") / "tuned", tiny_target_folder)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TEXT).logits


def test_a_merged_adapter_says_what_the_kept_one_says(tiny_target_folder: Path, adapter: Path) -> None:
    loaded = load_causal_lm(str(tiny_target_folder), "float32", adapter=str(adapter))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_target_folder), adapter).eval()
    plain = load_causal_lm(str(tiny_target_folder), "float32")
    torch.testing.assert_close(logits(loaded.model), logits(kept), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits(loaded.model), logits(plain.model), atol=1e-2)
    assert not loaded.model.training
    assert type(loaded.model) is type(plain.model)
    assert loaded.name == f"{tiny_target_folder.name}+tuned"


def test_the_fingerprint_is_that_of_model_and_adapter_together(
    tiny_target_folder: Path, adapter: Path, tmp_path: Path
) -> None:
    other = save_adapter(tmp_path / "other", tiny_target_folder, seed=1)
    found = [
        load_causal_lm(str(tiny_target_folder), "float32", adapter=str(one)).fingerprint for one in (adapter, other)
    ]
    found.append(load_causal_lm(str(tiny_target_folder), "float32").fingerprint)
    assert len(set(found)) == 3
    assert found[0] == load_causal_lm(str(tiny_target_folder), "float32", adapter=str(adapter)).fingerprint


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ({"hidden": 64}, "size mismatch"),
        ({"num_layers": 2}, "no place for .*layers.2"),
        ({"num_layers": 6}, "no weights for .*layers.4"),
    ],
    ids=["wider", "fewer layers", "more layers"],
)
def test_an_adapter_of_another_base_is_refused(
    tmp_path: Path, adapter: Path, base: dict[str, int], message: str
) -> None:
    folder = save_tiny(tmp_path / "base", **base)
    with pytest.raises(ModelError, match=message) as refused:
        load_causal_lm(str(folder), "float32", adapter=str(adapter))
    assert "does not fit base" in str(refused.value)
    assert "Name the base it was made for" in str(refused.value)


def test_another_name_of_the_base_is_said_aloud(
    tiny_target_folder: Path, tmp_path: Path, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_causal_lm(str(tiny_target_folder), "float32", adapter=str(adapter))
        assert not caplog.records
        load_causal_lm(str(save_tiny(tmp_path / "base", seed=5)), "float32", adapter=str(adapter))
    assert "names the base" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "it has no adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "PREFIX_TUNING"}'), "PREFIX_TUNING"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "it has no adapter_model.safetensors"),
        (
            lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
            "pickle .* never read",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"cut"), "does not fit"),
        (shutil.rmtree, "There is no folder"),
    ],
)
def test_what_is_no_adapter_says_why(
    tiny_target_folder: Path, adapter: Path, tmp_path: Path, spoil: object, message: str
) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        load_causal_lm(str(tiny_target_folder), "float32", adapter=str(folder))


@pytest.fixture(scope="module")
def int8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "int8"
    model = quantize_int8(Draft(tiny_model()), 16).model
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_target_of_eight_bits_answers_from_its_integers(int8_folder: Path) -> None:
    target = load_target(str(int8_folder), "float32")
    assert any(isinstance(module, Int8Linear) for module in target.model.modules())
    assert target.stop_ids == (2,)
    (answer,) = target.write([torch.tensor([5, 6, 7])], GREEDY, 8, 4, [0], lambda tokens: None)
    with torch.no_grad():
        text = torch.tensor([[5, 6, 7, *answer.token_ids.tolist()]])
        said = target.model(text).logits[0, 2:-1, :259].argmax(-1)
    assert said.tolist() == answer.token_ids.tolist()
    assert target.fingerprint != load_target_of_float(int8_folder).fingerprint


def load_target_of_float(folder: Path) -> object:
    plain = folder.with_name("plain")
    if not plain.exists():
        save_tiny(plain)
    return load_target(str(plain), "float32")


def test_an_adapter_is_not_merged_into_rounded_weights(int8_folder: Path, adapter: Path) -> None:
    with pytest.raises(ModelError, match="quantized, and an adapter cannot be merged"):
        load_causal_lm(str(int8_folder), "float32", adapter=str(adapter))


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("gptq", "pip install optimum gptqmodel"),
        ("awq", "pip install gptqmodel"),
        ("bitsandbytes", "pip install bitsandbytes"),
        ("exl3", "serve it in exllamav3"),
    ],
)
def test_what_a_quantized_folder_lacks_is_named(
    tiny_draft_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, remedy: str
) -> None:
    monkeypatch.setattr("foredraft.models.quantized.find_spec", lambda package: None)
    folder = Path(shutil.copytree(tiny_draft_folder, tmp_path / "model"))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ModelError, match=remedy) as refused:
        load_causal_lm(str(folder), "float32")
    assert method in str(refused.value)
    assert "full precision" in str(refused.value)


def test_nothing_is_missing_for_plain_weights_and_for_installed_packages() -> None:
    assert missing_package({}) == ""
    assert missing_package({"quantization_config": {"quant_method": "compressed-tensors"}}) == ""


def foredraft(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["foredraft", *map(str, words)])
    with costs_as_said(), pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_command_line_and_a_recipe_mean_the_same_adapted_target(
    monkeypatch: pytest.MonkeyPatch, tiny_target_folder: Path, adapter: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "sea"}\n{"prompt": "owl"}\n')
    common = ("--target", tiny_target_folder, "--target-adapter", adapter, "--max-new-tokens", 4)
    words = ("collect", *common, "--prompts", prompts, "--temperature", 0, "--out", tmp_path / "trace", "--json")
    assert foredraft(monkeypatch, *words) == 0
    expected = load_causal_lm(str(tiny_target_folder), adapter=str(adapter)).fingerprint
    assert open_trace(tmp_path / "trace").info.target_fingerprint == expected
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"target: {{model: {tiny_target_folder}, adapter: {adapter}}}\n"
        f"trace: {{prompts: [{{file: {prompts}, train: 1, eval: 1}}], laws: [{{temperature: 0}}], max_new_tokens: 4}}\n"
        "candidates: {lookup: [{ngram: {kind: prompt-lookup}}]}\n"
        "evaluate: {num_draft_tokens: 1, audit_prompts: 0, cost_repeats: 3}\n"
    )
    assert foredraft(monkeypatch, "run", recipe, "--out", tmp_path / "run", "--json") == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["target"]["fingerprint"] == expected
    assert report["target"]["name"].endswith("+tuned")
