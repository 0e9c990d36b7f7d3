"""Online learning on a domain that the draft never saw: what it gains there, and what it loses elsewhere.

    python benchmarks/adapt/run.py --target MODEL --draft DRAFT --prompts new-domain.jsonl --work DIR \
        --out benchmarks/adapt/table.md

The draft is one of recipes/quickstart.yaml, trained on code, code_edit, instruct and math. Requests of the new domain
are answered by speculative decoding, and gathered; the draft then learns from what was gathered. Each stage is kept in
--work: the same command goes on where it was.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from foredraft.core.law import GREEDY
from foredraft.models.target import LocalTarget, load_target
from foredraft.settings import PromptSource, TraceSettings
from foredraft.trace.collect import collect
from foredraft.trace.prompts import Prompt, read_prompts
from foredraft.trace.split import split, split_sources
from foredraft.trace.store import Trace

OLD_DOMAINS = ["code", "code_edit", "instruct", "math"]
OLD = PromptSource(file="shipped", domains=OLD_DOMAINS, train=48, eval=24)


def old_prompts(more: int) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Return the prompts that the draft of the quickstart was trained on, and others of their domains."""
    known = split_sources([OLD], 0)
    taken = {prompt.id for prompt in (*known.train, *known.eval)}
    rest = [prompt for prompt in read_prompts(OLD) if prompt.id not in taken]
    return known.train, [*known.eval, *rest[:: len(rest) // more][:more]]


def answers(target: LocalTarget, prompts: Sequence[Prompt], tokens: int, out: Path) -> Trace:
    settings = TraceSettings(prompts=[OLD], max_new_tokens=tokens, batch_size=12)
    return collect(target, prompts, settings, GREEDY, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", required=True, help="JSONL of the new domain")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--held-out", type=int, default=60, help="prompts of the new domain that only score")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    target = load_target(asked.target, "float32")
    new = split(read_prompts(PromptSource(file=asked.prompts)), asked.requests, asked.held_out, 0)
    trained_on, others = old_prompts(36)
    for name, prompts in (("new-eval", new.eval), ("old-eval", others), ("old-train", trained_on)):
        answers(target, prompts, asked.tokens, asked.work / name)
        print(name, "done", flush=True)


if __name__ == "__main__":
    main()
