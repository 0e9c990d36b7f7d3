"""The command that runs a draft in the runtime that will serve it."""

from pathlib import Path
from typing import Annotated

import typer

from foredraft.commands.common import Json, TargetName, fail_with, named_target, print_figures, progress_bars
from foredraft.core.lengths import LONGEST_DRAFT

app = typer.Typer()


@app.command(
    epilog="""
Examples:

    foredraft verify served/draft --runtime transformers --target my-model

    foredraft verify served/gguf --runtime llama.cpp --target my-model --num-prompts 20 --json

    foredraft verify prompt-lookup:max_match=3 --runtime vllm --target my-model --python venv-vllm/bin/python
"""
)
def verify(
    draft: Annotated[str, typer.Argument(help="Exported folder, .gguf file, or prompt-lookup:max_match=3.")],
    target: TargetName,
    runtime: Annotated[
        str, typer.Option(help="transformers, vllm, llama.cpp, openvino, onnxruntime-genai or mlx-lm.")
    ] = "transformers",
    prompts: Annotated[
        str, typer.Option(help="JSONL with prompt, messages or turns; `shipped` for the package's own.")
    ] = "shipped",
    num_prompts: Annotated[int, typer.Option(help="Prompts asked, the first ones.", min=1)] = 5,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 32,
    num_draft_tokens: Annotated[
        int, typer.Option("--k", help="0 takes the plan's beside the draft.", min=0, max=LONGEST_DRAFT)
    ] = 0,
    python: Annotated[
        str, typer.Option(help="Interpreter of the runtime's environment; empty takes FOREDRAFT_..._PYTHON.")
    ] = "",
    seconds: Annotated[
        float, typer.Option(help="Longest that one run of the runtime may take.", min=1.0, max=604800.0)
    ] = 1200.0,
    threads: Annotated[int, typer.Option(help="Threads of the runtime.", min=1)] = 1,
    keep: Annotated[
        Path | None,
        typer.Option(help="Folder for the target in the runtime's form, found again next time.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Decode greedily in the real runtime in float32: are counts by position foredraft's, and text the target's?

    Exit status 1 where they are not, or where nothing was drafted.
    """
    from foredraft.settings import PromptSource
    from foredraft.trace.prompts import read_prompts
    from foredraft.verification.table import verification_table
    from foredraft.verification.verify import VerifySettings
    from foredraft.verification.verify import verify as verify_draft

    asked = read_prompts(PromptSource(file=prompts))[:num_prompts]
    settings = VerifySettings(num_draft_tokens, max_new_tokens, python, seconds, threads, keep)
    loaded = named_target(target, "float32", "")
    found = verify_draft(draft, loaded, runtime, asked, settings, progress_bars())
    print_figures(found.to_json(), verification_table(found), as_json)
    fail_with(found.faults)
