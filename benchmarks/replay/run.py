"""Scoring by replay beside running transformers' assisted generation for every drafter and draft length.

    python benchmarks/replay/run.py --target MODEL --draft a=DRAFT --draft b=DRAFT --draft c=DRAFT --out table.md

The target answers a few prompts once, greedily and at temperature 1 (the trace). Replay then scores three draft
models and three drafters without a model at k = 1..8. transformers decodes the same prompts with each draft model at
the lengths of --k; a run at another length is taken to last as long as the mean of those. Both sides use full heads,
one process, the same threads. Tokens a call are compared with replay's 95 % interval.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from foredraft.acceptance.evaluate import score
from foredraft.acceptance.intervals import interval, tokens_per_call
from foredraft.acceptance.leaderboard import describe_machine
from foredraft.acceptance.report import AcceptanceReport
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.core.protocols import Drafter
from foredraft.drafters import load_drafter
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.draft import Draft, load_draft
from foredraft.models.target import LocalTarget, load_target
from foredraft.ngram.prompt_lookup import PromptLookup
from foredraft.settings import PromptSource, TraceSettings
from foredraft.trace.collect import collect
from foredraft.trace.prompts import read_prompts
from foredraft.trace.store import Trace, open_trace

KS = list(range(1, 9))
LAWS = (GREEDY, SamplingLaw())


@dataclass(frozen=True)
class Assisted:
    """One run of transformers over all prompts."""

    seconds: float
    tokens: int
    calls: int

    @property
    def tokens_per_call(self) -> float:
        return self.tokens / self.calls


def assisted(
    target: PreTrainedModel, trace: Trace, law: SamplingLaw, tokens: int, padding: list[int], **how: Any
) -> Assisted:
    calls, emitted = [0], 0
    hook = target.register_forward_hook(lambda *args: calls.__setitem__(0, calls[0] + 1))
    sampling = {"do_sample": False} if law.is_greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    torch.manual_seed(0)
    began = time.perf_counter()
    for row in trace.rows(tops=False):
        ids = row.prompt_ids[None].long()
        found = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, suppress_tokens=padding or None,
            **sampling, **how,
        )  # fmt: skip
        emitted += found.shape[1] - ids.shape[1]
    seconds = time.perf_counter() - began
    hook.remove()
    return Assisted(seconds, emitted, calls[0])


def collected(target: LocalTarget, count: int, tokens: int, law: SamplingLaw, out: Path) -> Trace:
    every = read_prompts(PromptSource(file="shipped"))
    chosen = [every[index] for index in np.linspace(0, len(every) - 1, count).astype(int)]
    settings = TraceSettings(prompts=[PromptSource(file="shipped")], max_new_tokens=tokens)
    collect(target, chosen, settings, law, out)
    return open_trace(out)


def target_pass(target: LocalTarget, trace: Trace) -> float:
    """Return the seconds of one teacher-forced pass of the target over a trace, with the laws of all answer tokens."""
    as_drafter = CausalLMDrafter(Draft(target.model), trace.info.law, target.vocab_size)
    began = time.perf_counter()
    score("target", as_drafter, trace, [1])
    return time.perf_counter() - began


def replayed(drafters: dict[str, Drafter], trace: Trace) -> tuple[dict[str, AcceptanceReport], dict[str, float]]:
    reports, seconds = {}, {}
    for name, drafter in drafters.items():
        began = time.perf_counter()
        reports[name] = score(name, drafter, trace, KS)
        seconds[name] = time.perf_counter() - began
    return reports, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", action="append", required=True, help="name=folder")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--work", type=Path, required=True, help="folder for the traces")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    folders = {name: Path(folder) for name, _, folder in (draft.partition("=") for draft in asked.draft)}
    target = load_target(asked.target, asked.dtype)
    stock = AutoModelForCausalLM.from_pretrained(asked.target, dtype=asked.dtype).eval()
    padding = list(range(len(target.tokenizer), target.vocab_size))
    models = {
        name: CausalLMDrafter(Draft(load_draft(folder, asked.dtype).model), SamplingLaw(), target.vocab_size)
        for name, folder in folders.items()
    }
    free = {
        "prompt-lookup": PromptLookup(target.vocab_size),
        "suffix-automaton": load_drafter("suffix-automaton", target),
    }
    free["prompt-lookup, 2 tokens"] = PromptLookup(target.vocab_size, max_match=2)
    lines = [str(describe_machine()), ""]
    for law in LAWS:
        trace = collected(target, asked.count, asked.tokens, law, asked.work / str(law))
        everyone: dict[str, Drafter] = {**models, **free}
        replayed(everyone, trace)
        reports, seconds = replayed(everyone, trace)
        whole = target_pass(target, trace)
        runs: dict[tuple[str, int], Assisted] = {}
        lines += [
            "| drafter | law | k | replay tokens/call (95 %) | transformers | inside |",
            "|---|---|---|---|---|---|",
        ]
        for name, folder in folders.items():
            assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=asked.dtype).eval()
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
            for k in asked.k:
                assistant.generation_config.num_assistant_tokens = k
                run = assisted(stock, trace, law, asked.tokens, padding, assistant_model=assistant)
                runs[name, k] = run
                found = interval(tokens_per_call(k)(reports[name]), np.random.default_rng(0))
                inside = found.low - 1e-9 <= run.tokens_per_call <= found.high + 1e-9
                lines.append(
                    f"| {name} | {law} | {k} | {found.value:.3f} ({found.low:.3f}-{found.high:.3f}) | "
                    f"{run.tokens_per_call:.3f} | {'yes' if inside else 'no'} |"
                )
                print(lines[-1], flush=True)
        mean_run = float(np.mean([run.seconds for run in runs.values()]))
        total, one = sum(seconds.values()), min(run.seconds for run in runs.values())
        lines += [
            "",
            f"{law}: {trace.info.num_rows} prompts, {trace.info.num_tokens} tokens. "
            + ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in seconds.items())
            + f"; replay of all six at k = 1..8 {total:.2f} s.",
            f"Assisted generation: {mean_run:.1f} s a run (mean of {len(runs)}), {mean_run * 48:.0f} s for six "
            f"drafters at eight lengths: replay takes 1/{mean_run * 48 / total:.0f} of it, and a drafter "
            f"1/{one / (total / 6):.1f} of the fastest assisted run.",
            f"One target pass over the trace {whole:.2f} s; one more drafter without a model costs "
            + ", ".join(f"{seconds[name] / whole:.2%} ({name})" for name in free)
            + " of it.",
            "",
        ]
        print("\n".join(lines[-4:]), flush=True)
    if asked.out:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
