"""Situations that a contextual policy tells apart: the domain of the request and how long its end was seen before."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from foredraft.core.protocols import Answer
from foredraft.select.ledger import EVERYWHERE

_LONGEST_MATCH = 16
_READ_AGAIN = 128  # tokens after which the domain is looked at again
_LOOKED_AT = 512  # latest tokens that it is read from
_PAIR = 2


def no_domain(token_ids: Sequence[int]) -> str:
    """Return the domain of text that cannot be read."""
    return ""


@dataclass(frozen=True, slots=True)
class Situations:
    """Numbers situations; EVERYWHERE stands for all.

    Attributes:
        domains: Names; any other is one more.
        edges: Match lengths at which the next class begins.
    """

    domains: tuple[str, ...] = ()
    edges: tuple[int, ...] = (2, 4, 8)

    def __len__(self) -> int:
        return 1 + (len(self.domains) + 1) * (len(self.edges) + 1)

    def number(self, domain: str, match: int) -> int:
        """Return the number of a situation, never EVERYWHERE."""
        known = self.domains.index(domain) if domain in self.domains else len(self.domains)
        return EVERYWHERE + 1 + known * (len(self.edges) + 1) + sum(match >= edge for edge in self.edges)


class Reader:
    """Follows one text and says in which situation its end is.

    Args:
        domain_of: Names the domain of some tokens.
    """

    def __init__(self, situations: Situations, domain_of: Callable[[Sequence[int]], str] = no_domain) -> None:
        self.situations = situations
        self._domain_of = domain_of
        self._text: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}
        self._domain, self._read_at = "", 0
        self._match = 0

    @property
    def domain(self) -> str:
        return self._domain

    def start(self, text: Sequence[int]) -> None:
        """Begin another text."""
        self._text, self._latest, self._match, self._read_at = [], {}, 0, 0
        for token in text:
            self._grow(token)
        self._domain = self._domain_of(self._text[-_LOOKED_AT:])
        self._read_at = len(self._text)

    def grow(self, tokens: Sequence[int]) -> None:
        """Follow the text on."""
        for token in tokens:
            self._grow(token)
            if len(self._text) - self._read_at >= _READ_AGAIN:
                self._domain = self._domain_of(self._text[-_LOOKED_AT:])
                self._read_at = len(self._text)

    def at_end(self) -> int:
        """Return the situation of the text's end."""
        return self.situations.number(self._domain, self._match)

    def _grow(self, token: int) -> None:
        """Add a token; the match is the longest common end with the latest occurrence of the last two tokens."""
        text = self._text
        text.append(token)
        if len(text) < _PAIR:
            return
        pair = (text[-2], token)
        before = self._latest.get(pair, 0)
        self._latest[pair] = len(text)
        length, longest = 0, min(before, _LONGEST_MATCH)
        while length < longest and text[before - 1 - length] == text[-1 - length]:
            length += 1
        self._match = length


def situations_in(reader: Reader, answer: Answer) -> Int64[np.ndarray, " answer"]:
    """Return the situation before every answer token; the domain is read where decoding would read it."""
    tokens = answer.token_ids.tolist()
    reader.start(tokens[: answer.start])
    found = np.empty(answer.num_tokens, np.int64)
    for place, token in enumerate(tokens[answer.start :]):
        found[place] = reader.at_end()
        reader.grow([token])
    return found
