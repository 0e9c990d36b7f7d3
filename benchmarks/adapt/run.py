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

from foredraft.core.digest import digest_of
from foredraft.core.law import GREEDY
from foredraft.generation import Asked
from foredraft.models.target import LocalTarget, load_target
from foredraft.online import MEGABYTE, Requests, serve
from foredraft.settings import DecodeSettings, PromptSource, TraceSettings
from foredraft.trace.buffer import BufferFolder, buffer_info
from foredraft.trace.collect import collect
from foredraft.trace.prompts import Prompt, read_prompts, render
from foredraft.trace.split import split, split_sources
from foredraft.trace.store import Trace, open_trace

OLD_DOMAINS = ["code", "code_edit", "instruct", "math"]
OLD = PromptSource(file="shipped", domains=OLD_DOMAINS, train=48, eval=24)


def old_prompts(target: LocalTarget, count: int, longest: int) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Return the prompts that the draft of the quickstart was trained on, and others of their domains.

    `count` of each at most; those of more than `longest` tokens are left out, to save time.
    """
    known = split_sources([OLD], 0)
    taken = {prompt.id for prompt in (*known.train, *known.eval)}
    rest = [prompt for prompt in read_prompts(OLD) if prompt.id not in taken]
    others = [*known.eval, *rest[:: max(1, len(rest) // count)]]
    short = [[one for one in some if len(render(one, target.tokenizer)) <= longest] for some in (known.train, others)]
    return short[0][:count], short[1][:count]


def answers(target: LocalTarget, prompts: Sequence[Prompt], tokens: int, out: Path) -> Trace:
    settings = TraceSettings(prompts=[OLD], max_new_tokens=tokens, batch_size=12)
    return collect(target, prompts, settings, GREEDY, out)


def gather(target: LocalTarget, draft: Path, prompts: Sequence[Prompt], tokens: int, out: Path) -> Trace:
    """Serve requests by speculative decoding with the draft; those that were served before are left out."""
    info = buffer_info(target, GREEDY, 64)
    buffer = BufferFolder.open(out, info, 256 * MEGABYTE)
    served = {one.row.prompt_id for one in buffer.gathered()}
    left = [prompt for prompt in prompts if digest_of(render(prompt, target.tokenizer).tolist()) not in served]
    requests = Requests(left, Asked(GREEDY, tokens), DecodeSettings(k=4, batch_size=8))
    serve(draft, target, requests, buffer)
    return open_trace(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", required=True, help="JSONL of the new domain")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--held-out", type=int, default=60, help="prompts of the new domain that only score")
    parser.add_argument("--old", type=int, default=48, help="prompts of the old domains, to rehearse and to score each")
    parser.add_argument("--longest", type=int, default=600, help="prompts of the old domains with more tokens are left out")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", default="", help="gather: serve the requests and stop")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    target = load_target(asked.target, "float32")
    new = split(read_prompts(PromptSource(file=asked.prompts)), asked.requests, asked.held_out, 0)
    if asked.only == "gather":
        gather(target, asked.draft, new.train, asked.tokens, asked.work / "served")
        return
    trained_on, others = old_prompts(target, asked.old, asked.longest)
    print(len(trained_on), "old prompts to rehearse,", len(others), "that only score", flush=True)
    for name, prompts in (("new-eval", new.eval), ("old-eval", others), ("old-train", trained_on)):
        answers(target, prompts, asked.tokens, asked.work / name)
        print(name, "done", flush=True)


if __name__ == "__main__":
    main()
