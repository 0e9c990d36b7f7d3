"""A made-up report with the shape of a real one: decaying acceptance, domains that differ, costs that decide."""

import random
from collections.abc import Sequence
from typing import Any

DOMAINS = {"code": 0.10, "math": 0.04, "tools": 0.13, "chat": -0.06, "writing": -0.11, "translation": -0.03}
LENGTHS = range(1, 9)
NUM_PROMPTS = 60

# name, kind, acceptance at T=0, decay by position, cost ratio, parameters, bytes
QUICKSTART = (
    ("prefix-6", "causal-lm", 0.66, 0.985, 0.212, 51_200_000, 102_400_000),
    ("prefix-6-match", "causal-lm", 0.68, 0.985, 0.214, 51_200_000, 102_400_000),
    ("prefix-6-int8", "causal-lm", 0.675, 0.985, 0.128, 51_200_000, 62_000_000),
    ("prefix-5-healed", "causal-lm", 0.64, 0.98, 0.181, 47_700_000, 95_400_000),
    ("prefix-6-untrained", "causal-lm", 0.07, 0.9, 0.212, 51_200_000, 102_400_000),
    ("ngram", "ngram", 0.33, 0.93, 0.0021, 0, 9_400_000),
    ("lookup", "prompt-lookup", 0.21, 1.02, 0.0004, 0, 0),
)


def made_up_report(candidates: Sequence[tuple[Any, ...]] = QUICKSTART, seed: int = 0) -> dict[str, Any]:
    """Return a whole report of schema 1; the winner is the fastest at T=1."""
    generator = random.Random(seed)
    laws = [
        {
            "temperature": temperature, "top_k": 0, "top_p": 1.0,
            "drafters": [_entry(candidate, temperature, generator) for candidate in candidates],
        }
        for temperature in (0.0, 1.0)
    ]  # fmt: skip
    ranked = sorted(laws[1]["drafters"], key=_speed, reverse=True)
    winner = ranked[0]
    speed = _speed(winner)
    return {
        "schema": 1,
        "target": {
            "name": "HuggingFaceTB/SmolLM2-135M-Instruct", "fingerprint": "3f2a", "dtype": "float32",
            "parameters": 134_515_008, "bytes": 269_060_552,
        },
        "laws": laws,
        "selection": {
            "drafter": winner["name"], "k": winner["best_k"], "predicted_speedup": speed,
            "interval": [speed * 0.95, speed * 1.05],
            "reasons": {entry["name"]: _reason(entry, winner) for entry in ranked[1:]},
            "sentence": f"{winner['name']} with {winner['best_k']} draft tokens a block is predicted to decode "
            f"{speed:.2f}x as fast as the target alone (95 % interval {speed * 0.95:.2f} to {speed * 1.05:.2f}), "
            "in 23 % of its memory.",
        },
        "curves": {c[0]: _curve(c, generator) for c in candidates if c[1] == "causal-lm" and "untrained" not in c[0]},
        "machine": {"processor": "Intel Xeon @ 2.70GHz", "cores": 2, "system": "Linux x86_64", "torch": "2.13.0+cpu"},
        "stages": [
            {"name": "collecting T=0", "seconds": 81.2}, {"name": "collecting T=1", "seconds": 94.6},
            {"name": "training", "seconds": 231.0}, {"name": "quantizing", "seconds": 2.4},
            {"name": "scoring", "seconds": 61.7}, {"name": "audit", "seconds": 48.9},
        ],
        "paired": [
            {"law": "T=1", "better": winner["name"], "worse": ranked[-1]["name"], "metric": "mean_tokens_per_call",
             "difference": 0.041, "interval": [-0.012, 0.094]},
            {"law": "T=1", "better": "prefix-6", "worse": "prefix-6-untrained", "metric": "expected_acceptance",
             "difference": 0.512, "interval": [0.481, 0.544]},
        ],
        "notes": [
            "Intervals are wide: 60 prompts resolve differences of about 3 points of acceptance, not less.",
            "The machine was shared while costs were measured: the spread of a target step was 6 %.",
        ],
    }  # fmt: skip


