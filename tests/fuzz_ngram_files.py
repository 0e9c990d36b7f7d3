"""Opens and queries mutated n-gram files: each gives the unmutated answer or a clean error.

    python tests/fuzz_ngram_files.py FOLDER NUM_FILES

Runs as a program of its own, since shape checks would make each of the many files a hundred times slower.
"""

import sys
from pathlib import Path

import numpy as np

from foredraft.core.errors import UserError
from foredraft.ngram.container import open_container, write_container
from foredraft.ngram.corpus import joined
from foredraft.ngram.counts import NAMES, count_ngrams, longest_context, read_counts
from foredraft.ngram.index import build_suffix_index, open_suffix_index

VOCAB = 40
CONTEXT = np.array([3, 1, 4, 1, 5], np.int64)


def main(folder: Path, num_files: int) -> str:
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, VOCAB, size).astype(np.int32) for size in (300, 50)]
    build_suffix_index(texts, VOCAB, "v", 16, folder / "index")
    counts = count_ngrams(*joined(texts, VOCAB), 3, 1)
    write_container(folder / "counts", "ngram", VOCAB, "v", list(zip(NAMES, counts.arrays, strict=True)), {"order": 3})
    refused = 0
    for name, ask in (("index", _ask_index), ("counts", _ask_counts)):
        whole, expected = (folder / name).read_bytes(), ask(folder / name)
        for _ in range(num_files // 2):
            (folder / "mutated").write_bytes(_mutated(whole, generator))
            try:
                answer = ask(folder / "mutated")
            except UserError:
                refused += 1
                continue
            assert answer == expected, "a mutated file was read as if it were sound"
    return f"{num_files} mutated files: {refused} refused, {num_files - refused} answered as before"


def _ask_index(path: Path) -> list[object]:
    index = open_suffix_index(path)
    lengths, tokens = np.empty(20, np.int64), np.empty((20, 4), np.int64)
    rows = index.rows(CONTEXT, lengths, tokens, 0, 20)
    return [lengths[:rows].tolist(), tokens[:rows].tolist(), index.container.vocab_size]


def _ask_counts(path: Path) -> list[object]:
    container = open_container(path, "ngram").verify().require_tokenizer(VOCAB, "v")
    counts = read_counts(container)
    node = longest_context(counts.order, counts.older, counts.first_child, CONTEXT, len(CONTEXT))
    return [node, counts.next_token[counts.first_next[node] : counts.first_next[node + 1]].tolist()]


def _mutated(whole: bytes, generator: np.random.Generator) -> bytes:
    data = bytearray(whole)
    at, size = int(generator.integers(len(data))), int(generator.integers(1, 64))
    match int(generator.integers(6)):
        case 0:
            data[at] ^= 1 << int(generator.integers(8))
        case 1:
            data[at : at + size] = generator.bytes(len(data[at : at + size]))
        case 2:
            del data[at:]
        case 3:
            data[at : at + size] = bytes(len(data[at : at + size]))
        case 4:
            data[at:at] = generator.bytes(size)
        case _:
            del data[at : at + size]
    return bytes(data)


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), int(sys.argv[2])))
