"""llama.cpp's lookup cache: what is written is read back, and damage is refused."""

import logging
import struct
from pathlib import Path

import numpy as np
import pytest

from foredraft.core.errors import CorpusError
from foredraft.ngram.corpus import joined
from foredraft.ngram.counts import NgramCounts, count_ngrams
from foredraft.ngram.llamacpp import export_lookup_cache, import_lookup_cache

VOCAB = 9


def counts(order: int = 3) -> NgramCounts:
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, VOCAB, size).astype(np.int32) for size in (50, 30)]
    return count_ngrams(*joined(texts, VOCAB), order, 1)


def test_the_static_file_is_the_documented_layout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bigram = count_ngrams(*joined([np.array([5, 6, 7, 5, 6, 8], np.int32)], VOCAB), 2, 1)
    with caplog.at_level(logging.WARNING):
        assert export_lookup_cache(bigram, tmp_path / "cache") == 3
    assert "does not say whose vocabulary" in caplog.text
    entries = [(7, 5, [(6, 1)]), (5, 6, [(7, 1), (8, 1)]), (6, 7, [(5, 1)])]
    expected = b"".join(
        struct.pack("<5i", first, second, -1, -1, len(pairs)) + b"".join(struct.pack("<2i", *pair) for pair in pairs)
        for first, second, pairs in entries
    )
    assert (tmp_path / "cache").read_bytes() == expected


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written = counts()
    export_lookup_cache(written, tmp_path / "cache", order=0)
    read = import_lookup_cache(tmp_path / "cache", VOCAB)
    begin = int(written.first_next[1])
    assert np.array_equal(read.older, written.older)
    assert np.array_equal(read.first_child, written.first_child)
    offset = int(read.first_next[1])
    assert np.array_equal(read.first_next[1:] - offset, written.first_next[1:] - begin)
    assert np.array_equal(read.next_token[offset:], written.next_token[begin:])
    assert np.array_equal(read.next_count[offset:], written.next_count[begin:])


def test_shorter_contexts_are_sums_of_longer_ones(tmp_path: Path) -> None:
    export_lookup_cache(counts(2), tmp_path / "cache", order=2)
    read = import_lookup_cache(tmp_path / "cache", VOCAB)
    assert read.order == 2
    for length in (0, 1):
        begin, end = read.levels()[length]
        assert (
            read.next_count[read.first_next[begin] : read.first_next[end]].sum()
            == read.next_count[read.first_next[read.levels()[2][0]] :].sum()
        )


@pytest.mark.parametrize("cut", [1, 4, 8, 21])
def test_a_file_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    export_lookup_cache(counts(), tmp_path / "cache")
    data = (tmp_path / "cache").read_bytes()
    (tmp_path / "cache").write_bytes(data[:-cut])
    with pytest.raises(CorpusError, match=r"cut short|no lookup cache"):
        import_lookup_cache(tmp_path / "cache", VOCAB)


def test_a_file_of_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    export_lookup_cache(counts(), tmp_path / "cache")
    with pytest.raises(CorpusError, match="not of a vocabulary of 4"):
        import_lookup_cache(tmp_path / "cache", 4)


def test_contexts_longer_than_four_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="5 cannot be written"):
        export_lookup_cache(counts(), tmp_path / "cache", order=5)
