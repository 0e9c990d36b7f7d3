"""Compares n-gram drafters on real text: the suffix index, transformers' prompt lookup, a dict, Snowflake's tree.

    python benchmarks/ngram/run.py --tokenizer FOLDER --edits code_edit.jsonl --out benchmarks/ngram

Corpora: the Python standard library of the running interpreter and this machine's man pages, split by file; of the
held-out files at most 6,000 tokens each are drafted. Code edit: the old version is the prompt, the new one is drafted.
Every block has `k` = 8 draft tokens, trees have 8 nodes, and a miss costs one call. Times are CPU time of one thread:
drafts at every position of the first texts of a set, drafter after drafter, in rounds; medians with the least and the
largest round. What a drafter needs to take in new text is part of them. Accepted tokens depend on no machine, and
`--texts 0` leaves them out. Snowflake's tree stands in the table where `arctic_inference` is installed.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from texts import TextSet, edits, library_files, manual_files, text_set
from tokenizers import Tokenizer

from foredraft.core.proposal import ROOT, Proposal
from foredraft.core.protocols import Answer
from foredraft.ngram.automaton import Automaton
from foredraft.ngram.index import SuffixIndex, build_suffix_index, open_suffix_index
from foredraft.ngram.jit import jit
from foredraft.ngram.suffix import SuffixDrafter, Voting, _voted_chain

K = 8
DEPTH = 32
ROUNDS = 5
TIMED_TEXTS, TIMED_TOKENS = 3, 500
GENERATOR = torch.Generator()
TREE, TUNED_TREE = "Snowflake's tree, defaults", "Snowflake's tree, tuned tree"
TUNED = {"min_token_prob": 0.0, "max_spec_factor": 4.0, "max_spec_offset": 8.0, "use_tree_spec": True}


@dataclass(frozen=True, slots=True)
class Spread:
    """Figures of several rounds: the median, the least and the largest."""

    median: float
    least: float
    largest: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        return Spread(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g}..{self.largest:.3g})"


@dataclass(frozen=True, slots=True)
class Score:
    """Draft tokens of a drafter kept in a call, NaN where nothing was decoded, and CPU microseconds of a draft."""

    accepted_per_call: float
    us_per_draft: Spread


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that the table shows: figures by corpus, by set of texts and drafter, and by part of a draft."""

    corpus_tokens: int
    builds: dict[str, dict[str, Spread]]
    scores: dict[str, dict[str, Score]]
    parts: dict[str, Spread]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--edits", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus-tokens", type=int, default=4_000_000)
    parser.add_argument("--texts", type=int, default=1_000, help="Most texts that are scored in a set.")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    result = Result(options.corpus_tokens, {}, {}, {})
    with tempfile.TemporaryDirectory() as folder:
        for name, files in (("code", library_files()), ("man pages", manual_files())):
            texts = text_set(files, tokenizer, options.corpus_tokens)
            index, result.builds[name] = _build(texts, vocab_size, Path(folder) / f"{name}.ngram")
            drafters, tree_build = _drafters(index, texts, vocab_size)
            result.builds[name] |= tree_build
            scored = {name: texts.scored}
            if name == "code":
                scored["code edit"] = edits(options.edits, tokenizer)
                result.parts.update(_parts(index, texts.scored, vocab_size))
            for one, answers in scored.items():
                result.scores[one] = {}
                times = draft_times(drafters, answers)
                for drafter, guess in drafters.items():
                    accepted = accepted_per_call(guess, answers[: options.texts])
                    result.scores[one][drafter] = Score(accepted, times[drafter])
                    (options.out / "table.md").write_text(_table(result), encoding="utf-8")


def accepted_per_call(guess: peers.Guess, answers: Sequence[Answer]) -> float:
    """Return the draft tokens kept in a call when certain drafts are decoded with over all texts."""
    calls = accepted = 0
    for answer in answers:
        text, at = answer.token_ids.tolist(), answer.start
        while at < len(text):
            kept = _accepted(guess(answer.token_ids[:at]), text[at : at + K])
            calls, accepted, at = calls + 1, accepted + kept, at + kept + 1
    return accepted / calls if calls else math.nan


