"""What a local target writes: transformers' greedy text, its own law, and rows that do not see each other."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.core.errors import NonFiniteError, PromptError
from foredraft.core.law import GREEDY, SamplingLaw, law_logprobs
from foredraft.core.protocols import Continuation, Target
from foredraft.models import batch
from foredraft.models.loading import load_causal_lm
from foredraft.models.target import LocalTarget
from tests.tiny import save_tiny

NUM_TOKENS, VOCAB_SIZE = 259, 272
TRUNCATED = SamplingLaw(temperature=0.8, top_k=30, top_p=0.9)
LENGTHS = (5, 17, 9, 1, 30, 12)
NEW = 24


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> LocalTarget:
    """The tiny target, which stops on tokens that it often writes."""
    loaded = load_causal_lm(str(tiny_target_folder))
    loaded.model.generation_config.eos_token_id = [2, *range(60, 75)]
    return LocalTarget(loaded)


@pytest.fixture(scope="module")
def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, NUM_TOKENS, (length,), generator=generator) for length in LENGTHS]


def _write(
    target: LocalTarget, prompts: list[Tensor], law: SamplingLaw, new: int = NEW, top: int = 8
) -> list[Continuation]:
    return target.write(prompts, law, new, top, list(range(len(prompts))), lambda count: None)


def _logits(target: LocalTarget, prompt: Tensor, answer: Continuation) -> Tensor:
    """Return the masked logits behind each token of an answer, from one full pass."""
    text = torch.cat([prompt, answer.token_ids])
    with torch.no_grad():
        logits = target.model(text[None, :-1]).logits[0, len(prompt) - 1 :]
    logits[:, NUM_TOKENS:] = float("-inf")
    return logits


def test_it_is_a_target(target: LocalTarget) -> None:
    assert isinstance(target, Target)
    assert (target.vocab_size, target.max_context) == (VOCAB_SIZE, 512)
    assert target.num_bytes == 4 * target.num_parameters > 0
    assert target.stop_ids[:2] == (2, 60)


def test_greedy_text_equals_transformers(target: LocalTarget, prompts: list[Tensor]) -> None:
    answers = _write(target, prompts, GREEDY)
    for prompt, answer in zip(prompts, answers, strict=True):
        theirs = target.model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            max_new_tokens=NEW,
            do_sample=False,
            suppress_tokens=list(range(NUM_TOKENS, VOCAB_SIZE)),
        )
        assert answer.token_ids.tolist() == theirs[0, len(prompt) :].tolist()
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}


@pytest.mark.parametrize("law", [GREEDY, SamplingLaw(), TRUNCATED], ids=str)
def test_a_row_does_not_depend_on_its_company(target: LocalTarget, prompts: list[Tensor], law: SamplingLaw) -> None:
    together = _write(target, prompts, law)
    assert len({len(answer.token_ids) for answer in together}) > 2, "rows must leave at different times"
    for seed, (prompt, answer) in enumerate(zip(prompts, together, strict=True)):
        (alone,) = target.write([prompt], law, NEW, 8, [seed], lambda count: None)
        assert alone.token_ids.tolist() == answer.token_ids.tolist()
        assert alone.finish_reason == answer.finish_reason
        torch.testing.assert_close(alone.logprobs, answer.logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(alone.top_logprobs, answer.top_logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("law", [GREEDY, SamplingLaw(), TRUNCATED], ids=str)
def test_figures_are_those_of_a_full_pass(target: LocalTarget, prompts: list[Tensor], law: SamplingLaw) -> None:
    for prompt, answer in zip(prompts, _write(target, prompts, law, top=40), strict=True):
        logits = _logits(target, prompt, answer)
        emitted = law_logprobs(logits, law).gather(-1, answer.token_ids[:, None]).squeeze(-1)
        torch.testing.assert_close(answer.logprobs, emitted, atol=1e-4, rtol=0)
        stored = law_logprobs(logits, SamplingLaw() if law.is_greedy else law)
        torch.testing.assert_close(answer.top_logprobs, stored.topk(40).values, atol=1e-4, rtol=0)
        torch.testing.assert_close(answer.top_logprobs, stored.gather(-1, answer.top_ids), atol=1e-4, rtol=0)
        torch.testing.assert_close(answer.tail_mass, 1 - stored.topk(40).values.exp().sum(-1), atol=1e-4, rtol=0)


def test_padding_rows_are_never_emitted(target: LocalTarget, prompts: list[Tensor]) -> None:
    hot = SamplingLaw(temperature=50.0)
    for answer in _write(target, prompts * 4, hot, top=VOCAB_SIZE):
        assert int(answer.token_ids.max()) < NUM_TOKENS
        assert answer.top_ids.shape[-1] == NUM_TOKENS
        assert int(answer.top_ids.max()) < NUM_TOKENS


def test_keeping_no_alternatives_changes_no_answer(target: LocalTarget, prompts: list[Tensor]) -> None:
    some, none = (_write(target, prompts, SamplingLaw(), top=top) for top in (8, 0))
    for with_tops, without in zip(some, none, strict=True):
        assert torch.equal(with_tops.token_ids, without.token_ids)
        assert torch.equal(with_tops.logprobs, without.logprobs)
        assert without.top_ids.shape == (len(without.token_ids), 0)
        assert (without.tail_mass == 1.0).all()


def test_samples_follow_the_law(target: LocalTarget, prompts: list[Tensor]) -> None:
    draws = 600
    answers = target.write([prompts[0]] * draws, TRUNCATED, 1, 8, list(range(draws)), lambda count: None)
    counts = torch.cat([answer.token_ids for answer in answers]).bincount(minlength=VOCAB_SIZE)
    law = law_logprobs(_logits(target, prompts[0], answers[0])[0], TRUNCATED).exp()
    error = (law * (1 - law) / draws).sqrt() + 1 / draws
    assert bool(((counts / draws - law).abs() <= 5 * error).all())


def test_the_same_call_gives_the_same_answers(target: LocalTarget, prompts: list[Tensor]) -> None:
    first, second = (_write(target, prompts, SamplingLaw()) for _ in range(2))
    for left, right in zip(first, second, strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()
        assert torch.equal(left.top_logprobs, right.top_logprobs)


def test_long_prompts_are_read_in_blocks(
    target: LocalTarget, prompts: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks in which a short prompt is nothing but padding included."""
    whole = _write(target, prompts, SamplingLaw())
    monkeypatch.setattr(batch, "_GROUP_TOKENS", 4 * len(prompts))
    for left, right in zip(whole, _write(target, prompts, SamplingLaw()), strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()
        torch.testing.assert_close(left.logprobs, right.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shared", [9, 20])
def test_what_all_prompts_begin_with_changes_nothing(target: LocalTarget, prompts: list[Tensor], shared: int) -> None:
    """Rows whose padding is shorter and longer than the shared tokens, which are read once."""
    longer = [torch.cat([prompts[4][:shared], prompt]) for prompt in prompts]
    for seed, (prompt, answer) in enumerate(zip(longer, _write(target, longer, SamplingLaw()), strict=True)):
        (alone,) = target.write([prompt], SamplingLaw(), NEW, 8, [seed], lambda count: None)
        assert alone.token_ids.tolist() == answer.token_ids.tolist()
        torch.testing.assert_close(alone.logprobs, answer.logprobs, atol=1e-4, rtol=0)


def test_progress_adds_up_to_the_tokens_written(target: LocalTarget, prompts: list[Tensor]) -> None:
    counts: list[int] = []
    answers = target.write(prompts, GREEDY, NEW, 8, [0] * len(prompts), counts.append)
    assert sum(counts) == sum(len(answer.token_ids) for answer in answers)


def test_nothing_asked_nothing_written(target: LocalTarget, prompts: list[Tensor]) -> None:
    assert _write(target, [], GREEDY) == []
    assert all(len(answer.token_ids) == 0 for answer in _write(target, prompts, GREEDY, new=0))


def test_an_empty_prompt_is_named(target: LocalTarget, prompts: list[Tensor]) -> None:
    with pytest.raises(PromptError, match="Prompt 1 is empty"):
        _write(target, [prompts[0], torch.empty(0, dtype=torch.long)], GREEDY)


def test_a_prompt_without_room_is_named_with_its_lengths(target: LocalTarget) -> None:
    with pytest.raises(PromptError, match="Prompt 0 has 500 tokens; with 24 new ones .* the 512 that"):
        _write(target, [torch.full((500,), 5)], GREEDY)


def test_broken_logits_name_prompt_and_position(tmp_path: Path) -> None:
    loaded = load_causal_lm(str(save_tiny(tmp_path / "untied", num_layers=1, tied=False)))
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[100] = float("nan")
    target = LocalTarget(loaded)
    with pytest.raises(NonFiniteError, match="NaN or infinite for prompt 1 at position 4 "):
        _write(target, [torch.tensor([5, 6, 7]), torch.tensor([5, 6, 7, 100])], GREEDY)


def test_a_target_without_stop_tokens_writes_to_the_end(tiny_target_folder: Path, prompts: list[Tensor]) -> None:
    loaded = load_causal_lm(str(tiny_target_folder))
    loaded.model.generation_config.eos_token_id = None
    target = LocalTarget(loaded)
    assert target.stop_ids == ()
    assert [len(answer.token_ids) for answer in _write(target, prompts, GREEDY)] == [NEW] * len(prompts)
