"""Does a draft do in a runtime what it does here? The runtime answers prompts, and its counts and text are compared."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.catalog import unknown_name_message
from foredraft.core.errors import CapabilityError, ModelError, PromptError, ServerError, UnknownNameError, UserError
from foredraft.core.law import GREEDY
from foredraft.core.lengths import LONGEST_DRAFT
from foredraft.core.options import read_options
from foredraft.core.pair import PairFacts
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Drafter
from foredraft.core.runtimes import REFUSED, verdict
from foredraft.decoding.speculative import Limits, plain_decode
from foredraft.drafters import load_drafter
from foredraft.export.lookup import LONGEST_MATCH, LOOKUP
from foredraft.export.plan import PLAN, UNMEASURED_LENGTH
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.facts import read_side
from foredraft.models.target import LocalTarget
from foredraft.trace.prompts import Prompt, render
from foredraft.verification.child import Job, Question, Replies, Reply, ask
from foredraft.verification.counting import Counting, literal_counts
from foredraft.verification.findings import CheckedPrompt, Difference, Verification, first_difference
from foredraft.verification.forms import FORMS, Served, target_in
from foredraft.verification.runtimes import RUNTIMES, Runtime

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """How much is asked, and of whom.

    Attributes:
        k: Draft tokens of a block; 0 takes the plan's beside the draft.
        max_new_tokens: Tokens of each answer; fewer where the target's plain answer ends before.
        python: Interpreter of the runtime's environment; empty takes the environment variable's.
        seconds: Longest that one run of the runtime may take.
        keep: Folder for the target in the runtime's form, found again the next time; None writes it anew.
    """

    k: int = 0
    max_new_tokens: int = 32
    python: str = ""
    seconds: float = 1200.0
    threads: int = 1
    keep: Path | None = None


def verify(
    draft: str,
    target: LocalTarget,
    runtime: str,
    prompts: Sequence[Prompt],
    settings: VerifySettings = VerifySettings(),
    progress: Progress = SILENT,
) -> Verification:
    """Decode prompts greedily in a runtime, plainly and with the draft, and compare with foredraft in float32.

    Answers are as long as the target's plain ones, and end early enough before an end token that none is drafted
    past it; so no runtime's rule for the end of an answer matters.

    Args:
        draft: An exported folder, a GGUF file, or `prompt-lookup:max_match=3`.
        target: Loaded in float32.

    Raises:
        UnknownNameError: no such runtime.
        MissingExtraError: its environment is not there; names the command that makes it.
        CapabilityError: the runtime refuses the pair; names the rule.
        PromptError: no prompt has an answer of some length.
        ServerError: the runtime did not come up, or stopped; with the end of its log.
    """
    if runtime not in RUNTIMES:
        raise UnknownNameError(unknown_name_message("runtime to verify in", runtime, RUNTIMES))
    chosen = RUNTIMES[runtime]
    lookup = _lookup(draft, runtime, chosen)
    python = chosen.python(settings.python)
    served = Served() if lookup else FORMS[chosen.form].served(draft)
    if served.weights:
        _refuse_by_rule(runtime, target, served.weights)
    k = settings.k or _planned(draft)
    drafter, counting = _drafter(target, served.weights, lookup, chosen, k)
    asked = [(prompt.id, render(prompt, target.tokenizer)) for prompt in prompts]
    with (
        progress.task(f"verify in {runtime}", 3.0, "runs") as task,
        target_in(chosen.form, target, served, settings.keep) as place,
    ):
        plain = [_plain(target, ids, settings.max_new_tokens, k) for _, ids in asked]
        kept = [(name, ids, answer) for (name, ids), answer in zip(asked, plain, strict=True) if len(answer) > 1]
        if not kept:
            raise PromptError("The target answers all of these prompts with a word or two: give others.")
        questions = tuple(Question(tuple(ids.tolist()), len(answer)) for _, ids, answer in kept)
        job = Job(place, served.place, k, questions, lookup, settings.threads)
        own = ask(chosen, python, job, False, settings.seconds)
        task.advance()
        drafted = ask(chosen, python, job, True, settings.seconds)
        task.advance()
        _refuse_unknown_tokens(runtime, target.vocab_size, (*own.replies, *drafted.replies))
        checked = tuple(
            _checked(target, drafter, name, ids, answer, counting, k, one.token_ids, other)
            for (name, ids, answer), one, other in zip(kept, own.replies, drafted.replies, strict=True)
        )
    warnings = _untested(runtime, chosen, drafted)
    return Verification(runtime, drafted.version, draft, k, served.is_exact, checked, warnings)


def _checked(
    target: LocalTarget,
    drafter: Drafter,
    name: str,
    ids: Int[Tensor, " tokens"],
    answer: list[int],
    counting: Counting,
    k: int,
    own: Sequence[int],
    drafted: Reply,
) -> CheckedPrompt:
    expected = literal_counts(target.session(), drafter, ids, answer[0], len(answer), k, counting)
    return CheckedPrompt(
        name,
        drafted.counted,
        expected,
        _difference(target, ids, own, drafted.token_ids),
        _difference(target, ids, answer, own),
        _draft_gap(drafter, ids, answer),
    )


def _refuse_unknown_tokens(runtime: str, vocab_size: int, replies: Sequence[Reply]) -> None:
    for token in (token for reply in replies for token in reply.token_ids):
        if not 0 <= token < vocab_size:
            raise ServerError(
                f"{runtime} answered with token {token}, and the target has 0 to {vocab_size - 1}: it runs another "
                "model, or its worker reads another version's answers."
            )


def _plain(target: LocalTarget, ids: Int[Tensor, " tokens"], max_new_tokens: int, k: int) -> list[int]:
    """Return the target's plain answer, cut so far before an end token that no block reaches it."""
    limits = Limits(max_new_tokens + k + 1, target.stop_ids, target.max_context)
    found = plain_decode(target.session(), ids, GREEDY, limits, torch.Generator())
    tokens = found.token_ids.tolist()
    return tokens[: min(max_new_tokens, max(0, len(tokens) - k - 2 * (found.finish_reason == "stop")))]