def draft_times(drafters: Mapping[str, peers.Guess], answers: Sequence[Answer]) -> dict[str, Spread]:
    """Return CPU microseconds of a draft at each position of the first texts; drafters take turns."""
    contexts = [
        answer.token_ids[:end]
        for answer in answers[:TIMED_TEXTS]
        for end in range(answer.start, min(answer.start + TIMED_TOKENS, len(answer.token_ids)))
    ]
    return _in_turns({name: (guess, contexts) for name, guess in drafters.items()})


def _in_turns(calls: Mapping[str, tuple[Callable[[Any], object], Sequence[Any]]]) -> dict[str, Spread]:
    """Return CPU microseconds of each call over its values, by rounds."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for call, values in calls.values():
        call(values[0])  # compiles
    for _ in range(ROUNDS):
        for name, (call, values) in calls.items():
            begun = time.thread_time()
            for value in values:
                call(value)
            spent[name].append(1e6 * (time.thread_time() - begun) / len(values))
    return {name: Spread.of(rounds) for name, rounds in spent.items()}


def _accepted(proposal: Proposal, text: list[int]) -> int:
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(proposal.parents, proposal.token_ids.tolist(), strict=True))
    }
    node = ROOT
    for depth, token in enumerate(text):
        if (node, token) not in children:
            return depth
        node = children[node, token]
    return len(text)


def _build(texts: TextSet, vocab_size: int, path: Path) -> tuple[SuffixIndex, dict[str, Spread]]:
    size = sum(len(text) for text in texts.corpus)
    build_suffix_index(texts.corpus[:1], vocab_size, "", DEPTH, path)  # compiles
    seconds = [cpu(partial(build_suffix_index, texts.corpus, vocab_size, "", DEPTH, path)) for _ in range(ROUNDS)]
    opened = [1e3 * cpu(partial(open_suffix_index, path)) for _ in range(ROUNDS)]
    index = open_suffix_index(path)
    index.container.verify()
    return index, {
        "build Mtok/s": Spread.of([size / one / 1e6 for one in seconds]),
        "bytes/token on disk": Spread.of([path.stat().st_size / size]),
        "in memory": Spread.of([index.num_bytes / size]),
        "open ms": Spread.of(opened),
    }


def _drafters(index: SuffixIndex, texts: TextSet, vocab_size: int) -> tuple[dict[str, peers.Guess], dict[str, Spread]]:
    """Return every drafter that is compared, and what the peer's tree took to build."""
    request, both = SuffixDrafter(vocab_size), SuffixDrafter(vocab_size, [(index, 1.0)])
    static = SuffixDrafter(vocab_size, [(index, 1.0)], Voting(num_context=0))
    drafters: dict[str, peers.Guess] = {
        "plain dict, 3 tokens": peers.dict_drafter(texts.corpus, vocab_size, K),
        "transformers' prompt lookup": peers.prompt_lookup(vocab_size, K),
    }
    alike = SuffixDrafter(vocab_size, [(index, 1.0)], Voting(base=1.0, context_weight=1.0))
    figures = {}
    if peers.SuffixDecodingCache is not None:
        begun = time.thread_time()
        tree = peers.SuffixTreePeer(texts.corpus, vocab_size, K)
        spent = time.thread_time() - begun
        figures["Snowflake's build Mtok/s"] = Spread.of([sum(len(text) for text in texts.corpus) / spent / 1e6])
        drafters |= {TREE: tree.guess(), TUNED_TREE: tree.guess(**TUNED)}
    drafters |= {
        "ours, request, chain": lambda context: request.propose(context, K, GENERATOR),
        "ours, corpus, chain": lambda context: static.propose(context, K, GENERATOR),
        "ours, both, chain": lambda context: both.propose(context, K, GENERATOR),
        "ours, both, tree": lambda context: both.propose_tree(context, K, K),
        "the same, each occurrence one vote": lambda context: alike.propose_tree(context, K, K),
    }
    return drafters, figures


