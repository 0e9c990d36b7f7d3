"""On-policy text for the end of a training: what the draft itself goes on with, and where it would be rejected.

Everything depends on the step, the seed and the weights of that step, so that a training that was killed goes on
as it would have.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.core.digest import digest_of
from foredraft.core.law import SamplingLaw, law_probs, sample_indices
from foredraft.distill.data import Group
from foredraft.distill.student import Student
from foredraft.models.head import NO_IDS, Head
from foredraft.models.kv_cache import KeyValueCache
from foredraft.models.masks import attention_masks
from foredraft.steps import RolloutSettings
from foredraft.trace.rows import TraceRow, unread


@final
class OnPolicy:
    """Puts on-policy text in the place of answers in the last steps of a training.

    A prompt's answers are gone on with by the draft with probability `settings.share`, drawn again by P(rejected) with
    probability `settings.replay`, and left as they are otherwise. General text is left as it is.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        num_steps: int,
        seed: int,
        head_token_ids: Int[Tensor, " kept"] = NO_IDS,
        num_tokens: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Take over the settings; the last `settings.fraction` of `num_steps` is on-policy.

        Args:
            head_token_ids: Tokens that the draft can say; empty for all.
            num_tokens: Rows of a whole head from there on are padding and never written; 0: none are.
            stop_ids: Tokens behind which it writes no more.
        """
        self.settings = settings
        self.first_step = num_steps - round(settings.fraction * num_steps)
        self._seed = seed
        self._head_token_ids = head_token_ids
        self._num_tokens = num_tokens
        self._stop_ids = tuple(stop_ids)

    def groups(self, step: int, planned: Sequence[Group], student: Student) -> list[Group]:
        """Return what step number `step` trains on in the place of what was planned for it."""
        if step < self.first_step:
            return list(planned)
        generator = torch.Generator().manual_seed(int(digest_of([self._seed, step]), 16) >> 1)
        return [self._group(group, student, generator) for group in planned]

    def _group(self, group: Group, student: Student, generator: torch.Generator) -> Group:
        chance = float(torch.rand((), generator=generator, dtype=torch.float64))
        if not group[0].is_targets or chance >= self.settings.share + self.settings.replay:
            return group
        if chance < self.settings.share:
            return self._rollouts(group, student, generator)
        return replayed(group, student, generator)

    def _rollouts(self, group: Group, student: Student, generator: torch.Generator) -> Group:
        """Return continuations of beginnings of one of the answers, as many tokens of them as the group has."""
        example = group[int(torch.randint(len(group), (1,), generator=generator))]
        text, start = example.row.answer().token_ids, len(example.row.prompt_ids)
        positions = sum(len(one.row.answer_ids) for one in group)
        count = -(-positions // self.settings.max_new_tokens)
        cuts = torch.randint(start, len(text), (count,), generator=generator)
        model = student.model
        head = Head(model, self._head_token_ids, self._num_tokens)
        law = SamplingLaw(self.settings.temperature * (example.temperature or 1.0))
        limit = self.settings.max_new_tokens
        with _for_inference(model):
            written = write_branches(model, head, text, cuts, law, limit, self._stop_ids, generator)
        return tuple(
            replace(
                example, row=_row(example.row, text[:cut], token_ids), is_targets=False, scored=NO_IDS, is_live=True
            )
            for cut, token_ids in zip(cuts.tolist(), written, strict=True)
        )


@torch.no_grad()
def write_branches(
    model: PreTrainedModel,
    head: Head,
    text: Int[Tensor, " tokens"],
    cuts: Int[Tensor, " branches"],
    law: SamplingLaw,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    generator: torch.Generator,
) -> list[Int[Tensor, " _"]]:
    """Let a model go on behind several beginnings of one text, each of `cuts` >= 1 tokens; the text is read once.

    Args:
        head: Of the model; a trimmed one writes only tokens that it has.
        stop_ids: A branch ends behind one of them.

    Returns: The new tokens of each branch, 1 to max_new_tokens.
    """
    device = model.device
    longest, branches = int(cuts.max()), torch.arange(len(cuts))
    cache = KeyValueCache(model, capacity=longest + len(cuts) * max_new_tokens)
    states = model.base_model(
        input_ids=text[None, :longest].to(device), cache=cache.inner, use_cache=True
    ).last_hidden_state[0]
    hidden = states[(cuts - 1).to(device)]
    columns = torch.arange(longest)
    visible = columns < cuts[:, None]
    written: list[Tensor] = []
    for step in range(max_new_tokens):
        written.append(_drawn(head, hidden, law, torch.rand(len(cuts), generator=generator, dtype=torch.float64)))
        if step + 1 == max_new_tokens or _ended(written, stop_ids).all():
            break
        # Every branch sees its beginning and its own tokens; they lie side by side in the cache.
        positions = cuts + step
        columns, visible = torch.cat([columns, positions]), torch.cat([visible, branches[:, None] == branches], 1)
        masks = attention_masks(model, visible[None], positions[None], columns[None])
        hidden = model.base_model(
            input_ids=written[-1][None].to(device),
            attention_mask=masks,
            position_ids=positions[None].to(device),
            cache=cache.inner,
            use_cache=True,
        ).last_hidden_state[0]
    return _until_stop(torch.stack(written, 1), stop_ids)


def replayed(group: Group, student: Student, generator: torch.Generator) -> Group:
    """Return the same answers with as many positions as before, drawn by how likely the draft is rejected there.

    P(rejected) is 1 - sum min(target, draft) over events. Where the draft is never rejected the group is left as it is.
    """
    chances = (1.0 - student.acceptance([group])).clamp(min=0.0)
    if not bool(chances.sum() > 0):
        return group
    drawn = torch.multinomial(chances.cpu(), len(chances), replacement=True, generator=generator).sort().values
    sizes = [len(example.positions) for example in group]
    again, first = [], 0
    for example, size in zip(group, sizes, strict=True):
        own = drawn[(drawn >= first) & (drawn < first + size)] - first
        if len(own):
            again.append(replace(example, scored=example.positions[own]))
        first += size
    return tuple(again)


@contextmanager
def _for_inference(model: PreTrainedModel) -> Iterator[None]:
    """Leave out what only training does: dropout, and recomputing activations, which forbids caches."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _drawn(
    head: Head, hidden: Float[Tensor, "branches hidden"], law: SamplingLaw, uniforms: Float[Tensor, " branches"]
) -> Int[Tensor, " branches"]:
    logits = head.logits(hidden)
    rows = logits.argmax(-1) if law.is_greedy else sample_indices(law_probs(logits, law), uniforms.to(logits.device))
    return (head.token_ids[rows] if len(head.token_ids) else rows).cpu()


def _ended(written: Sequence[Int[Tensor, " branches"]], stop_ids: Sequence[int]) -> Tensor:
    return torch.isin(torch.stack(list(written), 1), torch.tensor(list(stop_ids), dtype=torch.long)).any(1)


def _until_stop(written: Int[Tensor, "branches tokens"], stop_ids: Sequence[int]) -> list[Int[Tensor, " _"]]:
    stops = torch.isin(written, torch.tensor(list(stop_ids), dtype=torch.long))
    lengths = torch.where(stops.any(1), stops.int().argmax(1) + 1, written.shape[1])
    return [row[:length] for row, length in zip(written, lengths.tolist(), strict=True)]


def _row(like: TraceRow, prompt_ids: Int[Tensor, " prompt"], answer_ids: Int[Tensor, " answer"]) -> TraceRow:
    """Return text of the draft behind a beginning of `like`, without a stored law."""
    return TraceRow.of(
        unread(answer_ids),
        id=like.id,
        prompt_id=like.prompt_id,
        domain=like.domain,
        prompt_ids=prompt_ids,
        answer_ids=answer_ids,
        finish_reason="length",
    )
