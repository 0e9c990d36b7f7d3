"""Training and evaluation prompts that share nothing: exact and near duplicates stay on one side."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil, inf

from foredraft.core.digest import digest_of
from foredraft.core.errors import PromptError
from foredraft.settings import PromptSource
from foredraft.trace.near import near_duplicates
from foredraft.trace.prompts import Prompt, read_prompts

_EVAL_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Split:
    """Prompts whose answers drafts may learn from, and prompts that only score."""

    train: tuple[Prompt, ...]
    eval: tuple[Prompt, ...]


def split(prompts: Sequence[Prompt], train: int, eval: int, seed: int) -> Split:
    """Return `train` and `eval` prompts, balanced over domains, near duplicates never on both sides.

    Both counts 0 ask for everything: a fifth, rounded up, for evaluation. The choice depends on what the
    prompts say and on the seed, not on their order. Each side begins with one prompt of every domain, then a
    second, and so on.

    Raises:
        PromptError: there are not enough prompts that keep apart.
    """
    return _divide([prompts], [(train, eval)], seed)


def split_sources(sources: Sequence[PromptSource], seed: int) -> Split:
    """Read all sources and split each as it asks; no source's training prompt is near another's evaluation prompt.

    Raises:
        PromptError: a source cannot be read, or has fewer prompts that keep apart than it is asked for.
    """
    pools = [read_prompts(source) for source in sources]
    ids = [prompt.id for pool in pools for prompt in pool]
    if len(set(ids)) < len(ids):
        pools = [[replace(prompt, id=f"{number}/{prompt.id}") for prompt in pool] for number, pool in enumerate(pools)]
    return _divide(pools, [(source.train, source.eval) for source in sources], seed)


@dataclass(frozen=True, slots=True)
class _Candidate:
    prompt: Prompt
    group: int
    order: tuple[bool, str, str, str]


def _divide(pools: Sequence[Sequence[Prompt]], asked: Sequence[tuple[int, int]], seed: int) -> Split:
    """Fill the evaluation sides of all pools first, then the training sides with what is near none of them."""
    counts = [
        (train, eval) if train or eval else (len(pool), ceil(_EVAL_SHARE * len(pool)))
        for pool, (train, eval) in zip(pools, asked, strict=True)
    ]
    ordered = _in_order(pools, sum(eval for _, eval in counts), seed)
    side_of: dict[int, str] = {}
    eval_sides = [
        _take(candidates, eval, _eval_quotas(candidates, train, eval), side_of, "eval")
        for candidates, (train, eval) in zip(ordered, counts, strict=True)
    ]
    train_sides = [
        _take(candidates, train, {}, side_of, "train") for candidates, (train, _) in zip(ordered, counts, strict=True)
    ]
    for pool, ask, own_train, own_eval in zip(pools, asked, train_sides, eval_sides, strict=True):
        _require_enough(ask, (len(own_train), len(own_eval)), len(pool))
    return Split(tuple(chain(*train_sides)), tuple(chain(*eval_sides)))


def _require_enough(asked: tuple[int, int], found: tuple[int, int], given: int) -> None:
    """Raise unless a pool gave as many prompts for training and evaluation as it was asked for; (0, 0): one each."""
    train, eval = asked if any(asked) else (1, 1)
    if found[0] < train or found[1] < eval:
        raise PromptError(
            f"{given} prompts cannot give {train} for training and {eval} for evaluation: near duplicates stay on one "
            f"side, which leaves {found[0]} and {found[1]}. Ask for fewer, or give more prompts."
        )


def _in_order(pools: Sequence[Sequence[Prompt]], num_eval: int, seed: int) -> list[list[_Candidate]]:
    """Order each pool by hash, one prompt of each domain in turn. Groups larger than the evaluation come last."""
    prompts = [prompt for pool in pools for prompt in pool]
    hashes = [digest_of([seed, prompt.text]) for prompt in prompts]
    groups = near_duplicates([prompt.text for prompt in prompts])
    sizes = Counter(groups)
    first_hash: dict[int, str] = {}
    for group, own_hash in zip(groups, hashes, strict=True):
        first_hash[group] = min(own_hash, first_hash.get(group, own_hash))
    candidates = iter(
        [
            _Candidate(prompt, group, (sizes[group] > num_eval, first_hash[group], own_hash, prompt.id))
            for prompt, group, own_hash in zip(prompts, groups, hashes, strict=True)
        ]
    )
    return [_domains_in_turn([next(candidates) for _ in pool]) for pool in pools]


def _domains_in_turn(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    turns: Counter[str] = Counter()
    placed = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.order):
        domain = candidate.prompt.domain
        placed.append((turns[domain], domain, candidate))
        turns[domain] += 1
    return [candidate for _, _, candidate in sorted(placed, key=lambda place: place[:2])]


def _eval_quotas(candidates: Sequence[_Candidate], train: int, eval: int) -> dict[str, int]:
    """Return how many evaluation prompts each domain gives, so that small domains keep some for training."""
    shares = Counter(candidate.prompt.domain for candidate in candidates[: train + eval])
    exact = {domain: share * eval / shares.total() for domain, share in shares.items()}
    quotas = {domain: int(amount) for domain, amount in exact.items()}
    by_remainder = sorted(exact, key=lambda domain: (quotas[domain] - exact[domain], domain))
    for domain in by_remainder[: eval - sum(quotas.values())]:
        quotas[domain] += 1
    return quotas


def _take(
    candidates: Sequence[_Candidate], count: int, quotas: Mapping[str, int], side_of: dict[int, str], side: str
) -> list[Prompt]:
    """Return up to `count` prompts whose groups are not on the other side; exceed quotas only where they are short."""
    taken: set[int] = set()
    for limits in (quotas, {}):
        used = Counter(candidates[index].prompt.domain for index in taken)
        for index, candidate in enumerate(candidates):
            domain = candidate.prompt.domain
            free = index not in taken and side_of.get(candidate.group, side) == side
            if len(taken) < count and free and used[domain] < limits.get(domain, inf):
                side_of[candidate.group] = side
                used[domain] += 1
                taken.add(index)
    return [candidate.prompt for candidate in _domains_in_turn([candidates[index] for index in taken])]