def _parts(index: SuffixIndex, answers: Sequence[Answer], vocab_size: int) -> dict[str, Spread]:
    """Return CPU microseconds of the parts of a draft, over every position of some texts."""
    texts = [answer.token_ids.numpy() for answer in answers[:6]]
    contexts = [text[:end] for text in texts for end in range(1, len(text))]
    tensors = [torch.from_numpy(context) for context in contexts]
    lengths, tokens = np.empty(24, np.int64), np.empty((24, K), np.int64)
    request, both = SuffixDrafter(vocab_size), SuffixDrafter(vocab_size, [(index, 1.0)])
    static = SuffixDrafter(vocab_size, [(index, 1.0)], Voting(num_context=0))
    again = SuffixDrafter(vocab_size)

    def grown(call: Callable[..., object]) -> Callable[[np.ndarray], object]:
        """Say of each context but a text's first that it goes on from the one before, as replay does."""
        return lambda context: call(context, grown=len(context) > 1)

    return _compiled(texts, vocab_size) | _in_turns(
        {
            "update of the request tier, a token": (grown(request._request.follow), contexts),
            "chain from the request, update included": (grown(partial(request._chain, k=K)), contexts),
            "chain from the request that is known": (partial(again._chain, k=K, grown=True), [contexts[400]] * 2000),
            "matches in the corpus": (lambda context: index.rows(context, lengths, tokens, 0, 24), contexts),
            "chain from the corpus": (grown(partial(static._chain, k=K)), contexts),
            "chain from both": (grown(partial(both._chain, k=K)), contexts),
            "propose() from both, contexts compared": (lambda context: both.propose(context, K, GENERATOR), tensors),
        }
    )


def _compiled(texts: Sequence[np.ndarray], vocab_size: int) -> dict[str, Spread]:
    """Return CPU microseconds a token of the request tier's work alone: a whole text in one call of compiled code."""
    size = sum(map(len, texts))

    def updates() -> None:
        for text in texts:
            Automaton.empty(len(text)).follow(text)

    def chains() -> None:
        for text in texts:
            request = SuffixDrafter(vocab_size)
            rows, arena = request._consulted(text, K), request._request.arena(len(text))
            votes = rows.lengths, *request._votes, rows.tokens, request.voting.doubt
            _chains(*arena, text, request.voting.num_context, *votes, np.empty(K, np.int64))

    calls = {
        "compiled code alone: update of the request tier, a token": updates,
        "compiled code alone: update and chain from the request": chains,
    }
    for call in calls.values():
        call()  # compiles
    return {name: Spread.of([1e6 * cpu(call) / size for _ in range(ROUNDS)]) for name, call in calls.items()}


@jit
def _chains(
    states: np.ndarray,
    edges: np.ndarray,
    table: np.ndarray,
    counters: np.ndarray,
    text: np.ndarray,
    context: np.ndarray,
    num_context: int,
    lengths: np.ndarray,
    scales: np.ndarray,
    powers: np.ndarray,
    tokens: np.ndarray,
    doubt: float,
    draft: np.ndarray,
) -> int:
    """Draft at every position of `context`; return the tokens drafted, so that nothing is left out as unused."""
    drafted = 0
    for end in range(1, len(context)):
        drafted += _voted_chain(
            states, edges, table, counters, text, context[:end], end > 1, num_context,
            lengths, scales, powers, tokens, doubt, 0.0, draft,
        )  # fmt: skip
    return drafted


def cpu(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call in this thread."""
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


def _machine() -> str:
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{cpus[0].split(': ')[1]}, {len(cpus)} cores, Python {sys.version.split()[0]}, one thread"


def _table(result: Result) -> str:
    size = f"corpora of {result.corpus_tokens:,} tokens; {K} draft tokens a block"
    lines = ["# N-gram drafters on real text", "", f"{_machine()}; {size}."]
    lines += ["Made by run.py. What is fitted was fitted on other files than those scored here.", ""]
    columns = list(next(iter(result.builds.values())))
    lines += ["| corpus | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for name, row in result.builds.items():
        lines.append(f"| {name} | " + " | ".join(str(row[key]) for key in columns) + " |")
    lines += ["", "Draft tokens accepted in a call; CPU microseconds of a draft, the objects around it included:", ""]
    lines += ["| drafter | " + " | ".join(result.scores) + " |", "| --- |" + " --- |" * len(result.scores)]
    for drafter in next(iter(result.scores.values())):
        cells = [_cell(scores.get(drafter)) for scores in result.scores.values()]
        lines.append(f"| {drafter} | " + " | ".join(cells) + " |")
    lines += ["", "| part of a draft, code | CPU microseconds |", "| --- | --- |"]
    lines += [f"| {part} | {spent} |" for part, spent in result.parts.items()]
    return "\n".join(lines) + "\n"


def _cell(score: Score | None) -> str:
    return "" if score is None else f"{score.accepted_per_call:.3f}; {score.us_per_draft}"


if __name__ == "__main__":
    main()
