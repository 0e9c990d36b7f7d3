"""Laws read live: the same as stored ones where these are whole, and nothing is renormalised."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foredraft.core.errors import TraceError
from foredraft.core.law import GREEDY, SamplingLaw, law_probs
from foredraft.distill.data import Example, Group, read_groups, rows_of_tokens
from foredraft.distill.init import init_from_target
from foredraft.distill.live import LiveTarget
from foredraft.distill.losses import EventLaw, forward_kl, hard_cross_entropy, loss_gradient, total_variation
from foredraft.distill.packing import pack
from foredraft.distill.student import Student
from foredraft.distill.train import distill
from foredraft.models.head import NO_IDS
from foredraft.steps import DistillStep
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import Trace
from tests.distilling import held_out_acceptance, tiny_target, written_trace
from tests.tiny import tiny_model
from tests.traces import trace_row

ALL, TOKENS, PROMPT = rows_of_tokens(NO_IDS, 272), 272, 6
TRIMMED = torch.arange(1, 259, 2)


def _live(kept: torch.Tensor = NO_IDS) -> LiveTarget:
    return LiveTarget(tiny_model(), TOKENS, rows_of_tokens(kept, 272))


def _whole(trace: Trace, law: SamplingLaw = SamplingLaw()) -> list[Group]:
    """The answers of a trace with their laws in full, in float32: what a cache of the whole vocabulary would hold."""
    model, groups = tiny_model(), []
    for row in trace.rows(tops=False):
        with torch.no_grad():
            probs = law_probs(model(row.answer().token_ids[None, :-1]).logits[0, len(row.prompt_ids) - 1 :], law)
        ordered = probs.sort(-1, descending=True)
        full = replace(
            row,
            top_ids=ordered.indices.int(),
            top_logprobs=ordered.values.log(),
            tail_mass=torch.zeros(len(probs)),
            logprobs=probs.gather(1, row.answer_ids[:, None]).log().squeeze(1),
        )
        groups.append((Example.under(law, full),))
    return groups


def _stripped(groups: list[Group]) -> list[Group]:
    def bare(row: TraceRow) -> TraceRow:
        return replace(row, top_ids=row.top_ids[:, :0], top_logprobs=row.top_logprobs[:, :0])

    return [tuple(replace(one, row=bare(one.row), is_live=True) for one in group) for group in groups]


def _gradient(groups: list[Group], loss: object, kept: torch.Tensor = NO_IDS) -> dict[str, torch.Tensor]:
    student = Student.of(init_from_target(tiny_model(), range(1), kept))
    student.live = _live(kept)
    student.backward(groups, loss)
    return {name: weight.grad for name, weight in student.weights.items()}


@pytest.mark.parametrize("law", [SamplingLaw(), SamplingLaw(0.7), SamplingLaw(0.9, 12, 0.8)], ids=str)
@pytest.mark.parametrize("kept", [NO_IDS, TRIMMED], ids=["whole head", "trimmed head"])
@pytest.mark.parametrize("loss", [forward_kl, total_variation, hard_cross_entropy])
def test_a_cache_of_the_whole_vocabulary_and_the_live_target_give_the_same_gradient(
    law: SamplingLaw, kept: torch.Tensor, loss: object, tmp_path: Path
) -> None:
    cached = _whole(written_trace(tmp_path / "trace", tiny_model(), 4, SamplingLaw()), law)
    left, right = _gradient(cached, loss, kept), _gradient(_stripped(cached), loss, kept)
    assert any(float(gradient.abs().max()) > 1e-3 for gradient in left.values())
    for name, gradient in left.items():
        torch.testing.assert_close(right[name], gradient, rtol=1e-3, atol=2e-6)


def test_a_small_cache_is_within_the_tail_of_the_live_law(tmp_path: Path) -> None:
    trace = written_trace(tmp_path / "trace", tiny_model(), 4, SamplingLaw(), top=4)
    packed = pack(read_groups([trace]), ALL)
    live, tail = _live().laws(packed), packed.law.probs[:, -1]
    head = torch.randn(272, 32, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(len(tail), 32, generator=torch.Generator().manual_seed(1))
    few, all_of_it = (loss_gradient(hidden, head, laws, forward_kl) for laws in (packed.law, live))
    # Two gradients by the logits differ by at most twice the tail, summed over rows.
    bound = 2.0 * (tail + 2e-3) * head.norm(dim=1).max()
    assert bool(((few.hidden - all_of_it.hidden).norm(dim=1) <= bound).all())
    assert bool((few.acceptance >= all_of_it.acceptance - 2e-3).all())
    assert bool((few.acceptance <= all_of_it.acceptance + tail + 2e-3).all())
    assert float((few.acceptance - all_of_it.acceptance).max()) > 0.01


def test_mass_that_a_trimmed_head_lacks_is_not_renormalised(tmp_path: Path) -> None:
    packed = pack(read_groups([written_trace(tmp_path / "trace", tiny_model(), 3, top=16)]), ALL)
    whole, few = (_live(kept).laws(packed)[0:60] for kept in (NO_IDS, TRIMMED))
    torch.testing.assert_close(few.probs[:, :-1], whole.probs[:, TRIMMED])
    assert float(few.probs.sum(-1).max()) < 0.99
    unsaid = ~torch.isin(packed.emitted_ids, TRIMMED)
    assert unsaid.any()
    assert bool((few.emitted[unsaid] == len(TRIMMED)).all())
    assert TRIMMED[few.emitted[~unsaid]].tolist() == packed.emitted_ids[~unsaid].tolist()


def test_each_answer_is_taught_its_own_law() -> None:
    laws = [SamplingLaw(), SamplingLaw(0.5), SamplingLaw(1.0, 3), SamplingLaw(1.0, 0, 0.4)]
    row = trace_row("a", [5, 6, 7], [20, 21, 22])
    (group,) = _stripped([tuple(Example.under(law, row) for law in laws)])
    given = _live().laws(pack([group], ALL))[0:12].probs[:, :-1]
    with torch.no_grad():
        logits = tiny_model()(row.answer().token_ids[None, :-1]).logits[0, 2:]
    for number, law in enumerate(laws):
        torch.testing.assert_close(given[3 * number : 3 * number + 3], law_probs(logits, law))
    assert (given[6:9] > 0).sum(-1).tolist() == [3, 3, 3]


def test_padding_rows_of_the_targets_head_are_never_said() -> None:
    packed = pack([(Example(trace_row("a", [5], [20]), 1.0),)], ALL)
    law = LiveTarget(tiny_model(), 259, ALL).laws(packed)[0:1]
    assert float(law.probs[0, 259:].abs().sum()) == 0.0
    assert float(law.probs.sum()) == pytest.approx(1.0)


def test_the_targets_likeliest_token_counts_where_it_wrote_none() -> None:
    row = trace_row("a", [5, 6, 7], [20, 21, 22])
    (live,) = _stripped([(Example(row, 1.0, is_targets=False),)])
    law = _live().laws(pack([live], ALL))[0:3]
    assert law.emitted.tolist() == law.probs[:, :-1].argmax(-1).tolist()
    stored = pack([(Example(row, 1.0, is_targets=False),)], ALL).law
    assert stored.rows.gather(1, stored.emitted[:, None]).flatten().tolist() == [20, 21, 22]


def test_laws_are_made_for_a_slice_only_and_are_the_same_each_time(tmp_path: Path) -> None:
    packed = pack(read_groups([written_trace(tmp_path / "trace", tiny_model(), 3)]), ALL)
    live = _live().laws(packed)
    assert len(live) == len(packed.read) == 60
    first, again = live[10:20], live.to(torch.device("cpu"))[10:20]
    assert isinstance(first, EventLaw)
    assert len(first) == 10
    assert torch.equal(first.probs, again.probs)


def test_laws_that_nobody_can_say_are_asked_of_nobody() -> None:
    student = Student.of(init_from_target(tiny_model(), range(1), NO_IDS))
    with pytest.raises(TraceError, match="must be asked for, and there is no target to ask"):
        student.backward(_stripped([(Example(trace_row("a", [5], [20]), 1.0),)]), forward_kl)


def test_a_trace_without_laws_trains_live(tmp_path: Path) -> None:
    trace = written_trace(tmp_path / "trace", tiny_model(), 24, GREEDY, top=0)
    held_out = [written_trace(tmp_path / "eval", tiny_model(), 12, SamplingLaw(), prompt_seed=9)]
    draft = init_from_target(tiny_model(), range(1), NO_IDS)
    step = {"tokens": 3000, "batch_tokens": 200, "learning_rate": 1e-2}
    result = distill(draft, [trace], DistillStep(**step, laws="live"), tiny_target(), tmp_path / "live")
    before = held_out_acceptance(draft, tiny_model(), held_out)
    assert held_out_acceptance(result.draft, tiny_model(), held_out) > before + 0.03
