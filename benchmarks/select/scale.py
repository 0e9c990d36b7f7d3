"""A day's traffic through policies: distinct text as recorded answers, in order of arrival, from a cold start.

    python benchmarks/select/scale.py --tokenizer FOLDER --tokens 2_000_000 --out benchmarks/select/scale.md

Text: sources of the Python standard library and English man pages of this machine, each once, none tiled. Every file is
cut into answers of at most 1,000 tokens, behind the 64 tokens before them. It is what people wrote, not what a target
did: it says how fast a simulation is and how policies behave over long streams, nothing of a target's acceptance.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from foredraft.catalog import resolve
from foredraft.select.block_costs import BlockCosts
from foredraft.select.policies import read_policy
from foredraft.select.simulate import fixed_runs, record, request_oracle, simulate
from foredraft.trace.rows import TraceRow

sys.path.insert(0, str(Path(__file__).parents[1] / "ngram"))
from texts import in_hash_order, library_files, manual_files, token_lists

LENGTHS = (2, 4, 8)
ANSWER, PROMPT = 1000, 64
DRAFTERS = ("prompt-lookup", "suffix-automaton")
POLICIES = ("hedge", "marginal", "contextual", "ucb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    rows = list(taken(answers(tokenizer), options.tokens))
    drafters = {name: resolve("drafters", name)(tokenizer.get_vocab_size()) for name in DRAFTERS}
    began = time.process_time()
    traffic = record(drafters, rows, max(LENGTHS))
    lines = [line("replaying both drafters", traffic.tokens, time.process_time() - began)]
    costs = BlockCosts.by_ratio([0.002, 0.002], max(LENGTHS), 0.05)
    began = time.process_time()
    fixed = fixed_runs(traffic, costs, LENGTHS)
    best = min(float(run.seconds.sum()) for run in fixed)
    oracle = float(request_oracle(fixed).seconds.sum())
    lines.append(line("seven fixed arms and the oracle by request", traffic.tokens, time.process_time() - began))
    for name in POLICIES:
        began = time.process_time()
        seconds = float(simulate(traffic, read_policy(name), costs, LENGTHS, deciding=0.0).seconds.sum())
        spent = time.process_time() - began
        lines.append(line(name, traffic.tokens, spent, f"{best / seconds:.3f} | {oracle / seconds:.3f}"))
    options.out.write_text(table(lines, traffic.tokens, len(traffic.answers), best / oracle))


def answers(tokenizer: Tokenizer) -> Iterator[TraceRow]:
    files = in_hash_order([*library_files(), *manual_files()])
    for number, ids in enumerate(token_lists(files, tokenizer)):
        for start in range(PROMPT, len(ids) - PROMPT, ANSWER):
            text = torch.from_numpy(ids[start - PROMPT : start + ANSWER].astype(np.int64))
            yield row(f"{number}-{start}", text)


def row(name: str, text: torch.Tensor) -> TraceRow:
    answer = text[PROMPT:]
    nothing = torch.empty(len(answer), 0)
    return TraceRow(
        name, name, "text", text[:PROMPT], answer, torch.zeros(len(answer)), nothing.int(), nothing.half(),
        torch.ones(len(answer)), "length",
    )  # fmt: skip


def taken(rows: Iterator[TraceRow], tokens: int) -> Iterator[TraceRow]:
    for one in rows:
        if tokens <= 0:
            return
        tokens -= len(one.answer_ids)
        yield one


def line(what: str, tokens: int, spent: float, rest: str = " | ") -> str:
    return f"| {what} | {spent:.1f} | {tokens / spent:,.0f} | {rest} |"


def table(lines: list[str], tokens: int, count: int, gain: float) -> str:
    head = [
        f"# {tokens:,} distinct tokens in {count:,} answers through policies",
        "",
        "Standard library and man pages, in the order of a hash of the file names, cold start, one thread; CPU time.",
        f"The oracle by request is {gain:.3f} times as fast as the best fixed arm. See scale.py.",
        "",
        "| what | CPU s | tokens/s | x best fixed | of the oracle by request |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *lines]) + "\n"


if __name__ == "__main__":
    main()
