"""A target behind an OpenAI-compatible server: vLLM, SGLang, llama.cpp's, or another that gives log-probabilities."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor

from foredraft.core.digest import digest_of
from foredraft.core.errors import CapabilityError, UserError, VocabMismatchError
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.protocols import Continuation
from foredraft.models.remote.client import PATIENT, Client, Patience
from foredraft.models.remote.dialect import LLAMA_CPP, OTHER, SGLANG, VLLM, Said, Token, read_reply, request
from foredraft.models.vocabulary import Vocabulary, load_vocabulary

SERVERS_TOP = 20  # Alternatives that vLLM gives unless it is told otherwise.

_PROBE = "The three largest cities of the country are"
_TOKENIZER_PROBE = "  Ünïcode 12345, don't\n\ttabs; <b>tags</b> and 漢字!"
_MOVED = 1e-3  # nats by which a log-probability must differ to be another one
_NEAR_TIE = 0.1  # nats by which rounding may let a greedy server pass over the likeliest token
_MISSING_MASS = 1e-2  # mass that alternatives may leave out and still be the whole of a cut law
_SURE = 1e-3


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of the model that it serves.

    Attributes:
        dialect: See dialect.py.
        model: Name under which it serves the model.
        facts: What it says of the model itself: where it came from, its size, its quantization.
        num_rows, max_context: 0 where it does not say.
        dtype: Kind of the weights, "unknown" where it does not say.
        takes_ids: Whether prompts may be token ids.
        gives_ids: Whether its log-probabilities name tokens by id, and not only by text.
    """

    dialect: str
    model: str
    facts: Mapping[str, Any]
    num_rows: int
    max_context: int
    dtype: str
    takes_ids: bool = True
    gives_ids: bool = True


def is_url(name: str) -> bool:
    """Return whether a target's name is the address of a server."""
    return name.startswith(("http://", "https://"))


def connect(
    url: str,
    tokenizer: str,
    served_model: str = "",
    in_flight: int = 32,
    patience: Patience = PATIENT,
    trust_remote_code: bool = False,
) -> "RemoteTarget":
    """Return the target that a server serves, after asking it for one token.

    Args:
        url: Address, with or without /v1.
        tokenizer: Folder, .gguf file or hub id of the model's tokenizer; the chat template is applied here.
        served_model: Name of the model there; needed where the server serves several.
        in_flight: Requests that run at the same time.

    Raises:
        ServerError: the server cannot be reached.
        UserError: it serves no such model, or several and none was named.
        VocabMismatchError: it cuts text into other tokens than the tokenizer.
        CapabilityError: it gives no log-probabilities.
    """
    if not tokenizer:
        raise UserError(f"{url} takes tokens: name the tokenizer of its model (--tokenizer, a folder or hub id).")
    root = url.rstrip("/").removesuffix("/v1")
    client, vocabulary = Client(root, in_flight, patience), load_vocabulary(tokenizer, trust_remote_code)
    served = _served(client, served_model)
    _refuse_other_tokenizer(client, served, vocabulary)
    return RemoteTarget(client, _probed(client, served, vocabulary), vocabulary)


