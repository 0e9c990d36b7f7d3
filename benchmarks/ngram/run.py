"""Compares n-gram drafters on real text: the suffix index, transformers' prompt lookup, and a plain dict.

    python benchmarks/ngram/run.py --tokenizer FOLDER --edits code_edit.jsonl --out benchmarks/ngram

Corpora: the Python standard library of the running interpreter and this machine's man pages, split by file; of the
held-out files at most 6,000 tokens each are drafted. Code edit: the old version is the prompt, the new one is drafted.
Every block has `k` = 8 draft tokens, and a miss costs one call. Times are CPU seconds of one thread.
"""

import argparse
import glob
import gzip
import hashlib
import json
import sys
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from foredraft.core.proposal import ROOT, Proposal
from foredraft.ngram.index import SuffixIndex, build_suffix_index, open_suffix_index
from foredraft.ngram.suffix import SuffixDrafter, Voting

K = 8
HELD_OUT_TOKENS = 150_000
LONGEST_FILE = 6_000
GENERATOR = torch.Generator()
Guess = Callable[[torch.Tensor], Proposal]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--edits", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus-tokens", type=int, default=4_000_000)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    python = [path for path in stdlib.rglob("*.py") if "site-packages" not in path.parts]
    manuals = sorted({Path(name).resolve() for name in glob.glob("/usr/share/man/man*/*")})
    result = {"k": K, "machine": _machine(), "sets": {}, "build": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, files in (("code", python), ("man", manuals)):
            corpus, held_out = _split(files, tokenizer, options.corpus_tokens)
            index, result["build"][name] = _build(corpus, tokenizer.get_vocab_size(), Path(folder) / f"{name}.ngram")
            result["sets"][name] = _compare(index, corpus, [(text, 1) for text in held_out])
            if name == "code":
                result["sets"]["edit"] = _compare(index, corpus, _edits(options.edits, tokenizer))
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "TABLE.md").write_text(_table(result))


def _split(
    files: Iterable[Path], tokenizer: Tokenizer, corpus_tokens: int
) -> tuple[list[np.ndarray], list[torch.Tensor]]:
    """Return the corpus and the held-out texts, by file in the order of a hash of its name; no text twice."""
    corpus, held_out, seen = [], [], set()
    held_out_size = corpus_size = 0
    for path in sorted(files, key=lambda path: hashlib.sha256(path.name.encode()).hexdigest()):
        try:
            raw = path.read_bytes()
            text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        except (OSError, UnicodeDecodeError):
            continue
        if not 200 < len(text) < 400_000 or text in seen:
            continue
        seen.add(text)
        token_ids = np.array(tokenizer.encode(text).ids, np.int32)
        if held_out_size < HELD_OUT_TOKENS:
            held_out.append(torch.from_numpy(token_ids[:LONGEST_FILE].astype(np.int64)))
            held_out_size += len(held_out[-1])
        elif corpus_size < corpus_tokens:
            corpus.append(token_ids)
            corpus_size += len(token_ids)
    return corpus, held_out[1::2]  # the other half fitted the defaults of Voting


