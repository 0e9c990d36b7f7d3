"""Policies over recorded traffic: tokens per second by measured costs, regret, and what happens at a domain switch.

    python benchmarks/select/run.py --trace RUN/traces/train-T0-... --report RUN/report.json \
        --drafter lookup=prompt-lookup:max_match=4 --drafter suffix-automaton --out benchmarks/select

Answers arrive in the order of a hash of their ids, so that domains are mixed; every policy starts cold. Seconds are
those of the report; each adaptive block is charged 20 us more. No target is loaded. `--teach DIR` builds a suffix
corpus and an n-gram table from other answers of the target.
"""

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foredraft.catalog import resolve
from foredraft.checkpoint import DraftManifest
from foredraft.core.own_law import bound_for
from foredraft.core.progress import SILENT
from foredraft.drafters import load_drafter
from foredraft.scoring import read_report
from foredraft.select.arms import Arms
from foredraft.select.block_costs import BlockCosts
from foredraft.select.controller import Controller
from foredraft.select.policies import read_policy
from foredraft.select.simulate import Traffic, fixed_runs, record, simulate
from foredraft.select.unread import Unread
from foredraft.select.walk import Path as Blocks
from foredraft.select.walk import Recorded, walk
from foredraft.selection import References, named_spec
from foredraft.selection_costs import costs_by_requests
from foredraft.settings import SimulateSettings
from foredraft.steps import NgramStep
from foredraft.trace.store import absent_target, open_trace

POLICIES = ("thresholds", "ucb", "thompson", "hedge", "marginal", "score:speed=1,quality=0.1", "contextual")
LENGTHS = (2, 4, 8)
SWITCH_BLOCKS = 240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--drafter", action="append", default=[])
    parser.add_argument("--teach", type=Path)
    parser.add_argument("--not-in", type=Path, action="append", default=[], help="traces whose prompts are left out")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="draft tokens of the arms")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    traces = [open_trace(folder) for folder in options.trace]
    known = {row.prompt_id for folder in options.not_in for row in open_trace(folder).rows(tops=False)}
    answered = (row for trace in traces for row in trace.rows(tops=False) if len(row.answer_ids))
    rows = [row for row in answered if row.prompt_id not in known]
    rows = sorted(rows, key=lambda row: hashlib.sha256(row.id.encode()).hexdigest())[: options.limit or None]
    speaker, law = absent_target(traces), traces[0].info.law
    with tempfile.TemporaryDirectory() as folder:
        specs = dict(named_spec(spec) for spec in options.drafter)
        if options.teach:
            specs |= taught(options.teach, speaker.vocab_size, Path(folder))
        drafters = {name: bound_for(load_drafter(spec, speaker), law) for name, spec in specs.items()}
        began = time.perf_counter()
        traffic = record(drafters, rows, max(options.lengths))
        replayed = time.perf_counter() - began
        settings = SimulateSettings(lengths=list(options.lengths))
        report = read_report(options.report)
        costs = costs_by_requests(drafters, rows[0].answer(), max(options.lengths), settings, report, law.temperature)[
            1
        ]
    result = {
        "law": str(law),
        "target": speaker.name,
        "replay_seconds": replayed,
        **measured(traffic, costs, tuple(options.lengths)),
    }
    name = f"T{law.temperature:g}"
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(table(result))
    (options.out / f"{name}-switch.svg").write_text(plot(result["switch"]))


def taught(folder: Path, vocab_size: int, out: Path) -> dict[str, str]:
    """Build a suffix corpus from what the target said elsewhere; return specs by name."""
    trace = open_trace(folder)
    texts = [row.answer_ids.numpy().astype(np.int32) for row in trace.rows(tops=False)]
    info = trace.info
    manifest = DraftManifest("suffix", vocab_size, info.target, info.target_fingerprint, info.tokenizer_fingerprint)
    resolve("builders", "suffix")(texts, vocab_size, NgramStep(kind="suffix"), manifest, out / "suffix", SILENT)
    return {"suffix-corpus": str(out / "suffix")}


def measured(traffic: Traffic, costs: BlockCosts, lengths: tuple[int, ...]) -> dict:
    arms, references = Arms.of(traffic.names, lengths), References.of(traffic, costs, lengths)
    found = []
    for name in POLICIES:
        began = time.perf_counter()
        run = simulate(traffic, read_policy(name), costs, lengths)
        found.append(references.described(name, run, arms) | {"wall_seconds": time.perf_counter() - began})
    return {
        "answers": len(traffic.answers), "tokens": traffic.tokens, **references.to_json(arms), "policies": found,
        "hopeless": hopeless(traffic, costs, lengths), "switch": switched(traffic, costs, lengths),
        "deciding_us": deciding(),
    }  # fmt: skip