@final
class RemoteTarget:
    """Writes through a server. Implements core.protocols.Target.

    Every request says its whole law: temperature, top-k, top-p, and off for whatever else a server or the model's
    own files may switch on. The server's word is taken for it that it samples so; what can be seen is checked: that
    the tokens are those of the text, that greedy answers hold the likeliest tokens, that log-probabilities are of
    the processed law, that nothing is missing. A server need not give the same sampled answer twice.
    """

    def __init__(self, client: Client, served: Served, vocabulary: Vocabulary) -> None:
        self._client = client
        self._served = served
        self._vocabulary = vocabulary
        self._checked: set[SamplingLaw] = {GREEDY, SamplingLaw()}

    @property
    def served(self) -> Served:
        return self._served

    @property
    def name(self) -> str:
        """Name of the model there; a path's last part."""
        return PurePath(self._served.model).name if self._served.model.startswith("/") else self._served.model

    @property
    def fingerprint(self) -> str:
        """Digest of the model's name, of what the server says about the model, and of the tokenizer.

        Not of the address, so that a trace goes on behind another port. It cannot see weights: other weights
        under the same name and size, an adapter, or a cache in fewer bits are not noticed.
        """
        facts = [self._served.dialect, self.name, self._served.facts]
        return digest_of([facts, self._vocabulary.fingerprint])

    @property
    def dtype(self) -> str:
        return self._served.dtype

    @property
    def vocab_size(self) -> int:
        return self._served.num_rows or self._vocabulary.num_rows

    @property
    def max_context(self) -> int:
        return self._served.max_context or self._vocabulary.max_context

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._vocabulary.stop_ids

    @property
    def tokenizer(self) -> Any:
        return self._vocabulary.tokenizer

    @property
    def tokenizer_fingerprint(self) -> str:
        return self._vocabulary.fingerprint

    def write(
        self,
        prompts: Sequence[Int[Tensor, " _"]],
        law: SamplingLaw,
        max_new_tokens: int,
        top: int,
        seeds: Sequence[int],
        on_tokens: Callable[[int], None],
    ) -> list[Continuation]:
        """Answer prompts, many in flight, one seed each.

        The stored law is the sampling law, or the plain one when that is greedy.

        Args:
            top: Alternatives at each token; 0 keeps the emitted token's log-probability only, which greedy answers do
                without.

        Raises:
            ServerError: a request failed in all its tries.
            CapabilityError: an answer lacks log-probabilities, has fewer than asked, or under another law.
            VocabMismatchError: an answer's tokens are not those of its text.
            UserError: the server refuses a request.
        """
        self._require_law(law)
        if top and not self._served.gives_ids:
            raise CapabilityError(
                f"{self._client.base} names alternative tokens by text only, which does not tell tokens apart: "
                "collect with --top 0."
            )
        bodies = [
            request(self._served.dialect, self._served.model, self._prompt(prompt), law, max_new_tokens, top, seed)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

        def read(index: int, reply: Any) -> Continuation:
            said = read_reply(reply, self._client.base)
            self._require_prompt(said, len(prompts[index]))
            continuation = self._continuation(said, law, top)
            on_tokens(len(continuation.token_ids))
            return continuation

        try:
            return self._client.post_all("/v1/completions", bodies, read)
        except UserError as error:
            if isinstance(error, CapabilityError) or "logprobs" not in str(error):
                raise
            raise CapabilityError(
                f"{error}\nAsk for fewer alternatives (--top, {top} now), or let the server give more "
                f"(vLLM: --max-logprobs {top})."
            ) from error

    def _prompt(self, prompt: Int[Tensor, " _"]) -> list[int] | str:
        if self._served.takes_ids:
            return prompt.tolist()
        return str(self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False))

    def _require_prompt(self, said: Said, length: int) -> None:
        if said.prompt_tokens not in (-1, length):
            raise VocabMismatchError(
                f"{self._client.base} read {said.prompt_tokens} tokens of a prompt of {length}: its tokenizer is "
                "another one, adds tokens, or cuts long prompts. Name the tokenizer of its model (--tokenizer)."
            )

    def _continuation(self, said: Said, law: SamplingLaw, top: int) -> Continuation:
        if said.finish_reason not in ("stop", "length"):
            raise CapabilityError(
                f"{self._client.base} ended an answer for the reason {said.finish_reason!r}: only answers that stop by "
                "themselves or by length are the model's own. Switch off what cuts them."
            )
        token_ids = self._token_ids(said)
        logprobs = [token.logprob for token in said.tokens]
        needed = top > 0 or not law.is_greedy
        if needed and (len(logprobs) != len(token_ids) or not all(value <= _SURE for value in logprobs)):
            self._refuse_missing(sum(not math.isnan(value) for value in logprobs), len(token_ids))
        top_ids, top_logprobs = self._tops(said.tops, len(token_ids), top, law)
        if law.is_greedy:
            self._require_greedy(said)
        return Continuation(
            token_ids=torch.tensor(token_ids, dtype=torch.long),
            logprobs=torch.zeros(len(token_ids)) if law.is_greedy else torch.tensor(logprobs).clamp(max=0.0),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            tail_mass=(1.0 - top_logprobs.exp().sum(-1)).clamp(0.0, 1.0),
            finish_reason=said.finish_reason,
        )

    def _token_ids(self, said: Said) -> tuple[int, ...]:
        """Return the ids of the emitted tokens, which spell the text that came with them."""
        named = tuple(token.token_id for token in said.tokens)
        ids = said.token_ids or named
        if min(ids, default=0) >= 0:
            if named != ids and len(named) == len(ids) and min(named, default=-1) >= 0:
                raise VocabMismatchError(
                    f"{self._client.base} lists other tokens than it gives log-probabilities for: {list(ids[:8])} and "
                    f"{list(named[:8])}. This is a fault of the server; try another version of it."
                )
            self._require_text(ids, said.text)
            return ids
        ids = tuple(self.tokenizer(said.text, add_special_tokens=False)["input_ids"])
        if said.finish_reason == "stop" and len(self.stop_ids) == 1 and len(said.tokens) == len(ids) + 1:
            ids = (*ids, *self.stop_ids)  # The token that ended the answer is not in its text.
        texts = [self._text((token_id,), skip_special_tokens=True) for token_id in ids]
        given = [token.text for token in said.tokens]
        if len(given) != len(ids) or any(_differ(mine, theirs) for mine, theirs in zip(texts, given, strict=True)):
            raise VocabMismatchError(
                f"{self._client.base} gives no token ids, and its {len(given)} tokens are not the {len(ids)} that the "
                f"tokenizer cuts {said.text[:40]!r} into. Name the tokenizer of its model (--tokenizer), or use a "
                "server that gives ids (vLLM, llama.cpp)."
            )
        return ids

    def _require_text(self, ids: tuple[int, ...], text: str) -> None:
        if max(ids, default=0) >= self.vocab_size:
            raise VocabMismatchError(f"{self._client.base} emitted token {max(ids)} of {self.vocab_size}.")
        if not any(_spells(self._text(ids, skip), text) for skip in (False, True)):
            raise VocabMismatchError(
                f"{self._client.base} gives the text {text[:40]!r} for tokens that the tokenizer reads as "
                f"{self._text(ids, True)[:40]!r}: they are of two vocabularies. Name the tokenizer of its model "
                "(--tokenizer)."
            )

    def _text(self, ids: tuple[int, ...], skip_special_tokens: bool = False) -> str:
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def _refuse_missing(self, given: int, emitted: int) -> None:
        if given:
            raise CapabilityError(
                f"{self._client.base} gave {given} log-probabilities for {emitted} tokens: the answer cannot be "
                "scored. llama.cpp has none for draft tokens that it accepted: switch its speculative decoding off, or "
                "collect at temperature 0 with --top 0."
            )
        raise CapabilityError(
            f"{self._client.base} gave no log-probabilities. Switch them on there (vLLM: --max-logprobs 20; a proxy "
            "must pass `logprobs` through), or score text by --answers-from-log with a local target."
        )

    def _tops(
        self, tops: Sequence[tuple[Token, ...]], length: int, top: int, law: SamplingLaw
    ) -> tuple[Int[Tensor, "tokens top"], Tensor]:
        """Return the `top` best tokens of each position; a law that was cut to fewer is filled up with nothing."""
        ids, logprobs = torch.zeros(length, top, dtype=torch.long), torch.full((length, top), -math.inf)
        for position, given in enumerate(tops if top else ()):
            best = given[:top]
            if len(best) < top and sum(math.exp(token.logprob) for token in given) < 1.0 - _MISSING_MASS:
                raise CapabilityError(
                    f"{self._client.base} gave {len(best)} of {top} log-probabilities asked for. Ask for fewer "
                    f"(--top {len(best)}), or let the server give more (vLLM: --max-logprobs {top})."
                )
            taken = [token.token_id for token in best]
            unused = (token_id for token_id in range(self.vocab_size) if token_id not in taken)
            ids[position] = torch.tensor(taken + [next(unused) for _ in range(top - len(best))])
            logprobs[position, : len(best)] = torch.tensor([token.logprob for token in best])
        if top and len(tops) != length:
            raise CapabilityError(f"{self._client.base} gave alternatives for {len(tops)} of {length} tokens.")
        return ids, logprobs

    def _require_greedy(self, said: Said) -> None:
        for position, (token, given) in enumerate(zip(said.tokens, said.tops, strict=False)):
            if given and token.logprob < given[0].logprob - _NEAR_TIE:
                raise CapabilityError(
                    f"{self._client.base} was asked for greedy answers, and token {position} has log-probability "
                    f"{token.logprob:.2f} where another has {given[0].logprob:.2f}: it draws from another law. Does "
                    "something between here and the model set a temperature or a penalty?"
                )

    def _require_law(self, law: SamplingLaw) -> None:
        """Raise unless the server's log-probabilities are those of `law`; asks for up to three tokens."""
        if law in self._checked:
            return
        plain = self._first_token(SamplingLaw())
        changed = []
        if law.temperature != 1.0:
            warm = self._first_token(SamplingLaw(temperature=2.0))
            changed.append(abs(warm.tops[0][0].logprob - plain.tops[0][0].logprob) > _MOVED)
        if law.top_k or law.top_p < 1.0:
            cut = self._first_token(SamplingLaw(top_k=1))
            changed.append(cut.tokens[0].logprob > -_MOVED > plain.tops[0][0].logprob)
        if not all(changed):
            raise CapabilityError(
                f"{self._client.base} gives log-probabilities before temperature, top-k and top-p, and under {law} "
                "those after them are needed. Start the server so that it gives them (vLLM: --logprobs-mode "
                "processed_logprobs), or collect at temperature 0, or 1 without top-k and top-p."
            )
        self._checked.add(law)

    def _first_token(self, law: SamplingLaw) -> Said:
        said = _ask(self._client, self._served, self._vocabulary, law, top=1)
        if not said.tokens or not said.tops or not said.tops[0]:
            self._refuse_missing(len(said.tokens), 1)
        return said


