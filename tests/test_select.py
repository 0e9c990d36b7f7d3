"""Laws of the offline choice."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.acceptance.wording import Figure
from foredraft.core.errors import UserError
from foredraft.select.offline import NO_SPECULATION, CandidateFigures, choose, over_laws
from foredraft.settings import SelectSettings

TARGET_BYTES = 1_000_000_000
ROOMY = SelectSettings(memory_fraction=0.5)


def candidate(
    name: str, *speedups: float, megabytes: float = 50, spread: float = 0.02, **more: object
) -> CandidateFigures:
    """Return a candidate with predicted speedups at k = 1, 2, ... and tokens per call to match."""
    tokens = {k: Figure(2 * v, 2 * v * (1 - spread), 2 * v * (1 + spread)) for k, v in enumerate(speedups, 1)}
    speeds = dict(enumerate(speedups, 1))
    return CandidateFigures(name, **{"kind": "causal-lm", **more}, num_bytes=int(megabytes * 1e6),
                            mean_tokens_per_call=tokens, predicted_speedup=speeds)  # fmt: skip


def test_the_fastest_that_fits_wins_at_its_best_length() -> None:
    pool = [
        candidate("a", 1.2, 1.3, 1.25),
        candidate("b", 1.1, 1.4, 1.5, megabytes=90),
        candidate("c", 2.0, megabytes=600),
    ]
    selection = choose(pool, ROOMY, TARGET_BYTES)
    assert (selection.drafter, selection.k) == ("b", 3)
    assert selection.sentence == (
        "b with 3 draft tokens a block is predicted to decode 1.50x as fast as the target alone "
        "(95 % interval 1.47\N{EN DASH}1.53), in 9\N{NO-BREAK SPACE}% of its memory."
    )


def test_the_interval_is_that_of_the_tokens_per_call() -> None:
    selection = choose([candidate("a", 1.5, spread=0.1)], ROOMY, TARGET_BYTES)
    figure = selection.predicted_speedup
    assert (figure.low, figure.value, figure.high) == pytest.approx((1.35, 1.5, 1.65))
    bare = replace(candidate("a", 1.5), mean_tokens_per_call={})
    selection = choose([bare], ROOMY, TARGET_BYTES)
    assert not selection.predicted_speedup.has_interval
    assert "interval" not in selection.sentence


def test_the_memory_limit_is_inclusive() -> None:
    pool = [candidate("large", 1.5, megabytes=100)]
    assert choose(pool, SelectSettings(memory_fraction=0.1), TARGET_BYTES).drafter == "large"
    assert choose(pool, SelectSettings(memory_fraction=0.0999), TARGET_BYTES).drafter == NO_SPECULATION


def test_nothing_faster_means_no_speculation() -> None:
    selection = choose(
        [candidate("a", 0.8, 0.95), candidate("b", 1.0), candidate("c", 3.0, megabytes=900)], ROOMY, TARGET_BYTES
    )
    assert (selection.drafter, selection.k) == (NO_SPECULATION, 0)
    assert selection.predicted_speedup == Figure(1.0, 1.0, 1.0)
    assert selection.sentence == (
        "Decode without speculation: the fastest candidate that fits, b, is predicted 1.00x at its best length, "
        "1 draft token: no faster than the target alone."
    )
    assert selection.reasons == {
        "a": "It is predicted 0.95x at its best length, 2 draft tokens: no faster than the target alone.",
        "b": "It is predicted 1.00x at its best length, 1 draft token: no faster than the target alone.",
        "c": "It takes 900 MB, and the limit is 500 MB (50\N{NO-BREAK SPACE}% of the target).",
    }


def test_the_nearest_miss_is_stated_and_fits_as_it_says() -> None:
    pool = [
        candidate("slow", 0.9, megabytes=70),
        candidate("near", 1.3, megabytes=80),
        candidate("far", 2.0, megabytes=300),
    ]
    selection = choose(pool, SelectSettings(memory_fraction=0.05), TARGET_BYTES)
    assert selection.drafter == NO_SPECULATION
    assert selection.sentence == (
        "Decode without speculation: no candidate fits into 50.0 MB (5\N{NO-BREAK SPACE}% of the target). The "
        "nearest is near, 30.0 MB too large: with memory_fraction 0.08 it fits, predicted 1.30x at 1 draft token."
    )
    assert choose(pool, SelectSettings(memory_fraction=0.08), TARGET_BYTES).drafter == "near"
    both = choose(pool, SelectSettings(memory_fraction=0.05, max_bytes=10**6), TARGET_BYTES).sentence
    assert "79.0 MB too large: with max_bytes=80000000 and memory_fraction=0.08 it fits" in both
    roomier = SelectSettings(memory_fraction=0.08, max_bytes=80_000_000)
    assert choose(pool, roomier, TARGET_BYTES).drafter == "near"


def test_every_loser_gets_one_reason() -> None:
    pool = [
        candidate("winner", 1.5),
        candidate("close", 1.48),
        candidate("behind", 1.2, 1.3),
        candidate("slow", 0.7),
        candidate("large", 1.9, megabytes=700),
    ]
    assert choose(pool, ROOMY, TARGET_BYTES).reasons == {
        "close": "It is predicted 1.48x at 1 draft token, winner 1.50x; their intervals overlap, so that more prompts "
        "could turn this.",
        "behind": "It is predicted 1.30x at 2 draft tokens, winner 1.50x.",
        "slow": "It is predicted 0.70x at its best length, 1 draft token: no faster than the target alone.",
        "large": "It takes 700 MB, and the limit is 500 MB (50\N{NO-BREAK SPACE}% of the target).",
    }


def test_transformers_takes_no_trimmed_head_no_table_and_no_integers() -> None:
    pool = [
        candidate("trimmed", 1.9, head_rows=12288, full_head_twin="whole"),
        candidate("twinless", 1.8, head_rows=4096),
        candidate("rounded", 1.7, has_int8_body=True),
        candidate("table", 1.6, kind="ngram"),
        candidate("whole", 1.2),
        candidate("lookup", 1.1, kind="prompt-lookup", megabytes=0),
    ]
    selection = choose(pool, SelectSettings(memory_fraction=0.5, runtime="transformers"), TARGET_BYTES)
    assert selection.drafter == "whole"
    assert selection.reasons["trimmed"] == (
        "It computes 12288 rows of its head, and transformers takes no map of token ids: use its twin whole, which "
        "computes them all."
    )
    assert "make its twin with the step head" in selection.reasons["twinless"]
    assert "transformers widens them" in selection.reasons["rounded"]
    assert selection.reasons["table"] == "Transformers runs no ngram drafter."
    assert choose(pool, ROOMY, TARGET_BYTES).drafter == "trimmed"
    unservable = choose(pool[:4], SelectSettings(memory_fraction=0.5, runtime="transformers"), TARGET_BYTES)
    assert unservable.sentence == "Decode without speculation: none of the candidates can be served in transformers."


def test_of_equally_fast_ones_the_smallest_wins() -> None:
    pool = [candidate("large", 1.5, megabytes=80), candidate("small", 1.5, megabytes=20)]
    assert choose(pool, ROOMY, TARGET_BYTES).drafter == "small"


@given(st.lists(st.tuples(st.floats(0.3, 4.0), st.integers(1, 900)), min_size=1, max_size=6), st.floats(0.01, 1.0))
def test_the_choice_never_breaks_the_limit_never_loses_and_never_depends_on_order(
    figures: list[tuple[float, int]], fraction: float
) -> None:
    pool = [candidate(f"c{index}", speed, megabytes=size) for index, (speed, size) in enumerate(figures)]
    settings = SelectSettings(memory_fraction=fraction)
    selection = choose(pool, settings, TARGET_BYTES)
    assert replace(choose(pool[::-1], settings, TARGET_BYTES), reasons={}) == replace(selection, reasons={})
    fitting = [one for one in pool if one.num_bytes <= fraction * TARGET_BYTES]
    best = max([1.0, *(one.best.value for one in fitting)])
    assert selection.predicted_speedup.value == pytest.approx(best)
    others = {one.name for one in pool} - {selection.drafter}
    assert set(selection.reasons) == others
    assert all(selection.reasons.values())


def test_one_law_alone_changes_nothing() -> None:
    pool = [candidate("a", 1.2, 1.4), candidate("b", 1.3)]
    assert over_laws([pool]) == pool
    for twice, once in zip(over_laws([pool, pool]), pool, strict=True):
        assert twice.best.value == pytest.approx(once.best.value)
        assert twice.best_k == once.best_k


def test_times_add_up_over_laws() -> None:
    """Equal tokens of two laws at speedups 1 and 3 take 1 + 1/3 of the plain time of one law, for two laws of text."""
    pooled = over_laws([[candidate("a", 1.0, 2.0)], [candidate("a", 3.0, 2.0)]])
    assert pooled[0].predicted_speedup == pytest.approx({1: 2 / (1 / 1.0 + 1 / 3.0), 2: 2.0})
    assert pooled[0].mean_tokens_per_call[1].value == pytest.approx(2 / (1 / 2.0 + 1 / 6.0))


def test_unusable_figures_are_refused() -> None:
    with pytest.raises(UserError, match="nothing to choose from"):
        choose([], ROOMY, TARGET_BYTES)
    with pytest.raises(UserError, match="a stands twice"):
        choose([candidate("a", 1.2), candidate("a", 1.3)], ROOMY, TARGET_BYTES)
    with pytest.raises(UserError, match="no cost of b"):
        choose([candidate("a", 1.2), candidate("b")], ROOMY, TARGET_BYTES)
    with pytest.raises(UserError, match="no cost of a"):
        choose([candidate("a", float("nan"))], ROOMY, TARGET_BYTES)
    with pytest.raises(UserError, match="b was not scored under every law"):
        over_laws([[candidate("a", 1.2), candidate("b", 1.2)], [candidate("a", 1.2)]])
