"""The suffix automaton of one request: grows with the context and knows every earlier occurrence of its suffixes.

State 0 is the start. The suffix link of the newest state leads to the longest suffix that occurred before, and on
to shorter ones with more occurrences; each state remembers where its latest occurrence ended.

Source: Blumer et al. 1985. Latest ends are kept by touching the link path at each step, at most _TOUCHED states of
it: exact unless more than that many suffixes of different frequency occurred before, as in one token repeated.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64

from foredraft.ngram.jit import jit, pair_hash, signed

_TOUCHED = 64
_LENGTH, _LINK, _LATEST, _EDGES = range(4)  # columns of states
_TOKEN, _TARGET, _NEXT, _SOURCE = range(4)  # columns of edges
_STATES_USED, _EDGES_USED, _NEWEST, _SIZE = range(4)  # entries of counters
_NONE = -1


Arena = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(slots=True)
class Automaton:
    """One packed arena; its capacity is counted in tokens."""

    states: Int32[np.ndarray, "states 4"]
    edges: Int32[np.ndarray, "edges 4"]
    table: Int32[np.ndarray, " slots"]
    counters: Int64[np.ndarray, "4"]
    text: Int32[np.ndarray, " capacity"]

    @staticmethod
    def empty(capacity: int = 256) -> "Automaton":
        slots = 16
        while slots < 8 * capacity:
            slots *= 2
        automaton = Automaton(
            np.empty((2 * capacity + 2, 4), np.int32),
            np.empty((4 * capacity + 4, 4), np.int32),
            np.empty(slots, np.int32),
            np.empty(4, np.int64),
            np.empty(capacity, np.int32),
        )
        _clear(automaton.states, automaton.table, automaton.counters)
        return automaton

    def follow(self, context: Int64[np.ndarray, " context"], grown: bool = False) -> None:
        """Make the automaton that of `context`.

        What it holds is kept where the context only grew; `grown` says that it did, which saves comparing.
        """
        _follow(*self.arena(len(context)), context, grown)

    def rows(
        self,
        context: Int64[np.ndarray, " context"],
        lengths: Int64[np.ndarray, " rows"],
        tokens: Int64[np.ndarray, "rows k"],
        end_row: int,
        grown: bool = False,
    ) -> int:
        """Follow `context` and write its known suffixes, longest first, into rows 0 .. `end_row`.

        For each its length, and what followed where it occurred last; what is copied runs on into itself at the end
        of the context. Returns the first row left free.
        """
        return followed_rows(*self.arena(len(context)), context, grown, lengths, tokens, end_row)

    def arena(self, size: int) -> Arena:
        """Return what kernels take first, with room for a context of `size` tokens."""
        if size > len(self.text):
            larger = Automaton.empty(2 * size)
            self.states, self.edges, self.table = larger.states, larger.edges, larger.table
            self.counters, self.text = larger.counters, larger.text
        return self.states, self.edges, self.table, self.counters, self.text


@jit
def _clear(states: np.ndarray, table: np.ndarray, counters: np.ndarray) -> None:
    states[0, _LENGTH], states[0, _LINK], states[0, _LATEST], states[0, _EDGES] = 0, _NONE, 0, _NONE
    table[:] = _NONE
    counters[_STATES_USED], counters[_EDGES_USED], counters[_NEWEST], counters[_SIZE] = 1, 0, 0, 0


@jit
def _follow(
    states: np.ndarray,
    edges: np.ndarray,
    table: np.ndarray,
    counters: np.ndarray,
    text: np.ndarray,
    context: Int64[np.ndarray, " context"],
    grown: bool,
) -> None:
    shared = counters[_SIZE]
    differs = 0
    if shared <= len(context) and not grown:
        for index in range(shared):
            differs |= context[index] ^ text[index]
    if shared > len(context) or differs != 0:
        _clear(states, table, counters)
        shared = 0
    for index in range(shared, len(context)):
        text[index] = context[index]
        _extend(states, edges, table, counters, signed(text[index]))


@jit
def _find(table: np.ndarray, edges: np.ndarray, state: int, token: int) -> tuple[int, int]:
    """Return the edge, or _NONE, and the slot it has or would have."""
    mask = len(table) - 1
    slot = pair_hash(state, token) & mask
    while table[slot] != _NONE:
        edge = table[slot]
        if edges[edge, _TOKEN] == token and edges[edge, _SOURCE] == state:
            return edge, slot
        slot = (slot + 1) & mask
    return _NONE, slot


@jit
def _add_edge(
    states: np.ndarray,
    edges: np.ndarray,
    table: np.ndarray,
    counters: np.ndarray,
    state: int,
    token: int,
    target: int,
    slot: int,
) -> None:
    edge = counters[_EDGES_USED]
    counters[_EDGES_USED] += 1
    edges[edge, _TOKEN], edges[edge, _TARGET] = token, target
    edges[edge, _NEXT], edges[edge, _SOURCE] = states[state, _EDGES], state
    states[state, _EDGES] = edge
    table[slot] = edge


@jit
def _touch(states: np.ndarray, state: int, end: int) -> None:
    """Record that the suffixes of `state` and of its links occurred again, ending at `end`."""
    touched = 0
    while state > 0 and touched < _TOUCHED:
        states[state, _LATEST] = end
        state = states[state, _LINK]
        touched += 1


@jit
def _new_state(states: np.ndarray, counters: np.ndarray, length: int, link: int, latest: int) -> int:
    state = counters[_STATES_USED]
    counters[_STATES_USED] += 1
    states[state, _LENGTH], states[state, _LINK] = length, link
    states[state, _LATEST], states[state, _EDGES] = latest, _NONE
    return state


@jit
def _extend(states: np.ndarray, edges: np.ndarray, table: np.ndarray, counters: np.ndarray, token: int) -> None:
    newest = counters[_NEWEST]
    _touch(states, states[newest, _LINK], counters[_SIZE])
    counters[_SIZE] += 1
    state = _new_state(states, counters, states[newest, _LENGTH] + 1, 0, counters[_SIZE])
    counters[_NEWEST] = state
    at = newest
    while at != _NONE:
        edge, slot = _find(table, edges, at, token)
        if edge != _NONE:
            break
        _add_edge(states, edges, table, counters, at, token, state, slot)
        at = states[at, _LINK]
    if at == _NONE:
        return
    known = edges[edge, _TARGET]
    if states[known, _LENGTH] != states[at, _LENGTH] + 1:
        known = _split(states, edges, table, counters, at, token, known)
    states[state, _LINK] = known


@jit
def _split(
    states: np.ndarray, edges: np.ndarray, table: np.ndarray, counters: np.ndarray, at: int, token: int, known: int
) -> int:
    """Give the suffixes of `known` that `at` reaches a state of their own; return it."""
    twin = _new_state(states, counters, states[at, _LENGTH] + 1, states[known, _LINK], states[known, _LATEST])
    copied = states[known, _EDGES]
    while copied != _NONE:
        _, slot = _find(table, edges, twin, edges[copied, _TOKEN])
        _add_edge(states, edges, table, counters, twin, edges[copied, _TOKEN], edges[copied, _TARGET], slot)
        copied = edges[copied, _NEXT]
    while at != _NONE:
        edge, _ = _find(table, edges, at, token)
        if edge == _NONE or edges[edge, _TARGET] != known:
            break
        edges[edge, _TARGET] = twin
        at = states[at, _LINK]
    states[known, _LINK] = twin
    return twin


@jit
def followed_rows(
    states: np.ndarray,
    edges: np.ndarray,
    table: np.ndarray,
    counters: np.ndarray,
    text: np.ndarray,
    context: np.ndarray,
    grown: bool,
    lengths: np.ndarray,
    tokens: np.ndarray,
    end_row: int,
) -> int:
    """Do what `Automaton.rows` does."""
    _follow(states, edges, table, counters, text, context, grown)
    row, state, size = 0, states[counters[_NEWEST], _LINK], counters[_SIZE]
    while state > 0 and row < end_row:
        end = states[state, _LATEST]
        lengths[row] = states[state, _LENGTH]
        for offset in range(tokens.shape[1]):
            tokens[row, offset] = text[end + offset] if end + offset < size else tokens[row, offset - (size - end)]
        row += 1
        state = states[state, _LINK]
    return row
