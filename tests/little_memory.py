"""Run by test_ngram_corpora.py: indexes 6 million tokens in a process that may take 40 MB more than it holds."""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from foredraft.checkpoint import DraftManifest
from foredraft.core.errors import CorpusError
from foredraft.core.progress import SILENT
from foredraft.ngram.corpus import Corpus
from foredraft.ngram.suffix import build_weighted_suffix, load_suffix
from foredraft.ngram_step import NgramStep

VOCAB, SEQUENCES, SIZE = 30_000, 48, 125_000
MORE = 40_000_000  # the corpus alone takes 48 MB as it comes; indexed at once about 100


def sequence(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, VOCAB, SIZE)


def build(out: Path, shard_tokens: int, sequences: Iterator[np.ndarray]) -> None:
    manifest = DraftManifest("suffix", VOCAB, target="t", target_fingerprint="f", tokenizer_fingerprint="")
    settings = NgramStep(kind="suffix", shard_tokens=shard_tokens)
    build_weighted_suffix([Corpus("noise", 1.0, 0, sequences)], VOCAB, settings, manifest, out, SILENT)


def main(folder: Path) -> None:
    build(folder / "compiled", 10_000, iter([np.arange(1000)]))
    held = 1024 * int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (held + MORE, -1))
    try:
        build(folder / "whole", 100_000_000, map(sequence, range(SEQUENCES)))
    except CorpusError as error:
        print(error)
    build(folder / "sharded", 250_000, map(sequence, range(SEQUENCES)))
    print(len(list((folder / "sharded").glob("shard-*"))), "shards")
    resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
    last = torch.from_numpy(sequence(SEQUENCES - 1))
    guess = load_suffix(folder / "sharded").propose(last[:-3], 3, torch.Generator())
    if guess.token_ids.tolist() == last[-3:].tolist():
        print("the end of the corpus is known")
    if not (folder / "whole").exists():
        print("nothing is left of the whole one")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
