"""Answering by speculative decoding, in words: one prompt, or a file of them that can be interrupted."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.digest import digest_of
from foredraft.core.errors import OutputError
from foredraft.core.files import append_lines
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.own_law import bound_for
from foredraft.core.progress import SILENT, Progress
from foredraft.core.proposal import Proposal
from foredraft.core.protocols import Answer, Drafter, EmittedProbs
from foredraft.decoding.batched import decode_batch
from foredraft.decoding.gathering import gathered
from foredraft.decoding.length import Fallback, FixedLength, LengthPolicy, MarginalLength, WindowLength
from foredraft.decoding.rules import Rule, verify_block, verify_chain
from foredraft.decoding.speculative import Decoded, Limits, decode
from foredraft.decoding.witness import BLIND, Recorder
from foredraft.models.target import LocalTarget
from foredraft.settings import DecodeSettings
from foredraft.trace.buffer import Buffer
from foredraft.trace.prompts import NO_DOMAIN, Prompt, render

_RULES: dict[str, Rule] = {"chain": verify_chain, "block": verify_block}


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer may be.

    Attributes:
        law: The target's sampling law, which the answer keeps.
        stop: Texts after which an answer ends, as transformers' stop_strings; the one that came is part of it.
        is_raw: The prompt is text to go on from: no chat template is put around it.
    """

    law: SamplingLaw = GREEDY
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int = 0
    is_raw: bool = False


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer in words, and what it took."""

    text: str
    tokens: int
    target_calls: int
    seconds: float
    finish_reason: str

    @property
    def mean_tokens_per_call(self) -> float:
        return self.tokens / self.target_calls

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def generate(
    target: LocalTarget,
    drafter: Drafter | None,
    prompt: str,
    law: SamplingLaw = GREEDY,
    k: int = 4,
    max_new_tokens: int = 256,
    seed: int = 0,
) -> Generated:
    """Answer one user turn by speculative decoding, plainly where there is no drafter. The law is the target's."""
    asked = Asked(law, max_new_tokens, seed=seed)
    return next(answer(target, drafter, [as_prompt(prompt)], asked, DecodeSettings(k=k)))


def as_prompt(text: str) -> Prompt:
    """Return the prompt of one user turn."""
    return Prompt("prompt", NO_DOMAIN, ({"role": "user", "content": text},))


def answer(
    target: LocalTarget,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    asked: Asked,
    settings: DecodeSettings,
    buffer: Buffer | None = None,
) -> Iterator[Generated]:
    """Answer prompts in order, settings.batch_size at once; of several turns only the first.

    A prompt draws from a generator of its own, made of asked.seed and its id: its answer does not depend on the
    others, unless the drafter learns from them; then its law does not. Under a greedy law the text is that of plain
    decoding.

    Args:
        drafter: None decodes plainly.
        buffer: Is given what each answer taught; None keeps nothing.

    Raises:
        CapabilityError: a tree is asked for in a batch.
        PromptError: a prompt is empty, or leaves no room in the target's context.
    """
    guesser = _NoDrafter(target.vocab_size) if drafter is None else bound_for(drafter, asked.law)
    for start in range(0, len(prompts), settings.batch_size):
        part = prompts[start : start + settings.batch_size]
        for decoded in _decoded(target, guesser, part, asked, settings, buffer):
            text = target.tokenizer.decode(decoded.token_ids, skip_special_tokens=True)
            calls = decoded.target_calls
            yield Generated(text, len(decoded.token_ids), calls, decoded.seconds, decoded.finish_reason)


def answer_file(
    target: LocalTarget,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    asked: Asked,
    settings: DecodeSettings,
    out: Path,
    progress: Progress = SILENT,
    buffer: Buffer | None = None,
) -> int:
    """Write one JSON line for each prompt to `out`; lines that stand there are kept. Return how many were written.

    Raises:
        OutputError: `out` holds lines that are no answers to these prompts under these settings.
    """
    key = digest_of([target.fingerprint, asdict(asked)])
    done = _ids_in(out, key)
    unknown = done - {prompt.id for prompt in prompts}
    if unknown:
        raise OutputError(f"{out} holds an answer to {min(unknown)!r}, which is not asked: name another file.")
    left = [prompt for prompt in prompts if prompt.id not in done]
    with progress.task(f"answering {asked.law}", float(len(prompts)), "prompts", done=float(len(done))) as task:
        for prompt, one in zip(left, answer(target, drafter, left, asked, settings, buffer), strict=True):
            line = {"id": prompt.id, "answer": one.text, **asdict(one), "key": key}
            del line["text"]
            append_lines(out, [json.dumps(line, ensure_ascii=False)])
            task.advance()
            task.note(f"{one.mean_tokens_per_call:.2f} tokens per call")
    return len(left)


