"""Measured speedup of a draft in llama.cpp or vLLM beside what foredraft predicts.

    python benchmarks/export/speed.py --runtime vllm --target TARGET --draft exports/six --source DRAFT --k 1 2 3
    python benchmarks/export/speed.py --runtime llama.cpp --target TARGET --draft exports/six-f16 exports/small \\
        --source DRAFT SMALL --k 1 2 3 --type q8_0 --keep exports

Answers are the target's own greedy ones, as long as they are in the first run. The runtime is started --repeats times
for each row, in turns with plain decoding: a start is set against the mean of the plain ones before and behind it,
since machines change their speed by the minute. The first answer of each start is left out. A speedup is seconds of all
plain requests / seconds of all with the draft, prompts included, with a 95 % interval by bootstrap over prompts; each
further draft at its best length is set against the first at its best, paired by prompt.

Two predictions stand beside it: foredraft's own (SOURCE's foredraft.json: PyTorch in float32), and tokens per guess as
counted here / (1 + k x cost), cost being the draft's seconds a token where this runtime serves it alone / the target's.
vLLM runs in float32 without compilation; llama.cpp with its defaults, the target in --type.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
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
    """Answers of one start: seconds [prompts]; tokens, blocks, accepted tokens."""

    seconds: np.ndarray
    tokens: int
    blocks: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Turns:
    """Starts of one kind, and the seconds [prompts] of plain decoding around them."""

    plain: np.ndarray
    found: Timed

    @property
    def speedup(self) -> float:
        return float(self.plain.sum() / self.found.seconds.sum())


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
    parser.add_argument("--repeats", type=int, default=2)
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
    starts = {(draft, k): (replace(job, k=k, draft=draft), True) for draft in served for k in chosen.k}
    starts |= {(draft, 0): (replace(job, target=Path(draft)), False) for draft in served}
    turns = in_turns(chosen, job, starts)
    tokens = sum(question.max_new_tokens for question in job.questions)
    rows, best = [], []
    for number, draft in enumerate(served):
        alone = turns[draft, 0]
        cost = alone.found.seconds.sum() / alone.plain.sum() * tokens / alone.found.tokens
        source = chosen.source[number] if number < len(chosen.source) else None
        found = {k: turns[draft, k] for k in chosen.k}
        rows += [as_row(chosen, number, source, k, found[k], float(cost)) for k in chosen.k]
        best.append(max(found.values(), key=lambda one: one.speedup))
    print(_HEADER)
    for row in rows:
        print(f"| {' | '.join(map(str, row.values()))} |")
    for name, one in zip(chosen.draft[1:], best[1:], strict=True):
        first_name, speedup = Path(chosen.draft[0]).name, against(best[0], one)
        print(f"{Path(name).name} at its best length: {speedup} times as fast as {first_name} at its")
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


def in_turns(
    chosen: argparse.Namespace, plainly: Job, starts: Mapping[tuple[str, int], tuple[Job, bool]]
) -> dict[tuple[str, int], Turns]:
    """Time every start --repeats times, plain decoding before and behind each."""
    seen: dict[tuple[str, int], list[Turns]] = {key: [] for key in starts}
    for _ in range(chosen.repeats):
        before = timed(chosen, plainly, False)
        for key, (job, speculate) in starts.items():
            found, after = timed(chosen, job, speculate), timed(chosen, plainly, False)
            seen[key].append(Turns((before.seconds + after.seconds) / 2, found))
            before = after
    return {key: together(some) for key, some in seen.items()}


def timed(chosen: argparse.Namespace, job: Job, speculate: bool) -> Timed:
    found = replies(chosen.runtime, job, speculate)
    seconds = np.array([reply.seconds for reply in found])
    tokens = sum(len(reply.token_ids) for reply in found)
    blocks = sum(reply.counted.blocks or 0 for reply in found)
    return Timed(seconds, tokens, blocks, sum(reply.counted.accepted for reply in found))


def together(some: Sequence[Turns]) -> Turns:
    plain = np.mean([one.plain for one in some], 0)
    found = np.mean([one.found.seconds for one in some], 0)
    return Turns(plain, replace(some[0].found, seconds=found))


def with_interval(value: Callable[[np.ndarray], np.ndarray], prompts: int) -> str:
    """Return what `value` says of all prompts [1, prompts], with its interval by bootstrap over them."""
    drawn = np.random.default_rng(0).integers(prompts, size=(2000, prompts))
    low, high = np.quantile(value(drawn), [0.025, 0.975])
    return f"{value(np.arange(prompts)[None])[0]:.2f} ({low:.2f}..{high:.2f})"


def ratio(turns: Turns) -> str:
    plain, found = turns.plain, turns.found.seconds
    return with_interval(lambda drawn: plain[drawn].sum(1) / found[drawn].sum(1), len(plain))


def against(one: Turns, other: Turns) -> str:
    """Return the other's speedup / that of the one."""

    def speedup(turns: Turns, drawn: np.ndarray) -> np.ndarray:
        return np.asarray(turns.plain[drawn].sum(1) / turns.found.seconds[drawn].sum(1))

    return with_interval(lambda drawn: speedup(other, drawn) / speedup(one, drawn), len(one.plain))


def as_row(
    chosen: argparse.Namespace, number: int, source: Path | None, k: int, turns: Turns, cost: float
) -> dict[str, Any]:
    per_guess = 1.0 + turns.found.accepted / max(turns.found.blocks, 1)
    return {
        "runtime": chosen.runtime,
        "draft": Path(chosen.draft[number]).name,
        "k": k,
        "measured": ratio(turns),
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