def hopeless(traffic: Traffic, costs: BlockCosts, lengths: tuple[int, ...], tokens: int = 20_000) -> dict[str, float]:
    """Return plain decoding's time / each policy's on text of which no drafter guesses a token, and all try."""
    room = np.minimum(max(lengths), tokens - np.arange(tokens))
    offered = np.stack([room] * len(traffic.names))
    text = Recorded(offered, np.zeros_like(offered), np.ones(tokens, np.int64))
    stream = Traffic(traffic.names, traffic.model_free, (text,))
    return {
        name: tokens * costs.plain / float(simulate(stream, read_policy(name), costs, lengths).seconds.sum())
        for name in POLICIES
    }


def deciding(blocks: int = 3000) -> dict[str, float]:
    """Return microseconds of one thread for a choice among ten arms, and for learning from its block, by policy.

    Three drafters at three lengths and no speculation; both drafters without a model are scored on every block.
    """
    arms, costs = Arms.of(("a", "b", "c"), LENGTHS), BlockCosts.by_ratio([0.002, 0.002, 0.2], 8, 0.03)
    accepted = np.minimum(np.random.default_rng(0).geometric(0.4, 2 * blocks) - 1, 8).tolist()
    found = {}
    for name in POLICIES:
        spent = []
        for _ in range(5):
            controller = Controller(arms, costs, read_policy(name), (True, True, False), num_situations=29)
            unread = Unread(len(arms.names))
            began = time.thread_time()
            for block in range(blocks):
                if block % 64 == 0:
                    unread.start(300)
                choice = controller.decide(1 + block % 28, unread)
                reading = unread.read(choice.readers, costs.reading)
                controller.seen(choice.situation, 0, 8, 8, accepted[2 * block])
                controller.seen(choice.situation, 1, 8, 8, accepted[2 * block + 1])
                controller.done(choice, choice.k, 1, reading)
                unread.grow(1, choice.readers)
            spent.append(1e6 * (time.thread_time() - began) / blocks)
        found[name] = float(np.median(spent))
    return found


def switched(traffic: Traffic, costs: BlockCosts, lengths: tuple[int, ...]) -> dict:
    """Return rates around a switch between the two domains that a fixed arm serves worst together."""
    by_domain: dict[str, list[Recorded]] = {}
    for answer in traffic.answers:
        by_domain.setdefault(answer.domain, []).append(answer)
    sizes = {domain: sum(map(len, own)) for domain, own in by_domain.items()}
    enough = min(500, sorted(sizes.values())[-2])  # tokens; fewer only where no two domains have as many
    rates = {
        domain: np.array([run.tokens_per_second for run in fixed_runs(_part(traffic, own), costs, lengths)])
        for domain, own in by_domain.items()
        if sizes[domain] >= enough
    }
    loss = {
        (one, other): rates[other].max() / rates[other][rates[one].argmax()]
        for one in rates for other in rates if one != other
    }  # fmt: skip
    before, after = max(loss, key=lambda pair: loss[pair])
    arms = Arms.of(traffic.names, lengths)
    curves = {}
    for name in ("hedge", "marginal", "contextual", "thompson"):
        controller = Controller(arms, costs, read_policy(name), traffic.model_free,
                                num_situations=200, seed=0)  # fmt: skip
        unread = Unread(len(traffic.names))
        first = [walk(answer, controller, unread) for answer in by_domain[before]]
        second = [walk(answer, controller, unread) for answer in by_domain[after]]
        curves[name] = _around(first, second)
    best = {domain: int(rates[domain].argmax()) for domain in (before, after)}
    for domain, arm in best.items():
        controller = Controller(arms, costs, read_policy(f"fixed:arm={arm}"), traffic.model_free)
        unread = Unread(len(traffic.names))
        first = [walk(answer, controller, unread) for answer in by_domain[before]]
        curves[f"{arms.label(arm)} (best for {domain})"] = _around(
            first, [walk(answer, controller, unread) for answer in by_domain[after]]
        )
    reached = {name: curve["after_30"] / float(rates[after].max()) for name, curve in curves.items()}
    return {"before": before, "after": after, "curves": curves, "share_of_best_after_30_blocks": reached}


def _part(traffic: Traffic, answers: Sequence[Recorded]) -> Traffic:
    return Traffic(traffic.names, traffic.model_free, tuple(answers))


