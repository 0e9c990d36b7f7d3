"""The offline choice over any number of reports of one target: where each drafter pays, the front, the portfolio."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.acceptance.leaderboard import noise_warnings
from foredraft.acceptance.wording import Figure, interval, size, times
from foredraft.cascading import with_cascades
from foredraft.core.errors import UserError
from foredraft.core.pareto import pareto_front
from foredraft.select.offline import NO_SPECULATION, CandidateFigures, choose, harmonic_mean, over_laws
from foredraft.select.portfolio import best_portfolio, checked_mix, doubts
from foredraft.settings import SelectSettings


def choose_from(report: Mapping[str, Any], settings: SelectSettings) -> dict[str, Any]:
    """Return the selection of a report as plain values, for traffic with equally many tokens of each law."""
    if any(entry["predicted_speedup"] is None for law in report["laws"] for entry in law["drafters"]):
        raise UserError(
            "The report has no costs, since the target was not there to be timed: score the drafters with --target, "
            "or choose by mean_tokens_per_call and the times of your own server."
        )
    figures = over_laws([[_figures(entry, law, settings) for entry in law["drafters"]] for law in report["laws"]])
    if settings.max_joules and not all(one.plain_seconds for one in figures):
        raise UserError("max_joules needs the times of target steps, and the report keeps none: evaluate again.")
    selection = choose(figures, settings, required_bytes(report["target"], settings))
    speedup = selection.predicted_speedup
    laws = " and ".join(law["label"] for law in report["laws"])
    averaged = f" (Times of {laws} averaged.)" if len(report["laws"]) > 1 else ""
    return {
        "drafter": "" if selection.drafter == NO_SPECULATION else selection.drafter,
        "k": selection.k,
        "predicted_speedup": speedup.value,
        "interval": [speedup.low, speedup.high] if speedup.has_interval else None,
        "sentence": selection.sentence + averaged,
        "reasons": dict(selection.reasons),
        "warnings": noise_warnings(report.get("paired", ()), selection.drafter),
        "exported": _exportable(figures, selection.drafter),
        "refused": list(selection.refused),
        "speedups": {
            one.name: {
                "k": one.best_k,
                "value": one.best.value,
                "interval": [one.best.low, one.best.high] if one.best.has_interval else None,
                "joules": one.joules(settings.watts) if settings.watts else None,
            }
            for one in figures
        },
    }


def required_bytes(entry: Mapping[str, Any], settings: SelectSettings) -> int:
    """Return the memory of a target or drafter of a report, keys and values of the context included."""
    passes = entry.get("passes") or {"kv_bytes_per_token": 0.0}
    return int(entry["bytes"] + settings.context * settings.batch_size * passes["kv_bytes_per_token"])


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one report with the drafters of all.

    Raises:
        UserError: they are of different targets, laws or traces, or two drafters of different figures share a name.
    """
    first = reports[0]
    for number, report in enumerate(reports[1:], 2):
        _same("target", number, first["target"].get("fingerprint"), report["target"].get("fingerprint"),
              first["target"]["name"], report["target"]["name"])  # fmt: skip
        _same("laws", number, _laws(first), _laws(report))
        traces = [[law.get("trace") for law in one["laws"]] for one in (first, report)]
        _same("traces", number, traces[0], traces[1])
    laws = []
    for index, law in enumerate(first["laws"]):
        drafters: dict[str, Any] = {}
        for report in reports:
            for entry in report["laws"][index]["drafters"]:
                known = drafters.setdefault(entry["name"], entry)
                if known["mean_tokens_per_call"] != entry["mean_tokens_per_call"]:
                    raise UserError(f"{entry['name']} stands in two reports with other figures: rename one of them.")
        entries = list(drafters.values())
        timed = {rows: steps for rows, steps in law["batch"].items() if all(rows in one["batch"] for one in entries)}
        laws.append({**law, "batch": timed, "drafters": entries})
    return {**first, "laws": laws, "paired": [pair for report in reports for pair in report.get("paired", ())]}


