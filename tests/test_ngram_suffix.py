"""Suffix array, automaton, votes and the suffix drafter, each against brute force."""

from pathlib import Path

import numpy as np
import pytest
import torch

from foredraft.checkpoint import DraftManifest
from foredraft.core.errors import CheckpointError, CorpusError, UserError, VocabMismatchError
from foredraft.core.progress import SILENT
from foredraft.core.proposal import ROOT, Proposal
from foredraft.core.protocols import Answer, Drafter
from foredraft.ngram.automaton import Automaton
from foredraft.ngram.index import build_suffix_index, open_suffix_index
from foredraft.ngram.suffix import SuffixDrafter, Voting, build_suffix, context_drafter, load_suffix, pooled
from foredraft.ngram.suffix_array import padding, reversed_text, suffix_array
from foredraft.ngram.votes import vote_chain, vote_tree
from foredraft.steps import NgramStep

GENERATOR = torch.Generator()


def texts(seed: int, vocab_size: int, sizes: tuple[int, ...] = (90, 1, 0, 150)) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, size).astype(np.int32) for size in sizes]


def joined_text(sequences: list[np.ndarray], vocab_size: int, depth: int) -> np.ndarray:
    bounds = np.cumsum([0, *(len(sequence) for sequence in sequences)])
    return reversed_text(np.concatenate(sequences), bounds, vocab_size, depth)


def common_suffix(context: list[int], before: list[int], depth: int) -> int:
    length = 0
    while length < min(depth, len(context), len(before)) and context[-1 - length] == before[-1 - length]:
        length += 1
    return length


