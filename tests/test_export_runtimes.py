"""Laws of folders for vLLM, SGLang and MLX-LM: files that transformers loads, a card and a plan with the command."""

import json
import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.catalog import names
from foredraft.check import check_pair
from foredraft.checkpoint import record_measurement
from foredraft.core.errors import CapabilityError, OutputError, UnknownNameError, UserError
from foredraft.export.folder import write_token_map
from foredraft.export.plan import PLAN, length_by_batch, planned_length, slowdown_sentence
from foredraft.export.vllm import model_free_config, speculative_config
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.layers import keep_layers
from foredraft.models.target import LocalTarget, load_target
from foredraft.verbs import export_draft, refuse_unknown_runtime
from tests.test_export_transformers import KEPT, manifest_for

FOLDERS = ("mlx-lm", "sglang", "transformers", "vllm")
MEASURED: dict[str, Any] = {
    "T=0": {
        "expected_acceptance": 0.6,
        "acceptance_by_position": {"1": [0.6], "2": [0.6, 0.5]},
        "mean_tokens_per_call": {"1": 1.6, "2": 1.9},
        "predicted_speedup": {"1": 1.2, "2": 1.3, "3": 0.9},
        "best_k": 2,
        "cost_ratio": 0.2,
        "prompts": 8,
        "batch": {
            "1": {"predicted_speedup": {"2": 1.3}, "best_k": 2},
            "8": {"predicted_speedup": {"1": 1.1}, "best_k": 1},
            "32": {"predicted_speedup": {"1": 0.8}, "best_k": 1},
        },
    }
}


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> LocalTarget:
    return load_target(str(tiny_target_folder), "float32")