def _spells(mine: str, theirs: str) -> bool:
    """Return whether two texts are the same but for a leading space and a character that was cut off at the end."""
    mine, theirs = mine.strip(), theirs.strip()
    if mine == theirs:
        return True
    whole = mine.rstrip("\N{REPLACEMENT CHARACTER}")
    return whole.rstrip() == theirs.rstrip("\N{REPLACEMENT CHARACTER}").rstrip()


def _differ(mine: str, theirs: str) -> bool:
    """Return whether two tokens differ as far as text shows; parts of a character do not show."""
    part = "\N{REPLACEMENT CHARACTER}"
    return mine.strip() != theirs.strip() and part not in mine and not theirs.startswith("bytes:")


def _served(client: Client, wanted: str) -> Served:
    """Return what the server lists; a server without a list of models is asked as it is."""
    listed = _models(client)
    if not listed:
        if not wanted:
            raise UserError(f"{client.base} does not say which models it serves: name one (--model).")
        return Served(OTHER, wanted, {}, 0, 0, "unknown")
    names = [str(entry.get("id")) for entry in listed]
    if wanted and wanted not in names:
        raise UserError(f"{client.base} does not serve {wanted!r}; it serves: {', '.join(names)}.")
    if not wanted and len(listed) > 1:
        raise UserError(f"{client.base} serves several models; name one (--model): {', '.join(names)}.")
    entry = listed[names.index(wanted)] if wanted else listed[0]
    meta = entry.get("meta") or {}
    owner = str(entry.get("owned_by"))
    facts: dict[str, Any] = {"root": PurePath(str(entry.get("root") or "")).name}
    facts |= {key: meta[key] for key in ("n_params", "size", "ftype", "n_vocab") if key in meta}
    return Served(
        dialect=owner if owner in (VLLM, LLAMA_CPP, SGLANG) else OTHER,
        model=str(entry.get("id")),
        facts=facts,
        num_rows=int(meta.get("n_vocab") or 0),
        max_context=int(entry.get("max_model_len") or meta.get("n_ctx") or 0),
        dtype=str(meta.get("ftype") or "unknown"),
    )


