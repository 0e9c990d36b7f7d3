"""Commands that do the whole job: run a recipe, export a draft, answer with one."""

from pathlib import Path
from typing import Annotated

import typer

from foredraft.commands.common import (
    STDERR,
    Adapter,
    DraftFolder,
    Dtype,
    Json,
    Out,
    Overrides,
    TargetName,
    Trust,
    named_target,
    print_figures,
    progress_bars,
    show_report,
)
from foredraft.core.errors import UserError
from foredraft.core.lengths import LONGEST_DRAFT

app = typer.Typer()


@app.command(
    epilog=r"""
Examples:

    foredraft run recipes/quickstart.yaml

    foredraft run --target my-model --prompts traffic.jsonl --out runs/mine

    accelerate launch --multi_gpu --num_processes 8 -m foredraft.cli run recipes/quickstart.yaml
"""
)
def run(
    overrides: Overrides,
    recipe: Annotated[Path | None, typer.Argument(help="Recipe; left out, the shipped default pool.")] = None,
    target: Annotated[str, typer.Option(help="Folder, .gguf file or hub id, instead of the recipe's.")] = "",
    prompts: Annotated[
        Path | None, typer.Option(help="For the default pool: JSONL with prompt, messages or turns.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; the same again goes on there.")] = None,
    as_json: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Make all that a recipe describes and is not there yet: traces, drafts, scores, the report, exports."""
    from foredraft.core.processes import join_processes
    from foredraft.pool import default_recipe, run_recipe
    from foredraft.recipe import load_recipe

    join_processes()
    if recipe is not None:
        resolved = load_recipe(recipe, [*overrides, *([f"target.model={target}"] if target else [])])
    elif target and prompts is not None:
        resolved = default_recipe(target, prompts, overrides)
    else:
        raise UserError("Name a recipe, or give --target and --prompts for the default pool.")
    folder = out or Path("runs") / (recipe.stem if recipe else "default")
    if report := run_recipe(resolved, folder, progress_bars(), trust_remote_code):
        show_report(report, folder, as_json)


@app.command(
    epilog="""
Examples:

    foredraft export runs/mine/drafts/prefix-6/distill-1a2b3c4d --target my-model --out served/draft

    foredraft export draft --target my-model --runtime llama.cpp:type=q8_0 --out served/gguf

    foredraft export prompt-lookup:max_match=4 --target my-model --runtime vllm --out served/lookup
"""
)
def export(
    draft: DraftFolder,
    target: TargetName,
    out: Out,
    runtime: Annotated[
        str,
        typer.Option(
            help="transformers, vllm, sglang, llama.cpp:type=f16, openvino:weights=fp16, onnxruntime-genai, mlx-lm, "
            "llamacpp-lookup, sglang-ngram."
        ),
    ] = "transformers",
    num_draft_tokens: Annotated[
        int,
        typer.Option(
            "--k", help="Draft tokens of a block; 0 takes the best length measured.", min=0, max=LONGEST_DRAFT
        ),
    ] = 4,
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
) -> None:
    """Write a draft as another runtime loads it, with a model card and a plan of its settings."""
    from foredraft.verbs import export_draft

    folder = export_draft(draft, named_target(target, dtype, adapter), runtime, num_draft_tokens, out)
    print_figures({"runtime": runtime, "folder": str(folder)}, f"For {runtime}: {folder}", as_json)


@app.command(
    epilog="""
Examples:

    foredraft generate --target my-model --drafter draft --k 4 "Explain speculative decoding."

    foredraft generate --target my-model --drafter "draft+tree:max_nodes=16" --set rule=chain "Hello"

    foredraft generate --target my-model --drafter draft --prompts traffic.jsonl --out answers.jsonl --set batch_size=8
"""
)
def generate(
    target: TargetName,
    overrides: Overrides,
    stop: Annotated[
        list[str],
        typer.Option(
            help="Text after which an answer ends; can be repeated.", default_factory=list, show_default=False
        ),
    ],
    prompt: Annotated[str, typer.Argument(help="What the user says; or give --prompts.")] = "",
    prompts: Annotated[str, typer.Option(help="JSONL of prompts to answer instead, into --out.")] = "",
    out: Annotated[Path | None, typer.Option(help="JSONL of answers; the same command goes on there.")] = None,
    drafter: Annotated[
        str, typer.Option(help="Draft folder, hub id or kind, and ways of drafting: draft+tree; empty decodes plainly.")
    ] = "",
    num_draft_tokens: Annotated[
        int, typer.Option("--k", help="Draft tokens of a block.", min=1, max=LONGEST_DRAFT)
    ] = 4,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.")] = 0,
    top_p: float = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    gather: Annotated[
        Path | None,
        typer.Option(help="Buffer folder that `adapt` learns from; gets context, answer, laws and guesses."),
    ] = None,
    megabytes: Annotated[float, typer.Option(help="Most that --gather holds; the oldest go.", min=0.001)] = 256.0,
    raw: Annotated[bool, typer.Option("--raw", help="Go on from the text itself, without the chat template.")] = False,
    seed: int = 0,
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Answer prompts by speculative decoding; the law of the answers is the target's.

    --set takes rule, length, longest, cost_ratio, target_growth, fallback_after, pause and batch_size.
    """
    from foredraft.core.law import SamplingLaw
    from foredraft.drafters import load_drafter
    from foredraft.generation import Asked, answer, answer_file, as_prompt
    from foredraft.online import open_buffer
    from foredraft.recipe import settings_from
    from foredraft.settings import DecodeSettings, PromptSource
    from foredraft.trace.prompts import read_prompts

    if bool(prompt) == bool(prompts) or bool(prompts) != bool(out):
        raise UserError("Give a prompt, or --prompts with --out.")
    asked = Asked(SamplingLaw(temperature, top_k, top_p), max_new_tokens, tuple(stop), seed, raw)
    settings = settings_from(DecodeSettings, [f"k={num_draft_tokens}", *overrides])
    loaded = named_target(target, dtype, adapter, trust_remote_code)
    guesser = load_drafter(drafter, loaded, trust_remote_code) if drafter else None
    buffer = open_buffer(loaded, asked, gather, megabytes) if gather else None
    if out is not None:
        wanted = read_prompts(PromptSource(file=prompts))
        count = answer_file(loaded, guesser, wanted, asked, settings, out, progress_bars(), buffer)
        print_figures({"answers": str(out), "new": count}, f"{count} new answers: {out}", as_json)
        return
    (found,) = answer(loaded, guesser, [as_prompt(prompt)], asked, settings, buffer)
    figures = {
        "text": found.text,
        "tokens": found.tokens,
        "target_calls": found.target_calls,
        "mean_tokens_per_call": found.mean_tokens_per_call,
        "tokens_per_second": found.tokens_per_second,
        "finish_reason": found.finish_reason,
    }
    print_figures(figures, found.text, as_json)
    STDERR.print(
        f"{found.tokens} tokens, {found.target_calls} target calls, "
        f"{found.mean_tokens_per_call:.2f} tokens per call, {found.tokens_per_second:.1f} tok/s"
    )
