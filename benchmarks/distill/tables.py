"""The tables of a recipe of this folder, from the report that its run left.

    python benchmarks/distill/tables.py runs/losses --k 4 > benchmarks/distill/losses.md

One row for each candidate that guesses with a trained model: what replay on held-out prompts gave under each law, with
95 % intervals over prompts, what a draft step costs, the predicted and the measured speedup at the best length, and the
training behind it. With --curve the training's course follows: acceptance on held-out training prompts by minutes. With
--against NAME the differences of expected acceptance from a candidate follow, paired by prompt.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.acceptance.intervals import expected_acceptance, paired_difference
from foredraft.acceptance.report import AcceptanceReport


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--k", default="4")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--against", action="append", default=[])
    options = parser.parse_args()
    report = json.loads((options.run / "report.json").read_text(encoding="utf-8"))
    print(_machine(report))
    print("\n".join(_scores(report, options.k)))
    if options.curve:
        print("\n".join(_curves(report)))
    for name in options.against:
        print("\n".join(_differences(options.run, report, name)))


def _differences(run: Path, report: dict[str, Any], name: str) -> Iterator[str]:
    keys = {stage["name"]: stage["key"] for stage in report["stages"]}
    laws = [law["label"] for law in report["laws"]]

    def scored(drafter: str, law: str) -> AcceptanceReport:
        (file,) = (run / "scores").glob(f"score-{keys[f'score {drafter} {law}']}*.json")
        return AcceptanceReport.from_json(json.loads(file.read_text(encoding="utf-8")))

    yield f"\n| expected acceptance minus that of {name} | {' | '.join(laws)} |"
    yield "|---" * (len(laws) + 1) + "|"
    for other in (entry["name"] for entry in report["laws"][0]["drafters"]):
        if other != name:
            found = [
                paired_difference(
                    scored(other, law), scored(name, law), expected_acceptance, np.random.default_rng(0)
                ).difference
                for law in laws
            ]
            cells = [f"{one.value:+.4f} ({one.low:+.4f}..{one.high:+.4f})" for one in found]
            yield f"| {other} | {' | '.join(cells)} |"


def _machine(report: dict[str, Any]) -> str:
    seconds = {stage["name"]: stage["seconds"] for stage in report["stages"]}
    collecting = sum(value for name, value in seconds.items() if name.startswith("collect train"))
    scored, machine = report["laws"][0]["drafters"][0], report["machine"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, torch {machine['torch']}; "
        f"{report['target']['name']} in {report['target']['dtype']}; {scored['prompts']} held-out prompts with 95 % "
        f"intervals; collecting the training answers took {collecting / 60:.1f} min.\n"
    )


def _scores(report: dict[str, Any], k: str) -> Iterator[str]:
    laws = [law["label"] for law in report["laws"]]
    columns = [f"{what}, {law}" for law in laws for what in ("expected acceptance", f"tokens per call, k={k}")]
    columns += ["cost ratio", *(f"best k: predicted / measured speedup, {law}" for law in laws), "positions", "minutes"]
    yield f"| draft | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    minutes = _minutes(report)
    for entries in zip(*(law["drafters"] for law in report["laws"]), strict=True):
        first = entries[0]
        curve = report["curves"].get(first["name"], [])
        cells = [cell for entry in entries for cell in (_interval(entry, "expected_acceptance"), _per_call(entry, k))]
        cells += [f"{first['cost_ratio']:.3f}", *(_speedup(entry) for entry in entries)]
        cells += [f"{curve[-1]['positions']:,}" if curve else "", f"{minutes.get(first['name'], 0.0):.1f}"]
        yield f"| {first['name']} | {' | '.join(cells)} |"


def _interval(entry: dict[str, Any], name: str) -> str:
    low, high = entry["interval"][name]
    return f"{entry[name]:.3f} ({low:.3f}..{high:.3f})"


def _per_call(entry: dict[str, Any], k: str) -> str:
    low, high = entry["interval"]["mean_tokens_per_call"][k]
    return f"{entry['mean_tokens_per_call'][k]:.2f} ({low:.2f}..{high:.2f})"


def _speedup(entry: dict[str, Any]) -> str:
    best = str(entry["best_k"])
    measured = entry.get("measured_speedup")
    return f"{best}: {entry['predicted_speedup'][best]:.2f}x / " + (f"{measured['value']:.2f}x" if measured else "-")


def _minutes(report: dict[str, Any]) -> dict[str, float]:
    """Return what making each candidate took, in minutes, by name."""
    minutes: dict[str, float] = {}
    for stage in report["stages"]:
        verb, _, name = stage["name"].partition(" ")
        if verb in ("distill", "init", "prune", "quantize"):
            minutes[name] = minutes.get(name, 0.0) + stage["seconds"] / 60
    return minutes


def _curves(report: dict[str, Any], points: int = 12) -> Iterator[str]:
    for name, curve in report["curves"].items():
        yield (
            f"\n{name}\n\n| minutes | positions | loss | acceptance on the step's text | tokens per call, held out |\n"
            + "|---" * 5
            + "|"
        )
        validated = [point for point in curve if point.get("mean_tokens_per_call")] or curve
        for point in validated[:: max(1, len(validated) // points)]:
            shown = f"{point['mean_tokens_per_call']:.3f}" if point.get("mean_tokens_per_call") else ""
            yield (
                f"| {point['seconds'] / 60:.1f} | {point['positions']:,} | {point['loss']:.3f} | "
                f"{point['acceptance']:.3f} | {shown} |"
            )


if __name__ == "__main__":
    main()
