"""A batch gives every prompt the answer that it gets alone, and keeps the target's law."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from foredraft.core.errors import CapabilityError, NonFiniteError, PromptError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.protocols import Drafter
from foredraft.decoding import batched
from foredraft.decoding.batched import decode_batch
from foredraft.decoding.length import WindowLength
from foredraft.decoding.rules import Rule, verify_block, verify_chain
from foredraft.decoding.speculative import Limits, decode
from foredraft.decoding.trees import TreeDrafter, TreeShape
from foredraft.models.causal_lm import CausalLMDrafter, load_causal_lm_drafter
from foredraft.models.target import LocalTarget, load_target
from foredraft.ngram.prompt_lookup import PromptLookup
from foredraft.ngram.traffic import traffic_drafter
from tests.enumeration import forked_law
from tests.test_decoding_lossless import DRAFT, TARGET
from tests.toys import MarkovDrafter, MarkovSession, sequence_law

PROMPTS = ("The cat sat on the mat. The cat", "a", "aaaa bbbb aaaa bb", "owl")
DRAFTERS: dict[str, Callable[[LocalTarget, CausalLMDrafter], Drafter]] = {
    "model": lambda target, draft: draft,
    "prompt lookup": lambda target, draft: PromptLookup(target.vocab_size),
}


@pytest.fixture(scope="module")
def target(shallow_target_folder: Path) -> LocalTarget:
    return load_target(str(shallow_target_folder), "float32")


@pytest.fixture(scope="module")
def draft(tiny_draft_folder: Path) -> CausalLMDrafter:
    return load_causal_lm_drafter(tiny_draft_folder, "float32")


def prompt_ids(target: LocalTarget) -> list[Tensor]:
    return [target.tokenizer(prompt, return_tensors="pt").input_ids[0] for prompt in PROMPTS]


def generators() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(number) for number in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "law", [GREEDY, SamplingLaw(), pytest.param(SamplingLaw(0.7, top_k=20, top_p=0.9), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("rule", [verify_chain, verify_block])
def test_each_prompt_gets_the_answer_that_it_gets_alone(
    law: SamplingLaw, kind: str, rule: Rule, target: LocalTarget, draft: CausalLMDrafter
) -> None:
    drafter, limits = DRAFTERS[kind](target, draft).bind(law), Limits(14, target.stop_ids, target.max_context)
    prompts, policy = prompt_ids(target), partial(WindowLength, 2, 4, window=1)
    together = decode_batch(
        target.batch_session(len(prompts)), drafter, prompts, law, policy, limits, generators(), rule
    )
    for prompt, generator, found in zip(prompts, generators(), together, strict=True):
        alone = decode(target.session(), drafter, prompt, law, policy(), limits, generator, rule)
        assert (found.token_ids.tolist(), found.blocks) == (alone.token_ids.tolist(), alone.blocks)
        assert found.finish_reason == alone.finish_reason


def test_answers_that_end_early_leave_the_batch(target: LocalTarget, draft: CausalLMDrafter) -> None:
    """The first tokens of two answers stop them: their rows are gone from the passes that follow."""
    prompts, law = prompt_ids(target), SamplingLaw()
    free = decode_batch(target.batch_session(4), draft, prompts, law, 2, Limits(9), generators())
    stops = (int(free[0].token_ids[0]), int(free[2].token_ids[4]))
    rows: list[int] = []
    hook = target.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    stopped = decode_batch(target.batch_session(4), draft, prompts, law, 2, Limits(9, stops), generators())
    hook.remove()
    assert rows[0] == 4
    assert rows[-1] < 3
    assert stopped[0].token_ids.tolist() == free[0].token_ids[:1].tolist()
    for one, other in zip(stopped, free, strict=True):
        assert one.token_ids.tolist() == other.token_ids[: len(one.token_ids)].tolist()


class Numbered:
    """A Markov target that follows several texts."""

    def logits(self, texts: Mapping[int, Tensor], last: Mapping[int, int]) -> dict[int, Tensor]:
        return {number: MarkovSession(TARGET).logits(text, last[number]) for number, text in texts.items()}

    def drop(self, number: int) -> None: ...


@pytest.mark.parametrize("rule", [verify_chain, verify_block])
def test_the_joint_law_of_a_batch_is_the_product_of_the_laws(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, law = [torch.tensor([0]), torch.tensor([0, 1])], SamplingLaw()

    def run(uniform: Callable[[], float]) -> tuple[tuple[int, ...], ...]:
        monkeypatch.setattr(batched, "uniforms", lambda generator: uniform)
        drafter = MarkovDrafter(DRAFT, uniform=uniform)
        answers = decode_batch(
            Numbered(), drafter, prompts, law, 1, Limits(2), [torch.Generator(), torch.Generator()], rule
        )
        return tuple(tuple(answer.token_ids.tolist()) for answer in answers)

    found = forked_law(run)
    first, second = (sequence_law(MarkovSession(TARGET), prompt, law, 2) for prompt in prompts)
    assert len(found) == len(first) * len(second)
    for (one, other), chance in found.items():
        assert chance == pytest.approx(first[one] * second[other], abs=1e-6)


def test_a_drafter_that_learns_from_traffic_learns_every_text_of_a_batch(target: LocalTarget) -> None:
    traffic, prompts = traffic_drafter(target.vocab_size, capacity=2000, segment=40), prompt_ids(target)[1:]
    answers = decode_batch(target.batch_session(3), traffic, prompts, GREEDY, 3, Limits(8), generators()[1:])
    lengths, tokens = np.empty(4, np.int64), np.empty((4, 1), np.int64)
    for prompt, answer in zip(prompts, answers, strict=True):
        text = torch.cat([prompt, answer.token_ids]).numpy()
        assert traffic.cache.rows(text[:-1], lengths, tokens, 0, 4) > 0
        assert (lengths[0], tokens[0, 0]) == (len(text) - 1, text[-1])


def test_what_a_batch_cannot_do_is_refused(target: LocalTarget, draft: CausalLMDrafter) -> None:
    prompts, tree = prompt_ids(target), TreeDrafter(draft.bind(GREEDY), TreeShape(6, 2))
    with pytest.raises(CapabilityError, match="one prompt at a time"):
        decode_batch(target.batch_session(4), tree, prompts, GREEDY, 3, Limits(4), generators())
    with pytest.raises(PromptError, match="0 tokens"):
        decode_batch(
            target.batch_session(4), draft, [*prompts[:3], torch.empty(0, dtype=torch.long)], GREEDY, 3, Limits(4),
            generators(),
        )  # fmt: skip


def test_non_finite_logits_name_the_prompt_and_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    session, prompts = Numbered(), [torch.tensor([0, 1]), torch.tensor([0, 1, 0])]
    healthy = session.logits
    monkeypatch.setattr(
        session,
        "logits",
        lambda texts, last: {n: x * (torch.nan if n else 1.0) for n, x in healthy(texts, last).items()},
    )
    with pytest.raises(NonFiniteError, match="Prompt 1 of the batch: .* token 3 of the text"):
        decode_batch(session, MarkovDrafter(DRAFT), prompts, GREEDY, 1, Limits(4), generators()[:2])
