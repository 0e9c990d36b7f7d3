"""The split: nothing that is read for training comes back, exactly or nearly, for evaluation."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.core.errors import PromptError
from foredraft.settings import PromptSource
from foredraft.trace.near import NEAR, near_duplicates
from foredraft.trace.prompts import Prompt
from foredraft.trace.split import split, split_sources

WORDS = [f"w{index}" for index in range(400)]


def prompt(name: str, text: str, domain: str = "d") -> Prompt:
    return Prompt(name, domain, ({"role": "user", "content": text},))


def text_of(rng: random.Random, length: int) -> str:
    return " ".join(rng.choices(WORDS, k=length))


def edited(rng: random.Random, text: str, edits: int) -> str:
    words = text.split()
    for _ in range(edits):
        words[rng.randrange(len(words))] = rng.choice(WORDS)
    return " ".join(words)


def jaccard(one: str, other: str) -> float:
    """The plain definition, over texts of five words or more."""
    sets = []
    for text in (one, other):
        words = text.lower().split()
        sets.append({tuple(words[start : start + 5]) for start in range(len(words) - 4)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def family(seed: int, size: int = 12) -> list[str]:
    """Texts with repeats: some exact, some edited a little, some a lot."""
    rng = random.Random(seed)
    texts = [text_of(rng, rng.randrange(5, 60)) for _ in range(size)]
    for _ in range(size):
        texts.append(edited(rng, rng.choice(texts), rng.randrange(4)))
    rng.shuffle(texts)
    return texts


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_groups_are_exactly_the_chains_of_near_texts(seed: int) -> None:
    texts = family(seed)
    groups = near_duplicates(texts)
    expected = list(range(len(texts)))
    for i, one in enumerate(texts):
        for j in range(i):
            if jaccard(one, texts[j]) >= NEAR - 1e-12:
                expected = [expected[j] if group == expected[i] else group for group in expected]
    pairs = [(i, j) for i in range(len(texts)) for j in range(i)]
    assert [groups[i] == groups[j] for i, j in pairs] == [expected[i] == expected[j] for i, j in pairs]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 8), st.integers(1, 4))
def test_no_near_duplicate_is_on_both_sides(seed: int, train: int, held_out: int) -> None:
    prompts = [prompt(str(index), text, f"d{index % 3}") for index, text in enumerate(family(seed))]
    parts = split(prompts, train, held_out, seed)
    assert (len(parts.train), len(parts.eval)) == (train, held_out)
    assert len({one.id for one in (*parts.train, *parts.eval)}) == train + held_out
    for one in parts.train:
        for other in parts.eval:
            assert jaccard(one.text, other.text) < NEAR


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is the capital of France?", "what is  the CAPITAL of France"),
        ("hi", "Hi!"),
        ("🙂", "🙂 "),
        ("请把下面这首诗翻译成现代汉语白话文，并逐句赏析", "请把下面这首诗翻译成现代汉语白话文,并逐句赏析。"),
        ("ﬁne ２ go", "fine 2 go"),
    ],
)
def test_case_spacing_punctuation_and_forms_of_letters_do_not_count(one: str, other: str) -> None:
    assert len(set(near_duplicates([one, other]))) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [("hi", "ho"), ("🙂", "🙃"), ("a b c d", "a b c e"), ("今天天气怎么样", "明天天气怎么样呢")],
)
def test_short_texts_that_differ_are_apart(one: str, other: str) -> None:
    assert len(set(near_duplicates([one, other]))) == 2


def test_the_threshold_itself_is_near() -> None:
    words = WORDS[:14]
    whole, at, below = (" ".join(words[:length]) for length in (14, 11, 10))
    assert (jaccard(whole, at), jaccard(whole, below)) == (0.7, 0.6)
    assert len(set(near_duplicates([whole, at]))) == len(set(near_duplicates([at, whole]))) == 1
    assert len(set(near_duplicates([whole, below]))) == 2


def test_a_template_around_many_prompts_makes_them_no_duplicates() -> None:
    rng = random.Random(0)
    template = text_of(rng, 300)
    texts = [f"{template} {text_of(rng, 12)}" for _ in range(60)]
    assert len(set(near_duplicates(texts))) == 60
    assert len(set(near_duplicates([*texts, texts[0] + " indeed", texts[1].upper()]))) == 60
    assert len(set(near_duplicates(texts[:10]))) == 1


def test_the_choice_ignores_order_and_follows_the_seed() -> None:
    prompts = [prompt(str(index), text, f"d{index % 3}") for index, text in enumerate(family(1, 40))]
    shuffled = random.Random(1).sample(prompts, len(prompts))
    one, two, other = split(prompts, 20, 8, 0), split(shuffled, 20, 8, 0), split(prompts, 20, 8, 1)
    assert one == two
    assert one != other


def test_domains_are_balanced_and_small_ones_train_too() -> None:
    rng = random.Random(0)
    sizes = {"big": 200, "middle": 60, "small": 9}
    prompts = [prompt(f"{name}{i}", text_of(rng, 20), name) for name, size in sizes.items() for i in range(size)]
    parts = split(prompts, 100, 20, 0)
    assert counts(parts.train + parts.eval) == {"big": 56, "middle": 55, "small": 9}
    held_out = counts(parts.eval)
    assert held_out["small"] in (1, 2)
    assert abs(held_out["big"] - held_out["middle"]) <= 1
    assert {one.domain for one in parts.train[:3]} == {one.domain for one in parts.eval[:3]} == set(sizes)


def test_everything_is_used_where_no_number_is_asked() -> None:
    rng = random.Random(0)
    prompts = [prompt(str(i), text_of(rng, 20)) for i in range(33)]
    parts = split(prompts, 0, 0, 0)
    assert (len(parts.train), len(parts.eval)) == (26, 7)


def test_a_large_group_goes_to_training() -> None:
    rng = random.Random(0)
    base = text_of(rng, 100)
    prompts = [prompt(f"same{i}", edited(rng, base, 1)) for i in range(15)]
    prompts += [prompt(f"own{i}", text_of(rng, 20)) for i in range(15)]
    for seed in range(5):
        parts = split(prompts, 20, 5, seed)
        assert all(one.id.startswith("own") for one in parts.eval)


def test_too_few_prompts_that_keep_apart_are_an_error() -> None:
    rng = random.Random(0)
    prompts = [prompt(str(i), text_of(rng, 20)) for i in range(10)]
    with pytest.raises(
        PromptError, match=r"10 prompts cannot give 8 for training and 3 for evaluation: .* leaves 7 and 3"
    ):
        split(prompts, 8, 3, 0)
    with pytest.raises(PromptError, match=r"4 prompts cannot give 1 for training and 1 .* leaves 0 and 1"):
        split([prompt(str(i), "the same") for i in range(4)], 0, 0, 0)


def test_sources_are_kept_apart_from_each_other(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = [text_of(rng, 30) for _ in range(20)]
    sources = []
    for name, train, held_out in (("a", 10, 0), ("b", 0, 10)):
        rows = [{"id": i, "prompt": f"{text} {name}"} for i, text in enumerate(texts)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        sources.append(PromptSource(file=str(tmp_path / name), train=train, eval=held_out))
    parts = split_sources(sources, 0)
    assert [one.id[:2] for one in parts.train] == ["0/"] * 10
    assert [one.id[:2] for one in parts.eval] == ["1/"] * 10
    assert not {one.id[2:] for one in parts.train} & {one.id[2:] for one in parts.eval}


def counts(prompts: Sequence[Prompt]) -> dict[str, int]:
    return dict(Counter(one.domain for one in prompts))
