"""Builds and queries suffix indexes of growing size over distinct source text, and says what each token costs.

    python benchmarks/ngram/scale.py --tokenizer FOLDER --roots DIR [DIR ...] --work DIR --tokens 100_000_000

Text: every readable file of 200 bytes to 400 kB under the roots (unpacked Debian and PyPI source packages), no content
twice. It is tokenized once into DIR/tokens.i32 and goes on there after an interruption. Needs about 16 bytes of memory
a token. Each size is built in a process of its own, so that its peak memory is its own.
"""

import argparse
import hashlib
import json
import multiprocessing
import resource
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
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
    size = _tokenize(options.roots, tokenizer, options.work, options.tokens + HELD_OUT)
    sizes = [tokens for tokens in (10**5, 10**6, 10**7, 10**8) if tokens <= size - HELD_OUT]
    rows = []
    for tokens in sizes:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(_measure, (options.work, tokens, tokenizer.get_vocab_size())))
        (options.work / "scale.json").write_text(json.dumps(rows, indent=1) + "\n")


def _texts(roots: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield (digest, text) of each file, in a fixed order that mixes the roots."""
    files = [path for root in roots for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in sorted(files, key=lambda path: hashlib.sha256(str(path).encode()).hexdigest()):
        if 200 <= path.stat().st_size <= 400_000:
            raw = path.read_bytes()
            try:
                yield hashlib.sha256(raw).hexdigest(), raw.decode()
            except UnicodeDecodeError:
                continue


def _tokenize(roots: list[Path], tokenizer: Tokenizer, work: Path, wanted: int) -> int:
    """Append to tokens.i32 and bounds.json until there are enough tokens; return how many there are."""
    state = work / "bounds.json"
    bounds, seen = json.loads(state.read_text()) if state.exists() else ([0], [])
    known = set(seen)
    with (work / "tokens.i32").open("ab") as file:
        file.truncate(4 * bounds[-1])
        for digest, text in _texts(roots):
            if bounds[-1] >= wanted:
                break
            if digest in known:
                continue
            known.add(digest)
            token_ids = np.array(tokenizer.encode(text).ids, np.int32)
            file.write(token_ids.tobytes())
            bounds.append(bounds[-1] + len(token_ids))
            if len(bounds) % 2000 == 0:
                file.flush()
                state.write_text(json.dumps([bounds, sorted(known)]))
    state.write_text(json.dumps([bounds, sorted(known)]))
    return bounds[-1]


def _measure(work: Path, size: int, vocab_size: int) -> dict[str, float]:
    tokens = np.memmap(work / "tokens.i32", np.int32, "r")
    bounds = [bound for bound in json.loads((work / "bounds.json").read_text())[0] if bound <= len(tokens) - HELD_OUT]
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


if __name__ == "__main__":
    main()
