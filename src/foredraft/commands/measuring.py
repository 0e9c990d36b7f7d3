"""Commands that measure, compare and choose."""

import json
from pathlib import Path
from typing import Annotated

import typer

from foredraft.commands.common import (
    Adapter,
    AllowNoise,
    Dtype,
    FailUnder,
    Hardware,
    Json,
    Metric,
    Out,
    Overrides,
    Trust,
    fail_with,
    named_target,
    opened_traces,
    print_figures,
    progress_bars,
    show_report,
)
from foredraft.core.errors import UserError
from foredraft.core.lengths import LONGEST_DRAFT

app = typer.Typer()


@app.command(
    "evaluate-acceptance",
    epilog="""
Examples:

    foredraft evaluate-acceptance --target my-model --drafter draft --prompts traffic.jsonl --out scores

    foredraft evaluate-acceptance --target my-model --drafter prompt-lookup:max_match=4 --trace trace --out scores

    foredraft evaluate-acceptance --drafter draft --trace trace --server-metrics http://host:8000 --out scores
""",
)
def evaluate_acceptance(
    drafters: Annotated[
        list[str], typer.Option("--drafter", help="Draft folder, hub id, or kind:option=value,...; can be repeated.")
    ],
    out: Out,
    overrides: Overrides,
    traces: Annotated[
        list[Path],
        typer.Option(
            "--trace",
            help="Trace folder instead of --prompts; can be repeated.",
            default_factory=list,
            show_default=False,
        ),
    ],
    temperatures: Annotated[
        list[float],
        typer.Option(
            "--temperature",
            help="Laws to score under; 0 and 1 unless given.",
            default_factory=lambda: [0.0, 1.0],
            show_default=False,
        ),
    ],
    target: Annotated[
        str, typer.Option(help="Folder, .gguf file or hub id. Left out, traces are scored without times.")
    ] = "",
    prompts: Annotated[
        str, typer.Option(help="JSONL with prompt, messages or turns; `shipped` for the package's own.")
    ] = "",
    server_metrics: Annotated[
        str, typer.Option(help="Address of a server that speculates, whose counters are shown beside the scores.")
    ] = "",
    limit: Annotated[int, typer.Option(help="Prompts scored; 0 takes all.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    fail_under: FailUnder = "",
    metric: Metric = "expected_acceptance",
    allow_noise: AllowNoise = False,
    hardware: Hardware = None,
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Score drafters by replaying them over what the target itself wrote."""
    from foredraft.acceptance.counters import read_server
    from foredraft.limits import Limit, report_shortfalls
    from foredraft.pool import evaluate_drafters
    from foredraft.recipe import settings_from
    from foredraft.settings import EvaluateSettings, LawSettings, PromptSource, TraceSettings
    from foredraft.trace.store import absent_target

    if bool(prompts) == bool(traces):
        raise UserError("Give --prompts, or --trace with answers that the target wrote.")
    least = Limit.read(fail_under, metric, allow_noise) if fail_under else None
    if least is not None and least.is_relative:
        raise UserError("--fail-under takes a percentage only where two drafters are compared: foredraft compare.")
    collecting = TraceSettings(
        prompts=[PromptSource(file=prompts or "shipped", eval=limit)],
        laws=[LawSettings(temperature=temperature) for temperature in temperatures],
        max_new_tokens=max_new_tokens,
    )
    settings = settings_from(
        EvaluateSettings, [*overrides, *([f"hardware={json.dumps(hardware)}"] if hardware else [])]
    )
    opened = opened_traces(traces)
    loaded = named_target(target, dtype, adapter, trust_remote_code) if target else absent_target(opened)
    server = read_server(server_metrics) if server_metrics else None
    report = evaluate_drafters(
        loaded, drafters, opened or collecting, out, settings, progress_bars(), trust_remote_code, server
    )
    show_report(report, out, as_json)
    fail_with(report_shortfalls(report, least) if least else [])


@app.command(
    epilog="""
Examples:

    foredraft compare runs/before runs/after --fail-under -2%

    foredraft compare runs/mine --drafter prefix-6 --drafter prefix-6-int8

    foredraft compare runs/mine vllm-bench.json --drafter prefix-6
"""
)
def compare(
    first: Annotated[Path, typer.Argument(help="Run folder or report.json: the baseline.")],
    drafters: Annotated[
        list[str],
        typer.Option(
            "--drafter",
            help="A name that both have, or one of each; left out, all names that both have.",
            default_factory=list,
            show_default=False,
        ),
    ],
    second: Annotated[
        Path | None,
        typer.Argument(help="Another one, or a report of `vllm bench serve` or of SGLang's bench_serving."),
    ] = None,
    num_draft_tokens: Annotated[int, typer.Option("--k", help="Draft length; 0 takes the first's best.", min=0)] = 0,
    fail_under: FailUnder = "",
    metric: Metric = "expected_acceptance",
    allow_noise: AllowNoise = False,
    as_json: Json = False,
) -> None:
    """Compare drafters on the same text, paired by prompt: how much, how sure, and how many prompts would tell."""
    from foredraft.compare import compare_reports, comparison_json
    from foredraft.compare_table import comparison_table
    from foredraft.limits import Limit, shortfalls

    least = Limit.read(fail_under, metric, allow_noise) if fail_under else None
    found = compare_reports(first, second, drafters, num_draft_tokens)
    missed = shortfalls(found, least) if least else []
    print_figures({"comparisons": comparison_json(found), "under": missed}, comparison_table(found), as_json)
    fail_with(missed)


@app.command(
    epilog="""
Example:

    foredraft counters http://host:8000
"""
)
def counters(
    url: Annotated[str, typer.Argument(help="Address of a vLLM, SGLang or llama.cpp server that speculates.")],
    as_json: Json = False,
) -> None:
    """Read a server's own counts of drafted and accepted tokens, under the names that scores have here."""
    from foredraft.acceptance.counters import read_server

    found = read_server(url)
    print_figures(found.to_json(), found.sentence, as_json)


@app.command(
    epilog="""
Examples:

    foredraft check my-model my-draft

    foredraft check my-model.gguf my-draft.gguf --runtime llama.cpp --json
"""
)
def check(
    target: Annotated[str, typer.Argument(help="Folder, .gguf file or hub id.")],
    draft: Annotated[str, typer.Argument(help="Draft folder, transformers folder, .gguf file or hub id.")],
    runtimes: Annotated[
        list[str],
        typer.Option(
            "--runtime",
            help="Where the pair must be usable; foredraft and transformers unless given; can be repeated.",
            default_factory=list,
            show_default=False,
        ),
    ],
    trace: Annotated[Path | None, typer.Option(help="Trace whose text weights the tokens that map.")] = None,
    num_draft_tokens: Annotated[
        int, typer.Option("--k", help="Draft tokens that the commands ask for.", min=1, max=LONGEST_DRAFT)
    ] = 4,
    weights: Annotated[
        bool, typer.Option("--weights", help="Read the target's weights too: has it changed behind the draft?")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say whether a draft can serve a target, in which runtime, and what fixes it. Exit status 2 where it cannot."""
    from foredraft.check import check_pair
    from foredraft.check_table import check_table

    found = check_pair(target, draft, runtimes, trace, num_draft_tokens, weights)
    print_figures(found.to_json(), check_table(found), as_json)
    if not found.is_usable:
        raise typer.Exit(2)


@app.command(
    epilog="""
Example:

    foredraft report runs/quickstart

    foredraft report runs/quickstart --hardware h100 --hardware my-card.yaml --batch-size 1 --batch-size 16
"""
)
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a run or of evaluate-acceptance.")],
    hardware: Hardware = None,
    batch_sizes: Annotated[
        list[int] | None, typer.Option("--batch-size", min=1, help="Requests decoded together there; repeat for more.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of context of each request there.", min=1)] = 1024,
    as_json: Json = False,
) -> None:
    """Show the leaderboard of a finished run again, or what it predicts for another machine; no model is loaded."""
    from foredraft.scoring import predicted_elsewhere, read_report
    from foredraft.settings import EvaluateSettings

    found = read_report(folder / "report.json")
    if hardware:
        settings = EvaluateSettings(batch_sizes=batch_sizes or [1], batch_context=context)
        found = predicted_elsewhere(found, hardware, settings)
    show_report(found, folder, as_json)


@app.command(
    "hardware",
    epilog="""
Examples:

    foredraft hardware

    foredraft hardware --measure --out this-machine.yaml
""",
)
def show_hardware(
    measure: Annotated[bool, typer.Option("--measure", help="Measure this processor; takes seconds.")] = False,
    out: Annotated[Path | None, typer.Option(help="YAML file to write the measured profile to.")] = None,
    watts: Annotated[float, typer.Option(help="Power of this machine while it decodes.", min=0.1)] = 65.0,
    as_json: Json = False,
) -> None:
    """List the machines that predictions can be made for, or measure this one."""
    from foredraft.hardware.profile import profile_yaml, shipped

    if not measure:
        profiles = {name: profile.model_dump() for name, profile in shipped().items()}
        lines = [f"{name:20} {profile['name']}" for name, profile in profiles.items()]
        print_figures(profiles, "\n".join(lines), as_json)
        return
    from foredraft.core.files import whole_file
    from foredraft.hardware.measure import measure_profile

    if out is not None and out.exists():
        raise UserError(f"{out} exists already and is never overwritten: name another file.")
    measured = measure_profile(watts=watts)
    text = profile_yaml(measured)
    if out is not None:
        with whole_file(out) as partial:
            partial.write_text(text, encoding="utf-8")
    print_figures(measured.model_dump(), text, as_json)
