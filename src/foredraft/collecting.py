"""Traces of a run: what the target, or a server of its weights, answers to the prompts of each part."""

from collections.abc import Callable, Sequence
from functools import cache

from foredraft.core.digest import digest_of
from foredraft.core.law import SamplingLaw
from foredraft.core.progress import Progress
from foredraft.core.protocols import Target
from foredraft.models.remote.target import connect
from foredraft.models.remote.twin import ServedTwin
from foredraft.models.target import LocalTarget
from foredraft.settings import TraceSettings
from foredraft.trace.collect import collect
from foredraft.trace.prompts import Prompt, prompts_digest, read_prompts
from foredraft.trace.split import split_sources
from foredraft.trace.store import Trace, open_trace
from foredraft.workspace import Workspace


def collected(
    workspace: Workspace,
    target: LocalTarget,
    writer: Callable[[], Target],
    settings: TraceSettings,
    part: str,
    prompts: Sequence[Prompt],
    law: SamplingLaw,
    progress: Progress,
) -> Trace:
    """Return the trace of what a target answers to some prompts under one law; collected unless it is there."""
    numbers = settings.model_dump(include={"max_new_tokens", "top", "batch_size", "seed"})
    inputs = [target.fingerprint, target.tokenizer_fingerprint, prompts_digest(prompts), str(law), numbers]
    key = digest_of([*inputs, "served"] if settings.server else inputs)
    path = workspace.root / "traces" / f"{part}-{str(law).replace(' ', '-').replace('=', '')}-{key[:8]}"
    workspace.stage(
        f"collect {part} {law}",
        key,
        path,
        lambda out: collect(writer(), prompts, settings, law, out, progress),
        lambda out: out.exists() and open_trace(out).info.complete,
    )
    return open_trace(path)


def writer_of(target: LocalTarget, settings: TraceSettings) -> Callable[[], Target]:
    """Return what connects, when it is first asked, to whoever writes the target's answers."""

    @cache
    def writer() -> Target:
        if settings.server is None:
            return target
        where = settings.server
        return ServedTwin.of(target, connect(where.url, str(target.path), where.model, where.in_flight))

    return writer


def prompts_to_score(settings: TraceSettings) -> Sequence[Prompt]:
    """Return all prompts, or as many as `eval` asks for, balanced over domains."""
    if any(source.eval for source in settings.prompts):
        return split_sources(settings.prompts, settings.seed).eval
    return [prompt for source in settings.prompts for prompt in read_prompts(source)]
