"""foredraft's generate beside transformers' assisted generation: same target, draft, k and prompts, one process.

    python benchmarks/decoding/run.py --target MODEL --draft DRAFT --out benchmarks/decoding/table.md

Each prompt is answered by every engine in turn, in an order that changes from prompt to prompt; clocks run over
whole calls, reading the prompt included. Ratios are of sums over prompts, with quartiles over prompts.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from foredraft.acceptance.leaderboard import describe_machine
from foredraft.core.law import SamplingLaw
from foredraft.core.protocols import Drafter
from foredraft.decoding.speculative import Limits, decode, plain_decode
from foredraft.models.causal_lm import load_causal_lm_drafter
from foredraft.models.target import LocalTarget, load_target
from foredraft.ngram.prompt_lookup import PromptLookup
from foredraft.settings import PromptSource
from foredraft.trace.prompts import read_prompts, render


@dataclass(frozen=True)
class Run:
    """One answer: its tokens and the seconds of the whole call."""

    token_ids: list[int]
    seconds: float


Engine = Callable[[torch.Tensor, int], Run]


def foredraft(target: LocalTarget, drafter: Drafter | None, law: SamplingLaw, k: int, tokens: int) -> Engine:
    limits = Limits(tokens, target.stop_ids, target.max_context)

    def run(prompt: torch.Tensor, seed: int) -> Run:
        generator = torch.Generator().manual_seed(seed)
        began = time.perf_counter()
        if drafter is None:
            answer = plain_decode(target.session(), prompt, law, limits, generator)
        else:
            answer = decode(target.session(), drafter.bind(law), prompt, law, k, limits, generator)
        return Run(answer.token_ids.tolist(), time.perf_counter() - began)

    return run


def peer(model: PreTrainedModel, law: SamplingLaw, tokens: int, padding: list[int], **how: Any) -> Engine:
    """Return transformers' generate; `how` names its assistant or its prompt lookup, and neither decodes plainly."""
    sampling = {"do_sample": False} if law.is_greedy else {"do_sample": True, "temperature": law.temperature}

    def run(prompt: torch.Tensor, seed: int) -> Run:
        torch.manual_seed(seed)
        began = time.perf_counter()
        ids = model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=tokens, top_k=0, top_p=1.0,
            suppress_tokens=padding or None, **sampling, **how,
        )  # fmt: skip
        return Run(ids[0, len(prompt) :].tolist(), time.perf_counter() - began)

    return run


def interleaved(engines: dict[str, Engine], prompts: list[torch.Tensor]) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for engine in engines.values():
        engine(prompts[0], 0)
    for number, prompt in enumerate(prompts):
        names = list(engines)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            runs[name].append(engines[name](prompt, number))
        print(number + 1, "of", len(prompts), flush=True)
    return runs


def ratio(slow: list[Run], fast: list[Run]) -> str:
    """Return seconds a token of `slow` / of `fast`: of sums, with quartiles over prompts."""
    times = np.array([[run.seconds for run in runs] for runs in (slow, fast)])
    counts = np.array([[len(run.token_ids) for run in runs] for runs in (slow, fast)])
    whole = (times.sum(1) / counts.sum(1))[0] / (times.sum(1) / counts.sum(1))[1]
    low, high = np.quantile((times / counts)[0] / (times / counts)[1], [0.25, 0.75])
    return f"{whole:.2f} ({low:.2f}-{high:.2f})"


def row(label: str, law: SamplingLaw, k: int, runs: dict[str, list[Run]]) -> str:
    speeds = {
        name: sum(len(run.token_ids) for run in some) / sum(run.seconds for run in some) for name, some in runs.items()
    }
    same = sum(one.token_ids == two.token_ids for one, two in zip(runs["foredraft"], runs["transformers"], strict=True))
    text = f"{same} of {len(runs['foredraft'])}" if law.is_greedy else "drawn"
    return (
        f"| {label} | {law} | {k} | {speeds['foredraft']:.1f} | {speeds['transformers']:.1f} | "
        f"{ratio(runs['transformers'], runs['foredraft'])} | {text} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", type=Path, required=True, help="folder of a draft with a full head")
    parser.add_argument("--prompts", default="shipped")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--k", type=int, nargs="+", default=[4])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    target = load_target(asked.target, asked.dtype)
    assistant = AutoModelForCausalLM.from_pretrained(asked.draft, dtype=asked.dtype).eval()
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    draft = load_causal_lm_drafter(asked.draft, asked.dtype)
    stock = AutoModelForCausalLM.from_pretrained(asked.target, dtype=asked.dtype).eval()
    every = read_prompts(PromptSource(file=asked.prompts))
    chosen = [every[index] for index in np.linspace(0, len(every) - 1, asked.count).astype(int)]
    prompts = [render(prompt, target.tokenizer) for prompt in chosen]
    padding = list(range(len(target.tokenizer), target.vocab_size))
    lines = [
        "| drafter | law | k | foredraft tok/s | transformers tok/s | foredraft / transformers | same text |",
        "|---|---|---|---|---|---|---|",
    ]
    for law, k in itertools.product(map(SamplingLaw, asked.temperature), asked.k):
        assistant.generation_config.num_assistant_tokens = k
        pairs: dict[str, tuple[Engine, Engine]] = {
            "none": (
                foredraft(target, None, law, k, asked.tokens),
                peer(stock, law, asked.tokens, padding),
            ),
            "draft model": (
                foredraft(target, draft, law, k, asked.tokens),
                peer(stock, law, asked.tokens, padding, assistant_model=assistant),
            ),
            "prompt lookup": (
                foredraft(target, PromptLookup(target.vocab_size, max_match=2), law, k, asked.tokens),
                peer(stock, law, asked.tokens, padding, prompt_lookup_num_tokens=k),
            ),
        }
        for label, (ours, theirs) in pairs.items():
            runs = interleaved({"foredraft": ours, "transformers": theirs}, prompts)
            lines.append(row(label, law, k, runs))
            print(lines[-1], flush=True)
    if asked.out:
        asked.out.write_text(f"{describe_machine()}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
