"""Decoding with real (tiny) models: equal to plain decoding and to transformers, token for token."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.core.errors import NonFiniteError, PromptError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.protocols import Drafter
from foredraft.decoding.cascade import Cascade
from foredraft.decoding.rules import verify_block
from foredraft.decoding.speculative import Limits, decode, plain_decode
from foredraft.decoding.stopping import ConfidentDrafter
from foredraft.decoding.trees import TreeDrafter, TreeShape
from foredraft.models.causal_lm import CausalLMDrafter, load_causal_lm_drafter
from foredraft.models.draft import Draft
from foredraft.models.loading import load_causal_lm
from foredraft.models.target import LocalTarget
from foredraft.ngram.prompt_lookup import PromptLookup
from tests.tiny import save_tiny

PROMPTS = ("The cat sat on the mat. The cat", "aaaa bbbb")
NEW_TOKENS = 16


def target_and_draft(target_folder: Path, draft_folder: Path) -> tuple[LocalTarget, CausalLMDrafter]:
    target = LocalTarget(load_causal_lm(str(target_folder), "float32"))
    return target, load_causal_lm_drafter(draft_folder, "float32").bind(GREEDY)


def assert_greedy_equals_transformers(target_folder: Path, draft_folder: Path) -> None:
    """Decode greedily with a chain and compare with transformers' generate, token for token."""
    target, drafter = target_and_draft(target_folder, draft_folder)
    assert_answers(target, drafter, 4, answered_by_transformers(target))


def answered_by_transformers(target: LocalTarget) -> list[tuple[Tensor, list[int]]]:
    """Return each prompt and its greedy answer."""
    answers = []
    for prompt in PROMPTS:
        ids = target.tokenizer(prompt, return_tensors="pt").input_ids
        padding = list(range(len(target.tokenizer), target.vocab_size))
        text = target.model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, suppress_tokens=padding)[0]
        answers.append((ids[0], text[ids.shape[1] :].tolist()))
    return answers


def assert_answers(target: LocalTarget, drafter: Drafter, k: int, wanted: list[tuple[Tensor, list[int]]]) -> None:
    limits, session = Limits(NEW_TOKENS, target.stop_ids, target.max_context), target.session()
    for ids, answer in wanted:
        found = decode(session, drafter, ids, GREEDY, k, limits, torch.Generator().manual_seed(0))
        assert found.token_ids.tolist() == answer


DRAFTERS: dict[str, Callable[[LocalTarget, CausalLMDrafter], Drafter]] = {
    "model": lambda target, draft: draft,
    "sampling model": lambda target, draft: draft.bind(SamplingLaw()),
    "the target itself": lambda target, draft: itself(target),
    "prompt lookup": lambda target, draft: PromptLookup(target.vocab_size),
    "confident": lambda target, draft: ConfidentDrafter(draft, 0.2),
    "tree": lambda target, draft: TreeDrafter(draft, TreeShape(10, 3)),
    "tree of the target": lambda target, draft: TreeDrafter(itself(target), TreeShape(10, 3)),
    "cascade": lambda target, draft: Cascade(itself(target), target.session(), draft, 2),
}


def itself(target: LocalTarget) -> CausalLMDrafter:
    return CausalLMDrafter(Draft(target.model, torch.empty(0, dtype=torch.long)), GREEDY, target.vocab_size)


@pytest.fixture(scope="module")
def wanted(shallow_target_folder: Path) -> list[tuple[Tensor, list[int]]]:
    return answered_by_transformers(LocalTarget(load_causal_lm(str(shallow_target_folder), "float32")))


def test_plain_decoding_equals_transformers_token_for_token(
    wanted: list[tuple[Tensor, list[int]]], shallow_target_folder: Path
) -> None:
    target = LocalTarget(load_causal_lm(str(shallow_target_folder), "float32"))
    limits, session = Limits(NEW_TOKENS, target.stop_ids, target.max_context), target.session()
    for ids, answer in wanted:
        assert plain_decode(session, ids, GREEDY, limits, torch.Generator()).token_ids.tolist() == answer


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind == "sampling model" else []) for kind in DRAFTERS]
)
def test_greedy_decoding_equals_transformers_token_for_token(
    kind: str, wanted: list[tuple[Tensor, list[int]]], shallow_target_folder: Path, tiny_draft_folder: Path
) -> None:
    target, draft = target_and_draft(shallow_target_folder, tiny_draft_folder)
    assert_answers(target, DRAFTERS[kind](target, draft), 4, wanted)


def test_the_target_as_its_own_draft_is_never_rejected(tmp_path: Path) -> None:
    target = LocalTarget(load_causal_lm(str(save_tiny(tmp_path / "unpadded", vocab_size=259)), "float32"))
    ids = target.tokenizer(PROMPTS[0], return_tensors="pt").input_ids[0]
    for drafter, law in ((itself(target), GREEDY), (itself(target).bind(SamplingLaw()), SamplingLaw())):
        decoded = decode(target.session(), drafter, ids, law, 3, Limits(20), torch.Generator().manual_seed(1))
        assert all(block.accepted == block.examined for block in decoded.blocks)
    tree = TreeDrafter(itself(target), TreeShape(12, 2))
    decoded = decode(target.session(), tree, ids, GREEDY, 3, Limits(20), torch.Generator())
    assert all(block.accepted == block.examined for block in decoded.blocks)


def test_the_cache_is_cropped_and_nothing_is_read_twice(shallow_target_folder: Path, tiny_draft_folder: Path) -> None:
    target, drafter = target_and_draft(shallow_target_folder, tiny_draft_folder)
    read: list[int] = []
    target.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    ids = target.tokenizer(PROMPTS[0], return_tensors="pt").input_ids[0]
    for tried, rule in ((drafter, verify_block), (TreeDrafter(drafter, TreeShape(6, 2)), verify_block)):
        read.clear()
        decoded = decode(target.session(), tried, ids, GREEDY, 4, Limits(20), torch.Generator(), rule)
        # A call reads the prompt or the token drawn last, and the draft tokens: never an accepted one again.
        assert read == [(len(ids) if i == 0 else 1) + block.drafted for i, block in enumerate(decoded.blocks)]


def test_the_context_limit_is_respected(shallow_target_folder: Path, tiny_draft_folder: Path) -> None:
    target, drafter = target_and_draft(shallow_target_folder, tiny_draft_folder)
    prompt, limits = torch.full((target.max_context - 5,), 70), Limits(50, (), target.max_context)
    assert len(decode(target.session(), drafter, prompt, GREEDY, 4, limits, torch.Generator()).token_ids) == 5
    with pytest.raises(PromptError, match="512 tokens cannot be answered: the target reads 1 to 512"):
        plain_decode(target.session(), torch.full((512,), 70), GREEDY, limits, torch.Generator())


def test_non_finite_logits_name_the_position(shallow_target_folder: Path) -> None:
    target = LocalTarget(load_causal_lm(str(shallow_target_folder), "float32"))
    with torch.no_grad():
        target.model.base_model.norm.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="token 3 of the text"):
        plain_decode(target.session(), torch.tensor([70, 71, 72]), GREEDY, Limits(4), torch.Generator())
