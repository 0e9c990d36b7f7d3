"""Traces of answers that a target gave before: read again under a law that the user states, and never decoded."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from foredraft.core.digest import digest_of
from foredraft.core.errors import PromptError, TraceError, VocabMismatchError
from foredraft.core.law import SamplingLaw
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Answer, Reading, ReadingTarget, Target
from foredraft.settings import TraceSettings
from foredraft.trace.collect import info_of
from foredraft.trace.prompts import Prompt, content_digest, file_bytes, jsonl_rows, parse_prompt, render
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import LOGGED, Trace, TraceInfo, TraceWriter

_log = logging.getLogger(__name__)

NEAR_TIE = 0.5  # nats; what other kernels or bfloat16 move the gap of two logits by
_SUSPICIOUS_SCORE = 5.0
_OUTSIDE = 3.0


@runtime_checkable
class LogReader(Target, ReadingTarget, Protocol):
    """A target that reads text it did not write now."""


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    """One row of a log.

    Attributes:
        where: File and line, for errors.
        text: The answer; empty where the log has token ids only.
        token_ids: The answer's tokens; empty where the log has text only.
        finish_reason: "stop", "length", or empty where the log does not say.
    """

    where: str
    id: str
    prompt: Prompt
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class LogChecks:
    """What reading a log again showed, over the answers read in this call; figures add up.

    Attributes:
        tokens: Answer tokens.
        near_ties: Tokens that the law would not have emitted here, by no more than rounding explains.
        respelled: Answers whose token ids are not those that the tokenizer cuts their text into.
        surprise: Sum over tokens of log target(token) less its mean under the law, in nats.
        variance: Sum of the variances of log target(token) under the law.
        outside: Answers whose own score is beyond 3.
    """

    tokens: int = 0
    near_ties: int = 0
    respelled: int = 0
    surprise: float = 0.0
    variance: float = 0.0
    answers: int = 0
    outside: int = 0

    @property
    def score(self) -> float:
        """How many standard deviations the text's log-probability lies off what its law expects; 0 for greedy.

        Within about 3 for text of this law, by the martingale central limit theorem. Positive: too probable, as text
        of a lower temperature is.
        """
        return self.surprise / math.sqrt(self.variance) if self.variance > 0 else 0.0

    @property
    def is_suspicious(self) -> bool:
        return abs(self.score) > _SUSPICIOUS_SCORE

    @property
    def sentence(self) -> str:
        """What there is to say, in words; empty for nothing."""
        said = []
        if self.near_ties:
            said.append(f"{self.near_ties} of {self.tokens} tokens are near ties that were decided the other way here.")
        if self.respelled:
            said.append(f"{self.respelled} answers have other tokens than the tokenizer cuts their text into.")
        if self.is_suspicious:
            said.append(
                f"The text is {'more' if self.score > 0 else 'less'} probable than its law expects, by "
                f"{abs(self.score):.0f} standard deviations ({self.outside} of {self.answers} answers by more than 3): "
                "it was hardly written under this law. Scores on it would be wrong; state the law that it has."
            )
        return " ".join(said)

    def __add__(self, other: "LogChecks") -> "LogChecks":
        return LogChecks(*(one + two for one, two in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "score": self.score, "suspicious": self.is_suspicious}


@dataclass(frozen=True, slots=True)
class LoggedTrace:
    """A finished trace of a log, and what was seen while reading it."""

    trace: Trace
    checks: LogChecks = field(default_factory=LogChecks)


def read_log(path: Path, prompts: Sequence[Prompt] = ()) -> list[LoggedAnswer]:
    """Return the answers of a log, in file order.

    A row has a prompt (`prompt` or `messages`, in itself, in `request` or in `body`; or an `id` or `custom_id` of
    one of `prompts`) and an answer: `answer`, or the last message if it is the assistant's, or one of `choices`,
    in itself or in `response`. It may have the answer's tokens (`answer_ids`, or `token_ids` in the choice) and a
    `finish_reason`. Answers that say "stop" get the stop token behind them, those that say nothing do not.

    Raises:
        PromptError: a row lacks one of the two, or says what another said; names the file and the line.
    """
    by_id = {prompt.id: prompt for prompt in prompts}
    answers = [_logged(row, where, by_id) for row, where in jsonl_rows(file_bytes(path), str(path))]
    if not answers:
        raise PromptError(f"{path} holds no answers.")
    seen: dict[str, str] = {}
    for answer in answers:
        if answer.id in seen:
            raise PromptError(f"{answer.where}: answer {answer.id!r} was given before, in {seen[answer.id]}.")
        seen[answer.id] = answer.where
    return answers


def collect_logged(
    target: LogReader,
    answers: Sequence[LoggedAnswer],
    settings: TraceSettings,
    law: SamplingLaw,
    out: Path,
    progress: Progress = SILENT,
    near_tie: float = NEAR_TIE,
) -> LoggedTrace:
    """Let the target read the answers under `law`, keep what it says of them in `out`, and return the trace.

    Nothing is decoded. That the target wrote them under this law is the user's word; tokens that it could not have
    written are refused, and text whose probability does not fit the law is warned of.

    Args:
        settings: Its top and batch_size count here.
        near_tie: Nats by which a token may lie outside the law, for rounding; such tokens are counted.

    Raises:
        PromptError: an answer is empty, or too long with its prompt.
        VocabMismatchError: token ids do not spell their text.
        TraceError: a token is impossible under the law, or `out` holds another trace.
        OutputError: `out` holds something else.
    """
    texts = [_tokens(target, answer) for answer in answers]
    writer = TraceWriter.open(out, _info(target, answers, texts, settings, law))
    size, done, checks = settings.batch_size, len(writer.info.shards), LogChecks()
    num_tokens = [float(text.num_tokens) for text in texts]
    start = done * size
    with progress.task(f"reading {law}", sum(num_tokens), "tokens", done=sum(num_tokens[:start])) as task:
        for first in range(start, len(texts), size):
            part, logged = texts[first : first + size], answers[first : first + size]
            readings = target.read(part, law, settings.top, lambda tokens: task.advance(float(tokens)))
            _refuse_impossible(target, logged, part, readings, law, near_tie)
            writer.append([_row(*row) for row in zip(logged, part, readings, strict=True)])
            checks += sum((_checked(reading, law) for reading in readings), _respelled(target, logged, part))
    trace = writer.finish()
    if checks.is_suspicious:
        _log.warning("%s: %s", out, checks.sentence)
    return LoggedTrace(trace, checks)


def _logged(row: Any, where: str, prompts: Mapping[str, Prompt]) -> LoggedAnswer:
    _require(isinstance(row, dict), where, "a row must be an object with a prompt and an answer")
    request = _inner(row.get("request", row), "body")
    asked = {key: value for key, value in request.items() if key in ("prompt", "messages", "tools", "domain")}
    asked |= {key: row[key] for key in ("domain", "chat_template_kwargs") if key in row}
    text, ids, reason = _answer(row, where)
    messages = asked.get("messages")
    if text is None and isinstance(messages, list) and messages and _role(messages[-1]) == "assistant":
        text, asked["messages"] = messages[-1].get("content"), messages[:-1]
    _require(text is not None or bool(ids), where, "there is no answer: give answer, choices or an assistant's message")
    _require(isinstance(text or "", str), where, "the answer is no text (a call of a tool, perhaps), leave it out")
    _require(bool(text) or bool(ids), where, "the answer is empty, leave it out")
    name = str(row.get("id", row.get("custom_id", "")))
    if "prompt" in asked or "messages" in asked:
        prompt = parse_prompt({**asked, "id": name} if name else asked, where)
        prompt = prompt if prompt.id else replace(prompt, id=content_digest(prompt, where))
    else:
        _require(name in prompts, where, f"there is no prompt, and no --prompts with the id {name!r}")
        prompt = prompts[name]
    identity = name or digest_of([prompt.id, text, list(ids)])
    return LoggedAnswer(where, identity, prompt, text or "", ids, reason)


def _answer(row: Mapping[str, Any], where: str) -> tuple[Any, tuple[int, ...], str]:
    """Return text, token ids and finish reason as far as a row has them outside its messages."""
    reply = _inner(row.get("response", row), "body")
    choices = reply.get("choices", [])
    _require(isinstance(choices, list) and len(choices) <= 1, where, "a row has one answer, not several choices")
    choice = choices[0] if choices else {}
    _require(isinstance(choice, dict), where, "a choice must be an object")
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    ids = row.get("answer_ids") or choice.get("token_ids") or []
    _require(isinstance(ids, list) and all(type(one) is int for one in ids), where, "answer_ids are whole numbers")
    return row.get("answer", text), tuple(ids), str(row.get("finish_reason") or choice.get("finish_reason") or "")


def _inner(value: Any, key: str) -> dict[str, Any]:
    """Return an object, or the one that it wraps."""
    outer = value if isinstance(value, dict) else {}
    return outer[key] if isinstance(outer.get(key), dict) else outer


def _role(message: Any) -> str:
    return str(message.get("role")) if isinstance(message, dict) else ""


def _tokens(target: LogReader, answer: LoggedAnswer) -> Answer:
    """Return prompt and answer in tokens.

    Raises:
        PromptError: both together are longer than the target reads, or one has no tokens.
        VocabMismatchError: the given ids do not spell the given text.
    """
    prompt_ids = render(answer.prompt, target.tokenizer)
    ids = list(answer.token_ids) or _cut(target, answer.text)
    if answer.token_ids:
        _require_spelling(target, answer)
    if answer.finish_reason == "stop" and target.stop_ids and (not ids or ids[-1] not in target.stop_ids):
        own = target.tokenizer.eos_token_id
        ids.append(own if own in target.stop_ids else target.stop_ids[0])
    _require(bool(ids), answer.where, "the answer has no tokens, leave it out")
    _require(len(prompt_ids) > 0, answer.where, "the prompt has no tokens")
    if len(prompt_ids) + len(ids) > target.max_context:
        raise PromptError(
            f"{answer.where}: prompt and answer take {len(prompt_ids) + len(ids)} tokens, {target.name} reads "
            f"{target.max_context}. Leave the row out."
        )
    return Answer(torch.cat((prompt_ids, torch.tensor(ids, dtype=torch.long))), len(prompt_ids))


def _cut(target: LogReader, text: str) -> list[int]:
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])


def _require_spelling(target: LogReader, answer: LoggedAnswer) -> None:
    ids = answer.token_ids
    if min(ids) < 0 or max(ids) >= target.vocab_size:
        raise VocabMismatchError(
            f"{answer.where}: answer_ids hold {max(ids) if min(ids) >= 0 else min(ids)}, {target.name} has "
            f"{target.vocab_size} tokens. The log is of another model."
        )
    spelled = [_text(target, ids, skip) for skip in (True, False)]
    if answer.text and answer.text not in spelled:
        raise VocabMismatchError(
            f"{answer.where}: answer_ids spell {spelled[0][:40]!r}, the answer is {answer.text[:40]!r}. The log is of "
            f"another tokenizer than that of {target.name}, or its text was changed."
        )


def _text(target: LogReader, ids: Sequence[int], skip_special_tokens: bool) -> str:
    return str(
        target.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )


def _info(
    target: LogReader,
    answers: Sequence[LoggedAnswer],
    texts: Sequence[Answer],
    settings: TraceSettings,
    law: SamplingLaw,
) -> TraceInfo:
    said = [[answer.id, text.start, text.token_ids.tolist()] for answer, text in zip(answers, texts, strict=True)]
    info = info_of(target, digest_of(said), settings, law)
    return replace(info, max_new_tokens=max(text.num_tokens for text in texts), provenance=LOGGED)


def _refuse_impossible(
    target: LogReader,
    answers: Sequence[LoggedAnswer],
    texts: Sequence[Answer],
    readings: Sequence[Reading],
    law: SamplingLaw,
    near_tie: float,
) -> None:
    wrong = [
        (answer, text, reading) for answer, text, reading in zip(answers, texts, readings, strict=True)
        if bool((reading.gap > near_tie).any())
    ]  # fmt: skip
    if not wrong:
        return
    answer, text, reading = wrong[0]
    position = int((reading.gap > near_tie).nonzero()[0])
    token = target.tokenizer.decode(text.token_ids[text.start + position])
    raise TraceError(
        f"{answer.where}: token {position} of the answer, {token!r}, is none that {target.name} emits under {law}: it "
        f"lies {float(reading.gap[position]):.2f} nats below. {len(wrong)} of {len(answers)} answers up to there hold "
        "such tokens: the log was written under another law, by another model, or from another chat template or "
        "system prompt. State the law that it has, or leave those answers out."
    )


def _row(answer: LoggedAnswer, text: Answer, reading: Reading) -> TraceRow:
    return TraceRow.of(
        reading,
        id=f"{answer.id}#1",
        prompt_id=answer.prompt.id,
        domain=answer.prompt.domain,
        prompt_ids=text.token_ids[: text.start],
        answer_ids=text.token_ids[text.start :],
        finish_reason=answer.finish_reason or "length",
    )


def _checked(reading: Reading, law: SamplingLaw) -> LogChecks:
    surprise, variance = float((reading.logprobs - reading.mean).sum()), float(reading.variance.sum())
    score = surprise / math.sqrt(variance) if variance > 0 else 0.0
    return LogChecks(
        tokens=len(reading.gap),
        near_ties=int((reading.gap > 0).sum()),
        surprise=0.0 if law.is_greedy else surprise,
        variance=0.0 if law.is_greedy else variance,
        answers=1,
        outside=int(not law.is_greedy and abs(score) > _OUTSIDE),
    )


def _respelled(target: LogReader, answers: Sequence[LoggedAnswer], texts: Sequence[Answer]) -> LogChecks:
    """Return the answers whose given ids are another spelling of their text than the tokenizer's."""
    pairs = [(answer, text.token_ids[text.start :].tolist()) for answer, text in zip(answers, texts, strict=True)]
    return LogChecks(
        respelled=sum(
            bool(answer.token_ids) and _cut(target, _text(target, ids, False)) != ids for answer, ids in pairs
        )
    )


def _require(holds: bool, where: str, fault: str) -> None:
    if not holds:
        raise PromptError(f"{where}: {fault}.")
