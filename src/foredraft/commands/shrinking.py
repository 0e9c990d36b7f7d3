"""Commands that shrink drafts: fewer bits, fewer layers, narrower ones."""

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
    draft_figures,
    named_target,
    opened_traces,
    print_figures,
    progress_bars,
)

app = typer.Typer()

OptionalTraces = Annotated[
    list[Path],
    typer.Option("--trace", help="Training trace; can be repeated.", default_factory=list, show_default=False),
]

Scored = Annotated[
    list[Path],
    typer.Option("--score", help="Trace that only scores what is written.", default_factory=list, show_default=False),
]


@app.command(
    epilog="""
Examples:

    foredraft quantize draft --target my-model --out draft-int8

    foredraft quantize draft --target my-model --trace trace --set bits=4 --set method=gptq --out draft-int4

    foredraft quantize draft --target my-model --set 'bits={head: 4, layers.0.*: 16, layers.*.down: 8, layers.*: 4/64}'
    --out draft-mixed
"""
)
def quantize(
    draft: DraftFolder,
    target: TargetName,
    out: Out,
    overrides: Overrides,
    traces: OptionalTraces,
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
) -> None:
    """Round a draft's weights: 8 or 4 bits, each unit its own."""
    from foredraft import compressing
    from foredraft.compress_tables import size_table
    from foredraft.recipe import settings_from
    from foredraft.steps import QuantizeStep

    step = settings_from(QuantizeStep, overrides)
    loaded = named_target(target, dtype, adapter)
    manifest = compressing.quantize_draft(draft, loaded, opened_traces(traces, loaded), step, out, progress_bars())
    figures = draft_figures(out, manifest) | {"units": manifest.options["units"]}
    print_figures(figures, size_table(manifest.options["units"], str(out)), as_json)


@app.command(
    epilog="""
Examples:

    foredraft prune draft --target my-model --trace trace --set layers=2 --set by=acceptance --out draft-4

    foredraft prune draft --target my-model --trace trace --set ffn=1024 --set runtime=llama.cpp --set heal=linear
    --out draft-narrow
"""
)
def prune(
    draft: DraftFolder,
    target: TargetName,
    traces: Traces,
    out: Out,
    overrides: Overrides,
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
) -> None:
    """Cut layers, widths or head rows out of a draft. Heal it afterwards with `foredraft distill --draft`."""
    from foredraft import compressing
    from foredraft.commands.common import print_draft
    from foredraft.recipe import settings_from
    from foredraft.steps import PruneStep

    step = settings_from(PruneStep, overrides)
    loaded = named_target(target, dtype, adapter)
    manifest = compressing.prune_draft(draft, loaded, opened_traces(traces, loaded), step, out, progress_bars())
    print_draft(out, manifest, as_json)


@app.command(
    epilog="""
Examples:

    foredraft low-rank draft --target my-model --trace trace --set share=0.5 --out draft-thin

    foredraft low-rank draft --target my-model --trace trace --set share=0.5 --set form=factored --out draft-thin

    foredraft low-rank draft --target my-model --set units=layers.*.down --set rank=64 --set by=weights --out draft-thin
"""
)
def low_rank(
    draft: DraftFolder,
    target: TargetName,
    out: Out,
    overrides: Overrides,
    traces: OptionalTraces,
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
) -> None:
    """Lower the rank of a draft's matrices; they are written as plain ones, or as two thin ones each."""
    from foredraft.compress_tables import rank_table
    from foredraft.factoring import low_rank_draft
    from foredraft.recipe import settings_from
    from foredraft.steps import LowRankStep

    step = settings_from(LowRankStep, overrides)
    loaded = named_target(target, dtype, adapter)
    manifest = low_rank_draft(draft, loaded, opened_traces(traces, loaded), step, out, progress_bars())
    cuts = manifest.options["low_rank"]
    print_figures(draft_figures(out, manifest) | {"matrices": cuts}, rank_table(cuts, str(out), step.form), as_json)


@app.command(
    epilog="""
Example:

    foredraft sensitivity draft --target my-model --trace trace --set probes=10 --set parts=20 --set 'masks=["2:4"]'
"""
)
def sensitivity(
    draft: DraftFolder,
    target: TargetName,
    traces: Traces,
    overrides: Overrides,
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
) -> None:
    """Show how much of a draft's acceptance hangs on each of its parts."""
    from foredraft.compress_tables import sensitivity_table
    from foredraft.recipe import settings_from
    from foredraft.sensing import draft_sensitivity
    from foredraft.steps import SensitivitySettings

    settings = settings_from(SensitivitySettings, overrides)
    loaded = named_target(target, dtype, adapter)
    found = draft_sensitivity(draft, loaded, opened_traces(traces, loaded), settings, progress_bars())
    print_figures(found, sensitivity_table(found, settings.by), as_json)


@app.command(
    epilog="""
Examples:

    foredraft compress draft --target my-model --trace trace --set megabytes=40 --set hardware=desktop-cpu --out small

    foredraft compress draft --target my-model --trace trace --score eval --set heal=20000 --set method=gptq --out small
"""
)
def compress(
    draft: DraftFolder,
    target: TargetName,
    traces: Traces,
    out: Out,
    overrides: Overrides,
    scored: Scored,
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
) -> None:
    """Search bits, layers, widths, rows and draft length together for the largest predicted speedup in a budget."""
    from foredraft import searching
    from foredraft.compress_tables import front_table
    from foredraft.recipe import settings_from
    from foredraft.steps import CompressStep

    step = settings_from(CompressStep, overrides)
    loaded = named_target(target, dtype, adapter)
    found = searching.compress_draft(
        draft, loaded, opened_traces(traces, loaded), step, out, progress_bars(), opened_traces(scored, loaded)
    )
    print_figures(found, front_table(found), as_json)