def choose_among(
    reports: Sequence[Mapping[str, Any]],
    settings: SelectSettings,
    inner: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the selection over all reports, with what it rests on.

    Args:
        inner: Reports of drafters as targets, by their names: cascades stand in the choice too (see cascading.py).

    Raises:
        UserError: reports that do not belong together, or one without costs; a batch size that was not timed; a mix of
            domains that were not scored.
    """
    report = with_cascades(merged(reports), inner or {}, settings.batch_size)
    chosen = choose_from(report, settings)
    by_domain = [row for law in report["laws"] for row in _law_rows(law)]
    entries = report["laws"][0]["drafters"]
    domains = sorted(entries[0]["domains"])
    mix = checked_mix(settings.mix or _traffic(report), domains)
    speedups = {entry["name"]: _over_laws(report, entry["name"], settings.batch_size) for entry in entries}
    limit = min(settings.memory_fraction * required_bytes(report["target"], settings), settings.most_bytes)
    held = {entry["name"]: required_bytes(entry, settings) for entry in entries}
    allowed = {name: rates for name, rates in speedups.items() if name not in chosen["refused"]}
    portfolio = best_portfolio(allowed, mix, settings.portfolio, held, limit)
    return {
        **chosen,
        "figures": by_domain,
        "front": {law["label"]: _front(law) for law in report["laws"]},
        "mix": mix,
        "portfolio": {
            "drafters": list(portfolio.drafters),
            "predicted_speedup": portfolio.speedup,
            "serves": dict(portfolio.serves),
            "bytes": portfolio.num_bytes,
        },
        "sensitivity": _sensitivity(report, chosen, settings),
    }


def choice_table(selection: Mapping[str, Any]) -> str:
    """Return a selection as text."""
    lines = [selection["sentence"], *(f"  {name}: {reason}" for name, reason in selection["reasons"].items())]
    lines += selection["warnings"]
    for law, front in selection["front"].items():
        lines.append(f"Front of cost and acceptance, {law}: " + ", ".join(
            f"{one['name']} ({one['cost_ratio']:.3g}, {one['expected_acceptance']:.3f})" for one in front))  # fmt: skip
    portfolio = selection["portfolio"]
    if portfolio["drafters"]:
        served = ", ".join(f"{domain}: {name}" for domain, name in portfolio["serves"].items())
        lines.append(
            f"Best portfolio: {' + '.join(portfolio['drafters'])}, {times(portfolio['predicted_speedup'])} over the mix"
            f" ({served}), {size(float(portfolio['bytes']))}."
        )
    lines += [one["sentence"] for one in selection["sensitivity"]]
    lines.append(f"{'law':8}{'batch':>6} {'domain':18}{'drafter':24}{'k':>3}{'tok/call':>9}{'predicted':>10}  interval")
    for one in selection["figures"]:
        figure = Figure(one["predicted_speedup"], *(one["interval"] or ()))
        lines.append(
            f"{one['law']:8}{one['batch_size']:>6} {one['domain'] or 'all':18.18}{one['drafter']:24.24}{one['k']:>3}"
            f"{one['mean_tokens_per_call']:>9.2f}{times(figure.value):>10}  {interval(figure)}"
        )
    return "\n".join(lines)


def _same(what: str, number: int, one: Any, other: Any, *names: str) -> None:
    if one != other:
        shown = names or (str(one), str(other))
        raise UserError(
            f"The reports are of different {what}: {shown[0]} in the first, {shown[1]} in report {number}. Choose "
            "among drafters that were scored for one target, under the same laws, on the same traces."
        )


def _laws(report: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [(law["temperature"], law["top_k"], law["top_p"]) for law in report["laws"]]


def _law_rows(law: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the best length and its expected speedup by batch size, drafter and domain; domain "" is all."""
    rows = []
    for batch in law["batch"]:
        for entry in law["drafters"]:
            if batch not in entry["batch"]:
                continue
            for domain in ("", *sorted(entry["domains"])):
                part = entry["domains"][domain] if domain else entry
                speedup = _speedups(law, entry, part, batch)
                k = max(speedup, key=lambda length: speedup[length])
                tokens = part["mean_tokens_per_call"][k]
                bounds = part["interval"]["mean_tokens_per_call"][k]
                known = all(math.isfinite(bound) for bound in bounds)
                rows.append({
                    "law": law["label"], "batch_size": int(batch), "domain": domain, "drafter": entry["name"],
                    "k": int(k), "mean_tokens_per_call": tokens, "predicted_speedup": speedup[k],
                    "interval": [bound / tokens * speedup[k] for bound in bounds] if known else None,
                })  # fmt: skip
    return rows


def _speedups(
    law: Mapping[str, Any], entry: Mapping[str, Any], part: Mapping[str, Any], batch: str
) -> dict[str, float]:
    """Return the predicted speedup on some text by draft length, from that over all and its own tokens and guesses."""
    steps = law["batch"][batch]["target_seconds"]
    found = {}
    for k, overall in entry["batch"][batch]["predicted_speedup"].items():
        block = entry["mean_tokens_per_call"][k] / overall  # in plain steps
        guesses = part["guess_share"][k] - entry["guess_share"][k]
        block += guesses * (steps[str(int(k) + 1)] - steps["1"]) / steps["1"]
        found[k] = part["mean_tokens_per_call"][k] / block
    return found


def _over_laws(report: Mapping[str, Any], name: str, batch_size: int) -> dict[str, float]:
    """Return the speedup by domain at the best length of each law, for equally many tokens of each law."""
    best: dict[str, list[float]] = {}
    for law in report["laws"]:
        entry = next(one for one in law["drafters"] if one["name"] == name)
        for domain, part in entry["domains"].items():
            best.setdefault(domain, []).append(max(_speedups(law, entry, part, str(batch_size)).values()))
    return {domain: harmonic_mean(rates) for domain, rates in best.items()}


def _traffic(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the tokens of each domain in the report."""
    return {name: float(part["tokens"]) for name, part in report["laws"][0]["drafters"][0]["domains"].items()}


def _front(law: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries = {entry["name"]: entry for entry in law["drafters"]}
    points = {name: (entry["cost_ratio"], entry["expected_acceptance"]) for name, entry in entries.items()}
    keys = ("name", "cost_ratio", "expected_acceptance")
    return [{key: entries[name][key] for key in keys} for name in pareto_front(points)]


def _sensitivity(
    report: Mapping[str, Any], chosen: Mapping[str, Any], settings: SelectSettings
) -> list[dict[str, Any]]:
    """Return for each other candidate how likely more prompts would turn the choice."""
    prompts = report["laws"][0]["drafters"][0]["prompts"]
    figures = {name: Figure(one["value"], *(one["interval"] or ())) for name, one in chosen["speedups"].items()}
    if chosen["drafter"] not in figures:
        return []
    found = []
    for doubt in doubts(chosen["drafter"], figures, prompts):
        if doubt.other in chosen["refused"]:
            continue
        needed = math.ceil(doubt.prompts_needed) if math.isfinite(doubt.prompts_needed) else None
        settled = needed is not None and needed <= prompts
        sentence = (
            f"More prompts would hardly turn the choice to {doubt.other}: {doubt.chance:.1%} that it is faster."
            if settled
            else f"More prompts could turn the choice to {doubt.other}: {doubt.chance:.1%} that it is faster; "
            + (f"about {needed} prompts would settle it, there are {prompts}." if needed else "they are equally fast.")
        )
        found.append({"drafter": doubt.other, "chance": doubt.chance, "prompts_needed": needed, "sentence": sentence})
    return found


def _predicted_speedup(entry: Mapping[str, Any], settings: SelectSettings) -> Mapping[str, float]:
    if settings.batch_size == 1:
        return entry["predicted_speedup"]
    timed = entry.get("batch") or {}
    if str(settings.batch_size) not in timed:
        raise UserError(
            f"The report did not time {settings.batch_size} requests together, only {', '.join(timed) or '1'}: "
            f"evaluate with --set batch_sizes=[1,{settings.batch_size}]."
        )
    return timed[str(settings.batch_size)]["predicted_speedup"]


def _figures(entry: Mapping[str, Any], law: Mapping[str, Any], settings: SelectSettings) -> CandidateFigures:
    bounds = entry["interval"]["mean_tokens_per_call"]
    return CandidateFigures(
        entry["name"],
        entry["kind"],
        required_bytes(entry, settings),
        {int(k): Figure(value, *bounds[k]) for k, value in entry["mean_tokens_per_call"].items()},
        {int(k): value for k, value in _predicted_speedup(entry, settings).items()},
        entry["head_rows"],
        entry["twin"],
        entry["has_int8_body"],
        _plain_seconds(law, settings),
    )


def _plain_seconds(law: Mapping[str, Any], settings: SelectSettings) -> float:
    """Return the time of a token of plain decoding, of all requests decoded together."""
    timed = {**law, **(law.get("batch") or {}).get(str(settings.batch_size), {})}
    step = (timed.get("target_seconds") or {}).get("1", 0.0) + (timed.get("plain_overhead_seconds") or 0.0)
    return step / settings.batch_size


def _exportable(figures: Sequence[CandidateFigures], winner: str) -> dict[str, Any]:
    """Name the draft that leaves for other runtimes: the winner, or the best one that is a model of full precision."""
    drafts = [one for one in figures if one.kind == "causal-lm" and not one.has_int8_body]
    if not drafts:
        return {}
    best = max(drafts, key=lambda one: (one.name == winner, one.best.value))
    return {"drafter": best.name, "k": best.best_k}
