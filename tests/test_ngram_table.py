"""The n-gram table against brute-force counting, and its file against damage."""

import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.checkpoint import DraftManifest
from foredraft.core.errors import CheckpointError, CorpusError, OutputError, VocabMismatchError
from foredraft.core.progress import SILENT
from foredraft.core.protocols import Answer, Drafter
from foredraft.ngram.jit import COMPILED
from foredraft.ngram.table import FILE, NgramTable, build_ngram_table, load_ngram_table
from foredraft.steps import NgramStep

GENERATOR = torch.Generator()


def manifest(vocab_size: int) -> DraftManifest:
    return DraftManifest("ngram", vocab_size, "a-target", "t" * 16, "v" * 16)


def build(sequences: list[np.ndarray], vocab_size: int, out: Path, order: int = 3, min_count: int = 1) -> NgramTable:
    settings = NgramStep(kind="ngram", order=order, min_count=min_count)
    build_ngram_table(sequences, vocab_size, settings, manifest(vocab_size), out, SILENT)
    return load_ngram_table(out)


def brute_force(sequences: list[np.ndarray], context: list[int], order: int, min_count: int) -> int:
    followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for sequence in sequences:
        for end in range(1, len(sequence)):
            for length in range(1, min(order, end) + 1):
                followers[tuple(sequence[end - length : end].tolist())][int(sequence[end])] += 1
    for length in range(min(order, len(context)), 0, -1):
        seen = followers.get(tuple(context[-length:]), Counter())
        if seen.total() >= min_count:
            return min(seen, key=lambda token: (-seen[token], token))
    return -1


def random_sequences(seed: int, vocab_size: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, size).astype(np.int32) for size in (60, 1, 0, 40)]


@pytest.mark.parametrize(("order", "min_count"), [(1, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("vocab_size", [3, 12])
def test_it_guesses_the_most_frequent_continuation_of_the_longest_known_context(
    tmp_path: Path, order: int, min_count: int, vocab_size: int
) -> None:
    sequences = random_sequences(vocab_size, vocab_size)
    table = build(sequences, vocab_size, tmp_path / "table", order, min_count)
    text = np.random.default_rng(99).integers(0, vocab_size, 40)
    for end in range(1, len(text)):
        expected, context = [], text[:end].tolist()
        while len(expected) < 4:
            guess = brute_force(sequences, context + expected, order, min_count)
            if guess < 0:
                break
            expected.append(guess)
        assert table.propose(torch.from_numpy(text[:end]), 4, GENERATOR).token_ids.tolist() == expected


def test_replay_equals_propose_at_every_position(tmp_path: Path) -> None:
    table = build(random_sequences(1, 20), 20, tmp_path / "table")
    text = torch.from_numpy(np.random.default_rng(5).integers(0, 20, 60))
    for start in (1, 30, 60):
        for k in (1, 4):
            (replayed,) = table.replay([Answer(text, start)], k)
            assert not replayed.by_block_start
            for t in range(len(text) - start):
                guess = table.propose(text[: start + t], k, GENERATOR).token_ids.tolist()
                assert bool(replayed.guessed[t]) == bool(guess)
                assert float(replayed.probs[t]) == float(guess[:1] == [int(text[start + t])])


def test_contexts_do_not_cross_sequences(tmp_path: Path) -> None:
    table = build([np.array([1, 2], np.int32), np.array([3, 4], np.int32)], 10, tmp_path / "table")
    assert table.propose(torch.tensor([2]), 1, GENERATOR).token_ids.tolist() == []
    assert table.propose(torch.tensor([3]), 1, GENERATOR).token_ids.tolist() == [4]


def test_the_same_corpus_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        build(random_sequences(7, 50), 50, tmp_path / name)
    assert (tmp_path / "one" / FILE).read_bytes() == (tmp_path / "two" / FILE).read_bytes()


def test_it_is_a_drafter_that_knows_its_size(tmp_path: Path) -> None:
    table = build(random_sequences(7, 50), 50, tmp_path / "table")
    assert isinstance(table, Drafter)
    assert 0 < table.num_bytes <= (tmp_path / "table" / FILE).stat().st_size


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="holds no tokens"):
        build([np.empty(0, np.int32)], 10, tmp_path / "table")
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, bad: int) -> None:
    sequences = [np.array([1, 2], np.int32), np.array([3, bad], np.int32)]
    with pytest.raises(CorpusError, match=f"sequence 1 has token {bad} at position 1, outside the vocabulary of 10"):
        build(sequences, 10, tmp_path / "table")


def test_text_instead_of_ids_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="sequence 0 is no list of token ids"):
        build([np.array([0.5, 1.5])], 10, tmp_path / "table")


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    build(random_sequences(7, 50), 50, tmp_path / "table")
    with pytest.raises(OutputError, match="never overwritten"):
        build(random_sequences(8, 50), 50, tmp_path / "table")


def test_a_truncated_file_is_refused_at_any_length(tmp_path: Path) -> None:
    build(random_sequences(7, 50), 50, tmp_path / "table")
    file = tmp_path / "table" / FILE
    whole = file.read_bytes()
    for length in {0, 1, 7, 8, 20, 24, 100, 500, len(whole) // 2, len(whole) - 64, len(whole) - 1}:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"n-gram file|damaged|truncated|was changed"):
            load_ngram_table(tmp_path / "table")


def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    build(random_sequences(7, 50), 50, tmp_path / "table")
    file = tmp_path / "table" / FILE
    whole = file.read_bytes()
    refused = 0
    for position in range(0, len(whole), 31):
        changed = bytearray(whole)
        changed[position] ^= 1 << (position % 8)
        file.write_bytes(changed)
        try:
            load_ngram_table(tmp_path / "table")
        except CheckpointError:
            refused += 1
    assert refused > 0.9 * len(range(0, len(whole), 31))


def test_a_table_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    build(random_sequences(7, 50), 50, tmp_path / "table")
    build(random_sequences(7, 50), 51, tmp_path / "other")
    (tmp_path / "table" / FILE).write_bytes((tmp_path / "other" / FILE).read_bytes())
    with pytest.raises(VocabMismatchError, match="built for 51 tokens, the target has 50"):
        load_ngram_table(tmp_path / "table")


@pytest.mark.skipif(not COMPILED, reason="numba is missing or switched off")
def test_a_hundred_thousand_positions_replay_in_about_a_second(tmp_path: Path) -> None:
    tokens = (np.random.default_rng(0).zipf(1.3, 100_000) % 49152).astype(np.int32)
    table = build([tokens], 49152, tmp_path / "table", order=4)
    text = torch.from_numpy(tokens.astype(np.int64))
    table.replay([Answer(text[:50], 1)], 8)
    begun = time.perf_counter()
    table.replay([Answer(text, 1)], 8)
    assert time.perf_counter() - begun < 3.0