def _around(first: Sequence[Blocks], second: Sequence[Blocks]) -> dict:
    """Return tokens per second in windows of 20 blocks around the switch, and from 30 blocks behind it on."""
    tokens = np.concatenate([path.tokens for path in (*first, *second)])
    seconds = np.concatenate([path.seconds for path in (*first, *second)])
    switch = sum(len(path.tokens) for path in first)
    window = np.ones(20)
    rate = np.convolve(tokens, window, "valid") / np.convolve(seconds, window, "valid")
    begin = max(switch - SWITCH_BLOCKS // 2 - 19, 0)
    late = slice(switch + 30, None)
    return {
        "blocks": (np.arange(begin, min(switch + SWITCH_BLOCKS, len(rate))) + 19 - switch).tolist(),
        "rate": rate[begin : switch + SWITCH_BLOCKS].round(3).tolist(),
        "after_30": float(tokens[late].sum() / seconds[late].sum()),
    }


def plot(switch: dict) -> str:
    """Return the curves as SVG; block 0 is the switch."""
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#888888", "#000000")
    top = max(max(curve["rate"]) for curve in switch["curves"].values())
    left, right = min(c["blocks"][0] for c in switch["curves"].values()), SWITCH_BLOCKS
    parts = []
    for index, (name, curve) in enumerate(switch["curves"].items()):
        points = " ".join(
            f"{50 + 700 * (block - left) / (right - left):.1f},{300 - 260 * rate / top:.1f}"
            for block, rate in zip(curve["blocks"], curve["rate"], strict=False)
        )
        colour = colours[index % len(colours)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{60 + 240 * (index % 3)}" y="{335 + 16 * (index // 3)}" fill="{colour}">{name}</text>')
    zero = 50 + 700 * -left / (right - left)
    axes = (
        f'<line x1="{zero:.1f}" y1="40" x2="{zero:.1f}" y2="300" stroke="#999" stroke-dasharray="4"/>'
        f'<line x1="50" y1="300" x2="750" y2="300" stroke="#999"/><text x="50" y="30">tokens per second, mean of 20 '
        f'blocks; dashed: {switch["before"]} gives way to {switch["after"]}</text><text x="10" y="45">{top:.0f}</text>'
        '<text x="20" y="303">0</text>'
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 375" font-family="sans-serif" font-size="12">'
        f'<rect width="780" height="375" fill="white"/>{axes}{"".join(parts)}</svg>\n'
    )


def table(result: dict) -> str:
    domains = list(result["policies"][0]["domains"])
    lines = [
        f"# Policies over {result['tokens']:,} tokens of {result['target']}, {result['law']}",
        "",
        f"{result['answers']} answers, domains mixed, cold start; seconds by measured costs, 20 us charged a choice. "
        "Domains: times plain decoding, and the regret against the best fixed arm in seconds behind all.",
        "",
        "| policy | tok/s | x plain | x best fixed | of request oracle | " + " | ".join(domains) + " | regret s |",
        "| --- |" + " --- |" * (5 + len(domains)),
    ]
    blank = " |" * (len(domains) + 1)
    best, oracle = result["best_fixed"]["tokens_per_second"], result["request_oracle"]["tokens_per_second"]
    for key, label in (("plain", "no speculation"), ("best_fixed", f"{result['best_fixed']['arm']}, the best fixed"),
                       ("request_oracle", "oracle by request"), ("position_oracle", "oracle by position")):  # fmt: skip
        rate = result[key]["tokens_per_second"]
        lines.append(f"| {label} | {rate:.2f} | {result[key]['over_plain']:.2f} | {rate / best:.3f} "
                     f"| {rate / oracle:.3f} |{blank}")  # fmt: skip
    for one in result["policies"]:
        cells = " | ".join(f"{one['domains'][domain]['over_plain']:.2f}" for domain in domains)
        lines.append(
            f"| {one['policy']} | {one['tokens_per_second']:.2f} | {one['over_plain']:.2f} "
            f"| {one['over_best_fixed']:.3f} | {one['of_request_oracle']:.3f} | {cells} "
            f"| {one['regret_seconds']:+.1f} |"
        )
    shown = ", ".join(f"{name} {share:.3f}" for name, share in result["hopeless"].items())
    switch = result["switch"]
    decided = ", ".join(f"{name} {spent:.1f}" for name, spent in result["deciding_us"].items())
    after = ", ".join(f"{name} {share:.3f}" for name, share in switch["share_of_best_after_30_blocks"].items())
    lines += [
        "",
        f"Text that no drafter can guess, times plain decoding: {shown}.",
        "",
        f"After a switch from {switch['before']} to {switch['after']}, from 30 blocks on, of the new best arm's rate: "
        f"{after}. See the plot beside this file.",
        "",
        f"Microseconds of a thread for one choice among ten arms and learning from two scored drafters: {decided}.",
        "",
        f"Replaying the drafters took {result['replay_seconds']:.0f} s, a policy "
        f"{np.mean([one['wall_seconds'] for one in result['policies']]):.1f} s.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
