"""Greedy decoding with every registered drafter equals transformers' generate, on a tiny and on a real target."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foredraft.catalog import names, resolve
from foredraft.checkpoint import DraftManifest
from foredraft.core.law import GREEDY
from foredraft.core.progress import SILENT
from foredraft.core.protocols import Drafter
from foredraft.decoding.batched import decode_batch
from foredraft.decoding.speculative import Limits, decode
from foredraft.distill.init import init_from_target
from foredraft.drafters import load_drafter
from foredraft.models.draft import save_draft
from foredraft.models.head import NO_IDS
from foredraft.models.target import LocalTarget, load_target
from foredraft.steps import NgramStep

PROMPTS = ("The cat sat on the mat. The cat sat on", "for i in range(10):\n    print(i)\nfor i in")
K = 4


def made(name: str, target: LocalTarget, folder: Path, written: list[Tensor]) -> Drafter:
    """Return the drafter of a registered name; those that are built are built from what the target writes."""
    draft = str(folder / "causal-lm")
    match name:
        case "causal-lm":
            return load_drafter(draft, target)
        case "cascade":
            return load_drafter(f"prompt-lookup+cascade:middle={draft}", target)
        case "mixture":
            return load_drafter(f"{draft}+mixture:ngram={folder / 'ngram-law'}", target)
        case "first-guess":
            return load_drafter(f"{draft}+first-guess:first=prompt-lookup", target)
        case _ if name in names("wrappers"):
            return load_drafter(f"{draft}+{name}", target)
        case _ if name in names("drafters"):
            return load_drafter(name, target)
    sequences = [text.numpy().astype("int32") for text in written]
    out = folder / name
    resolve("builders", name)(sequences, target.vocab_size, NgramStep(kind=name), manifest(name, target), out, SILENT)
    return load_drafter(str(out), target)


def manifest(kind: str, target: LocalTarget) -> DraftManifest:
    return DraftManifest(kind, target.vocab_size, target.name, target.fingerprint, target.tokenizer_fingerprint)


def assert_equals_transformers(source: Path, folder: Path, new_tokens: int) -> None:
    target, stock = load_target(str(source), "float32"), AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    padding = list(range(len(target.tokenizer), target.vocab_size))
    prompts = [target.tokenizer(prompt, return_tensors="pt").input_ids[0] for prompt in PROMPTS]
    written = [
        stock.generate(
            ids[None], attention_mask=torch.ones_like(ids[None]), max_new_tokens=new_tokens, do_sample=False,
            suppress_tokens=padding or None,
        )[0]
        for ids in prompts
    ]  # fmt: skip
    draft = init_from_target(target.model, [0, target.model.config.num_hidden_layers - 1], NO_IDS)
    save_draft(draft, folder / "causal-lm", manifest("causal-lm", target), target.tokenizer)
    limits, generators = Limits(new_tokens, target.stop_ids, target.max_context), [torch.Generator()] * len(prompts)
    for name in ("causal-lm", *names("drafters"), *names("builders"), *names("wrappers")):
        drafter = made(name, target, folder, written).bind(GREEDY)
        for ids, wanted in zip(prompts, written, strict=True):
            found = decode(target.session(), drafter, ids, GREEDY, K, limits, torch.Generator())
            assert found.token_ids.tolist() == wanted[len(ids) :].tolist(), name
        if name != "tree":
            batch = decode_batch(target.batch_session(2), drafter, prompts, GREEDY, K, limits, generators)
            for ids, wanted, found in zip(prompts, written, batch, strict=True):
                assert found.token_ids.tolist() == wanted[len(ids) :].tolist(), f"{name} in a batch"


@pytest.mark.slow
def test_every_registered_drafter_on_a_tiny_target(tiny_target_folder: Path, tmp_path: Path) -> None:
    assert_equals_transformers(tiny_target_folder, tmp_path, 12)


@pytest.mark.real_model
def test_every_registered_drafter_on_a_real_target(tmp_path: Path) -> None:
    """Needs a folder with SmolLM2-135M-Instruct, named by FOREDRAFT_REAL_MODEL."""
    if "FOREDRAFT_REAL_MODEL" not in os.environ:
        pytest.skip("FOREDRAFT_REAL_MODEL names no folder")
    assert_equals_transformers(Path(os.environ["FOREDRAFT_REAL_MODEL"]), tmp_path, 24)
