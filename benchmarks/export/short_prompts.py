"""Short prompts of the package's own, for runtimes on few cores."""

from collections.abc import Sequence

from foredraft.models.target import LocalTarget
from foredraft.settings import PromptSource
from foredraft.trace.prompts import Prompt, read_prompts, render


def spread(target: LocalTarget, count: int, longest: int, domains: Sequence[str] = ()) -> list[Prompt]:
    """Return prompts of at most `longest` tokens, one domain after the other; of all domains where none is named."""
    left = [
        prompt
        for prompt in read_prompts(PromptSource(file="shipped", domains=list(domains)))
        if len(render(prompt, target.tokenizer)) <= longest
    ]
    chosen: list[Prompt] = []
    while len(chosen) < count and left:
        for domain in sorted({prompt.domain for prompt in left}):
            chosen.append(next(prompt for prompt in left if prompt.domain == domain))
            left.remove(chosen[-1])
    return chosen[:count]