def _models(client: Client) -> list[dict[str, Any]]:
    text = client.get("/v1/models")
    try:
        return [dict(entry) for entry in json.loads(text or "{}").get("data") or []]
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{client.base}/v1/models gives no list of models: is this an OpenAI-compatible server?"
        ) from error


def _refuse_other_tokenizer(client: Client, served: Served, vocabulary: Vocabulary) -> None:
    if 0 < served.num_rows < len(vocabulary.tokenizer):
        raise VocabMismatchError(
            f"{client.base} serves a model of {served.num_rows} tokens, the tokenizer has {len(vocabulary.tokenizer)}. "
            "Name the tokenizer of that model (--tokenizer)."
        )
    if served.dialect not in (VLLM, LLAMA_CPP):
        return
    body = {"model": served.model, "prompt": _TOKENIZER_PROBE, "content": _TOKENIZER_PROBE, "add_special_tokens": False}
    (theirs,) = client.post_all("/tokenize", [body], lambda _, reply: reply.get("tokens"))
    mine = vocabulary.tokenizer(_TOKENIZER_PROBE, add_special_tokens=False)["input_ids"]
    if theirs != mine:
        raise VocabMismatchError(
            f"{client.base} cuts {_TOKENIZER_PROBE!r} into {theirs}, the tokenizer into {mine}. Name the tokenizer of "
            "the model that it serves (--tokenizer)."
        )


def _probed(client: Client, served: Served, vocabulary: Vocabulary) -> Served:
    """Return what is served with how prompts go in and tokens come out."""
    try:
        said = _ask(client, served, vocabulary, GREEDY, top=0)
    except UserError:
        # Some take text only; whatever else is wrong shows again.
        served = replace(served, takes_ids=False)
        said = _ask(client, served, vocabulary, GREEDY, top=0)
    gives_ids = all(token.token_id >= 0 for token in said.tokens)
    return replace(served, gives_ids=gives_ids)


def _ask(client: Client, served: Served, vocabulary: Vocabulary, law: SamplingLaw, top: int) -> Said:
    prompt = vocabulary.tokenizer(_PROBE)["input_ids"] if served.takes_ids else _PROBE
    body = request(served.dialect, served.model, prompt, law, 1, top, 0)
    (said,) = client.post_all("/v1/completions", [body], lambda _, reply: read_reply(reply, client.base))
    return said
