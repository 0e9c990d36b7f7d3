"""Online learning on a domain that the draft never saw: what it gains there, and what it loses elsewhere.

    python benchmarks/adapt/run.py --target MODEL --draft DRAFT --prompts new-domain.jsonl --work DIR \
        --out benchmarks/adapt/table.md

The draft is one of recipes/quickstart.yaml, trained on code, code_edit, instruct and math. Requests of the new domain
are answered greedily by speculative decoding, and gathered; the draft then learns from what was gathered, for at most
--minutes. Each stage is kept in --work: the same command goes on where it was, request by request.

Without --old-train and --old-eval, answers to prompts of the old domains are collected first.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.acceptance.leaderboard import describe_machine
from foredraft.checkpoint import MANIFEST, DraftManifest, read_manifest
from foredraft.core.digest import digest_of
from foredraft.core.law import GREEDY
from foredraft.distill.adapt.guard import Shift, replay_both
from foredraft.distill.adapt.learn import adapt
from foredraft.distill.adapt.objective import original_loss
from foredraft.distill.adapt.text import Text
from foredraft.generation import Asked
from foredraft.models.causal_lm import CausalLMDrafter, load_causal_lm_drafter
from foredraft.models.draft import Draft, load_draft
from foredraft.models.target import LocalTarget, load_target
from foredraft.online import MEGABYTE, Requests, serve
from foredraft.settings import DecodeSettings, PromptSource, TraceSettings
from foredraft.steps import AdaptStep, DistillStep, MetaStep
from foredraft.trace.buffer import BufferFolder, buffer_info
from foredraft.trace.collect import collect
from foredraft.trace.prompts import Prompt, read_prompts, render
from foredraft.trace.split import split, split_sources
from foredraft.trace.store import Trace, open_trace
from foredraft.trainings import adapt_draft, distill_draft, meta_draft

OLD_DOMAINS = ["code", "code_edit", "instruct", "math"]
OLD = PromptSource(file="shipped", domains=OLD_DOMAINS, train=48, eval=24)
K = 4


@dataclass(frozen=True)
class Texts:
    """What there is to learn from and to score on."""

    served: Trace
    new_eval: Trace
    old_train: list[Trace]
    old_eval: list[Trace]


def old_prompts(target: LocalTarget, count: int) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Return the prompts that the draft of the quickstart was trained on, and others of their domains."""
    known = split_sources([OLD], 0)
    taken = {prompt.id for prompt in (*known.train, *known.eval)}
    rest = [prompt for prompt in read_prompts(OLD) if prompt.id not in taken]
    others = [*known.eval, *rest[:: max(1, len(rest) // count)]]
    return known.train[:count], others[:count]


def answers(target: LocalTarget, prompts: Sequence[Prompt], tokens: int, out: Path) -> Trace:
    settings = TraceSettings(prompts=[OLD], max_new_tokens=tokens, batch_size=12)
    return collect(target, prompts, settings, GREEDY, out)


def gather(target: LocalTarget, draft: Path, prompts: Sequence[Prompt], asked: argparse.Namespace, out: Path) -> Trace:
    """Serve requests by speculative decoding with the draft; those that were served before are left out."""
    buffer = BufferFolder.open(out, buffer_info(target, GREEDY, 64), 256 * MEGABYTE)
    served = {one.row.prompt_id for one in buffer.gathered()}
    left = [prompt for prompt in prompts if digest_of(render(prompt, target.tokenizer).tolist()) not in served]
    decoding = DecodeSettings(k=K, batch_size=asked.batch_size)
    serve(draft, target, Requests(left, Asked(GREEDY, asked.tokens), decoding), buffer)
    return open_trace(out)


def made(out: Path, make: Callable[[Path], DraftManifest]) -> DraftManifest:
    """Return the manifest of a draft that is there, or that `make` writes."""
    if not (out / MANIFEST).is_file():
        make(out)
    print(out.name, "is there", flush=True)
    return read_manifest(out)


def row(label: str, steps: str, new: Shift, old: Shift) -> str:
    cells = []
    for shift in (new, old):
        found = shift.to_json()
        for name in ("mean_tokens_per_call", "expected_acceptance"):
            entry = found[name]
            low, high = entry["interval"]
            cells.append(f"{entry['after']:.3f} ({entry['difference']:+.3f}, {low:+.3f} to {high:+.3f})")
    return f"| {label} | {steps} | {' | '.join(cells)} |"


def compared(label: str, steps: str, before: Path, after: Path | Draft, texts: Texts) -> str:
    old_drafter = load_causal_lm_drafter(before, "float32")
    new_drafter = (
        load_causal_lm_drafter(after, "float32")
        if isinstance(after, Path)
        else CausalLMDrafter(after, GREEDY, old_drafter.vocab_size)
    )
    new = replay_both(old_drafter, new_drafter, [Text.of(texts.new_eval)], K)
    old = replay_both(old_drafter, new_drafter, [Text.of(trace) for trace in texts.old_eval], K)
    line = row(label, steps, new, old)
    print(line, flush=True)
    return line


def collected(target: LocalTarget, asked: argparse.Namespace) -> Texts:
    new = split(read_prompts(PromptSource(file=asked.prompts)), asked.requests, asked.held_out, 0)
    served = gather(target, asked.draft, new.train, asked, asked.work / "served")
    print("served", served.info.num_rows, "answers", flush=True)
    new_eval = answers(target, new.eval, asked.tokens, asked.work / "new-eval")
    print("new-eval done", flush=True)
    if asked.old_train:
        return Texts(served, new_eval, *([open_trace(p) for p in ps] for ps in (asked.old_train, asked.old_eval)))
    trained_on, others = old_prompts(target, asked.old)
    old_train, old_eval = (
        answers(target, prompts, asked.tokens, asked.work / name)
        for name, prompts in (("old-train", trained_on), ("old-eval", others))
    )
    return Texts(served, new_eval, [old_train], [old_eval])


def table(target: LocalTarget, asked: argparse.Namespace, texts: Texts) -> list[str]:
    step = AdaptStep(minutes=asked.minutes, passes=asked.passes, learning_rate=asked.rate)
    served = [Text.of(texts.served)]

    manifest = made(
        asked.work / "adapted",
        lambda out: adapt_draft(asked.draft, target, served, texts.old_train, texts.old_eval, step, out),
    )
    found = manifest.options["adapted"]
    curve = manifest.curve or found.get("curve", ())
    print("kept:", found["kept"], found["reason"], f"{curve[-1]['seconds']:.0f} s of training", flush=True)
    lines = [
        "| draft | optimizer steps | new: tokens per call | new: acceptance | old: tokens per call | old: acceptance |",
        "|---|---|---|---|---|---|",
        compared("before", "0", asked.draft, asked.draft, texts),
        compared(f"adapted ({found['kept']} kept)", str(len(curve)), asked.draft, asked.work / "adapted", texts),
    ]
    few, old = step.model_copy(update={"steps": asked.few}), [Text.of(trace) for trace in texts.old_train]
    _, task_loss = original_loss(read_manifest(asked.draft).steps)
    meta = MetaStep(outer_steps=asked.outer_steps)
    positions = meta.outer_steps * meta.inner_steps * meta.batch_tokens
    plain = DistillStep(tokens=positions, batch_tokens=meta.batch_tokens, learning_rate=meta.inner_rate)
    starts = {
        "as it is": asked.draft,
        "plain": asked.work / "start-plain",
        "reptile": asked.work / "start-reptile",
    }
    made(starts["plain"], lambda out: distill_draft(asked.draft, target, texts.old_train, plain, out))
    made(starts["reptile"], lambda out: meta_draft(asked.draft, target, texts.old_train, meta, out))
    for name, start in starts.items():
        draft = adapt(load_draft(start, "float32"), served, old, few, task_loss).draft
        before = f"{meta.outer_steps * meta.inner_steps} + {asked.few}" if name != "as it is" else str(asked.few)
        lines.append(compared(f"few steps from a start: {name}", before, asked.draft, draft, texts))
    return [*lines, "", f"Served: {found['answers']} answers, {found['tokens']} tokens, acceptance_rate "
            f"{found['accepted'] / max(1, found['examined']):.3f} while they were written. "
            f"Training: {curve[-1]['seconds']:.0f} s. Old loss: {found['task_loss']}. Scored: "
            f"{texts.new_eval.info.num_rows} held-out answers of the new domain, "
            f"{sum(trace.info.num_rows for trace in texts.old_eval)} of the old ones, k={K}."]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", required=True, help="JSONL of the new domain")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--held-out", type=int, default=60, help="prompts of the new domain that only score")
    parser.add_argument("--old", type=int, default=48, help="prompts of the old domains, to rehearse and to score each")
    parser.add_argument("--old-train", type=Path, nargs="*", default=[], help="traces to rehearse")
    parser.add_argument(
        "--old-eval", type=Path, nargs="*", default=[], help="traces of the old domains that only score"
    )
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--passes", type=float, default=4.0)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--few", type=int, default=8, help="steps after which starts are compared")
    parser.add_argument("--outer-steps", type=int, default=16)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    target = load_target(asked.target, "float32")
    lines = table(target, asked, collected(target, asked))
    if asked.out:
        asked.out.write_text(f"{describe_machine()}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
