"""On-policy text: the draft really draws it, and it depends on the step, the seed and the weights alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foredraft.core.errors import RecipeError
from foredraft.core.law import GREEDY, SamplingLaw, law_probs
from foredraft.distill import rollouts
from foredraft.distill.data import Example, Group, num_positions, read_groups, rows_of_tokens
from foredraft.distill.init import init_from_target
from foredraft.distill.live import LiveTarget
from foredraft.distill.losses import forward_kl
from foredraft.distill.packing import pack
from foredraft.distill.rollouts import OnPolicy, replayed, write_branches
from foredraft.distill.student import Student
from foredraft.distill.train import distill
from foredraft.models.head import NO_IDS, Head
from foredraft.recipe import settings_from
from foredraft.steps import DistillStep, RolloutSettings
from tests.distilling import held_out_acceptance, tiny_target, written_trace
from tests.tiny import tiny_model
from tests.traces import trace_row

ALL = rows_of_tokens(NO_IDS, 272)
TEXT = torch.tensor([9, 20, 31, 42, 53, 64, 75, 86])
CRITICAL = 27.9  # chi-square, 9 degrees of freedom, one in a thousand


def _student(layers: int = 1, kept: torch.Tensor = NO_IDS) -> Student:
    return Student.of(init_from_target(tiny_model(), range(layers), kept))


def _branches(cuts: list[int], length: int, law: SamplingLaw, **options: object) -> list[torch.Tensor]:
    model, generator = tiny_model(num_layers=2), torch.Generator().manual_seed(0)
    head = Head(model, options.get("kept", NO_IDS))
    stops = options.get("stop_ids", ())
    return write_branches(model, head, TEXT, torch.tensor(cuts), law, length, stops, generator)


def _chi_square(drawn: torch.Tensor, probs: torch.Tensor, buckets: int = 10) -> float:
    """Compare drawn tokens with a law, over buckets of tokens of about equal mass."""
    order = probs.argsort(descending=True)
    bucket = torch.empty_like(order)
    bucket[order] = (probs[order].cumsum(0) * buckets).clamp(max=buckets - 1e-6).long()
    expected = torch.zeros(buckets).index_add_(0, bucket, probs) * len(drawn)
    seen = torch.bincount(bucket[drawn], minlength=buckets)
    return float(((seen - expected).square() / expected.clamp(min=1e-9)).sum())


@pytest.mark.parametrize("law", [SamplingLaw(), SamplingLaw(0.6)], ids=str)
@pytest.mark.parametrize("kept", [NO_IDS, torch.arange(3, 259, 2)], ids=["whole head", "trimmed head"])
def test_every_token_is_drawn_from_the_drafts_own_law(law: SamplingLaw, kept: torch.Tensor) -> None:
    written = torch.stack(_branches([4] * 3000, 2, law, kept=kept))
    model = tiny_model(num_layers=2)

    def own_law(text: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = model(text[None]).logits[0, -1]
        cut = torch.full_like(logits, float("-inf"))
        tokens = kept if len(kept) else torch.arange(272)
        cut[tokens] = logits[tokens]
        return law_probs(cut, law)

    assert _chi_square(written[:, 0], own_law(TEXT[:4])) < CRITICAL
    first = int(written[:, 0].mode().values)
    after = written[written[:, 0] == first, 1]
    assert len(after) > 60
    assert _chi_square(after, own_law(torch.cat([TEXT[:4], torch.tensor([first])])), 5) < 18.5  # 4 degrees
    # The test has power: the law of another beginning does not pass.
    assert _chi_square(written[:, 0], own_law(TEXT[:5])) > CRITICAL
    assert not len(kept) or bool(torch.isin(written, kept).all())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_branches_written_together_are_those_written_alone(family: str) -> None:
    model, cuts = tiny_model(num_layers=2, family=family), [8, 1, 5, 5, 3]
    written = write_branches(model, Head(model), TEXT, torch.tensor(cuts), GREEDY, 6, (), torch.Generator())
    for cut, branch in zip(cuts, written, strict=True):
        text = TEXT[:cut]
        for _ in range(6):
            with torch.no_grad():
                text = torch.cat([text, model(text[None]).logits[0, -1].argmax(-1, keepdim=True)])
        assert branch.tolist() == text[cut:].tolist()


def test_a_branch_ends_behind_a_stop_token() -> None:
    free = _branches([4] * 40, 8, SamplingLaw())
    stops = (int(free[0][3]), int(free[1][2]))
    for branch, stopped in zip(free, _branches([4] * 40, 8, SamplingLaw(), stop_ids=stops), strict=True):
        ends = [place + 1 for place, token in enumerate(branch.tolist()) if token in stops]
        assert stopped.tolist() == branch[: min(ends, default=8)].tolist()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    return read_groups([written_trace(tmp_path_factory.mktemp("t") / "t", tiny_model(), 24, SamplingLaw())])


def _tokens(groups: list[Group]) -> list[list[int]]:
    return [one.row.answer().token_ids.tolist() for group in groups for one in group]


def test_rollouts_depend_on_step_seed_and_weights_alone(answers: list[Group]) -> None:
    settings = RolloutSettings(fraction=0.5, share=1.0, max_new_tokens=5)
    policy, student = OnPolicy(settings, 10, seed=3), _student()
    answers = answers[:5]
    first = _tokens(policy.groups(7, answers, student))
    policy.groups(9, answers, student)
    assert _tokens(OnPolicy(settings, 10, seed=3).groups(7, answers, _student())) == first
    assert _tokens(policy.groups(8, answers, student)) != first
    assert _tokens(OnPolicy(settings, 10, seed=4).groups(7, answers, student)) != first
    assert _tokens(policy.groups(7, answers, _student(layers=2))) != first


def test_rollouts_go_on_with_beginnings_of_answers_and_cost_no_more_positions(answers: list[Group]) -> None:
    settings = RolloutSettings(fraction=0.5, share=1.0, max_new_tokens=5)
    for group, written in zip(answers, OnPolicy(settings, 10, 0).groups(9, answers, _student()), strict=True):
        whole = group[0].row.answer().token_ids
        assert num_positions(written) == num_positions(group)
        for example in written:
            cut = len(example.row.prompt_ids)
            assert len(group[0].row.prompt_ids) <= cut < len(whole)
            assert example.row.prompt_ids.tolist() == whole[:cut].tolist()
            assert example.is_live
            assert not example.is_targets


def test_only_the_last_steps_and_only_answers_are_replaced(answers: list[Group]) -> None:
    text = [tuple(replace(one, is_targets=False) for one in group) for group in answers[:6]]
    policy = OnPolicy(RolloutSettings(fraction=0.3, share=0.5, max_new_tokens=5), 10, 0)
    planned = [*answers, *text]
    assert policy.groups(6, planned, _student()) == planned
    late = policy.groups(7, planned, _student())
    assert all(left is right for left, right in zip(late[24:], text, strict=True))
    assert any(left is not right for left, right in zip(late[:24], answers, strict=True))


def test_the_shares_of_rollouts_and_replay_are_honoured(answers: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    again = tuple(replace(one, scored=torch.tensor([0])) for one in answers[0])
    monkeypatch.setattr(rollouts, "replayed", lambda *_: again)
    monkeypatch.setattr(rollouts, "write_branches", lambda *given: [torch.tensor([1])] * len(given[3]))
    policy = OnPolicy(RolloutSettings(fraction=1.0, share=0.3, replay=0.5, max_new_tokens=20), 40, 0)
    student, count, kinds = _student(), 40 * len(answers), {"rollouts": 0, "replay": 0}
    for step in range(40):
        for group in policy.groups(step, answers, student):
            kinds["rollouts"] += not group[0].is_targets
            kinds["replay"] += group is again
    # Four standard deviations of a binomial.
    assert kinds["rollouts"] == pytest.approx(0.3 * count, abs=4 * (0.21 * count) ** 0.5)
    assert kinds["replay"] == pytest.approx(0.5 * count, abs=4 * (0.25 * count) ** 0.5)


def test_positions_are_drawn_again_by_how_likely_they_are_rejected(
    answers: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    student, group = _student(), answers[0]
    accepted = student.acceptance([group])
    monkeypatch.setattr(Student, "acceptance", lambda *_: accepted)
    drawn = torch.cat([replayed(group, student, torch.Generator().manual_seed(seed))[0].scored for seed in range(150)])
    assert len(drawn) == 150 * num_positions(group)
    expected = (1.0 - accepted) / (1.0 - accepted).sum() * len(drawn)
    statistic = float(((torch.bincount(drawn, minlength=len(expected)) - expected).square() / expected).sum())
    assert statistic < 43.8  # 19 degrees of freedom, one in a thousand
    uniform = len(drawn) / len(expected)
    assert float(((torch.bincount(drawn) - uniform).square() / uniform).sum()) > 43.8


def test_acceptance_is_that_of_the_live_law_where_none_is_stored(answers: list[Group]) -> None:
    student, (example,) = _student(), answers[0]
    bare = replace(example.row, top_ids=example.row.top_ids[:, :0], top_logprobs=example.row.top_logprobs[:, :0])
    student.live = LiveTarget(tiny_model(), 272, ALL)
    asked = student.acceptance([(replace(example, row=bare, is_live=True),)])
    stored, tail = student.acceptance([answers[0]]), pack([answers[0]], ALL).law.probs[:, -1]
    assert bool((asked <= stored + 2e-3).all())
    assert bool((asked >= stored - tail - 2e-3).all())


def test_scored_positions_are_those_of_a_longer_context() -> None:
    row = trace_row("a", [5, 6, 7], [20, 21, 22, 23])

    def gradient(example: Example) -> dict[str, torch.Tensor]:
        student = _student()
        student.backward([(example,)], forward_kl)
        return {name: weight.grad for name, weight in student.weights.items()}

    for positions in ([2], [1, 2, 3]):
        behind = positions[0]
        tail = trace_row("b", [5, 6, 7, *[20, 21, 22][:behind]], [20, 21, 22, 23][behind : positions[-1] + 1])
        expected = gradient(Example(tail, 1.0))
        for times in (1, 2):
            given = gradient(Example(row, 1.0, scored=torch.tensor(positions * times)))
            for name, grad in given.items():
                torch.testing.assert_close(grad, expected[name], rtol=1e-3, atol=2e-6)
    packed = pack([(Example(row, 1.0, scored=torch.tensor([3, 1, 1])),)], ALL)
    assert packed.emitted_ids.tolist() == [23, 21, 21]
    assert packed.stems.token_ids.tolist() == [5, 6, 7]
    assert packed.branches.token_ids.tolist() == [20, 21, 22]


def test_a_training_with_rollouts_and_replay_teaches(tmp_path: Path) -> None:
    traces = [written_trace(tmp_path / "trace", tiny_model(), 32, SamplingLaw())]
    held_out = [written_trace(tmp_path / "eval", tiny_model(), 12, SamplingLaw(), prompt_seed=9)]
    settings = RolloutSettings(fraction=0.5, share=0.5, replay=0.3, max_new_tokens=5)
    step = DistillStep(tokens=2400, batch_tokens=200, learning_rate=1e-2, rollouts=settings)
    draft = init_from_target(tiny_model(), range(1), NO_IDS)
    result = distill(draft, traces, step, tiny_target(), tmp_path / "work")
    before = held_out_acceptance(draft, tiny_model(), held_out)
    assert held_out_acceptance(result.draft, tiny_model(), held_out) > before + 0.03
    assert result.rollbacks == ()


def test_shares_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RecipeError, match="share and replay together must lie above 0 and not above 1"):
        settings_from(DistillStep, ["rollouts.share=0.7", "rollouts.replay=0.5"])
