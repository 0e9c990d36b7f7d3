"""Verify exported drafts in the real runtimes and write the matrix: counts by position, text, runtime by drafter.

    python benchmarks/export/run.py --target TARGET --prompts 6 --max-new-tokens 24 --out results \\
        llama.cpp=exports/six-gguf transformers=exports/six vllm=exports/six vllm=prompt-lookup:max_match=3

Interpreters of the runtimes come from FOREDRAFT_..._PYTHON (tools/runtimes.sh). What is equal is decoded once and kept
in --out: the target's plain answers here and in each runtime, and literal runs of drafts of equal weights. A pair whose
result lies in --out is not run again; one that a runtime refuses or fails on is printed with its message, and the
others go on.
"""

import argparse
import json
import shelve
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from short_prompts import spread

from foredraft.core.errors import ForedraftError
from foredraft.core.protocols import Drafter
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.target import load_target
from foredraft.verification import counting
from foredraft.verification import verify as verifying
from foredraft.verification.verify import VerifySettings

_HEADER = (
    "| runtime | draft | drafted | accepted | by position | expected by position | prompts with equal counts | "
    "with equal text |\n|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", nargs="+", help="runtime=draft")
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--longest-prompt", type=int, default=70, help="tokens")
    parser.add_argument(
        "--domain", action="append", default=[], help="of the package's prompts; all where none is named"
    )
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--k", type=int, default=4)
    chosen = parser.parse_args()
    target = load_target(chosen.target, "float32")
    prompts = spread(target, chosen.prompts, chosen.longest_prompt, chosen.domain)
    settings = VerifySettings(chosen.k, chosen.max_new_tokens, seconds=3000.0, keep=chosen.out / "targets")
    chosen.out.mkdir(parents=True, exist_ok=True)
    remember_equal_runs(shelve.open(str(chosen.out / "decoded")), target.fingerprint)  # noqa: SIM115
    print(_HEADER)
    for pair in chosen.pairs:
        runtime, _, draft = pair.partition("=")
        file = chosen.out / f"{runtime}-{Path(draft).name}.json"
        if not file.exists():
            since = time.perf_counter()
            try:
                found = verifying.verify(draft, target, runtime, prompts, settings).to_json()
            except ForedraftError as error:
                print(f"| {runtime} | {Path(draft).name} | {' '.join(str(error).split())} |", flush=True)
                continue
            found["seconds"] = round(time.perf_counter() - since, 1)
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(row(json.loads(file.read_text(encoding="utf-8")), draft), flush=True)


def remember_equal_runs(kept: "shelve.Shelf[Any]", target: str) -> None:
    """Decode once what several pairs ask for: plain answers here and in a runtime, literal runs of a draft."""
    verifying._plain = remembered(  # type: ignore[assignment]
        verifying._plain, kept, lambda _, ids, longest, k: ("plain", target, ids.tolist(), longest, k)
    )
    ask = verifying.ask
    plainly = remembered(ask, kept, lambda runtime, python, job, *_: (runtime.worker, target, job.questions))
    verifying.ask = lambda runtime, python, job, speculate, seconds: (  # type: ignore[assignment]
        (ask if speculate else plainly)(runtime, python, job, speculate, seconds)
    )
    counting.decode = remembered(  # type: ignore[assignment]
        counting.decode,
        kept,
        lambda session, drafter, context, law, k, limits, generator: (
            who(drafter), target, context.tolist(), k, limits.max_new_tokens
        ),
    )  # fmt: skip


def who(drafter: Drafter) -> str:
    """Return what drafters of equal weights, or of equal lookup options, have in common."""
    if not isinstance(drafter, CausalLMDrafter):
        return repr(drafter)
    sums = [
        zlib.crc32(weight.contiguous().view(torch.uint8).numpy())
        for _, weight in sorted(drafter.draft.model.state_dict().items())
    ]
    return f"{sums} {drafter.draft.head_token_ids.tolist()}"


def remembered(answer: Callable[..., Any], kept: "shelve.Shelf[Any]", key: Callable[..., Any]) -> Callable[..., Any]:
    """Return `answer` with its results kept by the key of what it is given."""

    def once(*given: Any) -> Any:
        name = repr(key(*given))
        if name not in kept:
            kept[name] = answer(*given)
            kept.sync()
        return kept[name]

    return once


def row(found: dict[str, Any], draft: str) -> str:
    counted, expected = found["counted"], found["expected"]
    cells = [f"{found['runtime']} {found['version']}", Path(draft).name, _or_dash(counted["drafted"])]
    cells += [str(counted["accepted"]), _positions(counted), _positions(expected)]
    cells += [f"{found[name]} of {found['prompts']}" for name in ("same_counts", "same_text")]
    return f"| {' | '.join(cells)} |"


def _positions(counts: dict[str, Any]) -> str:
    places: Sequence[int] | None = counts["accepted_by_position"]
    return "-" if places is None else " ".join(map(str, places))


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


if __name__ == "__main__":
    main()