def _edits(path: Path, tokenizer: Tokenizer) -> list[tuple[torch.Tensor, int]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    pairs = [(tokenizer.encode(row["prompt"] + "\n").ids, tokenizer.encode(row["reference"]).ids) for row in rows]
    return [(torch.tensor((old + new)[:12_000]), len(old)) for old, new in pairs[1::2] if len(old) < 12_000]


def _build(corpus: list[np.ndarray], vocab_size: int, path: Path) -> tuple[SuffixIndex, dict[str, float]]:
    size = sum(len(text) for text in corpus)
    seconds = []
    build_suffix_index([corpus[0]], vocab_size, "", 32, path)  # compiles
    for _ in range(3):
        begun = time.thread_time()
        build_suffix_index(corpus, vocab_size, "", 32, path)
        seconds.append(time.thread_time() - begun)
    begun = time.perf_counter()
    index = open_suffix_index(path)
    opened = time.perf_counter() - begun
    return index, {
        "tokens": size,
        "Mtok_per_s": size / min(seconds) / 1e6,
        "bytes_per_token": path.stat().st_size / size,
        "open_ms": 1e3 * opened,
    }


def _compare(index: SuffixIndex, corpus: list[np.ndarray], texts: list[tuple[torch.Tensor, int]]) -> dict[str, object]:
    vocab_size = index.container.vocab_size
    request, both = SuffixDrafter(vocab_size), SuffixDrafter(vocab_size, [(index, 1.0)])
    static = SuffixDrafter(vocab_size, [(index, 1.0)], Voting(num_context=0))
    lookup = PromptLookupCandidateGenerator(num_output_tokens=K, max_matching_ngram_size=3, max_length=1 << 30)
    drafters: dict[str, Guess] = {
        "plain dict, 3 tokens": _dict_drafter(corpus, vocab_size),
        "transformers prompt lookup": lambda context: _looked_up(lookup, context, vocab_size),
        "suffix automaton, chain": lambda context: request.propose(context, K, GENERATOR),
        "suffix index, chain": lambda context: static.propose(context, K, GENERATOR),
        "both, chain": lambda context: both.propose(context, K, GENERATOR),
        "both, tree": lambda context: both.propose_tree(context, K),
    }
    return {name: _decode(guess, texts) for name, guess in drafters.items()}


def _decode(guess: Guess, texts: list[tuple[torch.Tensor, int]]) -> dict[str, float]:
    """Return accepted draft tokens per call and CPU microseconds per draft, over all texts."""
    guess(texts[0][0])
    calls = accepted = 0
    spent = 0.0
    for text, start in texts:
        at = start
        while at < len(text):
            context = text[:at]
            begun = time.thread_time()
            proposal = guess(context)
            spent += time.thread_time() - begun
            stands = _accepted(proposal, text[at : at + K].tolist())
            calls, accepted, at = calls + 1, accepted + stands, at + stands + 1
    return {"accepted_per_call": accepted / calls, "us_per_draft": 1e6 * spent / calls, "calls": calls}


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


def _looked_up(lookup: PromptLookupCandidateGenerator, context: torch.Tensor, vocab_size: int) -> Proposal:
    candidates, _ = lookup.get_candidates(context[None])
    return Proposal.certain(candidates[0, len(context) :], vocab_size)


def _dict_drafter(corpus: list[np.ndarray], vocab_size: int) -> Guess:
    """Return a drafter from a dict of three tokens to their most frequent successor."""
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in corpus:
        tokens = text.tolist()
        for first, second, third, following in zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False):
            counts[first, second, third][following] += 1
    best = {context: seen.most_common(1)[0][0] for context, seen in counts.items()}

    def guess(context: torch.Tensor) -> Proposal:
        recent = context[-3:].tolist()
        while len(recent) < 3 + K and tuple(recent[-3:]) in best:
            recent.append(best[tuple(recent[-3:])])
        return Proposal.certain(torch.tensor(recent[len(context[-3:]) :], dtype=torch.long), vocab_size)

    return guess


def _machine() -> str:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{cpu[0].split(': ')[1]}, {len(cpu)} cores, Python {sys.version.split()[0]}"


def _table(result: dict) -> str:
    lines = [
        "# N-gram drafters on real text",
        "",
        f"{result['machine']}; {result['k']} draft tokens a block. See run.py.",
        "",
    ]
    lines += ["| corpus | tokens | build Mtok/s | bytes/token | open ms |", "| --- | --- | --- | --- | --- |"]
    for name, row in result["build"].items():
        lines.append(
            f"| {name} | {row['tokens']:,} | {row['Mtok_per_s']:.1f} "
            f"| {row['bytes_per_token']:.2f} | {row['open_ms']:.1f} |"
        )
    sets = result["sets"]
    lines += ["", "| drafter | " + " | ".join(f"{name}: accepted per call (us)" for name in sets) + " |"]
    lines.append("| --- |" + " --- |" * len(sets))
    for drafter in next(iter(sets.values())):
        cells = [
            f"{rows[drafter]['accepted_per_call']:.3f} ({rows[drafter]['us_per_draft']:.0f})" for rows in sets.values()
        ]
        lines.append(f"| {drafter} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
