"""Literal speculative decoding of a few prompts: does it do what replay says, and how fast is it?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.acceptance.replay import acceptance_given_text, as_arrays, by_block_start
from foredraft.core.law import SamplingLaw, token_logprobs
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import CONTROLLED, Answer, Drafter, validity_of
from foredraft.decoding.speculative import Decoded, Limits, TargetSession, decode, plain_decode
from foredraft.models.target import LocalTarget

_SIMULATIONS = 4000
_RESAMPLES = 2000
_POSITIONS = 256
_DOUBT = 0.005  # share of the simulations on each side that a literal run may fall into and still disagree


@dataclass(frozen=True, slots=True)
class Audit:
    """What literal decoding did on a few prompts.

    Given the text that a literal run wrote, replay says how many target calls to expect and how they scatter
    (the text is the target's own, only accepting and rejecting is left to chance). `agrees` says that the
    literal number of calls lies within the middle 99 % of it. Where nothing is left to chance, as with a greedy
    target and a greedy draft, that demands equality.

    Attributes:
        k: Draft tokens of a block.
        prompts, tokens, calls: Of the literal run: prompts answered, tokens emitted, target calls.
        expected_calls, low, high: Replay's mean and middle 99 % of the calls for the same text.
        speedup: Wall clock per token, plain / speculative, ratio of sums. The target's reading of the prompt is left
            out, and the draft's too, unless it is for the drafter to choose who reads it.
        speedup_low, speedup_high: 95 % interval over prompts (cluster bootstrap; wide where prompts are few).
        same_text: Prompts whose text equals that of plain decoding; means something under a greedy law only.
    """

    k: int
    prompts: int
    tokens: int
    calls: int
    expected_calls: float
    low: float
    high: float
    speedup: float
    speedup_low: float
    speedup_high: float
    same_text: int

    @property
    def agrees(self) -> bool:
        return self.low <= self.calls <= self.high

    @property
    def mean_tokens_per_call(self) -> float:
        return self.tokens / self.calls

    @property
    def replayed_tokens_per_call(self) -> float:
        return self.tokens / self.expected_calls

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def audit(
    target: LocalTarget,
    drafters: Mapping[str, tuple[Drafter, int]],
    prompts: Sequence[Int[Tensor, " _"]],
    law: SamplingLaw,
    max_new_tokens: int,
    seed: int,
    progress: Progress = SILENT,
) -> dict[str, Audit]:
    """Decode each prompt plainly and with each drafter in turn, and compare with replay and with the clock.

    Without prompts there is nothing to say of any drafter.

    Args:
        drafters: By name, with the draft length of each; bound to the law they draw from.
        prompts: Token ids, each with room for max_new_tokens in the target's context.
        seed: Of the generators, one a prompt and drafter.
    """
    if not prompts:
        return {}
    limits = Limits(max_new_tokens, target.stop_ids, target.max_context)
    plain: list[Decoded] = []
    literal: dict[str, list[Decoded]] = {name: [] for name in drafters}
    with progress.task(f"audit {law}", float(len(prompts) * (len(drafters) + 1)), "answers") as task:
        for number, prompt in enumerate(prompts):
            session, generator = target.session(), torch.Generator().manual_seed(seed + number)
            session.logits(prompt, 1)
            plain.append(plain_decode(session, prompt, law, limits, generator))
            task.advance()
            for name, (drafter, k) in drafters.items():
                if validity_of(drafter) != CONTROLLED:
                    drafter.propose(prompt, 1, generator)
                literal[name].append(decode(session, drafter, prompt, law, k, limits, generator))
                task.advance()
    read = _read_once(target, law)
    return {
        name: _audit(read, drafter, k, prompts, plain, literal[name], seed) for name, (drafter, k) in drafters.items()
    }


def _audit(
    target_probs_of: Callable[[Answer], Float[np.ndarray, " answer"]],
    drafter: Drafter,
    k: int,
    prompts: Sequence[Int[Tensor, " _"]],
    plain: Sequence[Decoded],
    literal: Sequence[Decoded],
    seed: int,
) -> Audit:
    answers = [
        Answer(torch.cat((prompt, run.token_ids)), len(prompt)) for prompt, run in zip(prompts, literal, strict=True)
    ]
    generator = np.random.default_rng(seed)
    calls = np.zeros(_SIMULATIONS)
    for answer, emitted in zip(answers, drafter.replay(answers, k), strict=True):
        probs, guessed = as_arrays(emitted)
        accepts = np.where(guessed, acceptance_given_text(probs, target_probs_of(answer)), 0.0)
        calls += _simulated_calls(accepts if accepts.ndim == 2 else by_block_start(accepts, k, 0.0), k, generator)
    low, high = np.quantile(calls, [_DOUBT, 1 - _DOUBT]).tolist()
    speedup, speedup_low, speedup_high = _speedup(plain, literal, generator)
    return Audit(
        k,
        len(prompts),
        sum(len(run.token_ids) for run in literal),
        sum(run.target_calls for run in literal),
        float(calls.mean()),
        low,
        high,
        speedup,
        speedup_low,
        speedup_high,
        sum(torch.equal(one.token_ids, other.token_ids) for one, other in zip(plain, literal, strict=True)),
    )


def _read_once(target: LocalTarget, law: SamplingLaw) -> Callable[[Answer], Float[np.ndarray, " answer"]]:
    """Return what gives target(x) of each answer token x. A text is read once: greedy drafters write the same one."""
    known: dict[tuple[int, bytes], np.ndarray] = {}

    def target_probs(answer: Answer) -> Float[np.ndarray, " answer"]:
        text = (answer.start, answer.token_ids.numpy().tobytes())
        if text not in known:
            known[text] = _emitted_logprobs(target.session(), answer, law).double().exp().numpy()
        return known[text]

    return target_probs


def _emitted_logprobs(session: TargetSession, answer: Answer, law: SamplingLaw) -> Float[Tensor, " answer"]:
    """Return log target(x) of each answer token x; every token is read once, logits are held for a few positions."""
    parts = []
    for start in range(answer.start, len(answer.token_ids), _POSITIONS):
        emitted = answer.token_ids[start : start + _POSITIONS]
        logits = session.logits(answer.token_ids[: start + len(emitted) - 1], len(emitted))
        parts.append(token_logprobs(logits, emitted, law))
    return torch.cat(parts)


def _simulated_calls(accepts: Float[np.ndarray, "answer k"], k: int, generator: np.random.Generator) -> np.ndarray:
    """Return the target calls of many simulated runs over one text; entry (t, i) is for a block started at t."""
    length = len(accepts)
    start, calls = np.zeros(_SIMULATIONS, dtype=int), np.zeros(_SIMULATIONS)
    while (running := start < length).any():
        accepted, alive = np.zeros(_SIMULATIONS, dtype=int), running.copy()
        for offset in range(k):
            inside = alive & (start + offset < length)
            chance = accepts[np.minimum(start, length - 1), offset]
            alive = inside & (generator.random(_SIMULATIONS) < chance)
            accepted += alive
        calls += running
        start = start + accepted + 1
    return calls


def _speedup(
    plain: Sequence[Decoded], literal: Sequence[Decoded], generator: np.random.Generator
) -> tuple[float, float, float]:
    seconds = np.array([[run.seconds, len(run.token_ids)] for run in (*plain, *literal)]).reshape(2, len(plain), 2)

    def ratio(sums: np.ndarray) -> Any:
        per_token = sums[..., 0] / sums[..., 1]
        return per_token[0] / per_token[1]

    drawn = seconds[:, generator.integers(len(plain), size=(_RESAMPLES, len(plain)))].sum(2)
    low, high = np.quantile(ratio(drawn), [0.025, 0.975]).tolist()
    return float(ratio(seconds.sum(1))), low, high
