"""Lookup tables against brute force, and their drafter."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.checkpoint import DraftManifest
from foredraft.core.errors import CheckpointError, CorpusError
from foredraft.core.progress import SILENT
from foredraft.core.protocols import Answer
from foredraft.ngram.lookup_table import FILE, LookupTable, build_lookup_table, load_lookup_table, open_lookup_table
from foredraft.steps import NgramStep
from tests.contract_drafter import check_drafter

VOCAB = 6


def texts(seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB, size).astype(np.int32) for size in (80, 3, 60)]


def build(sequences: list[np.ndarray], folder: Path, key: int = 2, continuation: int = 3, min_count: int = 1) -> Path:
    settings = NgramStep(kind="lookup-table", key=key, continuation=continuation, min_count=min_count)
    manifest = DraftManifest("lookup-table", VOCAB, "t", "t", "v")
    build_lookup_table(sequences, VOCAB, settings, manifest, folder, SILENT)
    return folder


def looked_up(table: LookupTable, context: list[int], k: int = 3) -> list[int]:
    lengths, tokens = np.empty(1, np.int64), np.empty((1, k), np.int64)
    rows = table.rows(np.array(context, np.int64), lengths, tokens, 0, 1)
    return [token for token in tokens[0].tolist() if token >= 0] if rows else []


@pytest.mark.parametrize("min_count", [1, 3])
def test_an_entry_is_the_majority_among_those_that_agree(tmp_path: Path, min_count: int) -> None:
    sequences = texts()
    table = open_lookup_table(build(sequences, tmp_path / "draft", min_count=min_count) / FILE)
    for first in range(VOCAB):
        for second in range(VOCAB):
            followed = [
                text[at + 2 : at + 5].tolist()
                for text in sequences
                for at in range(len(text) - 2)
                if text[at : at + 2].tolist() == [first, second]
            ]
            expected: list[int] = []
            while len(followed) >= (min_count if not expected else 1) and len(expected) < 3:
                seen = Counter(text[len(expected)] for text in followed if len(text) > len(expected))
                if not seen:
                    break
                usual = min(seen, key=lambda token: (-seen[token], token))
                followed = [text for text in followed if text[len(expected) : len(expected) + 1] == [usual]]
                expected.append(usual)
            assert looked_up(table, [0, first, second]) == expected


def test_shares_fall_and_time_stamps_name_the_last_sequence(tmp_path: Path) -> None:
    sequences = [np.array([1, 2, 3, 4], np.int32), np.array([1, 2, 3, 5], np.int32), np.array([4, 4, 4], np.int32)]
    table = open_lookup_table(build(sequences, tmp_path / "draft") / FILE)
    (entry,) = np.flatnonzero((table.keys == [1, 2]).all(axis=1))
    assert table.following[entry].tolist() == [3, 4, -1]
    assert table.shares[entry].tolist() == [1.0, 0.5, 0.0]
    assert table.last_seen[entry] == 1


def test_the_drafter_holds_the_contract(tmp_path: Path) -> None:
    text = torch.from_numpy(texts(1)[0].astype(np.int64))
    check_drafter(load_lookup_table(build(texts(), tmp_path / "draft")), [Answer(text[:40], 5), Answer(text[40:50], 9)])


def test_unusable_corpora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="longer than a key of 9 tokens"):
        build([np.arange(5, dtype=np.int32)], tmp_path / "draft", key=9)
    with pytest.raises(CorpusError, match="No 2 tokens in a row occur 7 times in the corpus: lower min_count"):
        build([np.arange(5, dtype=np.int32)], tmp_path / "draft", min_count=7)


def test_a_truncated_table_is_refused(tmp_path: Path) -> None:
    folder = build(texts(), tmp_path / "draft")
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"truncated|was changed"):
        load_lookup_table(folder)
