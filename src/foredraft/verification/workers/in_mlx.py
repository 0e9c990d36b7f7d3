"""MLX-LM, one prompt after the other; it says of each token whether the draft gave it, and nothing of those refused."""

from collections.abc import Iterator
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.utils import load_model


def version() -> str:
    return metadata.version("mlx-lm")


def answers(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    target = _loaded(job["target"])
    draft = _loaded(job["draft"]) if job["speculate"] else None
    for prompt in job["prompts"]:
        ids, room = mx.array(prompt["token_ids"]), prompt["max_new_tokens"]
        if draft is None:
            tokens = [int(token) for token, _ in islice(generate_step(ids, target, max_tokens=room), room)]
            yield {"token_ids": tokens, "blocks": None, "drafted": None, "accepted": 0, "by_position": [0] * job["k"]}
            continue
        steps = speculative_generate_step(ids, target, draft, max_tokens=room, num_draft_tokens=job["k"])
        written = [(int(token), bool(drafted)) for token, _, drafted in islice(steps, room)]
        accepted = _accepted([drafted for _, drafted in written])
        yield {
            "token_ids": [token for token, _ in written],
            "blocks": None,
            "drafted": None,
            "accepted": sum(accepted),
            "by_position": [sum(one > place for one in accepted) for place in range(job["k"])],
        }


def _loaded(folder: str) -> Any:
    model, _ = load_model(Path(folder))
    model.set_dtype(mx.float32)
    return model


def _accepted(drafted: list[bool]) -> list[int]:
    """Return how many draft tokens each block gave; a block ends with a token of the target's own."""
    blocks, run = [], 0
    for is_drafted in drafted:
        run += is_drafted
        if not is_drafted:
            blocks.append(run)
            run = 0
    return [*blocks, run] if run else blocks