def _difference(
    target: LocalTarget, ids: Int[Tensor, " tokens"], one: Sequence[int], other: Sequence[int]
) -> Difference | None:
    position = first_difference(one, other)
    if position is None:
        return None
    text = torch.cat([ids, ids.new_tensor(list(one[:position]))])
    best = target.session().logits(text, 1)[0].topk(2).values
    return Difference(position, float(best[0] - best[1]))


@torch.no_grad()
def _draft_gap(drafter: Drafter, ids: Int[Tensor, " tokens"], answer: list[int]) -> float:
    if not isinstance(drafter, CausalLMDrafter):
        return math.inf
    text = torch.cat([ids, ids.new_tensor(answer)])[None]
    best = drafter.draft.model(text).logits[0, len(ids) - 1 : -1].float().topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def _refuse_by_rule(runtime: str, target: LocalTarget, source: str) -> None:
    """Say before the runtime does why it does not take the pair."""
    if not target.path.exists() or target.path == Path():
        return
    form = "gguf" if source.endswith(".gguf") else "folder"
    one = read_side(str(target.path))
    if (one.facts.form == "gguf") != (form == "gguf"):
        return  # the target is written anew in the draft's form
    found = verdict(runtime, PairFacts.of(one.facts, read_side(source).facts))
    if found.outcome == REFUSED:
        reasons = "; ".join(f"{finding.reason} {finding.fix}".strip() for finding in found.findings if finding.refuses)
        raise CapabilityError(f"{runtime} does not take {source}: {reasons}")


def _lookup(draft: str, name: str, runtime: Runtime) -> dict[str, int]:
    """Return the options of prompt lookup; empty for a draft that is a model.

    Raises:
        CapabilityError: the runtime has no lookup of its own.
        UserError: options that its lookup does not have, or lengths that cannot be.
    """
    if draft.partition(":")[0] != LOOKUP:
        return {}
    if runtime.lookup is None:
        raise CapabilityError(
            f"{name} {', '.join(runtime.tested)} has no prompt lookup: it drafts with models alone. Verify an exported "
            "draft in it, or the lookup in another runtime."
        )
    options = read_options(draft, {"max_match": int, "min_match": int})
    if "min_match" in options and not runtime.lookup.has_shortest:
        raise UserError(f"The lookup of {name} has no shortest match to set: leave min_match out of {draft}.")
    lengths: dict[str, int] = {"max_match": LONGEST_MATCH, "min_match": 1} | options
    if not 1 <= lengths["min_match"] <= lengths["max_match"]:
        raise UserError(f"{draft}: lookup needs 1 <= min_match <= max_match.")
    return lengths


def _drafter(
    target: LocalTarget, source: str, lookup: dict[str, int], runtime: Runtime, k: int
) -> tuple[Drafter, Counting]:
    """Return what guesses here as the runtime's drafter does there, and how the runtime counts it."""
    if lookup and runtime.lookup is not None:
        drafter = runtime.lookup.drafter(target.vocab_size, lookup["max_match"], lookup["min_match"], k)
        return drafter, runtime.lookup.counting
    return load_drafter(source, target).bind(GREEDY), runtime.counting


def _planned(draft: str) -> int:
    file = (Path(draft).parent if draft.endswith(".gguf") else Path(draft)) / PLAN
    if not file.is_file():
        return UNMEASURED_LENGTH
    try:
        k = int(json.loads(file.read_text(encoding="utf-8"))["num_draft_tokens"])
        if 1 <= k <= LONGEST_DRAFT:
            return k
        raise ValueError(f"num_draft_tokens is {k}")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ModelError(f"{file} cannot be read ({error}): export the draft again, or give --k.") from error


def _untested(runtime: str, chosen: Runtime, replies: Replies) -> tuple[str, ...]:
    if any(replies.version.startswith(version) for version in chosen.tested):
        return ()
    return (
        f"This is {runtime} {replies.version}; the worker was run with {', '.join(chosen.tested)} only: counts may "
        "mean something else.",
    )