@pytest.mark.parametrize("vocab_size", [1, 2, 5, 60, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("depth", [4, 32])
def test_positions_are_sorted_by_what_can_be_matched(vocab_size: int, depth: int) -> None:
    text = joined_text(texts(vocab_size, vocab_size), vocab_size, depth)
    order, first = suffix_array(text, vocab_size, depth)
    size = len(text) - padding(depth)
    assert sorted(order.tolist()) == list(range(size))
    keys = []
    for position in order:
        read = text[position : position + depth].tolist()
        keys.append(read[: read.index(0) + 1] if 0 in read else read)
    assert keys == sorted(keys)
    assert np.array_equal(np.diff(first), np.bincount(text[:size], minlength=vocab_size + 1))


@pytest.mark.parametrize("repeated", [1, 2, 7])
def test_text_that_repeats_itself_is_sorted(repeated: int) -> None:
    sequence = np.tile(np.arange(repeated, dtype=np.int32), 3000)
    order, _ = suffix_array(joined_text([sequence], 8, 16), 8, 16)
    assert sorted(order.tolist()) == list(range(len(sequence) + 1))


@pytest.mark.parametrize("vocab_size", [1, 2, 4, 30])
def test_the_automaton_knows_every_earlier_occurrence(vocab_size: int) -> None:
    text = texts(vocab_size, vocab_size, (60,))[0].astype(np.int64)
    automaton = Automaton.empty(8)
    lengths, tokens = np.empty(70, np.int64), np.empty((70, 3), np.int64)
    for end in range(1, len(text) + 1):
        found = automaton.rows(text[:end], lengths, tokens, 70)
        context = text[:end].tolist()
        longest = [common_suffix(context, context[:before], end) for before in range(end)]
        by_frequency = {sum(length >= wanted for length in longest): wanted for wanted in range(1, max(longest) + 1)}
        assert lengths[:found].tolist() == sorted(by_frequency.values(), reverse=True)
        for row in range(found):
            latest = max(before for before in range(end) if longest[before] >= lengths[row])
            copied = list(context)
            for offset in range(3):
                copied.append(copied[latest + offset])
            assert tokens[row].tolist() == copied[end:]


def test_the_automaton_crops_itself() -> None:
    text = texts(3, 4, (50,))[0].astype(np.int64)
    other = np.concatenate([text[:20], text[30:40]])
    lengths, tokens = np.empty(9, np.int64), np.empty((9, 4), np.int64)
    jumping = Automaton.empty()
    for context in (text, text[:10], other, text[:1], text):
        rows = Automaton.empty().rows(context, lengths, tokens, 9)
        expected = (lengths[:rows].tolist(), tokens[:rows].tolist())
        rows = jumping.rows(context, lengths, tokens, 9)
        assert (lengths[:rows].tolist(), tokens[:rows].tolist()) == expected


@pytest.mark.parametrize(("vocab_size", "depth"), [(3, 4), (3, 32), (12, 5), (90_000, 8)])
def test_the_index_finds_the_longest_matches_of_all(tmp_path: Path, vocab_size: int, depth: int) -> None:
    sequences = texts(vocab_size, min(vocab_size, 20))
    build_suffix_index(sequences, vocab_size, "v", depth, tmp_path / "shard.ngram")
    index = open_suffix_index(tmp_path / "shard.ngram")
    lengths, tokens = np.empty(12, np.int64), np.empty((12, 3), np.int64)
    for context in [*texts(77, min(vocab_size, 20), (1, 2, 30, 31, 32)), sequences[0][:40], sequences[3]]:
        found = index.rows(context.astype(np.int64), lengths, tokens, 1, 12)
        known = [
            (common_suffix(context.tolist(), text[:end].tolist(), depth), text[end : end + 3].tolist())
            for text in sequences
            for end in range(1, len(text) + 1)
        ]
        longest = sorted((length for length, _ in known if length), reverse=True)[:11]
        assert lengths[1:found].tolist() == longest
        for row in range(1, found):
            assert (int(lengths[row]), [token for token in tokens[row].tolist() if token >= 0]) in known


def test_a_chain_follows_the_majority_and_a_tree_holds_the_minority() -> None:
    tokens = np.array([[1, 2, 3], [1, 2, 4], [1, 5, -1], [7, 8, 9]])
    lengths, scales, powers = np.array([2, 1, 1, 9]), np.array([1.0, 1.0, 1.0, 1.25]), np.array([0.5, 1.0, 2.0])
    draft, parents = np.empty(5, np.int64), np.empty(5, np.int64)
    assert vote_chain(lengths, scales, powers, tokens, 0.0, 0.0, draft[:3]) == 3
    assert draft[:3].tolist() == [1, 2, 3]
    assert vote_chain(lengths, scales, powers, tokens, 0.0, 0.5, draft[:3]) == 1
    assert vote_chain(0 * lengths, scales, powers, tokens, 0.0, 0.0, draft[:3]) == 0
    nodes = vote_tree(lengths, scales, powers, tokens, 0.0, 0.0, draft, parents)
    assert list(zip(draft[:nodes].tolist(), parents[:nodes].tolist(), strict=True)) == [
        (1, ROOT), (2, 0), (7, ROOT), (8, 2), (9, 3),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SuffixDrafter]:
    folder = tmp_path_factory.mktemp("suffix")
    paths = [folder / "one.ngram", folder / "two.ngram"]
    for seed, path in enumerate(paths):
        build_suffix_index(texts(seed, 6), 6, "v", 8, path)
    shards = [open_suffix_index(path) for path in paths]
    return {
        "request": context_drafter(6),
        "corpus": pooled(shards[:1], 6, "v", voting=Voting(num_context=0)),
        "both": pooled(shards, 6, "v", weights=[1.0, 0.5], voting=Voting(least_confidence=0.02)),
    }


@pytest.mark.parametrize("name", ["request", "corpus", "both"])
def test_replay_equals_propose(drafters: dict[str, SuffixDrafter], name: str) -> None:
    drafter = drafters[name]
    assert isinstance(drafter, Drafter)
    text = torch.from_numpy(texts(50, 6, (60,))[0].astype(np.int64))
    for start in (1, 30, 59, 60):
        for k in (1, 5):
            (replayed,) = drafter.replay([Answer(text, start)], k)
            for t in range(len(text) - start):
                guess = drafter.propose(text[: start + t], k, GENERATOR).token_ids.tolist()
                emitted = text[start + t : start + t + k].tolist()
                guess = guess[: len(emitted)]
                hits = [float(a == b) for a, b in zip(guess, emitted, strict=False)]
                assert replayed.probs[t].tolist() == hits + [0.0] * (k - len(hits))
                assert replayed.guessed[t].tolist() == [True] * len(guess) + [False] * (k - len(guess))


def depths(tree: Proposal) -> list[int]:
    found: list[int] = []
    for parent in tree.parents:
        found.append(1 if parent == ROOT else found[parent] + 1)
    return found


@pytest.mark.parametrize("name", ["request", "corpus", "both"])
def test_a_tree_is_a_tree_inside_its_budget(drafters: dict[str, SuffixDrafter], name: str) -> None:
    text = torch.from_numpy(texts(51, 6, (60,))[0].astype(np.int64))
    for k in (0, 1, 8):
        tree = drafters[name].propose_tree(text, 5, k)
        assert len(tree) <= k
        assert max(depths(tree), default=0) <= 5
        assert all(parent < node for node, parent in enumerate(tree.parents))
        branches = list(zip(tree.parents, tree.token_ids.tolist(), strict=True))
        assert len(set(branches)) == len(branches)


def test_an_occurrence_in_the_corpus_is_copied(tmp_path: Path) -> None:
    sequence = np.arange(100, dtype=np.int32)
    settings, manifest = NgramStep(kind="suffix"), DraftManifest("suffix", 100, "t", "t", "v")
    build_suffix([sequence, sequence[:5]], 100, settings, manifest, tmp_path / "draft", SILENT)
    drafter = load_suffix(tmp_path / "draft")
    assert drafter.propose(torch.tensor([40, 41]), 4, GENERATOR).token_ids.tolist() == [42, 43, 44, 45]
    assert drafter.propose(torch.tensor([97]), 4, GENERATOR).token_ids.tolist() == [98, 99]
    assert drafter.propose(torch.tensor([99]), 4, GENERATOR).token_ids.tolist() == []
    assert drafter.num_bytes > 0


def test_unusable_corpora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="holds no tokens"):
        build_suffix_index([], 10, "v", 8, tmp_path / "shard.ngram")
    with pytest.raises(CorpusError, match="token 10 at position 1, outside the vocabulary of 10"):
        build_suffix_index([np.array([1, 10])], 10, "v", 8, tmp_path / "shard.ngram")
    assert not any(tmp_path.iterdir())


def test_shards_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    build_suffix_index(texts(1, 10), 10, "one", 8, tmp_path / "shard.ngram")
    shard = open_suffix_index(tmp_path / "shard.ngram")
    with pytest.raises(VocabMismatchError, match="built with tokenizer one, the target has two"):
        pooled([shard], 10, "two")
    with pytest.raises(VocabMismatchError, match="built for 10 tokens, the target has 11"):
        pooled([shard], 11, "one")


def test_damage_is_found_when_it_is_read_or_when_all_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "shard.ngram"
    build_suffix_index(texts(1, 10), 10, "v", 8, path)
    data = bytearray(path.read_bytes())
    index = open_suffix_index(path, verify=True)
    data[data.index(index.order.tobytes()) + 5] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="block 0 of 'order' does not match its checksum"):
        open_suffix_index(path, verify=True)
    late = open_suffix_index(path)
    with pytest.raises(CheckpointError, match="block 0 of 'order' does not match its checksum"):
        late.rows(np.array([1, 2]), np.empty(4, np.int64), np.empty((4, 2), np.int64), 0, 4)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(UserError, match=r"Unknown option 'bass' of suffix-automaton. Known: base, "):
        context_drafter(10, bass=2.0)
    with pytest.raises(UserError, match="base >= 1"):
        context_drafter(10, base=0.5)
