"""Costs by batch size and of the loop, and what they say: interleaved, whole blocks, every request."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.acceptance.batches import measure_batch
from foredraft.acceptance.cost import Costs, Seconds
from foredraft.acceptance.overhead import measure_overhead
from foredraft.acceptance.prediction import Yield, batch_figures
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.decoding import speculative
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.draft import Draft
from foredraft.models.loading import load_causal_lm
from foredraft.models.target import LocalTarget
from foredraft.ngram.prompt_lookup import PromptLookup
from tests.tiny import tiny_model

VOCAB = 272
STEP = 2e-4
TEXT = torch.arange(3, 43)


def exactly(seconds: float) -> Seconds:
    return Seconds(seconds, seconds, seconds)


@dataclass
class SlowTexts:
    """Texts whose every new token takes a while; remembers what it was asked."""

    rows: int
    asked: list[int] = field(default_factory=list)

    def again(self) -> None:
        self.asked.append(0)

    def logits(self, token_ids: Int[Tensor, "rows new"]) -> Tensor:
        self.asked.append(token_ids.shape[1])
        time.sleep(STEP * token_ids.numel())
        return torch.zeros(*token_ids.shape, VOCAB)


@dataclass
class Slow:
    """A target and a drafter that hands such texts out."""

    vocab_size: int = VOCAB
    law: SamplingLaw = GREEDY
    made: list[SlowTexts] = field(default_factory=list)

    def texts(self, token_ids: Int[Tensor, "rows context"]) -> SlowTexts:
        self.made.append(SlowTexts(len(token_ids)))
        return self.made[-1]

    def __getattr__(self, name: str) -> object:
        return {"kind": "slow", "num_parameters": 0, "num_bytes": 0}.get(name, lambda *words: None)


def single(names: Sequence[str]) -> Costs:
    steps = tuple(exactly(0.01 + 0.001 * n) for n in range(6))
    return Costs(steps, {name: {1: exactly(1e-5), 4: exactly(4e-5)} for name in names}, exactly(1e-4), exactly(5e-5))


def test_steps_and_blocks_are_timed_whole_for_every_request() -> None:
    target, drafter = Slow(), Slow()
    costs = measure_batch(target, {"slow": drafter}, TEXT, SamplingLaw(), [1, 4], 3, single(["slow"]), 3)
    assert len(costs.target) == 5
    for width, step in enumerate(costs.target, 1):
        assert 3 * width * STEP <= step.median < 3 * width * STEP + 0.05
    assert set(costs.blocks["slow"]) == {1, 4}
    assert costs.blocks["slow"][4].median >= 3 * 5 * STEP
    (texts,) = drafter.made
    assert texts.rows == 3
    # A block reads two tokens first, then one at a time, and starts from the same point each round.
    assert texts.asked == [0, 2, 0, 2, 1, 1, 1] * (3 + 2)


def test_a_drafter_without_a_model_runs_request_by_request() -> None:
    lookup = {"lookup": PromptLookup(VOCAB)}
    costs = measure_batch(Slow(), lookup, TEXT, GREEDY, [1, 4], 8, single(["lookup"]), 3)
    assert costs.draft_seconds("lookup", 4) == pytest.approx(8 * 4e-5)
    assert costs.overhead.median == pytest.approx(8e-4)
    assert costs.plain_overhead.median == pytest.approx(4e-4)


@pytest.mark.parametrize("law", [GREEDY, SamplingLaw(0.7, top_k=9)], ids=str)
def test_real_models_are_timed_over_a_batch(tiny_target_folder: object, law: SamplingLaw) -> None:
    target = LocalTarget(load_causal_lm(str(tiny_target_folder), "float32"))
    draft = Draft(tiny_model(num_layers=1), torch.arange(3, 100))
    drafter = CausalLMDrafter(draft, law, target.vocab_size)
    costs = measure_batch(target, {"draft": drafter}, TEXT, law, [1, 2], 4, single(["draft"]), 3)
    again = Costs.from_json(costs.to_json())
    assert again == costs
    assert all(step.median > 0 for step in costs.target)
    assert costs.blocks["draft"][2].median > 0


def test_the_loop_s_own_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, block = measure_overhead(VOCAB, SamplingLaw(), 2)
    assert all(value >= 0.0 for value in (*plain, *block))
    check = speculative.check_proposal

    def slower(*arguments: object) -> None:
        time.sleep(2e-2)
        check(*arguments)

    monkeypatch.setattr(speculative, "check_proposal", slower)
    slow_plain, slow_block = measure_overhead(VOCAB, SamplingLaw(), 2)
    assert min(*slow_plain, *slow_block) > 1e-2


def test_overhead_costs_what_the_formula_says() -> None:
    steps = (exactly(1.0), exactly(1.1), exactly(1.2))
    costs = Costs(steps, {"d": {1: exactly(0.1), 2: exactly(0.2)}}, exactly(0.3), exactly(0.05))
    assert costs.predicted_speedup("d", 2, 2.0) == pytest.approx(2.0 * 1.05 / (0.2 + 1.2 + 0.3))
    assert costs.predicted_speedup("d", 2, 1.5, guess_share=0.5) == pytest.approx(1.5 * 1.05 / (0.2 + 1.1 + 0.3))
    figures = batch_figures(costs, "d", Yield({1: 1.6, 2: 2.0}, {1: 1.0, 2: 1.0}), rows=4)
    assert figures["best_k"] == 2
    assert figures["tokens_per_second"] == pytest.approx(4 * 2.0 / (0.2 + 1.2 + 0.3))
    even = figures["break_even_acceptance"]["2"]
    assert (1 + even + even**2) * 1.05 == pytest.approx(0.2 + 1.2 + 0.3)


def test_where_no_length_gains_the_best_is_none() -> None:
    costs = Costs((exactly(1.0), exactly(1.9)), {"d": {1: exactly(0.1)}})
    figures = batch_figures(costs, "d", Yield({1: 1.5}, {1: 1.0}), rows=2)
    assert (figures["best_k"], figures["tokens_per_second"]) == (0, 2.0)
    assert figures["predicted_speedup"]["1"] < 1.0