def _decoded(
    target: LocalTarget,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    asked: Asked,
    settings: DecodeSettings,
    buffer: Buffer | None,
) -> list[Decoded]:
    contexts = [_tokens(target, prompt, asked) for prompt in prompts]
    text_of = partial(target.tokenizer.decode, skip_special_tokens=False)
    limits = Limits(asked.max_new_tokens, target.stop_ids, target.max_context, asked.stop, text_of)
    generators = [_generator(asked.seed, prompt) for prompt in prompts]
    rule, policy = _RULES[settings.rule], partial(_policy, settings)
    recorders = [Recorder(asked.law, buffer.info.top) for _ in prompts] if buffer is not None else []
    if len(prompts) == 1:
        session, witness = target.session(), recorders[0] if recorders else BLIND
        written = [decode(session, drafter, contexts[0], asked.law, policy(), limits, generators[0], rule, witness)]
    else:
        sessions = target.batch_session(len(prompts))
        written = decode_batch(sessions, drafter, contexts, asked.law, policy, limits, generators, rule, recorders)
    if buffer is not None:
        seen = zip(recorders, contexts, prompts, written, strict=True)
        buffer.add([gathered(recorder, ids, one.domain, said.finish_reason) for recorder, ids, one, said in seen])
    return written


def _tokens(target: LocalTarget, prompt: Prompt, asked: Asked) -> Int[Tensor, " tokens"]:
    if asked.is_raw:
        text = "".join(str(message.get("content", "")) for message in prompt.messages)
        return target.tokenizer(text, return_tensors="pt").input_ids[0]
    return render(prompt, target.tokenizer)


def _policy(settings: DecodeSettings) -> LengthPolicy:
    chosen: LengthPolicy
    match settings.length:
        case "window":
            chosen = WindowLength(min(settings.k, settings.longest), settings.longest)
        case "marginal":
            growth = settings.target_growth
            chosen = MarginalLength(settings.longest, settings.cost_ratio, lambda width: 1.0 + growth * (width - 1))
        case _:
            chosen = FixedLength(settings.k)
    return Fallback(chosen, settings.fallback_after, settings.pause) if settings.fallback_after else chosen


def _generator(seed: int, prompt: Prompt) -> torch.Generator:
    return torch.Generator().manual_seed(int(digest_of([seed, prompt.id]), 16) >> 1)


def _ids_in(out: Path, key: str) -> set[str]:
    if not out.exists():
        return set()
    whole, _, cut_off = out.read_text(encoding="utf-8").rpartition("\n")
    if not '{"id": '.startswith(cut_off[:7]):
        raise OutputError(f"{out} ends in something that is no answer, and is never overwritten: name another file.")
    ids = set()
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            found = row["id"], row["key"]
        except (ValueError, KeyError, TypeError):
            raise OutputError(f"{out}:{number} is no answer, and is never overwritten: name another file.") from None
        if found[1] != key:
            raise OutputError(f"{out}:{number} was answered by another target or law, or otherwise: name another file.")
        ids.add(found[0])
    return ids


@dataclass(frozen=True, slots=True)
class _NoDrafter:
    """Never has a guess: plain decoding."""

    vocab_size: int
    kind: str = "none"
    law: SamplingLaw = GREEDY
    num_parameters: int = 0
    num_bytes: int = 0

    def bind(self, law: SamplingLaw) -> "_NoDrafter":
        return self

    def propose(self, context: Int[Tensor, " tokens"], k: int, generator: torch.Generator) -> Proposal:
        return Proposal.empty(self.vocab_size)

    def replay(self, answers: Sequence[Answer], k: int) -> list[EmittedProbs]:
        nothing = [torch.zeros(answer.num_tokens) for answer in answers]
        return [EmittedProbs(zeros, zeros.bool()) for zeros in nothing]
