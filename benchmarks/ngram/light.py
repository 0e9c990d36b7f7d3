"""Trains light nets on a target's traces and scores each beside an n-gram of equal bytes.

    python benchmarks/ngram/light.py --target FOLDER --train TRACE [TRACE ...] --eval TRACE [TRACE ...] \\
        --work DIR --tokens 500_000

Nets take the target's embeddings along their leading directions, compute a trimmed head, and learn what is between the
two. The n-gram beside each is a suffix index over the same traces' answers and, behind them, as much of the Python
standard library and of the man pages as brings it to the net's bytes; where that text ends first, its bytes say so.
Times are CPU time of one thread, the median of drafts of four tokens. Adds a row to light.md beside this file for each.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from texts import library_files, manual_files, token_lists
from tokenizers import Tokenizer

from foredraft import trainings, verbs
from foredraft.acceptance.evaluate import score
from foredraft.core.protocols import Drafter
from foredraft.models.causal_lm import load_causal_lm_drafter
from foredraft.models.target import load_target
from foredraft.ngram.index import build_suffix_index, open_suffix_index
from foredraft.ngram.suffix import SuffixDrafter
from foredraft.steps import DistillStep, InitStep
from foredraft.trace.store import Trace, open_trace

K = 4
BYTES_A_TOKEN = 6.1
SHAPE = {"source": "scratch", "layers": "first-4", "hidden": 192, "heads": 6, "ffn": 384, "vocab": 8192}
NETS = {
    "convolution, 8 tokens": InitStep(**SHAPE, body="convolution"),
    "linear attention": InitStep(**SHAPE, body="linear_attention"),
    "convolution, 64 of 1,536 channels": InitStep(**{**SHAPE, "ffn": 1536}, body="convolution", active=64),
}
HEADER = """# Light nets beside n-grams of equal bytes

Made by light.py: see there. A draft of {k} tokens; tokens per call and acceptance by replay.

| drafter | bytes | CPU microseconds of a draft | {laws} |
| --- | --- | --- |{rules}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--train", type=Path, nargs="+", required=True)
    parser.add_argument("--eval", type=Path, nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=500_000)
    options = parser.parse_args()
    target = load_target(options.target, "float32")
    train, held_out = ([open_trace(path) for path in paths] for paths in (options.train, options.eval))
    texts = [row.answer_ids.numpy().astype(np.int32) for trace in train for row in trace.rows(tops=False)]
    options.work.mkdir(parents=True, exist_ok=True)
    texts += _files(options.work / "files.npy", Tokenizer.from_str(target.tokenizer.backend_tokenizer.to_str()))
    laws = " | ".join(f"{trace.info.law}: tokens per call, acceptance" for trace in held_out)
    table = Path(__file__).parent / "light.md"
    table.write_text(HEADER.format(k=K, laws=laws, rules=" --- |" * len(held_out)), encoding="utf-8")
    step = DistillStep(tokens=options.tokens, learning_rate=2e-3, finish="tvd_plus_plus")
    for name, init in NETS.items():
        folder = options.work / name.replace(" ", "-").replace(",", "")
        if not (folder / "new").exists():
            verbs.init_draft(target, train, init, folder / "new")
        if not (folder / "trained").exists():
            trainings.distill_draft(folder / "new", target, train, step, folder / "trained")
        net = load_causal_lm_drafter(folder / "trained", "float32")
        rows = [_row(name, net, net.num_bytes, held_out)]
        path = folder / "equal.ngram"
        build_suffix_index(_first(texts, int(net.num_bytes / BYTES_A_TOKEN)), target.vocab_size, "", 32, path)
        index = open_suffix_index(path)
        index.container.verify()
        beside = SuffixDrafter(target.vocab_size, [(index, 1.0)])
        rows.append(_row(f"suffix index beside it, {index.num_tokens:,} tokens", beside, index.num_bytes, held_out))
        with table.open("a", encoding="utf-8") as file:
            file.writelines(rows)


def _files(kept: Path, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Return the tokens of this machine's Python and man pages, read once and kept in a file."""
    if not kept.exists():
        np.save(kept, np.concatenate([*token_lists([*library_files(), *manual_files()], tokenizer)]))
    return [np.load(kept)]


def _first(texts: Sequence[np.ndarray], tokens: int) -> list[np.ndarray]:
    """Return the first texts, the last one cut, of `tokens` together."""
    found, left = [], tokens
    for text in texts:
        if left > 0:
            found.append(text[:left])
            left -= len(text)
    return found


def _row(name: str, drafter: Drafter, size: int, traces: Sequence[Trace]) -> str:
    reports = [score(name, drafter, trace, [K]) for trace in traces]
    cells = [f"{report.mean_tokens_per_call(K):.3f}, {report.expected_acceptance:.3f}" for report in reports]
    cost = _microseconds(drafter, next(iter(traces[0].answers())).token_ids)
    return f"| {name} | {size:,} | {cost:.0f} | " + " | ".join(cells) + " |\n"


def _microseconds(drafter: Drafter, text: torch.Tensor) -> float:
    generator, spent = torch.Generator(), []
    for end in range(len(text) // 2, len(text)):
        begun = time.thread_time()
        drafter.propose(text[:end], K, generator)
        spent.append(time.thread_time() - begun)
    return 1e6 * statistics.median(spent)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
