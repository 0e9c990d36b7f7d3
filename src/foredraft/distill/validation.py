"""What a draft in training is worth: replayed tokens per call on prompts that it does not learn from."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from foredraft.acceptance.evaluate import score_rows
from foredraft.core.digest import digest_of
from foredraft.core.errors import NonFiniteError
from foredraft.core.law import SamplingLaw
from foredraft.core.processes import Processes, summed
from foredraft.distill.data import Group
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.draft import Draft
from foredraft.steps import ValidationSettings
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import Trace

_LARGEST_SHARE = 0.1
# Fewer say next to nothing: the last weights are as good a choice.
_FEWEST_PROMPTS = 4
_MOST_REPLAYS = 20
# A replayed position costs about a third of a trained one: a tenth as many are about 3 % of the time.
_POSITIONS_FOR_EACH_REPLAYED = 10


@dataclass(frozen=True, slots=True)
class Validated:
    """The draft's worth on held-out answers, under all laws of the traces together.

    Attributes:
        step: Optimizer steps done; 0 before the first.
        positions: Answer positions trained on so far.
        seconds: Training time so far.
        mean_tokens_per_call: Answer tokens / replayed target calls, both summed over all held-out answers.
        expected_acceptance: Mean of min(1, draft(x) / target(x)) over their tokens x.
    """

    step: int
    positions: int
    seconds: float
    mean_tokens_per_call: float
    expected_acceptance: float


@final
class Validation:
    """Held-out answers, and when they are replayed."""

    def __init__(
        self, traces: Sequence[Trace], held_out: Sequence[Group], settings: ValidationSettings, tokens: int
    ) -> None:
        """Read the answers of `held_out` under the law that each trace was written with.

        Args:
            tokens: Answer positions of the whole training.
        """
        prompts = {example.row.prompt_id for group in held_out for example in group}
        self._rows = [(trace.info.law, _rows(trace, prompts)) for trace in traces] if prompts else []
        self._vocab_size = traces[0].info.vocab_size
        self._settings = settings
        size = sum(len(row.answer_ids) for _, rows in self._rows for row in rows)
        self._every = settings.every or max(math.ceil(tokens / _MOST_REPLAYS), _POSITIONS_FOR_EACH_REPLAYED * size)

    @property
    def is_on(self) -> bool:
        return bool(self._rows)

    def is_due(self, before: int, after: int, is_last: bool) -> bool:
        """Return whether to replay behind a step that took the positions trained on from `before` to `after`."""
        return self.is_on and (is_last or after // self._every > before // self._every)

    def has_given_up(self, seen: Sequence[Validated]) -> bool:
        """Return whether training has gone on in vain for `patience` replays."""
        patience = self._settings.patience
        return bool(patience and seen) and len(seen) - 1 - seen.index(best_of(seen)) >= patience

    def replay(self, draft: Draft, processes: Processes) -> tuple[float, float]:
        """Return mean_tokens_per_call and expected_acceptance of a draft. All processes must ask.

        Both are NaN for a draft that gives NaN. Where each process holds the whole draft they share the answers;
        where it is sharded all replay all of them.
        """
        ks = [self._settings.num_draft_tokens]
        first, step = (0, 1) if processes.sharded else (processes.rank, processes.count)
        drafter = CausalLMDrafter(draft, SamplingLaw(), self._vocab_size)
        tokens = calls = accepted = 0.0
        try:
            for law, rows in self._rows:
                if mine := rows[first::step]:
                    for counted in score_rows("the draft in training", drafter.bind(law), mine, ks):
                        tokens += counted.tokens
                        calls += float(counted.counts.calls[0])
                        accepted += counted.accepted_sum
        except NonFiniteError:
            calls = accepted = math.nan
        tokens, calls, accepted = summed(tokens, calls, accepted)
        return tokens / calls, accepted / tokens


def hold_out(groups: Sequence[Group], prompts: int, seed: int) -> tuple[list[Group], list[Group]]:
    """Return the groups to learn from and those held out: `prompts` of them, at most a tenth, balanced over domains.

    Which ones depends on their prompts' ids and the seed, not on their order. None where a tenth is fewer than 4.
    """
    count = min(prompts, int(_LARGEST_SHARE * len(groups)))
    if len(groups) < _FEWEST_PROMPTS / _LARGEST_SHARE:
        count = 0
    turns: Counter[str] = Counter()
    order: list[tuple[int, int, int]] = []
    for index, group in sorted(enumerate(groups), key=lambda one: digest_of([seed, one[1][0].row.prompt_id])):
        domain = group[0].row.domain
        order.append((turns[domain], len(order), index))
        turns[domain] += 1
    chosen = {index for *_, index in sorted(order)[:count]}
    return (
        [group for index, group in enumerate(groups) if index not in chosen],
        [group for index, group in enumerate(groups) if index in chosen],
    )


def best_of(seen: Sequence[Validated]) -> Validated:
    """Return the first of those with the most tokens per call."""
    return max(seen, key=lambda one: one.mean_tokens_per_call)


def _rows(trace: Trace, prompts: set[str]) -> list[TraceRow]:
    return [row for row in trace.rows(tops=False) if row.prompt_id in prompts and len(row.answer_ids)]
