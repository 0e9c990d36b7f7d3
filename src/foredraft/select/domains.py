"""The domain of a request by a small linear model over features made by hand; no tokenizer, no language model.

The weights are trained by tools/train_domains.py, which also says how well they do on sources it did not learn from.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from jaxtyping import Float64

DOMAINS = ("code", "mathematics", "dialogue", "prose", "structured", "other language")
_WINDOW = 2000  # characters that are looked at, the last ones
_MARKS = "{}[]\"'()=+-*/<>|\t,.?!:;_#@$%&\\"
_WORD = re.compile(r"[^\W\d_]+")
_LISTS = {
    "function words": "the of and to in a is that it was for on as with his her at by be this had not are but from or "
    "have an they which there were been has their who will would when",
    "address": "i you my your me we us our hi hello please thanks thank ok okay yes yeah sure sorry want need like can "
    "could help let",
    "code words": "def return import class self for if elif else none true false print int str len range raise try "
    "except function var const let void public static null include end while lambda assert",
    "other languages": "der die das und ist nicht ein eine zu mit von auf den dem des sich im es für er le la les et "
    "un une que est pour dans qui pas au el los las por con una es se del lo il di che non per sono de da em os na "
    "og det som att het van en niet je dat ze na do się jest i w",
    "sums": "many much total each more than times per percent sum less half twice cost costs price sold buy bought "
    "left altogether average number equation solve probability integer find value x y dollars hours minutes",
}
_ASKING = re.compile(
    r"(?:^|[.?!:\n]\s*)(?:what|how|why|which|who|where|when|can you|could you|do you|is there|explain|describe|write"
    r"|give|tell|suggest|compose|imagine|discuss)\b"
)
_QUANTITIES = re.compile(
    r"\bhow (?:many|much|long|far|old|often|fast|tall|large|big|likely)\b|\bnumber of\b|\bprobability\b|\bestimate"
    r"|\bcalculate|\bper (?:second|minute|hour|day|week|month|year|cent)\b|\bon average\b|\baverage\b"
)
_REASONING = re.compile(r"\bstep[ -]by[ -]step\b|\breasoning\b|\bshow (?:your|the) work|\btherefore\b|\bprove\b")
_SETS = {name: frozenset(words.split()) for name, words in _LISTS.items()}


@dataclass(frozen=True, slots=True)
class DomainModel:
    """A multinomial logistic regression.

    Attributes:
        mean, scale: Of each feature in training.
        weights: Row by domain.
    """

    mean: Float64[np.ndarray, " features"]
    scale: Float64[np.ndarray, " features"]
    weights: Float64[np.ndarray, "domains features"]
    bias: Float64[np.ndarray, " domains"]

    def domain(self, text: str) -> str:
        """Return the likeliest of DOMAINS; empty for text without a visible character."""
        if not text.strip():
            return ""
        features = np.clip((text_features(text) - self.mean) / self.scale, -6.0, 6.0)
        return DOMAINS[int((self.weights @ features + self.bias).argmax())]


@cache
def shipped_model() -> DomainModel:
    """Return the model that comes with the package."""
    data = json.loads(files("foredraft.data").joinpath("domains.json").read_text(encoding="utf-8"))
    return DomainModel(*(np.array(data[name]) for name in ("mean", "scale", "weights", "bias")))


def domain_of_tokens(decode: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], str]:
    """Return what names the domain of tokens, given what makes text of them."""
    return lambda token_ids: shipped_model().domain(decode(token_ids))


def text_features(text: str) -> Float64[np.ndarray, " features"]:
    """Return features of the end of a text: shares of characters, words and lines, as square roots."""
    text = text[-_WINDOW:]
    size = max(len(text), 1)
    words = _WORD.findall(text.lower())
    lines = [line for line in text.split("\n") if line.strip()] or [""]
    shares = [
        *(text.count(mark) / size for mark in _MARKS),
        sum(character > "\x7f" for character in text) / size,
        sum("\u3000" <= character <= "\u9fff" or character >= "\uff00" for character in text) / size,
        sum("\u00c0" <= character <= "\u024f" for character in text) / size,
        sum(character.isdigit() for character in text) / size,
        sum(character.isupper() for character in text) / size,
        text.count(" ") / size,
        text.count("\n") / size,
        *_word_shares(words),
        *(len(known.findall(text.lower())) / max(len(words), 1) for known in (_ASKING, _QUANTITIES, _REASONING)),
        sum(line[:1] in (" ", "\t") for line in lines) / len(lines),
        sum(line.rstrip()[-1:] in tuple(":;{}),[]") for line in lines) / len(lines),
        sum(line.rstrip()[-1:] in tuple(".?!") for line in lines) / len(lines),
        len(re.findall(r"\w\(|\w\.\w|\w_\w", text)) / size,
        len(re.findall(r"\d\s*[-+*/=<>^]|[-+*/=^]\s*\d|\$\d", text)) / size,
        len(re.findall(r'"\s*[:,\]}]', text)) / size,
    ]
    mean_line = sum(map(len, lines)) / len(lines)
    return np.array([*(math.sqrt(share) for share in shares), math.log(mean_line + 1.0), math.log(size + 1.0)])


def _word_shares(words: Sequence[str]) -> list[float]:
    count = max(len(words), 1)
    listed = [sum(word in known for word in words) / count for known in _SETS.values()]
    return [*listed, sum(map(len, words)) / count / 20.0, len(set(words)) / count]
