"""Traps that users of speculative decoding report, each made as files or as a runtime's answers, and each named.

Those of `check` are seen from files, before anything runs; the last ones only where the runtime runs, by `verify`.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.check import PairCheck, check_pair
from foredraft.export.transformers import export_transformers
from foredraft.models.target import load_target
from foredraft.verification import verify as verifying
from foredraft.verification.child import Job, Replies
from foredraft.verification.verify import verify
from tests.test_verification import PROMPTS, SETTINGS, answered_here
from tests.test_verification import here as here  # a fixture
from tests.tiny import save_tiny


def edited(file: str, **changes: Any) -> Callable[[Path], None]:
    """Change fields of a JSON file of a folder; None takes one out."""

    def edit(folder: Path) -> None:
        path = folder / file
        held = json.loads(path.read_text()) if path.is_file() else {}
        held |= changes
        path.write_text(json.dumps({name: value for name, value in held.items() if value is not None}))

    return edit


def another_token(folder: Path) -> None:
    file = folder / "tokenizer.json"
    held = json.loads(file.read_text())
    vocab = held["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    file.write_text(json.dumps(held))


def without_head(folder: Path) -> None:
    edited("config.json", tie_word_embeddings=False)(folder)


def integers_without_a_word(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: torch.ones(tensors[name].shape, dtype=torch.int8)}, folder / "model.safetensors")


def with_bos(folder: Path) -> None:
    edited("tokenizer_config.json", add_bos_token=True, bos_token="<|im_start|>")(folder)


# What was done; the folder's name; where it is seen; what is said of it, and the reports that it comes from.
TRAPS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "padded vocabulary (vllm#5203, transformers#45307)": (
        lambda folder: (save_tiny(folder, num_layers=1, vocab_size=288), None)[1],
        "vllm",
        "vocab_size must be equal, padding included: 272 and 288. Pad the draft to 272 rows, as foredraft export does.",
    ),
    "other tokens under equal sizes (sglang#24051, llama.cpp PR#3812)": (
        another_token,
        "transformers",
        "Equal vocab_size, so ids are taken as shared without a look at the tokens: acceptance near 0",
    ),
    "beginning-of-text token on one side (llama.cpp PR#4025)": (with_bos, "llama.cpp", "add_bos is False"),
    "context shorter than the target's (vllm#58080, SpecForge PR#271)": (
        edited("config.json", max_position_embeddings=128),
        "vllm",
        "vLLM stops drafting for the whole batch behind the draft's context: 128 tokens, the target reads 512",
    ),
    "a method read out of the path (vLLM)": (lambda folder: None, "vllm", "The draft's path contains 'eagle-'"),
    "no draft length (llama.cpp#25908, vllm#7540)": (lambda folder: None, "transformers", "transformers takes 20"),
    "a head that is neither tied nor there (sglang PR#27908, llama.cpp#12567)": (
        without_head,
        "",
        "config.json says tie_word_embeddings = false, but no head is stored",
    ),
    "recurrent layers (llama.cpp#20039, mlx-lm#1446)": (
        edited("config.json", layer_types=["linear_attention"]),
        "mlx-lm",
        "has recurrent layers, whose state cannot be cut back",
    ),
    "penalties in the generation settings": (
        edited("generation_config.json", repetition_penalty=1.1),
        "",
        "generation_config.json sets repetition_penalty = 1.1: transformers applies it to what the draft guesses",
    ),
    "a class that older versions do not know (unsloth#8444, mlx-lm#683)": (
        edited("tokenizer_config.json", tokenizer_class="TokenizersBackend"),
        "",
        "The draft's tokenizer_config.json names the class TokenizersBackend, which transformers before 5",
    ),
    "integers without quantization_config (vllm PR#40849)": (
        integers_without_a_word,
        "",
        "stores integers, but its config.json has no quantization_config",
    ),
    "other end tokens (koboldcpp#2325)": (
        edited("tokenizer_config.json", eos_token="<|endoftext|>"),
        "openvino",
        "The eos token is 2 and 0.",
    ),
}


def said(found: PairCheck, runtime: str) -> str:
    findings = list(found.findings) if not runtime else []
    findings += [finding for one in found.verdicts if one.runtime == runtime for finding in one.findings]
    return " ".join(f"{finding.reason} {finding.fix}" for finding in findings)


@pytest.mark.parametrize("name", TRAPS)
def test_check_names_the_trap_and_is_silent_without_it(name: str, tiny_target_folder: Path, tmp_path: Path) -> None:
    make, runtime, message = TRAPS[name]
    folder = tmp_path / ("eagle-draft" if "path" in name else "draft")
    plain = tmp_path / "plain"
    for one in (plain, folder):
        save_tiny(one, num_layers=1)
        edited("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")(one)
    edited("generation_config.json", num_assistant_tokens=4)(plain)
    if folder.name == "draft" and "padded" in name:
        for file in folder.iterdir():
            file.unlink()
    make(folder)
    target = str(tiny_target_folder)
    assert message in said(check_pair(target, str(folder)), runtime)
    assert message not in said(check_pair(target, str(plain)), runtime)


@pytest.mark.usefixtures("here")
def test_verify_names_text_that_leaves_plain_decoding(
    tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime that keeps a rejected token, as caches cut back by one too few do (mlxcel#994, mlx-lm#1446)."""
    target = load_target(str(tiny_target_folder), "float32")
    target.model.generation_config.eos_token_id = None
    export_transformers(save_tiny(tmp_path / "draft"), target, 3, tmp_path / "out")

    def broken(runtime: Any, python: str, job: Job, speculate: bool, seconds: float) -> Replies:
        found = answered_here(runtime, python, job, speculate, seconds)
        if not speculate:
            return found
        first, *others = found.replies
        ids = (*first.token_ids[:4], (first.token_ids[4] + 1) % 259, *first.token_ids[5:])
        return replace(found, replies=(replace(first, token_ids=ids), *others))

    monkeypatch.setattr(verifying, "ask", broken)
    (fault,) = verify(str(tmp_path / "out"), target, "transformers", PROMPTS[:2], SETTINGS).faults
    assert fault.startswith(
        "p0: text with the draft leaves plain decoding at token 4, where the target's best token leads"
    )
