"""Peak memory beyond the weights of scoring, deciding and decoding with 150k tokens of vocabulary and 8k of context.

    python benchmarks/memory/run.py --out benchmarks/memory/table.md

A narrow random model stands for the target and one for the draft: what is measured is what grows with the
vocabulary and the context. Peak resident memory of the process, less what it held once both models were loaded.
"""

import argparse
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.acceptance.evaluate import score
from foredraft.acceptance.leaderboard import describe_machine
from foredraft.core.law import GREEDY, SamplingLaw, token_logprobs
from foredraft.decoding.speculative import Limits, decode
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.draft import Draft
from foredraft.models.head import Head
from foredraft.models.session import Session
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import Trace, TraceInfo, TraceWriter

VOCAB, CONTEXT, ANSWER = 152_064, 8192, 4096


def model(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def resident() -> float:
    """Return the resident memory in GiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**30


def peak_of(work: Callable[[], object]) -> tuple[float, float]:
    """Return the highest resident memory while `work` ran, less that before it, in GiB, and the seconds."""
    before, peak, done = resident(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    return peak[0] - before, seconds


def trace_of(text: torch.Tensor, law: SamplingLaw, folder: Path) -> Trace:
    info = TraceInfo("random", "f" * 16, "t" * 16, VOCAB, "float32", law, SamplingLaw(), 1, ANSWER, 0, "p" * 16, 1)
    writer = TraceWriter.open(folder, info)
    answer, certain = text[-ANSWER:], torch.zeros(ANSWER)
    row = TraceRow(
        "a#1", "a", "none", text[:-ANSWER], answer, certain, answer[:, None].int(), certain[:, None].half(), certain,
        "length",
    )  # fmt: skip
    writer.append([row])
    return writer.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    target, draft = model(4), model(1)
    drafter = CausalLMDrafter(Draft(draft), SamplingLaw(), VOCAB)
    text = torch.randint(0, VOCAB, (CONTEXT,))
    lines = [str(describe_machine()), "", "| what | GiB beyond the weights | seconds |", "|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        plain = trace_of(text, SamplingLaw(), Path(folder) / "plain")
        cut = trace_of(text, SamplingLaw(0.8, top_k=50, top_p=0.9), Path(folder) / "cut")
        prompt, limits = text[: CONTEXT - 64], Limits(32, (), CONTEXT)
        jobs: dict[str, Callable[[], object]] = {
            f"score a draft over {ANSWER} of {CONTEXT} tokens, T=1": lambda: score("draft", drafter, plain, [1, 8]),
            "the same, T=0.8 top-k=50 top-p=0.9": lambda: score("draft", drafter, cut, [1, 8]),
            "decode 32 tokens behind a prompt of 8128, k=8": lambda: decode(
                Session(target, Head(target)), drafter, prompt, GREEDY, 8, limits, torch.Generator()
            ),
            "the same, drawn": lambda: decode(
                Session(target, Head(target)), drafter, prompt, SamplingLaw(), 8, limits, torch.Generator()
            ),
        }
        for name, job in jobs.items():
            peak, seconds = peak_of(job)
            lines.append(f"| {name} | {peak:.2f} | {seconds:.1f} |")
            print(lines[-1], flush=True)
        whole = peak_of(lambda: token_logprobs(torch.randn(ANSWER, VOCAB), text[-ANSWER:], SamplingLaw()))
        lines.append(f"| for comparison: the laws of {ANSWER} positions at once | {whole[0]:.2f} | {whole[1]:.1f} |")
        print(lines[-1], flush=True)
    if asked.out:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
