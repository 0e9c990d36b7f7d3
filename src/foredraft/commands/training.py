"""Commands that start drafts and teach them."""

import json
from pathlib import Path
from typing import Annotated

import typer

from foredraft.commands.common import (
    Adapter,
    DraftFolder,
    Dtype,
    Json,
    Out,
    Overrides,
    TargetName,
    Traces,
    Trust,
    named_target,
    opened_traces,
    print_adapted,
    print_draft,
    progress_bars,
)
from foredraft.core.errors import UserError

app = typer.Typer()


@app.command(
    epilog="""
Examples:

    foredraft init --target my-model --trace trace --set layers=first-4+last-2 --set heal=linear --out draft

    foredraft init --target my-model --trace trace --set layers=first-8 --set heads=6 --set ffn=1024 --out narrow

    foredraft init --target my-model --set from=small-sibling --out sibling
"""
)
def init(
    target: TargetName,
    out: Out,
    overrides: Overrides,
    traces: Annotated[
        list[Path],
        typer.Option(
            "--trace", help="What the target wrote; repeat for more.", default_factory=list, show_default=False
        ),
    ],
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Make an untrained draft: layers of the target or of a sibling, narrowed, healed, or new."""
    from foredraft import verbs
    from foredraft.recipe import settings_from
    from foredraft.steps import InitStep, Step

    step = settings_from(InitStep, overrides)
    if verbs.learns(Step(init=step)) and not traces:
        raise UserError("vocab, hidden, heads, ffn and heal are decided by what the target wrote: give --trace.")
    loaded = named_target(target, dtype, adapter, trust_remote_code)
    verbs.refuse_impossible(Step(init=step), loaded)
    print_draft(out, verbs.init_draft(loaded, opened_traces(traces, loaded), step, out), as_json)


@app.command(
    epilog="""
Example:

    foredraft distill --target my-model --trace trace --layers first-6 --set tokens=200_000 --out draft

    foredraft distill --target my-model --trace trace --set 'text.files=[wiki.jsonl]' --set text.share=0.5 --out draft
"""
)
def distill(
    target: TargetName,
    traces: Traces,
    out: Out,
    overrides: Overrides,
    draft: Annotated[Path | None, typer.Option(help="Draft folder to go on from, instead of --layers.")] = None,
    layers: Annotated[
        str, typer.Option(help="Target layers to start from: first-6, every-5, first-4+last-2, 0,1,29.")
    ] = "first-6",
    vocab: Annotated[int, typer.Option(help="Rows of the head to keep; 0 keeps all.")] = 0,
    eval_prompts: Annotated[
        str, typer.Option(help="JSONL of prompts that drafts are scored on: refused in what is learnt.")
    ] = "",
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Teach a draft the target's law on the target's own answers, and on general text."""
    from foredraft import trainings, verbs
    from foredraft.core.processes import join_processes
    from foredraft.recipe import settings_from
    from foredraft.settings import PromptSource
    from foredraft.steps import DistillStep, InitStep
    from foredraft.trace.prompts import read_prompts

    step = settings_from(DistillStep, overrides)
    here = join_processes()
    loaded, opened = named_target(target, dtype, adapter, trust_remote_code), opened_traces(traces)
    if not here.is_main:
        trainings.help_training(loaded)
        return
    if draft is None:
        draft = out.with_name(f"{out.name}-untrained")
        if not draft.exists():
            verbs.init_draft(loaded, opened, InitStep(layers=layers, vocab=vocab), draft)
    held_out = read_prompts(PromptSource(file=eval_prompts)) if eval_prompts else []
    written = trainings.distill_draft(draft, loaded, opened, step, out, progress_bars(), held_out=held_out)
    trainings.dismiss_helpers()
    print_draft(out, written, as_json)


@app.command(
    epilog="""
Examples:

    foredraft adapt draft --target my-model --buffer served --trace trace --out draft-2

    foredraft adapt draft --target my-model --prompts traffic.jsonl --no-text --trace trace --out draft-2

    foredraft adapt draft --target my-model --meta --trace trace --set inner_steps=8 --out draft-meta
"""
)
def adapt(
    draft: DraftFolder,
    target: TargetName,
    out: Out,
    overrides: Overrides,
    buffers: Annotated[
        list[Path],
        typer.Option("--buffer", help="What was gathered; repeat for more.", default_factory=list, show_default=False),
    ],
    traces: Annotated[
        list[Path],
        typer.Option(
            "--trace",
            help="Answers of the old domains, against forgetting; with --meta the domains to learn from.",
            default_factory=list,
            show_default=False,
        ),
    ],
    guards: Annotated[
        list[Path],
        typer.Option(
            "--guard",
            help="Other answers of the old domains, which only score; left out, a share of --trace.",
            default_factory=list,
            show_default=False,
        ),
    ],
    prompts: Annotated[str, typer.Option(help="JSONL of prompts to answer first, into --buffer.")] = "",
    no_text: Annotated[
        bool, typer.Option("--no-text", help="Keep the answers to --prompts in memory: no text, no token is written.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Law of the answers to --prompts; 0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    megabytes: Annotated[float, typer.Option(help="Most that the buffer of --prompts holds.", min=0.001)] = 256.0,
    meta: Annotated[bool, typer.Option("--meta", help="Meta-learn a start over the domains of --trace.")] = False,
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Let a draft learn from what was served, and keep the old one where that makes it worse.

    --set takes the keys of the recipe steps `adapt` and, with --meta, `meta`.
    """
    from foredraft import online, trainings
    from foredraft.core.law import SamplingLaw
    from foredraft.generation import Asked
    from foredraft.recipe import settings_from
    from foredraft.settings import PromptSource
    from foredraft.steps import AdaptStep, MetaStep
    from foredraft.trace.prompts import read_prompts

    if meta:
        if buffers or prompts or guards:
            raise UserError("--meta learns from --trace alone: leave out --buffer, --prompts and --guard.")
        found = settings_from(MetaStep, overrides)
        loaded = named_target(target, dtype, adapter, trust_remote_code)
        written = trainings.meta_draft(draft, loaded, opened_traces(traces), found, out, progress_bars())
        print_draft(out, written, as_json)
        return
    step = settings_from(AdaptStep, [f"buffer={json.dumps([str(folder) for folder in buffers])}", *overrides])
    asked = read_prompts(PromptSource(file=prompts)) if prompts else []
    requests = online.Requests(asked, Asked(SamplingLaw(temperature), max_new_tokens), keeps_text=not no_text)
    loaded = named_target(target, dtype, adapter, trust_remote_code)
    manifest = online.adapt_online(
        draft, loaded, requests, megabytes, opened_traces(traces), opened_traces(guards), step, out, progress_bars()
    )
    print_adapted(out, manifest, as_json)