def many_candidates(count: int) -> list[tuple[Any, ...]]:
    """Return candidates of every strength, with long and short names."""
    generator = random.Random(7)
    return [
        (
            f"prefix-{1 + index % 12}-{('int8', 'pruned-healed', 'lowrank-128', 'distilled-lk')[index % 4]}-v{index}",
            ("causal-lm", "ngram", "suffix", "multi-token-head")[index % 4],
            generator.uniform(0.1, 0.75), generator.uniform(0.93, 1.0), generator.uniform(0.001, 0.6),
            generator.randint(1, 60) * 10**6, generator.randint(2, 120) * 10**6,
        )
        for index in range(count)
    ]  # fmt: skip


def _entry(candidate: tuple[Any, ...], temperature: float, generator: random.Random) -> dict[str, Any]:
    name, kind, acceptance, decay, cost_ratio, parameters, num_bytes = candidate
    acceptance = acceptance - 0.05 * temperature
    score = _score(acceptance, decay, 0.035, generator)
    predicted = {str(k): score["mean_tokens_per_call"][str(k)] / (k * cost_ratio + 1 + 0.035 * k) for k in LENGTHS}
    best = max(predicted, key=predicted.__getitem__)
    measured = predicted[best] * generator.uniform(0.93, 1.02)
    literal = score["mean_tokens_per_call"][best] * generator.uniform(0.98, 1.02)
    domains = {
        domain: _score(acceptance * (1 + shift) + generator.uniform(-0.04, 0.04), decay, 0.08, generator)
        | {"prompts": NUM_PROMPTS // len(DOMAINS), "tokens": 1210}
        for domain, shift in DOMAINS.items()
    }
    return {
        "name": name, "kind": kind, **score, "domains": domains, "cost_ratio": cost_ratio,
        "predicted_speedup": predicted, "best_k": int(best),
        "measured_speedup": {"k": int(best), "value": measured, "interval": [measured * 0.93, measured * 1.07]},
        "audit": {
            "prompts": 8, "tokens": 512, "mean_tokens_per_call": {best: literal},
            "replayed_mean_tokens_per_call": {best: literal * generator.uniform(0.99, 1.01)},
            "same_text": 8, "agrees": True,
        },
        "parameters": parameters, "bytes": num_bytes, "prompts": NUM_PROMPTS, "tokens": 7263,
    }  # fmt: skip


def _score(acceptance: float, decay: float, width: float, generator: random.Random) -> dict[str, Any]:
    by_position, tokens = {}, {}
    for k in LENGTHS:
        rates = [min(0.98, acceptance * 1.03 * decay**i + generator.uniform(-0.006, 0.006)) for i in range(k)]
        by_position[str(k)] = rates
        reach, emitted = 1.0, 1.0
        for rate in rates:
            reach *= rate
            emitted += reach
        tokens[str(k)] = emitted
    return {
        "expected_acceptance": acceptance,
        "acceptance_by_position": by_position,
        "mean_tokens_per_call": tokens,
        "interval": {
            "expected_acceptance": [max(acceptance - width, 0.0), acceptance + width],
            "acceptance_by_position": {
                k: [[max(v - width, 0), v + width] for v in rates] for k, rates in by_position.items()
            },
            "mean_tokens_per_call": {k: [v - 2 * width * (v - 1), v + 2 * width * (v - 1)] for k, v in tokens.items()},
        },
    }  # fmt: skip


def _curve(candidate: tuple[Any, ...], generator: random.Random) -> list[dict[str, float]]:
    end = candidate[2]
    rate = generator.uniform(520, 700)
    return [
        {
            "positions": positions, "seconds": positions / rate,
            "loss": 3.9 * (1 - end) + 2.6 / (1 + positions / 6000) + generator.uniform(-0.04, 0.04),
            "acceptance": end - (end - 0.07) / (1 + positions / 5000) + generator.uniform(-0.008, 0.008),
            **({} if positions % 10_000 else {"mean_tokens_per_call": 1 + 2 * end * positions / (positions + 9000)}),
        }
        for positions in range(0, 60_001, 2_500)
    ]  # fmt: skip


def _speed(entry: dict[str, Any]) -> float:
    return max(entry["predicted_speedup"].values())


def _reason(entry: dict[str, Any], winner: dict[str, Any]) -> str:
    if _speed(entry) < 1:
        return f"No k gains anything: {_speed(entry):.2f}x at its best, k = {entry['best_k']}."
    return (
        f"Predicted {_speed(entry):.2f}x at k = {entry['best_k']}, below the {_speed(winner):.2f}x of {winner['name']}."
    )
