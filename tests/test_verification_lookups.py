"""Laws of the lookups of other runtimes: each copies what its own rule copies."""

import sys
from pathlib import Path

import pytest
import torch

from foredraft.core.errors import CapabilityError, UserError
from foredraft.core.protocols import Drafter
from foredraft.models.target import LocalTarget, load_target
from foredraft.verification.lookups import EarliestLookup, NgramSimple
from foredraft.verification.runtimes import RUNTIMES
from foredraft.verification.verify import VerifySettings, verify

VOCAB = 10
LATE_AND_EARLY = [0, 1, 2, 7, 7, 7, 1, 2, 8, 8, 8, 1, 2]


def guess(drafter: Drafter, context: list[int], k: int = 3) -> list[int]:
    return drafter.propose(torch.tensor(context), k, torch.Generator()).token_ids.tolist()


@pytest.mark.parametrize(
    ("match", "context", "copied"),
    [
        (2, LATE_AND_EARLY, [8, 8, 8]),  # the latest of two
        (2, [0, 1, 2, 3, 3, 4, 4, 1, 2], [3, 3, 4]),
        (2, [1, 2, 3, 3, 4, 4, 5, 1, 2], []),  # the first token starts no match
        (2, [0, 1, 2, 3, 3, 1, 2], []),  # a history of match + longest + 1 tokens is too short
        (2, [0, 1, 2, 3, 3, 4, 1, 2], [3, 3, 4]),  # and one of a token more is not
        (2, [0, 0, 0, 0, 0, 1, 2, 3, 1, 2], [3, 1]),  # the newest token is not copied
        (3, [0, 0, 0, 0, 0, 1, 2, 3, 1, 2, 3], []),  # fewer tokens than are matched
        (3, [0, 0, 0, 0, 1, 2, 3, 4, 1, 2, 3], [4, 1, 2]),
        (1, [0, 0, 0, 0, 0, 0, 5, 5], []),  # one token before the newest is no match
        (1, [0, 0, 0, 0, 0, 5, 6, 5], [6]),
    ],
)
def test_ngram_simple_copies_whole_blocks_behind_the_latest_match(
    match: int, context: list[int], copied: list[int]
) -> None:
    assert guess(NgramSimple(VOCAB, match, 3), context) == copied


@pytest.mark.parametrize(
    ("drafter", "context", "copied"),
    [
        (EarliestLookup(VOCAB), LATE_AND_EARLY, [7, 7, 7]),
        (EarliestLookup(VOCAB), [9, 2, 5, 1, 2, 6, 1, 2], [6, 1, 2]),  # a longer match before an earlier one
        (EarliestLookup(VOCAB, min_match=2), [2, 5, 1, 2], []),
        (EarliestLookup(VOCAB), [2, 5, 1, 2], [5, 1, 2]),
        (EarliestLookup(VOCAB, max_match=6), [1, 1, 1, 1, 1, 1], [1]),
        (EarliestLookup(VOCAB, max_match=6, halves=True), [1, 1, 1, 1, 1, 1], [1, 1, 1]),
        (EarliestLookup(VOCAB, max_match=5, halves=True), [1, 1, 1, 1, 1, 1], [1]),
    ],
)
def test_the_earliest_match_of_the_longest_suffix_is_copied(
    drafter: Drafter, context: list[int], copied: list[int]
) -> None:
    assert guess(drafter, context) == copied


@pytest.mark.parametrize(
    ("runtime", "copied", "of_two_tokens"),
    [
        ("transformers", [7, 7, 7], [5, 1, 2]),
        ("vllm", [7, 7, 7], [5, 1, 2]),
        ("llama.cpp", [8, 8, 8], []),
        ("openvino", [7, 7, 7], [5, 1, 2]),
        ("onnxruntime-genai", [8, 8, 8], []),
    ],
)
def test_each_runtime_guesses_by_its_own_rule(runtime: str, copied: list[int], of_two_tokens: list[int]) -> None:
    lookup = RUNTIMES[runtime].lookup
    assert lookup is not None
    drafter = lookup.drafter(VOCAB, 2, 1, 3)
    assert guess(drafter, LATE_AND_EARLY) == copied
    assert guess(drafter, [2, 5, 1, 2]) == of_two_tokens


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> LocalTarget:
    return load_target(str(tiny_target_folder), "float32")


@pytest.mark.parametrize(
    ("runtime", "draft", "kind", "message"),
    [
        ("mlx-lm", "prompt-lookup", CapabilityError, "mlx-lm 0.32 has no prompt lookup: it drafts with models alone"),
        ("llama.cpp", "prompt-lookup:min_match=2", UserError, "lookup of llama.cpp has no shortest match to set"),
        ("transformers", "prompt-lookup:min_match=2", UserError, "leave min_match out of prompt-lookup:min_match=2"),
        ("llama.cpp", "prompt-lookup:max_match=4", UserError, "max_match=4 and 3 draft tokens it never drafts"),
        ("vllm", "prompt-lookup:min_match=4", UserError, "needs 1 <= min_match <= max_match"),
        ("openvino", "prompt-lookup:max_match=0", UserError, "needs 1 <= min_match <= max_match"),
    ],
)
def test_a_lookup_that_a_runtime_does_not_have_is_refused_before_it_starts(
    runtime: str, draft: str, kind: type[Exception], message: str, target: LocalTarget
) -> None:
    with pytest.raises(kind, match=message):
        verify(draft, target, runtime, [], VerifySettings(k=3, python=sys.executable))
