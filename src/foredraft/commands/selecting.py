"""Commands that choose: a drafter for a deployment, a policy for traffic, a shape before anything is trained."""

from pathlib import Path
from typing import Annotated

import typer

from foredraft.commands.common import (
    Adapter,
    Dtype,
    Json,
    Overrides,
    Trust,
    named_target,
    opened_traces,
    print_figures,
    progress_bars,
)
from foredraft.core.errors import UserError

app = typer.Typer()


@app.command(
    epilog="""
Examples:

    foredraft select runs/mine/report.json --memory-fraction 0.2

    foredraft select runs/a/report.json runs/b/report.json --set context=4096 --set portfolio=2

    foredraft select runs/mine/report.json --cascade six=runs/six-as-target/report.json

    foredraft select --simulate --trace day --drafter prompt-lookup --drafter suffix-automaton --policy hedge
"""
)
def select(
    overrides: Overrides,
    traces: Annotated[
        list[Path],
        typer.Option(
            "--trace", help="For --simulate: traces in order of arrival.", default_factory=list, show_default=False
        ),
    ],
    drafters: Annotated[
        list[str],
        typer.Option(
            "--drafter",
            help="For --simulate: a spec, or name=spec under the name that the report has.",
            default_factory=list,
            show_default=False,
        ),
    ],
    policies: Annotated[
        list[str],
        typer.Option(
            "--policy",
            help="For --simulate: all unless given; can be repeated.",
            default_factory=list,
            show_default=False,
        ),
    ],
    cascades: Annotated[
        list[str],
        typer.Option(
            "--cascade",
            help="DRAFTER=report.json of that drafter as a target: what drafts for it makes cascades, which are "
            "candidates too; can be repeated.",
            default_factory=list,
            show_default=False,
        ),
    ],
    reports: Annotated[
        list[Path] | None, typer.Argument(help="report.json of runs or of evaluate-acceptance, of one target.")
    ] = None,
    memory_fraction: Annotated[float, typer.Option(help="Largest draft, as a share of the target's bytes.")] = 0.1,
    runtime: Annotated[
        str, typer.Option(help="Where the draft will be served: foredraft or transformers.")
    ] = "foredraft",
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run policies over recorded traffic; a report gives the times.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="For --simulate: file to write the fastest policy to; `generate --drafter` takes it."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="For --simulate: page to write with choice over time, regret curves and bars by domain."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose the drafter and its length, or the policy that chooses anew for each block, and say why.

    --set takes what a recipe's `select` takes (context, max_bytes, watts and max_joules, batch_size, mix, portfolio,
    full_vocabulary), and
    with --simulate lengths, limit, batch_size, target_bytes, cost_ratio, target_seconds, target_growth,
    deciding_seconds and seed.
    """
    from foredraft.recipe import settings_from
    from foredraft.scoring import read_report

    found = [read_report(path) for path in reports or []]
    if simulate:
        from foredraft.catalog import names
        from foredraft.selection import simulate_policies
        from foredraft.selection_page import write_page
        from foredraft.selection_table import simulation_table
        from foredraft.settings import SimulateSettings

        if not traces or not drafters or len(found) > 1 or cascades:
            raise UserError(
                "--simulate needs --trace and --drafter, takes the times of one report at most, and no --cascade."
            )
        settings = settings_from(SimulateSettings, overrides)
        known, wanted = found[0] if found else None, policies or names("policies")
        figures = simulate_policies(traces=opened_traces(traces), specs=drafters, policies=wanted,
                                    settings=settings, report=known, progress=progress_bars(), out=out)  # fmt: skip
        if html is not None:
            write_page(html, figures)
        print_figures(figures, simulation_table(figures), as_json)
        return
    from foredraft.choosing import choice_table, choose_among
    from foredraft.settings import SelectSettings

    if not found or traces or drafters or policies or out or html:
        raise UserError("Name a report.json; --trace, --drafter, --policy, --out and --html go with --simulate.")
    limits = [f"memory_fraction={memory_fraction}", f"runtime={runtime}", *overrides]
    inner = {name: read_report(Path(path)) for name, path in map(_named_report, cascades)}
    selection = choose_among(found, settings_from(SelectSettings, limits), inner)
    print_figures(selection, choice_table(selection), as_json)


def _named_report(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not (separator and name and path):
        raise UserError(f"--cascade takes DRAFTER=report.json, not {text!r}.")
    return name, path


@app.command(
    epilog="""
Example:

    foredraft plan my-model --hardware h100 --batch-size 8
"""
)
def plan(
    target: Annotated[str, typer.Argument(help="Folder, .gguf file or hub id.")],
    hardware: Annotated[str, typer.Option(help="A shipped profile or a YAML file; `foredraft hardware` lists them.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of context of each request.")] = 1024,
    memory_fraction: Annotated[float, typer.Option(min=0.0, help="Largest draft, as a share of the target.")] = 0.1,
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Say which shape of draft could pay for a target at all, before anything is trained: break-even acceptance."""
    from foredraft.plan import default_shapes, plan_json, plan_shapes, plan_table

    loaded = named_target(target, dtype, adapter, trust_remote_code)
    width, rows = loaded.model.config.get_text_config().hidden_size, loaded.vocab_size
    shapes = default_shapes(loaded.passes.layers, rows)
    found = plan_shapes(loaded.passes, width, rows, hardware, shapes, batch_size, context, memory_fraction)
    figures = plan_json(found, hardware, batch_size, context)
    print_figures(figures, plan_table(figures), as_json)
