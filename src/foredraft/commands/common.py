"""What the commands share: the application, options, and how results are shown."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType

if TYPE_CHECKING:
    from foredraft.checkpoint import DraftManifest
    from foredraft.core.progress import Progress
    from foredraft.models.target import LocalTarget
    from foredraft.trace.store import Trace

# Tables keep their columns where stdout is a file or a pipe.
STDOUT, STDERR = Console(width=None if sys.stdout.isatty() else 100), Console(stderr=True)

TargetName = Annotated[str, typer.Option("--target", help="The target: folder, .gguf file or hub id.")]

Out = Annotated[Path, typer.Option(help="Folder to write; one that holds something else is left alone.")]

DraftFolder = Annotated[Path, typer.Argument(help="Draft folder.")]

Traces = Annotated[list[Path], typer.Option("--trace", help="Trace folder; can be repeated.")]

Overrides = Annotated[
    list[str],
    typer.Option("--set", help="key=value as in a recipe; can be repeated.", default_factory=list, show_default=False),
]

FailUnder = Annotated[
    str, typer.Option(help="Exit with status 1 where the metric is less; `compare` takes the change, -2% too.")
]

Metric = Annotated[
    str,
    typer.Option(help="What --fail-under is about: expected_acceptance, mean_tokens_per_call or predicted_speedup."),
]

AllowNoise = Annotated[bool, typer.Option("--allow-noise", help="Fail only where the whole 95 % interval lies under.")]

Hardware = Annotated[
    list[str] | None,
    typer.Option("--hardware", help="Machine to predict for: a shipped profile, or a YAML file; can be repeated."),
]

Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]

Adapter = Annotated[
    str, typer.Option("--target-adapter", help="LoRA adapter that the target is served with: folder or hub id.")
]

Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Let Python code that comes with a model run.")]


def progress_bars() -> "Progress":
    from foredraft.display import progress_for

    return progress_for(STDERR)


def named_target(name: str, dtype: str, adapter: str, trust_remote_code: bool = False) -> "LocalTarget":
    from foredraft.models.target import load_target

    return load_target(name, dtype, trust_remote_code, adapter)


def opened_traces(folders: list[Path], target: "LocalTarget | None" = None) -> "list[Trace]":
    """Return the traces in some folders; where `target` is given, one that it did not write is refused."""
    from foredraft.trace.store import open_trace, require_written_by

    opened = [open_trace(folder) for folder in folders]
    if target is not None:
        for trace in opened:
            require_written_by(trace, target)
    return opened


def show_report(report: dict[str, Any], folder: Path, as_json: bool) -> None:
    from foredraft.acceptance.terminal import leaderboard_table

    print_figures(report, leaderboard_table(report), as_json)
    if not as_json:
        STDOUT.print(f"Report: {folder / 'report.html'}", soft_wrap=True)


def fail_with(missed: list[str]) -> None:
    for sentence in missed:
        STDERR.print(f"[bold red]under:[/] {escaped(sentence)}", highlight=False, soft_wrap=True)
    if missed:
        raise typer.Exit(1)


def draft_figures(out: Path, manifest: "DraftManifest") -> dict[str, Any]:
    return {"draft": str(out), "kind": manifest.kind, "digest": manifest.digest, "target": manifest.target}


def print_draft(out: Path, manifest: "DraftManifest", as_json: bool) -> None:
    print_figures(draft_figures(out, manifest), f"{manifest.kind} draft for {manifest.target}: {out}", as_json)


def print_adapted(out: Path, manifest: "DraftManifest", as_json: bool) -> None:
    found = manifest.options["adapted"]
    figures = {"draft": str(out), "digest": manifest.digest, **found}
    change = found["held_out"]["mean_tokens_per_call"]
    gain = f"{change['before']:.3f} -> {change['after']:.3f} tokens per call on held-out answers"
    shown = f"The old draft stays, {found['reason']}: {out}" if found["reason"] else f"Adapted, {gain}: {out}"
    print_figures(figures, shown, as_json)


def print_figures(figures: dict[str, Any], shown: RenderableType, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(figures, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        STDOUT.print(shown, highlight=False, markup=False, soft_wrap=isinstance(shown, str))


def escaped(text: str) -> str:
    return text.replace("[", r"\[")
