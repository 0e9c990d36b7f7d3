"""Collecting a trace: the target answers prompts, shard by shard, and a killed run goes on where it was."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from jaxtyping import Int
from torch import Tensor

from foredraft.core.digest import digest_of
from foredraft.core.errors import NonFiniteError, PromptError
from foredraft.core.law import SamplingLaw
from foredraft.core.progress import SILENT, Progress, Task
from foredraft.core.protocols import Continuation, Speaker, Target
from foredraft.settings import TraceSettings
from foredraft.trace.prompts import Prompt, ignores_settings, prompts_digest, render
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import Trace, TraceInfo, TraceWriter

_log = logging.getLogger(__name__)


def collect(
    target: Target,
    prompts: Sequence[Prompt],
    settings: TraceSettings,
    law: SamplingLaw,
    out: Path,
    progress: Progress = SILENT,
) -> Trace:
    """Let the target answer every prompt under `law`, keep what it says in `out`, and return the complete trace.

    Prompts of as many turns and similar length share a shard, which saves padding; the shards come in an order
    drawn by the seed. Each row draws from a seed of its own, made of settings.seed, the law, the prompt's id and
    the turn. Finished shards in `out` are kept: the same call after a kill gives the same bytes as one that ran
    through.

    Args:
        settings: Its max_new_tokens, top, batch_size and seed count here.

    Raises:
        PromptError: there are no prompts, two share an id, or one is longer than the target reads; before any decoding.
        TraceError: `out` holds a trace made otherwise.
        OutputError: `out` holds something else.
    """
    shards = _shards(prompts, _lengths(target, prompts, settings.max_new_tokens), settings)
    writer = TraceWriter.open(out, info_of(target, prompts_digest(prompts), settings, law))
    num_done = len(writer.info.shards)
    if num_done < len(shards):
        _warn_of_ignored_settings(target, prompts)
    most = [float(settings.max_new_tokens * sum(prompt.num_turns for prompt in shard)) for shard in shards]
    with progress.task(f"collecting {law}", sum(most), "tokens", done=sum(most[:num_done], 0.0)) as task:
        meter = _Meter(task)
        for shard, most_tokens in zip(shards[num_done:], most[num_done:], strict=True):
            rows = _answer(target, shard, settings, law, meter.count)
            writer.append(rows)
            task.advance(most_tokens - sum(len(row.answer_ids) for row in rows))
    return writer.finish()


class _Meter:
    """Reports tokens as they are written, with their rate."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._start = perf_counter()
        self._tokens = 0

    def count(self, tokens: int) -> None:
        self._tokens += tokens
        self._task.advance(float(tokens))
        self._task.note(f"{self._tokens / (perf_counter() - self._start):.0f} tokens/s")


def _lengths(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> list[int]:
    """Return the tokens of each prompt, all its turns together; raise where the target cannot read and answer it."""
    if not prompts:
        raise PromptError("There are no prompts to answer.")
    lengths = [len(render(prompt, target.tokenizer, [""] * len(prompt.later_turns))) for prompt in prompts]
    seen: set[str] = set()
    for prompt, length in zip(prompts, lengths, strict=True):
        if prompt.id in seen:
            raise PromptError(f"Two prompts have the id {prompt.id!r}: ids must differ.")
        seen.add(prompt.id)
        if length == 0:
            raise PromptError(f"Prompt {prompt.id!r} has no tokens.")
        if length + prompt.num_turns * max_new_tokens > target.max_context:
            raise PromptError(
                f"Prompt {prompt.id!r} takes {length} tokens and {prompt.num_turns} x {max_new_tokens} for answers; "
                f"{target.name} reads {target.max_context}. Leave it out, shorten it, or lower max_new_tokens."
            )
    return lengths


def _shards(prompts: Sequence[Prompt], lengths: Sequence[int], settings: TraceSettings) -> list[list[Prompt]]:
    ordered = sorted(zip(prompts, lengths, strict=True), key=lambda pair: (pair[0].num_turns, pair[1], pair[0].id))
    size = settings.batch_size
    shards = [[prompt for prompt, _ in ordered[start : start + size]] for start in range(0, len(ordered), size)]
    return sorted(shards, key=lambda shard: digest_of([settings.seed, shard[0].id]))


def info_of(target: Speaker, digest: str, settings: TraceSettings, law: SamplingLaw) -> TraceInfo:
    """Return what the manifest of a new trace says; `digest` is the identity of what was said to the target."""
    return TraceInfo.of(
        target,
        law,
        settings.top,
        settings.batch_size,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
        prompts_digest=digest,
    )


def _warn_of_ignored_settings(target: Target, prompts: Sequence[Prompt]) -> None:
    ignored = [prompt.id for prompt in prompts if ignores_settings(prompt, target.tokenizer)]
    if ignored:
        _log.warning(
            "%d prompts, %r first, carry tools or chat_template_kwargs that the chat template of %s does not use.",
            len(ignored), ignored[0], target.name,
        )  # fmt: skip


def _answer(
    target: Target,
    prompts: Sequence[Prompt],
    settings: TraceSettings,
    law: SamplingLaw,
    on_tokens: Callable[[int], None],
) -> list[TraceRow]:
    """Return the rows of one shard; all first answers are written before any second one."""
    rows: list[list[TraceRow]] = [[] for _ in prompts]
    said: list[list[str]] = [[] for _ in prompts]
    for turn in range(max(prompt.num_turns for prompt in prompts)):
        going_on = [i for i, prompt in enumerate(prompts) if turn < prompt.num_turns and len(said[i]) == turn]
        contexts = {i: render(prompts[i], target.tokenizer, said[i]) for i in going_on}
        # Read again as text, an answer may take more tokens than it had; a conversation that outgrew the context ends.
        room = target.max_context - settings.max_new_tokens
        contexts = {i: context for i, context in contexts.items() if len(context) <= room}
        if not contexts:
            break
        seeds = [_seed(settings.seed, law, prompts[i].id, turn) for i in contexts]
        continuations = target.write(
            list(contexts.values()), law, settings.max_new_tokens, settings.top, seeds, on_tokens
        )
        for (i, context), continuation in zip(contexts.items(), continuations, strict=True):
            rows[i].append(_row(prompts[i], turn, context, continuation))
            said[i].append(target.tokenizer.decode(continuation.token_ids, skip_special_tokens=True))
    return [row for own in rows for row in own]


def _seed(seed: int, law: SamplingLaw, prompt_id: str, turn: int) -> int:
    return int(digest_of([seed, asdict(law), prompt_id, turn]), 16) >> 1


def _row(prompt: Prompt, turn: int, context: Int[Tensor, " tokens"], continuation: Continuation) -> TraceRow:
    finite = continuation.logprobs.isfinite()
    if not finite.all():
        position = int((~finite).nonzero()[0])
        raise NonFiniteError(
            f"The target gave its own token {position} of the answer to prompt {prompt.id!r} a log-probability of "
            f"{float(continuation.logprobs[position])}."
        )
    return TraceRow.of(
        continuation,
        id=f"{prompt.id}#{turn + 1}",
        prompt_id=prompt.id,
        domain=prompt.domain,
        prompt_ids=context,
        answer_ids=continuation.token_ids,
        finish_reason=continuation.finish_reason,
    )
