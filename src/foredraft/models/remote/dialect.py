"""What servers are asked for a completion, and how they say what came of it.

Three dialects of the same API: vLLM, llama.cpp's server, and everything else (SGLang among it). Two forms of
log-probabilities: lists by kind, as OpenAI's completions once had, and one object a token.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from foredraft.core.errors import CapabilityError
from foredraft.core.law import SamplingLaw

VLLM, LLAMA_CPP, SGLANG, OTHER = "vllm", "llamacpp", "sglang", "other"
_SEEDS = 2**31
# vLLM writes the logarithm of nothing as -9999.
_NOTHING = -9000.0
_NO_FIGURE: Mapping[str, Any] = {"logprob": math.nan}
_TOKEN_ID = re.compile(r"token_id:(\d+)")

# What servers do to a law unless they are told not to. Some take their defaults from the model's own files.
_NEUTRAL: Mapping[str, Mapping[str, Any]] = {
    VLLM: {
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
    },
    # Its own order draws the temperature last; top-k and top-p belong behind it.
    LLAMA_CPP: {"min_p": 0.0, "repeat_penalty": 1.0, "samplers": ["temperature", "top_k", "top_p"]},
    SGLANG: {"min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True, "skip_special_tokens": False},
    OTHER: {},
}


@dataclass(frozen=True, slots=True)
class Token:
    """A token as a server names it, with its log-probability; NaN where the server gave none.

    Attributes:
        token_id: -1 where the server gave text only.
    """

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Said:
    """One completion.

    Attributes:
        token_ids: The tokens as the server lists them apart from the log-probabilities; empty where it does not.
        tokens: The emitted tokens with their log-probabilities; empty where the server gives none.
        tops: For each of them the most probable tokens, best first.
        finish_reason: As the server says it.
        prompt_tokens: Tokens of the prompt as the server counts; -1 where it does not.
    """

    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[Token, ...]
    tops: tuple[tuple[Token, ...], ...]
    finish_reason: str
    prompt_tokens: int


def request(
    dialect: str,
    model: str,
    prompt: Sequence[int] | str,
    law: SamplingLaw,
    max_new_tokens: int,
    top: int,
    seed: int,
) -> dict[str, Any]:
    """Return the body that asks for one completion under exactly `law`, with `top` alternatives at each token."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_new_tokens,
        "temperature": law.temperature,
        "top_p": 1.0 if law.is_greedy else law.top_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed % _SEEDS,
        "logprobs": top,
        **_NEUTRAL[dialect],
    }
    if dialect == LLAMA_CPP:
        # It reads 0 as "none". Asked for what sampling left, it gives the processed law.
        body |= {"logprobs": max(top, 1), "post_sampling_probs": not law.is_greedy}
    if law.top_k and not law.is_greedy:
        body["top_k"] = law.top_k
    elif dialect != OTHER:
        body["top_k"] = -1 if dialect == SGLANG else 0
    return body


def read_reply(reply: Any, where: str) -> Said:
    """Return what a completion says.

    Raises:
        CapabilityError: it has not the form of one; names the server.
    """
    try:
        (choice,) = reply["choices"]
        tokens, tops = _logprobs(choice.get("logprobs") or {})
        return Said(
            text=str(choice["text"]),
            token_ids=tuple(int(token_id) for token_id in choice.get("token_ids") or ()),
            tokens=tokens,
            tops=tops,
            finish_reason=str(choice.get("finish_reason")),
            prompt_tokens=int((reply.get("usage") or {}).get("prompt_tokens", -1)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CapabilityError(
            f"{where} answers, but not as an OpenAI-compatible completion ({type(error).__name__}: {error}). "
            "Is the address the one that ends in /v1?"
        ) from error


def _logprobs(given: Mapping[str, Any]) -> tuple[tuple[Token, ...], tuple[tuple[Token, ...], ...]]:
    if given.get("content") is not None:
        entries = given["content"]
        lists = [entry.get("top_logprobs", entry.get("top_probs")) or () for entry in entries]
        # llama.cpp writes probability 1 without alternatives for draft tokens that it accepted: that is no figure.
        emitted = (replace(_entry(entry), **({} if one else _NO_FIGURE)) for entry, one in zip_longest(entries, lists))
        return tuple(emitted), tuple(_best_first(map(_entry, one)) for one in lists)
    texts, logprobs = given.get("tokens") or (), given.get("token_logprobs") or ()
    named = tuple(_named(text, value) for text, value in zip_longest(texts, logprobs))
    tops = given.get("top_logprobs") or [{}] * len(named)
    return named, tuple(_best_first(_named(text, value) for text, value in (top or {}).items()) for top in tops)


def _entry(entry: Mapping[str, Any]) -> Token:
    if "prob" in entry:
        logprob = math.log(entry["prob"]) if entry["prob"] > 0 else -math.inf
    else:
        logprob = _number(entry.get("logprob"))
    return Token(int(entry.get("id", -1)), str(entry.get("token", "")), logprob)


def _named(text: Any, logprob: Any) -> Token:
    match = _TOKEN_ID.fullmatch(str(text))
    return Token(int(match[1]) if match else -1, str(text), _number(logprob))


def _number(logprob: Any) -> float:
    if not isinstance(logprob, int | float):
        return math.nan
    return -math.inf if logprob < _NOTHING else float(logprob)


def _best_first(tokens: Any) -> tuple[Token, ...]:
    return tuple(sorted(tokens, key=lambda token: (-token.logprob, token.token_id)))
