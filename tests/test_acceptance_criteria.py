"""Criteria of a draft's law: the batched pass equals the slow one, bounds hold, and none of them ranks drafts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from foredraft.acceptance.criteria import Criteria, frequent_tokens, measure_criteria
from foredraft.acceptance.overlap import measure_overlap
from foredraft.checkpoint import DraftManifest
from foredraft.core.law import GREEDY, SamplingLaw, law_probs
from foredraft.core.progress import SILENT
from foredraft.core.protocols import Answer, LawGiver
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.draft import Draft
from foredraft.ngram.law import build_ngram_law, load_ngram_law
from foredraft.steps import NgramStep
from foredraft.trace.rows import TraceRow
from tests.tiny import tiny_model
from tests.traces import trace_row

PLAIN = SamplingLaw()
VOCAB = 272


@dataclass(frozen=True)
class Fixed:
    """The same law everywhere, but for the last positions, where it has no guess."""

    law: Tensor
    silent: int = 0

    def laws(self, answers: Sequence[Answer]) -> Iterator[tuple[Tensor, Tensor]]:
        count = sum(answer.num_tokens for answer in answers) - self.silent
        yield torch.arange(count), self.law.expand(count, -1)


def told(probs: Sequence[float], top: int, tokens: Sequence[int]) -> list[TraceRow]:
    law = torch.tensor(probs).expand(len(tokens), -1)
    return [trace_row("a", [0], list(tokens), law, top, greedy=False)]


def written(target_seed: int = 3, top: int = 24) -> list[TraceRow]:
    """Answers of a tiny model, with its law at every position."""
    model, generator, rows = tiny_model(seed=target_seed), torch.Generator().manual_seed(1), []
    for number in range(6):
        text = torch.randint(3, 259, (9 + number,), generator=generator)
        with torch.no_grad():
            probs = law_probs(model(input_ids=text[None]).logits[0, 3:-1], PLAIN)
        rows.append(trace_row(f"{number}", text[:4].tolist(), text[4:].tolist(), probs, top, greedy=False))
    return rows


def some_drafters(tmp_path: Path) -> dict[str, LawGiver]:
    whole, trimmed = Draft(tiny_model(seed=4)), Draft(tiny_model(seed=5), torch.arange(3, 200, 2))
    manifest = DraftManifest("ngram-law", VOCAB, "t", "f", "k")
    text = [row.answer().token_ids.numpy().astype(np.int32) for row in written()]
    build_ngram_law(text[:3], VOCAB, NgramStep(kind="ngram-law"), manifest, tmp_path / "n", SILENT)
    return {
        "whole": CausalLMDrafter(whole, PLAIN, VOCAB),
        "trimmed": CausalLMDrafter(trimmed, SamplingLaw(0.7, top_k=20), VOCAB),
        "greedy": CausalLMDrafter(whole, GREEDY, VOCAB),
        "ngram-law": load_ngram_law(tmp_path / "n"),
    }


def test_laws_are_those_that_a_proposal_is_drawn_from(tmp_path: Path) -> None:
    answers = [row.answer() for row in written()]
    contexts = [one.token_ids[: one.start + i] for one in answers for i in range(one.num_tokens)]
    for name, drafter in some_drafters(tmp_path).items():
        seen = 0
        for positions, laws in drafter.laws(answers):
            for position, law in zip(positions.tolist(), laws, strict=True):
                step = drafter.propose(contexts[position], 1, torch.Generator().manual_seed(0))
                torch.testing.assert_close(law, step.laws.probs(0, int(step.token_ids[0])), atol=1e-5, rtol=1e-4)
                seen += 1
        assert seen == len(contexts), name


def test_the_batched_overlap_is_that_of_one_step_at_a_time(tmp_path: Path) -> None:
    rows = written()
    for name, drafter in some_drafters(tmp_path).items():
        slow = measure_overlap(drafter, rows, PLAIN, PLAIN).expected_acceptance
        fast = measure_criteria(drafter, rows).overlap.expected_acceptance
        assert fast == pytest.approx(slow, abs=2e-3), name


def test_a_target_is_its_own_perfect_draft() -> None:
    figures = measure_criteria(CausalLMDrafter(Draft(tiny_model(seed=3)), PLAIN, VOCAB), written(top=VOCAB)).to_json(
        True
    )
    assert figures["expected_acceptance_bounds"] == pytest.approx([1.0, 1.0], abs=2e-3)
    assert figures["kl_divergence"][0] == pytest.approx(0.0, abs=1e-5)
    assert figures["frequent_token_accuracy"] == 1.0
    assert figures["entropy_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert figures["kl_infinite_share"] == 0.0


def test_divergence_and_overlap_of_maths_8() -> None:
    figures = measure_criteria(Fixed(torch.tensor([0.6, 0.3, 0.1])), told([0.5, 0.3, 0.2], 3, [0, 1])).to_json(True)
    assert figures["kl_divergence"] == pytest.approx([0.0475, 0.0475], abs=5e-4)
    assert figures["expected_acceptance_bounds"] == pytest.approx([0.9, 0.9], abs=1e-3)


def test_divergence_does_not_rank_drafts() -> None:
    """A draft that misses half the tail diverges more and is accepted more than one that is too flat."""
    target = [0.6, *[0.04] * 10]
    misses = torch.tensor([0.8 - 1e-5, *[0.04] * 5, *[2e-6] * 5])
    flat = torch.tensor([0.3, *[0.07] * 10])
    one, other = (measure_criteria(Fixed(law), told(target, 11, [0])).to_json(True) for law in (misses, flat))
    assert one["kl_divergence"][0] > other["kl_divergence"][0]
    assert one["expected_acceptance_bounds"][0] > other["expected_acceptance_bounds"][0]
    assert one["entropy_ratio"] < 1.0 < other["entropy_ratio"]


def test_bounds_hold_where_the_tail_is_unknown() -> None:
    generator = np.random.default_rng(0)
    for top in (2, 5, 9):
        for _ in range(20):
            target, draft = (torch.tensor(generator.dirichlet(np.full(9, 0.7))).clamp(min=1e-6) for _ in range(2))
            target, draft = target / target.sum(), draft / draft.sum()
            exact = float((target * (target / draft).log()).sum())
            found = measure_criteria(Fixed(draft), told(target.tolist(), top, [1])).to_json(True)
            low, high = found["kl_divergence"]
            assert low - 2e-2 <= exact <= high + 2e-2
            if top == 9:
                assert high - low < 1e-6
            accepted = float(torch.minimum(target, draft).sum())
            below, above = found["expected_acceptance_bounds"]
            assert below - 2e-3 <= accepted <= above + 2e-3


def test_a_token_that_the_draft_rules_out_makes_the_divergence_infinite_not_the_report() -> None:
    figures = measure_criteria(Fixed(torch.tensor([1.0, 0.0, 0.0])), told([0.5, 0.3, 0.2], 3, [0, 1])).to_json(True)
    assert (figures["kl_divergence"], figures["kl_infinite_share"]) == ([None, None], 1.0)
    assert figures["expected_acceptance_bounds"] == pytest.approx([0.5, 0.5], abs=1e-3)
    assert figures["top10_coverage"] == 0.5  # a token of probability 0 is in no top 10
    assert figures["entropy_ratio"] == 0.0


def test_coverage_counts_the_ten_most_probable() -> None:
    draft = torch.arange(12, 0, -1).double() / 78
    rows = told([1 / 12] * 12, 12, list(range(12)))
    assert measure_criteria(Fixed(draft), rows).to_json(True)["top10_coverage"] == pytest.approx(10 / 12)


def test_frequent_tokens_make_four_fifths_of_the_text() -> None:
    assert frequent_tokens([1, 1, 1, 1, 2, 2, 3, 4, 5, 6]) == [1, 2, 3, 4]
    assert frequent_tokens([7]) == [7]
    rows = told([0.5, 0.3, 0.2], 3, [0, 0, 0, 0, 1])
    agrees, differs = (
        measure_criteria(Fixed(torch.tensor(law)), rows).to_json(True)["frequent_token_accuracy"]
        for law in ([0.9, 0.05, 0.05], [0.05, 0.9, 0.05])
    )
    assert (agrees, differs) == (1.0, 0.0)


def test_a_position_without_a_guess_is_accepted_with_nothing_and_counts_nowhere_else() -> None:
    law, rows = torch.tensor([0.5, 0.3, 0.2]), told([0.5, 0.3, 0.2], 3, [0, 1, 2, 0])
    figures = measure_criteria(Fixed(law, silent=1), rows).to_json(True)
    assert figures["expected_acceptance_bounds"] == pytest.approx([0.75, 0.75], abs=1e-3)
    assert figures["top10_coverage"] == 1.0


def test_parts_add_up(tmp_path: Path) -> None:
    rows, drafter = written(), some_drafters(tmp_path)["whole"]
    frequent_everywhere = measure_criteria(drafter, rows)
    added = measure_criteria(drafter, rows[:2]) + measure_criteria(drafter, rows[2:])
    for name in ("tokens", "overlap_low", "kl_low", "covered", "draft_entropy"):
        assert getattr(added, name) == pytest.approx(getattr(frequent_everywhere, name), rel=1e-5)
    assert (Criteria() + added) == added


def test_another_stored_law_bounds_no_acceptance() -> None:
    assert (
        measure_criteria(Fixed(torch.tensor([0.6, 0.4])), told([0.5, 0.5], 2, [0])).to_json(False)[
            "expected_acceptance_bounds"
        ]
        is None
    )
