"""Builds and queries suffix indexes of growing size over distinct source text, and says what each token costs.

    python benchmarks/ngram/scale.py --tokenizer FOLDER --roots DIR [DIR ...] --work DIR --tokens 100_000_000

Text: every readable file of 200 bytes to 400 kB under the roots (installed Python packages, unpacked sources), no
content twice. It is tokenized once into DIR/tokens.i32. Needs about 16 bytes of memory a token. Each size is built in a
process of its own, so that its peak memory is its own. Writes scale.md beside this file.
"""

import argparse
import json
import multiprocessing
import resource
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from texts import in_hash_order, token_lists
from tokenizers import Tokenizer

from foredraft.ngram.index import build_suffix_index, open_suffix_index
from foredraft.ngram.suffix import SuffixDrafter, Voting

K = 8
HELD_OUT = 20_000
GENERATOR = torch.Generator()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--roots", type=Path, nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    if not (options.work / "bounds.json").exists():
        _tokenize(options.roots, tokenizer, options.work, options.tokens + HELD_OUT)
    size = json.loads((options.work / "bounds.json").read_text())[-1]
    rows: list[dict[str, float]] = []
    for tokens in (10**5, 10**6, 10**7, 10**8):
        if tokens <= min(options.tokens, size - HELD_OUT):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(_measure, (options.work, tokens, tokenizer.get_vocab_size())))
            (Path(__file__).parent / "scale.md").write_text(_table(rows), encoding="utf-8")


def _tokenize(roots: list[Path], tokenizer: Tokenizer, work: Path, wanted: int) -> None:
    """Write tokens.i32, and bounds.json when there are enough tokens or no more text."""
    files = [path for root in roots for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    bounds = [0]
    with (work / "tokens.i32").open("wb") as file:
        for token_ids in token_lists(in_hash_order(files), tokenizer):
            file.write(token_ids.tobytes())
            bounds.append(bounds[-1] + len(token_ids))
            if bounds[-1] >= wanted:
                break
    (work / "bounds.json").write_text(json.dumps(bounds))


def _measure(work: Path, size: int, vocab_size: int) -> dict[str, float]:
    tokens = np.memmap(work / "tokens.i32", np.int32, "r")
    bounds = [bound for bound in json.loads((work / "bounds.json").read_text()) if bound <= len(tokens) - HELD_OUT]
    bounds = [bound for bound in bounds if bound < size] + [size]
    corpus = [np.array(tokens[begin:end]) for begin, end in pairwise(bounds)]
    path = work / f"index-{size}.ngram"
    build_suffix_index(corpus[:1], vocab_size, "", 32, path)  # compiles
    begun = time.thread_time()
    build_suffix_index(corpus, vocab_size, "", 32, path)
    seconds = time.thread_time() - begun
    begun = time.perf_counter()
    index = open_suffix_index(path)
    opened = time.perf_counter() - begun
    index.container.verify()
    drafter = SuffixDrafter(vocab_size, [(index, 1.0)], Voting(num_context=0))
    text = torch.from_numpy(np.array(tokens[-HELD_OUT:], np.int64))
    at, calls, accepted, spent = 1, 0, 0, 0.0
    while at < len(text):
        begun = time.thread_time()
        draft = drafter.propose(text[max(0, at - 64) : at], K, GENERATOR).token_ids
        spent += time.thread_time() - begun
        stands = 0
        for guess, token in zip(draft.tolist(), text[at : at + K].tolist(), strict=False):
            if guess != token:
                break
            stands += 1
        at, calls, accepted = at + stands + 1, calls + 1, accepted + stands
    return {
        "tokens": size,
        "build_Mtok_per_s": size / seconds / 1e6,
        "bytes_per_token": path.stat().st_size / size,
        "open_ms": 1e3 * opened,
        "peak_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "us_per_draft": 1e6 * spent / calls,
        "accepted_per_call": accepted / calls,
    }


def _table(rows: list[dict[str, float]]) -> str:
    columns = list(rows[0])
    lines = ["# Suffix indexes of growing size", "", "One thread; made by scale.py.", ""]
    lines += ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    for row in rows:
        cells = [f"{row[name]:,}" if name == "tokens" else f"{row[name]:.2f}" for name in columns]
        lines.append("| " + " | ".join(cells) + " |")
    last = rows[-1]
    billion = 10**9 / last["tokens"]
    lines += [
        "",
        f"Extrapolated to 10^9 tokens in five shards of 2 * 10^8: {last['bytes_per_token']:.1f} GB on disk, "
        f"{1e3 / last['build_Mtok_per_s'] / 60:.0f} minutes to build on one core at the last row's rate, at most "
        f"{last['peak_GB'] * billion / 5:.0f} GB of memory at a time, and five searches of about "
        f"{last['us_per_draft']:.0f} microseconds a draft.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
