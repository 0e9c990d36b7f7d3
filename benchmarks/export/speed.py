"""Measured speedup of a draft in llama.cpp or vLLM beside what foredraft predicts.

    python benchmarks/export/speed.py --runtime vllm --target TARGET --draft exports/six --source DRAFT --k 1 2 3
    python benchmarks/export/speed.py --runtime llama.cpp --target TARGET --draft exports/six-f16 exports/small \\
        --source DRAFT SMALL --k 1 2 3 --type q8_0 --keep exports

Answers are the target's own greedy ones, as long as they are in the first run. The runtime is started once for each
row, and for plain decoding before and behind all of them; each prompt is asked --repeats times and its median counts;
the first answer of each start is left out. Several drafts take turns, and each at its best length is set against the
first at its best, paired by prompt. A speedup is seconds of all plain requests / seconds of all with the draft,
prompts included, with a 95 % interval by bootstrap over prompts.

Two predictions stand beside it: foredraft's own (SOURCE's foredraft.json: PyTorch in float32), and tokens per guess as
counted here / (1 + k x cost), cost being the draft's seconds a token where this runtime serves it alone / the target's.
vLLM runs in float32 without compilation; llama.cpp with its defaults, the target in --type.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from short_prompts import spread

from foredraft.checkpoint import MANIFEST, read_manifest
from foredraft.export.gguf_file import write_gguf
from foredraft.export.gguf_vocabulary import vocabulary_fields
from foredraft.models.target import LocalTarget, load_target
from foredraft.trace.prompts import render
from foredraft.verification.child import Job, Question, Reply, ask
from foredraft.verification.forms import FORMS
from foredraft.verification.runtimes import RUNTIMES

_HEADER = (
    "| runtime | draft | k | measured speedup | tokens per guess | cost ratio there | predicted by it | "
    "predicted by foredraft |\n|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Timed:
    """Answers of one start: median seconds [prompts], and of one pass over them tokens, blocks, accepted tokens."""

    seconds: np.ndarray
    tokens: int
    blocks: int
    accepted: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=["llama.cpp", "vllm"], required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", nargs="+", required=True, help="as foredraft export wrote them")
    parser.add_argument("--source", nargs="*", type=Path, default=[], help="draft folders with measured figures")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--domains", nargs="*", default=[], help="of the package's own prompts; all without")
    parser.add_argument("--longest-prompt", type=int, default=120, help="tokens")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--type", default="q8_0", help="of a target that is written as GGUF")
    parser.add_argument("--keep", type=Path, default=Path("targets"), help="folder for the target as GGUF")
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    chosen = parser.parse_args()
    served = [FORMS[RUNTIMES[chosen.runtime].form].served(draft).place for draft in chosen.draft]
    target = load_target(chosen.target, "float32")
    questions, stops = asked(target, chosen), set(target.stop_ids)
    place = served_target(target, chosen)
    del target

    job = Job(place, served[0], max(chosen.k), questions, {}, chosen.threads, is_exact=False)
    first = replies(chosen.runtime, job, speculate=False)
    job = replace(job, questions=cut(questions, first, stops))
    before = timed(chosen, job, False)
    drafted = {(k, draft): timed(chosen, replace(job, k=k, draft=draft), True) for k in chosen.k for draft in served}
    alone = {draft: timed(chosen, replace(job, target=Path(draft)), False) for draft in served}
    plain = join(before, timed(chosen, job, False))
    rows, best = [], []
    for number, draft in enumerate(served):
        cost = float((alone[draft].seconds.sum() / alone[draft].tokens) / (plain.seconds.sum() / plain.tokens))
        source = chosen.source[number] if number < len(chosen.source) else None
        found = {k: drafted[k, draft] for k in chosen.k}
        rows += [as_row(chosen, number, source, k, plain, found[k], cost) for k in chosen.k]
        best.append(min(found.values(), key=lambda timed: float(timed.seconds.sum())))
    print(_HEADER)
    for row in rows:
        print(f"| {' | '.join(map(str, row.values()))} |")
    for name, one in zip(chosen.draft[1:], best[1:], strict=True):
        print(
            f"{Path(name).name} at its best: {ratio(best[0], one)} times as fast as {Path(chosen.draft[0]).name} at its"
        )
    if chosen.out:
        chosen.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def asked(target: LocalTarget, chosen: argparse.Namespace) -> tuple[Question, ...]:
    prompts = spread(target, chosen.prompts, chosen.longest_prompt, chosen.domains)
    return tuple(Question(tuple(render(one, target.tokenizer).tolist()), chosen.max_new_tokens) for one in prompts)


def served_target(target: LocalTarget, chosen: argparse.Namespace) -> Path:
    """Return the target as the runtime reads it, written where it must be."""
    if chosen.runtime == "vllm":
        return target.path
    path: Path = chosen.keep / f"target-{target.fingerprint}-{chosen.type}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(target.model, path, vocabulary_fields(target), target.name, default=chosen.type)
    return path


def replies(runtime: str, job: Job, speculate: bool) -> Sequence[Reply]:
    """Ask once more at the start, for the answer that is left out."""
    there = replace(job, questions=(job.questions[0], *job.questions))
    return ask(RUNTIMES[runtime], RUNTIMES[runtime].python(), there, speculate, 6000.0).replies[1:]


def cut(questions: Sequence[Question], found: Sequence[Reply], stops: set[int]) -> tuple[Question, ...]:
    """Let answers end where the target ends them, whether or not the runtime does."""
    lengths = [
        next((i for i, token in enumerate(reply.token_ids) if token in stops), len(reply.token_ids)) for reply in found
    ]
    return tuple(
        replace(question, max_new_tokens=length)
        for question, length in zip(questions, lengths, strict=True)
        if length > 1
    )


def timed(chosen: argparse.Namespace, job: Job, speculate: bool) -> Timed:
    found = replies(chosen.runtime, replace(job, questions=job.questions * chosen.repeats), speculate)
    once = found[: len(job.questions)]
    seconds = np.array([reply.seconds for reply in found]).reshape(chosen.repeats, -1)
    tokens = sum(len(reply.token_ids) for reply in once)
    blocks = sum(reply.counted.blocks or 0 for reply in once)
    return Timed(np.median(seconds, 0), tokens, blocks, sum(reply.counted.accepted for reply in once))


def join(one: Timed, other: Timed) -> Timed:
    return replace(one, seconds=(one.seconds + other.seconds) / 2)


def ratio(one: Timed, other: Timed) -> str:
    """Return how many times as fast the other is, with its interval by bootstrap over prompts."""
    drawn = np.random.default_rng(0).integers(len(one.seconds), size=(2000, len(one.seconds)))
    low, high = np.quantile(one.seconds[drawn].sum(1) / other.seconds[drawn].sum(1), [0.025, 0.975])
    return f"{one.seconds.sum() / other.seconds.sum():.2f} ({low:.2f}..{high:.2f})"


def as_row(
    chosen: argparse.Namespace, number: int, source: Path | None, k: int, plain: Timed, found: Timed, cost: float
) -> dict[str, Any]:
    per_guess = 1.0 + found.accepted / max(found.blocks, 1)
    return {
        "runtime": chosen.runtime,
        "draft": Path(chosen.draft[number]).name,
        "k": k,
        "measured": ratio(plain, found),
        "tokens_per_guess": round(per_guess, 2),
        "cost_ratio": round(cost, 3),
        "predicted": round(per_guess / (1 + k * cost), 2),
        "predicted_by_foredraft": foretold(source, k),
    }


def foretold(source: Path | None, k: int) -> float | str:
    if source is None or not (source / MANIFEST).is_file():
        return "-"
    found = read_manifest(source).measured.get("T=0", {}).get("predicted_speedup", {}).get(str(k))
    return "-" if found is None else round(float(found), 2)


if __name__ == "__main__":
    main()
