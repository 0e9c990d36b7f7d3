"""Scoring drafters on a trace: the figures, the draft's own law, and what is refused."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.acceptance.evaluate import score, score_bound
from foredraft.acceptance.fitting import fit_law
from foredraft.acceptance.overlap import measure_overlap, overlap_bounds
from foredraft.catalog import resolve
from foredraft.core.errors import DrafterError, NonFiniteError, TraceError, VocabMismatchError
from foredraft.core.law import GREEDY, SamplingLaw, law_probs
from foredraft.core.protocols import Answer, EmittedProbs
from foredraft.decoding.speculative import Limits, plain_decode
from foredraft.trace.store import Trace
from tests.toys import Lookup, MarkovDrafter, MarkovSession
from tests.traces import build_trace, trace_row

VOCAB = 5
TABLE = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8))
PLAIN = SamplingLaw()


def written(path: Path, law: SamplingLaw, answers: int = 12, length: int = 15, top: int = 3) -> Trace:
    """Collect a trace of the toy target."""
    session, rows = MarkovSession(TABLE), []
    for number in range(answers):
        prompt = torch.tensor([number % VOCAB])
        answer = plain_decode(session, prompt, law, Limits(length), torch.Generator().manual_seed(number)).token_ids
        stored = PLAIN if law.is_greedy else law
        probs = law_probs(session.logits(torch.cat([prompt, answer[:-1]]), length), stored)
        domain = "even" if number % 2 == 0 else "odd"
        rows.append(
            trace_row(f"{number:02}", prompt.tolist(), answer.tolist(), probs, top, domain, greedy=law.is_greedy)
        )
    return build_trace(path, rows, law, vocab_size=VOCAB)


def test_the_target_as_draft_is_always_accepted(tmp_path: Path) -> None:
    for law in (GREEDY, PLAIN, SamplingLaw(0.7, top_k=3)):
        report = score("itself", MarkovDrafter(TABLE), written(tmp_path / str(law), law), [1, 4])
        assert report.expected_acceptance == pytest.approx(1.0, abs=1e-5)
        assert report.mean_tokens_per_call(4) == pytest.approx(5.0, abs=1e-3)
        assert report.acceptance_by_position(4) == pytest.approx([1.0] * 4, abs=1e-5)
        assert (report.tokens, len(report.prompts), sorted(report.by_domain())) == (180, 12, ["even", "odd"])


def test_parts_of_a_trace_add_up_to_the_whole(tmp_path: Path) -> None:
    trace = written(tmp_path / "whole", PLAIN)
    rows = list(trace.rows())
    for name, drafter in (("model", MarkovDrafter(TABLE.roll(1, 0))), ("lookup", Lookup(VOCAB))):
        parts = [
            score(name, drafter, build_trace(tmp_path / f"{name}-{i}", rows[i::2], PLAIN, vocab_size=VOCAB), [1, 3])
            for i in range(2)
        ]
        whole, added = score(name, drafter, trace, [1, 3]), parts[0] + parts[1]
        assert added.mean_tokens_per_call(3) == pytest.approx(whole.mean_tokens_per_call(3))
        assert added.expected_acceptance == pytest.approx(whole.expected_acceptance)


def test_the_mean_of_clamped_ratios_estimates_the_overlap(tmp_path: Path) -> None:
    trace, drafter = written(tmp_path / "trace", PLAIN, answers=25, top=VOCAB), MarkovDrafter(0.5 * TABLE)
    report = score("draft", drafter, trace, [1])
    low, high = measure_overlap(drafter, trace.rows(), PLAIN, PLAIN).expected_acceptance
    assert high - low < 2e-3  # the trace holds the whole law, in float16
    assert report.expected_acceptance == pytest.approx(low, abs=0.05)


def test_top_k_storage_bounds_the_overlap() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        target, draft = (torch.tensor(generator.dirichlet(np.full(9, 0.5))) for _ in range(2))
        exact = float(torch.minimum(target, draft).sum())
        for top in (1, 4, 9):
            probs, ids = target.topk(top)
            low, high = overlap_bounds(ids, probs, float(1 - probs.sum()), draft)
            assert low - 1e-9 <= exact <= high + 1e-9
            if top == 9:
                assert high - low < 1e-9


def test_a_trace_of_another_stored_law_bounds_nothing(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="stores the law T=1, the text was written under T=0"):
        measure_overlap(MarkovDrafter(TABLE), [], PLAIN, GREEDY)


def test_a_draft_that_is_too_flat_is_fitted_to_a_lower_temperature(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace", PLAIN, answers=25)
    fitted = fit_law("flat", MarkovDrafter(0.5 * TABLE), trace, 3, factors=(0.0, 0.5, 1.0, 2.0))
    assert fitted.law == SamplingLaw(0.5)
    assert fitted.tried[fitted.law] > fitted.tried[PLAIN]
    assert fitted.gain.difference.value > 0
    exact = score_bound("flat", MarkovDrafter(0.5 * TABLE, SamplingLaw(0.5)), trace, [3])
    assert fitted.tried[fitted.law] == pytest.approx(exact.mean_tokens_per_call(3))


@dataclass(frozen=True)
class Broken(MarkovDrafter):
    """Gives one figure for every token."""

    figure: float = 0.0

    def bind(self, law: SamplingLaw) -> "Broken":
        return self

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        return [
            EmittedProbs(torch.full((answer.num_tokens,), self.figure), torch.ones(answer.num_tokens, dtype=torch.bool))
            for answer in answers
        ]


def test_figures_that_are_no_probabilities_are_refused(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace", PLAIN, answers=2)
    with pytest.raises(NonFiniteError, match="draft gave NaN for token 0 of the answer to prompt '00'"):
        score("draft", Broken(TABLE, figure=float("nan")), trace, [1])
    with pytest.raises(DrafterError, match=r"gave 1\.5, which is no probability"):
        score("draft", Broken(TABLE, figure=1.5), trace, [1])


def test_another_vocabulary_and_an_impossible_text_are_refused(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace", PLAIN, answers=2)
    with pytest.raises(VocabMismatchError, match="speaks 3 tokens"):
        score("draft", MarkovDrafter(TABLE[:3, :3]), trace, [1])
    row = next(trace.rows())
    impossible = replace(row, logprobs=torch.full_like(row.logprobs, float("-inf")))
    with pytest.raises(TraceError, match="impossible under the trace's own law"):
        score(
            "draft", MarkovDrafter(TABLE), build_trace(tmp_path / "other", [impossible], PLAIN, vocab_size=VOCAB), [1]
        )
    with pytest.raises(TraceError, match="holds no answers"):
        score("draft", MarkovDrafter(TABLE), build_trace(tmp_path / "none", [], PLAIN, vocab_size=VOCAB), [1])


@pytest.mark.slow
def test_what_learns_from_answers_is_scored_on_all_of_them_in_one(tmp_path: Path) -> None:
    """However long the trace: the last of 70 answers says again what the first one said."""
    texts = [list(range(40, 70)), *([100 + number, 200 - number, 3] for number in range(68))]
    rows = [trace_row(f"{number:02}", [1, 2], text) for number, text in enumerate([*texts, texts[0]])]
    trace = build_trace(tmp_path / "trace", rows, batch_size=32)
    learner = resolve("drafters", "traffic")(272, capacity=1 << 14, segment=64)
    first, *_, last = score("traffic", learner, trace, [2]).prompts
    assert first.accepted_sum == 0.0
    assert last.accepted_sum > 0.0
