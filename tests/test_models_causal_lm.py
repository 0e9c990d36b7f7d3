"""A causal language model as drafter: laws over the whole vocabulary, replay in chunks, trimmed heads."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.core.law import GREEDY, SamplingLaw, law_probs
from foredraft.core.protocols import Answer
from foredraft.models import causal_lm
from foredraft.models.causal_lm import CausalLMDrafter, load_causal_lm_drafter
from foredraft.models.draft import Draft
from foredraft.models.head import NO_IDS
from tests.tiny import tiny_model

VOCAB_SIZE = 272
KEPT = torch.arange(3, 120)
PLAIN = SamplingLaw()
LAWS = (GREEDY, PLAIN, SamplingLaw(temperature=0.7, top_k=20, top_p=0.9))


def _drafter(law: SamplingLaw = PLAIN, kept: Tensor = NO_IDS, vocab_size: int = VOCAB_SIZE) -> CausalLMDrafter:
    return CausalLMDrafter(Draft(tiny_model(num_layers=1), kept), law, vocab_size)


def _answers(count: int, seed: int = 0) -> list[Answer]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 40, (count,), generator=generator).tolist()
    return [Answer(torch.randint(3, 259, (length,), generator=generator), start=length // 3) for length in lengths]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("kept", [NO_IDS, KEPT], ids=["full head", "trimmed head"])
def test_replay_equals_a_full_pass(law: SamplingLaw, kept: Tensor) -> None:
    drafter = _drafter(law, kept)
    for answer, emitted in zip(_answers(5), drafter.replay(_answers(5), 4), strict=True):
        with torch.no_grad():
            logits = drafter.draft.model(answer.token_ids[None, :-1]).logits[0, answer.start - 1 :]
        rows = kept if len(kept) else torch.arange(VOCAB_SIZE)
        probs = torch.zeros(len(logits), VOCAB_SIZE)
        probs[:, rows] = law_probs(logits[:, rows], law)
        expected = probs.gather(-1, answer.token_ids[answer.start :, None]).squeeze(-1)
        torch.testing.assert_close(emitted.probs, expected, atol=1e-5, rtol=1e-4)
        assert bool(emitted.guessed.all())


def test_chunks_and_passes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, answers = _drafter(), _answers(9)
    whole = drafter.replay(answers, 4)
    monkeypatch.setattr(causal_lm, "_PASS_TOKENS", 50)
    monkeypatch.setattr(causal_lm, "_HEAD_POSITIONS", 3)
    for left, right in zip(whole, drafter.replay(answers, 4), strict=True):
        torch.testing.assert_close(left.probs, right.probs, atol=1e-5, rtol=1e-4)


def test_a_token_without_a_row_has_no_mass_and_is_never_proposed() -> None:
    drafter = _drafter(SamplingLaw(), KEPT)
    proposal = drafter.propose(torch.arange(200, 230), 8, _generator())
    assert set(proposal.token_ids.tolist()) <= set(KEPT.tolist())
    missing = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    missing[KEPT] = False
    assert proposal.laws.dense.shape == (8, VOCAB_SIZE)
    assert not bool(proposal.laws.dense[:, missing].any())
    (emitted,) = drafter.replay([Answer(torch.tensor([5, 6, 200, 7]), start=1)], 4)
    assert emitted.probs.tolist()[1] == 0.0
    assert bool(emitted.guessed.all())


@pytest.mark.parametrize("vocab_size", [259, 300])
def test_columns_that_differ_by_padding_are_cut_or_filled(vocab_size: int) -> None:
    drafter, answers = _drafter(vocab_size=vocab_size), _answers(2)
    proposal = drafter.propose(answers[0].token_ids, 3, _generator())
    assert proposal.laws.dense.shape == (3, vocab_size)
    torch.testing.assert_close(proposal.laws.dense.sum(-1), torch.ones(3))
    first = drafter.propose(answers[0].token_ids[: answers[0].start], 1, _generator()).laws.dense[0]
    expected = first[answers[0].token_ids[answers[0].start]]
    torch.testing.assert_close(drafter.replay(answers, 3)[0].probs[0], expected)


def test_there_is_no_guess_behind_the_draft_context() -> None:
    drafter = _drafter()
    limit = drafter.max_context
    text = torch.full((limit + 4,), 7)
    assert len(drafter.propose(text[: limit - 1], 4, _generator())) == 2
    assert len(drafter.propose(text[: limit + 1], 4, _generator())) == 0
    (emitted,) = drafter.replay([Answer(text, start=limit - 2)], 4)
    assert emitted.guessed.tolist() == [True, True, True, False, False, False]
    assert emitted.probs[3:].tolist() == [0.0, 0.0, 0.0]
    (beyond,) = drafter.replay([Answer(text, start=limit + 2)], 4)
    assert beyond.guessed.tolist() == [False, False]


def test_an_empty_text_gives_no_guess() -> None:
    assert len(_drafter().propose(torch.empty(0, dtype=torch.long), 4, _generator())) == 0


def test_a_greedy_draft_proposes_one_hot_rows() -> None:
    drafter = _drafter(GREEDY)
    proposal = drafter.propose(torch.arange(5, 25), 4, _generator())
    assert all(proposal.laws.is_one_hot(index) for index in range(4))
    text = torch.arange(5, 25)
    for token_id in proposal.token_ids.tolist():
        with torch.no_grad():
            assert int(drafter.draft.model(text[None]).logits[0, -1].argmax()) == token_id
        text = torch.cat([text, torch.tensor([token_id])])


def test_bound_twins_share_weights_and_no_cache() -> None:
    drafter = _drafter()
    twin = drafter.bind(GREEDY)
    assert (drafter.law, twin.law) == (SamplingLaw(), GREEDY)
    assert twin.draft.model is drafter.draft.model
    before = drafter.propose(torch.arange(5, 25), 4, _generator()).token_ids.tolist()
    twin.propose(torch.arange(50, 99), 4, _generator())
    assert drafter.propose(torch.arange(5, 25), 4, _generator()).token_ids.tolist() == before


def test_counts_are_what_a_step_reads_and_what_memory_holds() -> None:
    full, trimmed = _drafter(), _drafter(kept=KEPT)
    weights = sum(parameter.numel() for parameter in full.draft.model.parameters())
    assert full.num_parameters == weights
    assert trimmed.num_parameters == weights - (VOCAB_SIZE - len(KEPT)) * 32
    assert (full.num_bytes, trimmed.num_bytes) == (4 * weights, 4 * (weights + len(KEPT) * 32))
    untied = CausalLMDrafter(Draft(tiny_model(num_layers=1, tied=False)), GREEDY, VOCAB_SIZE)
    assert untied.num_parameters == weights
    assert untied.num_bytes == 4 * (weights + VOCAB_SIZE * 32)


def test_an_ordinary_folder_is_a_drafter(tiny_draft_folder: Path) -> None:
    drafter = load_causal_lm_drafter(tiny_draft_folder)
    assert (drafter.law, drafter.vocab_size, drafter.kind) == (SamplingLaw(), VOCAB_SIZE, "causal-lm")
