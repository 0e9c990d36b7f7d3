"""A simulation of policies as text."""

from collections.abc import Mapping
from typing import Any


def simulation_table(found: Mapping[str, Any]) -> str:
    """Return a simulation as text: references, policies, and for each policy its choice by domain and over time."""
    lines = [
        f"{found['tokens']} tokens of {found['answers']} answers by {found['target']}, {found['law']}; "
        + ("measured costs." if found["costs"]["measured"] else "costs as given, none was measured for the target."),
        "",
        _row("", "tok/s", "tok/call", "x plain", "x best fixed", "of oracle", "regret s"),
    ]
    best = found["best_fixed"]["tokens_per_second"]
    oracle = found["request_oracle"]["tokens_per_second"]
    for name in ("plain", "best_fixed", "request_oracle", "position_oracle"):
        one = found[name]
        label = one.get("arm", name.replace("_", " "))
        lines.append(_figures(f"{label} (fixed)" if name == "best_fixed" else label, one, best, oracle, ""))
    for one in found["policies"]:
        lines.append(_figures(one["policy"], one, best, oracle, f"{one['regret_seconds']:+.2f}"))
    for one in found["policies"]:
        lines += ["", f"{one['policy']}, by domain:"]
        for domain, part in one["domains"].items():
            lines.append(f"  {domain:18.18} {part['over_plain']:5.2f}x plain  {_words(part['chosen'])}")
        lines += ["  over time:"]
        for part in one["over_time"]:
            lines.append(f"  {part['answers']:6} answers {part['regret_seconds']:+9.2f} s  {_words(part['chosen'])}")
    return "\n".join(lines)


def _figures(label: str, one: Mapping[str, Any], best: float, oracle: float, regret: str) -> str:
    rate = one["tokens_per_second"]
    return _row(
        label, f"{rate:.2f}", f"{one['mean_tokens_per_call']:.2f}", f"{one['over_plain']:.2f}", f"{rate / best:.3f}",
        f"{rate / oracle:.3f}", regret,
    )  # fmt: skip


def _row(label: str, *cells: str) -> str:
    return f"{label:34.34}" + "".join(f"{cell:>13}" for cell in cells)


def _words(chosen: Mapping[str, float]) -> str:
    ranked = sorted(chosen.items(), key=lambda pair: -pair[1])[:3]
    return ", ".join(f"{label} {share:.0%}" for label, share in ranked)