@pytest.fixture(scope="module")
def draft_folder(target: LocalTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts") / "prefix"
    save_draft(Draft(keep_layers(target.model, [0, 1]), KEPT), folder, manifest_for(target), target.tokenizer)
    record_measurement(folder, MEASURED)
    return folder


@pytest.mark.parametrize("runtime", FOLDERS)
def test_a_folder_loads_says_its_command_and_passes_check(
    runtime: str, target: LocalTarget, draft_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "served"
    export_draft(draft_folder, target, runtime, 0, out)
    plan, card = json.loads((out / PLAN).read_text()), (out / "README.md").read_text()
    assert (plan["runtime"], plan["num_draft_tokens"]) == (runtime, 2)
    assert plan["num_draft_tokens_by_batch"] == {}, "measured with fewer rows: that does not hold with the whole head"
    assert plan["command"].replace("TARGET", target.name) in card
    stock, held = AutoModelForCausalLM.from_pretrained(out), load_draft(draft_folder, "float32").model
    text = torch.arange(3, 40)[None]
    assert torch.equal(stock(text).logits, held(text).logits)
    (one,) = [v for v in check_pair(str(target.path), str(out)).verdicts if v.runtime == runtime]
    assert one.command, one.findings


def test_sglang_gets_the_tokens_of_a_trimmed_head(target: LocalTarget, draft_folder: Path, tmp_path: Path) -> None:
    export_draft(draft_folder, target, "sglang", 3, tmp_path / "out")
    plan = json.loads((tmp_path / "out" / PLAN).read_text())
    assert torch.load(tmp_path / "out" / plan["files"]["token_map"], weights_only=True) == KEPT.tolist()
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in plan["command"]
    export_draft(draft_folder, target, "vllm", 3, tmp_path / "vllm")
    assert not (tmp_path / "vllm" / "token_map.pt").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_token_map_on_a_full_disk_is_told_by_the_system() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        write_token_map(Path("/dev/full"), KEPT)


def test_vllm_gets_a_length_for_each_range_of_batch_sizes() -> None:
    by_batch = length_by_batch(MEASURED)
    assert by_batch == {"1": 2, "8": 1, "32": 0}
    settings = speculative_config(2, by_batch)
    assert settings["num_speculative_tokens_per_batch_size"] == [[1, 7, 2], [8, 31, 1], [32, 32, 0]]
    assert "num_speculative_tokens_per_batch_size" not in speculative_config(2, {"1": 2})


def test_drafters_without_a_model_become_vllms_own(target: LocalTarget, tmp_path: Path) -> None:
    export_draft(Path("prompt-lookup:max_match=4,min_match=2"), target, "vllm", 3, tmp_path / "out")
    plan = json.loads((tmp_path / "out" / PLAN).read_text())
    asked = json.loads(shlex.split(plan["command"])[-1])
    assert asked == plan["settings"]
    assert asked == {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    }  # fmt: skip
    assert model_free_config(Path("suffix-automaton"), 5) == {"method": "suffix", "num_speculative_tokens": 5}
    with pytest.raises(CapabilityError, match="vLLM has no drafter like traffic"):
        export_draft(Path("traffic"), target, "vllm", 3, tmp_path / "traffic")


@pytest.mark.parametrize(
    ("runtime", "settings"),
    [
        (
            "llama.cpp",
            {"--spec-type": "ngram-simple", "--spec-ngram-simple-size-n": 2, "--spec-ngram-simple-size-m": 3},
        ),
        ("openvino", {"prompt_lookup": True, "max_ngram_size": 2, "num_assistant_tokens": 3}),
        ("onnxruntime-genai", {"ngram_size": 3, "max_draft_tokens": 3}),
    ],
)
def test_prompt_lookup_becomes_settings_of_the_runtimes_own(
    runtime: str, settings: dict[str, Any], target: LocalTarget, tmp_path: Path
) -> None:
    export_draft(Path("prompt-lookup:max_match=2"), target, runtime, 3, tmp_path / "out")
    plan = json.loads((tmp_path / "out" / PLAN).read_text())
    assert {name: plan["settings"][name] for name in settings} == settings
    assert plan["num_draft_tokens"] == 3
    if runtime == "llama.cpp":
        assert plan["command"].endswith("--spec-ngram-simple-size-n 2 --spec-ngram-simple-size-m 3")
        with pytest.raises(UserError, match="max_match is 1 to 3, not 4"):
            export_draft(Path("prompt-lookup:max_match=4"), target, runtime, 3, tmp_path / "longer")
    with pytest.raises(UserError, match="takes max_match, not 'min_match'"):
        export_draft(Path("prompt-lookup:min_match=2"), target, runtime, 3, tmp_path / "shortest")


@pytest.mark.parametrize("word", ["eagle-", "eagle3", "dflash", "dspark"])
def test_a_folder_name_that_vllm_reads_as_a_method_is_refused(
    word: str, target: LocalTarget, draft_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(OutputError, match=f"contains '{word}', from which vLLM guesses its method"):
        export_draft(draft_folder, target, "vllm", 3, tmp_path / f"my-{word}draft")
    assert not list(tmp_path.iterdir())


def test_the_length_is_the_best_that_was_measured() -> None:
    assert (planned_length(MEASURED), planned_length({})) == (2, 4)
    assert planned_length({"T=0": {**MEASURED["T=0"], "best_k": 0}}) == 1
    assert slowdown_sentence(MEASURED, 2) == slowdown_sentence({}, 2) == ""
    assert "predicted to be slower than plain decoding: 0.90x" in slowdown_sentence(MEASURED, 3)


def test_a_predicted_slowdown_is_said(
    target: LocalTarget, draft_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        export_draft(draft_folder, target, "mlx-lm", 3, tmp_path / "out")
    assert "With 3 draft tokens a block this draft is predicted to be slower" in caplog.text
    assert "predicted to be slower than plain decoding: 0.90x" in (tmp_path / "out" / "README.md").read_text()


def test_unknown_runtimes_and_options_are_named(target: LocalTarget, draft_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Unknown runtime to export for 'vlm'.*Did you mean 'vllm'"):
        export_draft(draft_folder, target, "vlm", 3, tmp_path / "out")
    with pytest.raises(UserError, match="llama.cpp takes type, types, not 'kind'"):
        refuse_unknown_runtime("llama.cpp:kind=f16")
    for name in names("exporters"):
        refuse_unknown_runtime(name)
