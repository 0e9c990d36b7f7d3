"""The command line: parse, call one function, print. Results go to stdout, everything else to stderr.

Heavy imports happen inside the commands, so that help and completion stay instant.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.logging import RichHandler

from foredraft.core.errors import ForedraftError, UserError

if TYPE_CHECKING:
    from foredraft.checkpoint import DraftManifest
    from foredraft.core.progress import Progress
    from foredraft.models.target import LocalTarget
    from foredraft.trace.store import Trace

app = typer.Typer(
    help="Make, shrink, measure and choose draft models for speculative decoding.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
# Tables keep their columns where stdout is a file or a pipe.
_stdout, _stderr = Console(width=None if sys.stdout.isatty() else 100), Console(stderr=True)

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
    if report := run_recipe(resolved, folder, _progress(), trust_remote_code):
        _show_report(report, folder, as_json)


@app.command(
    epilog="""
Examples:

    foredraft collect --target my-model --prompts traffic.jsonl --temperature 0 --out trace

    foredraft collect --target http://host:8000/v1 --tokenizer my-model --prompts traffic.jsonl --top 20 --out trace

    foredraft collect --target my-model --answers-from-log log.jsonl --temperature 0.7 --out trace
"""
)
def collect(
    target: Annotated[str, typer.Option("--target", help="Folder, .gguf file, hub id, or address of a server.")],
    out: Out,
    prompts: Annotated[
        str, typer.Option(help="JSONL with prompt, messages or turns; `shipped` for the package's own.")
    ] = "",
    log: Annotated[
        str, typer.Option("--answers-from-log", help="JSONL with prompts and the answers that this target gave.")
    ] = "",
    tokenizer: Annotated[str, typer.Option(help="For a server: its model's tokenizer, a folder or hub id.")] = "",
    model: Annotated[str, typer.Option(help="For a server of several models: which one.")] = "",
    in_flight: Annotated[int, typer.Option(help="For a server: requests at the same time.", min=1)] = 32,
    top: Annotated[
        int | None,
        typer.Option(
            help="Likeliest tokens kept at each position; 64, and 20 from a server, unless given.",
            min=0,
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.")] = 0,
    top_p: float = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Answers written at once.")] = 48,
    seed: int = 0,
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Write down what a target answers, with its law at every token. The same again goes on where it was."""
    from foredraft.core.law import SamplingLaw
    from foredraft.models.remote.target import SERVERS_TOP, connect, is_url
    from foredraft.settings import PromptSource, TraceSettings
    from foredraft.trace.collect import collect as collect_trace
    from foredraft.trace.prompts import read_prompts

    law, remote = SamplingLaw(temperature, top_k, top_p), is_url(target)
    if not (prompts or log):
        raise UserError("Give --prompts for the target to answer, or --answers-from-log with answers that it gave.")
    source = PromptSource(file=prompts or log)
    kept = top if top is not None else SERVERS_TOP if remote else TraceSettings.model_fields["top"].default
    settings = TraceSettings(
        prompts=[source], max_new_tokens=max_new_tokens, top=kept, batch_size=batch_size, seed=seed
    )
    asked = read_prompts(source) if prompts else []
    figures: dict[str, Any] = {}
    sentence = ""
    if log:
        from foredraft.trace.logged import collect_logged, read_log

        answers = read_log(Path(log), asked)
        found = collect_logged(
            _target(target, dtype, adapter, trust_remote_code), answers, settings, law, out, _progress()
        )
        info, figures["logged"], sentence = found.trace.info, found.checks.to_json(), found.checks.sentence
    else:
        speaker = (
            connect(target, tokenizer, model, in_flight, trust_remote_code=trust_remote_code)
            if remote
            else _target(target, dtype, adapter, trust_remote_code)
        )
        info = collect_trace(speaker, asked, settings, law, out, _progress()).info
    figures |= {"trace": str(out), "law": str(law), "answers": info.num_rows, "tokens": info.num_tokens}
    _print(figures, f"{info.num_rows} answers, {info.num_tokens:,} tokens, {law}: {out}\n{sentence}".strip(), as_json)


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
    loaded = _target(target, dtype, adapter, trust_remote_code)
    verbs.refuse_impossible(Step(init=step), loaded)
    _print_draft(out, verbs.init_draft(loaded, _traces(traces), step, out), as_json)


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
    loaded, opened = _target(target, dtype, adapter, trust_remote_code), _traces(traces)
    if not here.is_main:
        trainings.help_training(loaded)
        return
    if draft is None:
        draft = out.with_name(f"{out.name}-untrained")
        if not draft.exists():
            verbs.init_draft(loaded, opened, InitStep(layers=layers, vocab=vocab), draft)
    held_out = read_prompts(PromptSource(file=eval_prompts)) if eval_prompts else []
    written = trainings.distill_draft(draft, loaded, opened, step, out, _progress(), held_out=held_out)
    trainings.dismiss_helpers()
    _print_draft(out, written, as_json)


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
        loaded = _target(target, dtype, adapter, trust_remote_code)
        _print_draft(out, trainings.meta_draft(draft, loaded, _traces(traces), found, out, _progress()), as_json)
        return
    step = settings_from(AdaptStep, [f"buffer={json.dumps([str(folder) for folder in buffers])}", *overrides])
    asked = read_prompts(PromptSource(file=prompts)) if prompts else []
    requests = online.Requests(asked, Asked(SamplingLaw(temperature), max_new_tokens), keeps_text=not no_text)
    loaded = _target(target, dtype, adapter, trust_remote_code)
    manifest = online.adapt_online(
        draft, loaded, requests, megabytes, _traces(traces), _traces(guards), step, out, _progress()
    )
    _print_adapted(out, manifest, as_json)


@app.command(
    epilog="""
Example:

    foredraft quantize draft --target my-model --out draft-int8
"""
)
def quantize(
    draft: DraftFolder,
    target: TargetName,
    out: Out,
    overrides: Overrides,
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
) -> None:
    """Round a draft's weights to 8 bits."""
    from foredraft import verbs
    from foredraft.recipe import settings_from
    from foredraft.steps import QuantizeStep

    step = settings_from(QuantizeStep, overrides)
    _print_draft(out, verbs.quantize_draft(draft, _target(target, dtype, adapter), step, out), as_json)


@app.command(
    epilog="""
Example:

    foredraft prune draft --target my-model --trace trace --set layers=2 --out draft-4
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
    """Cut layers out of a draft. Heal it afterwards with `foredraft distill --draft`."""
    from foredraft import verbs
    from foredraft.recipe import settings_from
    from foredraft.steps import PruneStep

    step = settings_from(PruneStep, overrides)
    _print_draft(out, verbs.prune_draft(draft, _target(target, dtype, adapter), _traces(traces), step, out), as_json)


@app.command(
    "fit-law",
    epilog="""
Examples:

    foredraft fit-law draft --target my-model --trace trace --out draft-fitted

    foredraft fit-law draft --target my-model --set temperature=0.7 --set top_k=20 --out draft-cool
""",
)
def fit_law(
    draft: DraftFolder,
    target: TargetName,
    out: Out,
    overrides: Overrides,
    traces: Annotated[
        list[Path],
        typer.Option(
            "--trace", help="Training trace to fit on; repeat for more.", default_factory=list, show_default=False
        ),
    ],
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
) -> None:
    """Give a draft the temperature and top-k under which the target accepts most, or those you name."""
    from foredraft import verbs
    from foredraft.recipe import settings_from
    from foredraft.steps import LawStep

    step = settings_from(LawStep, overrides)
    if step.is_fitted and not traces:
        raise UserError("Give --trace to fit a law on, or --set temperature=... for a law of your own.")
    written = verbs.set_law(draft, _target(target, dtype, adapter), _traces(traces), step, out, _progress())
    _print_draft(out, written, as_json)


@app.command(
    "build-ngram",
    epilog="""
Example:

    foredraft build-ngram --target my-model --trace trace --set order=5 --out table
""",
)
def build_ngram(
    traces: Traces,
    out: Out,
    overrides: Overrides,
    target: Annotated[str, typer.Option(help="The target; left out, what the traces say of it.")] = "",
    kind: Annotated[str, typer.Option(help="What to build.")] = "ngram",
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
) -> None:
    """Build a drafter without a model from what the target wrote."""
    from foredraft import verbs
    from foredraft.recipe import settings_from
    from foredraft.steps import NgramStep
    from foredraft.trace.store import absent_target

    step = settings_from(NgramStep, [f"kind={kind}", *overrides])
    opened = _traces(traces)
    loaded = _target(target, dtype, adapter) if target else absent_target(opened)
    _print_draft(out, verbs.build_ngram(loaded, opened, step, out, _progress()), as_json)


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
    opened = _traces(traces)
    loaded = _target(target, dtype, adapter, trust_remote_code) if target else absent_target(opened)
    server = read_server(server_metrics) if server_metrics else None
    report = evaluate_drafters(
        loaded, drafters, opened or collecting, out, settings, _progress(), trust_remote_code, server
    )
    _show_report(report, out, as_json)
    _fail_with(report_shortfalls(report, least) if least else [])


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
    _print({"comparisons": comparison_json(found), "under": missed}, comparison_table(found), as_json)
    _fail_with(missed)


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
    _print(found.to_json(), found.sentence, as_json)


@app.command(
    epilog="""
Example:

    foredraft select runs/mine/report.json --memory-fraction 0.2
"""
)
def select(
    report: Annotated[Path, typer.Argument(help="report.json of a run or of evaluate-acceptance.")],
    memory_fraction: Annotated[float, typer.Option(help="Largest draft, as a share of the target's bytes.")] = 0.1,
    runtime: Annotated[
        str, typer.Option(help="Where the draft will be served: foredraft or transformers.")
    ] = "foredraft",
    as_json: Json = False,
) -> None:
    """Choose the drafter and its draft length, and say why the others lost."""
    from foredraft.recipe import validated
    from foredraft.scoring import choose_from, read_report
    from foredraft.settings import SelectSettings

    settings = validated(SelectSettings, {"memory_fraction": memory_fraction, "runtime": runtime}, "select")
    selection = choose_from(read_report(report), settings)
    lines = [selection["sentence"], *(f"  {name}: {reason}" for name, reason in selection["reasons"].items())]
    lines += selection["warnings"]
    _print(selection, "\n".join(lines), as_json)


@app.command(
    epilog="""
Example:

    foredraft export runs/mine/drafts/prefix-6/distill-1a2b3c4d --target my-model --out served/draft
"""
)
def export(
    draft: DraftFolder,
    target: TargetName,
    out: Out,
    runtime: Annotated[str, typer.Option(help="For which runtime.")] = "transformers",
    num_draft_tokens: Annotated[int, typer.Option("--k", help="Draft tokens of a block.", min=1)] = 4,
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
) -> None:
    """Write a draft as another runtime loads it."""
    from foredraft.verbs import export_draft

    folder = export_draft(draft, _target(target, dtype, adapter), runtime, num_draft_tokens, out)
    _print({"runtime": runtime, "folder": str(folder)}, f"For {runtime}: {folder}", as_json)


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
    num_draft_tokens: Annotated[int, typer.Option("--k", help="Draft tokens that the commands ask for.", min=1)] = 4,
    weights: Annotated[
        bool, typer.Option("--weights", help="Read the target's weights too: has it changed behind the draft?")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say whether a draft can serve a target, in which runtime, and what fixes it. Exit status 2 where it cannot."""
    from foredraft.check import check_pair
    from foredraft.check_table import check_table

    found = check_pair(target, draft, runtimes, trace, num_draft_tokens, weights)
    _print(found.to_json(), check_table(found), as_json)
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
    _show_report(found, folder, as_json)


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
        _print(profiles, "\n".join(f"{name:20} {profile['name']}" for name, profile in profiles.items()), as_json)
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
    _print(measured.model_dump(), text, as_json)


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
    num_draft_tokens: Annotated[int, typer.Option("--k", help="Draft tokens of a block.", min=1)] = 4,
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
    loaded = _target(target, dtype, adapter, trust_remote_code)
    guesser = load_drafter(drafter, loaded, trust_remote_code) if drafter else None
    buffer = open_buffer(loaded, asked, gather, megabytes) if gather else None
    if out is not None:
        wanted = read_prompts(PromptSource(file=prompts))
        count = answer_file(loaded, guesser, wanted, asked, settings, out, _progress(), buffer)
        _print({"answers": str(out), "new": count}, f"{count} new answers: {out}", as_json)
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
    _print(figures, found.text, as_json)
    _stderr.print(
        f"{found.tokens} tokens, {found.target_calls} target calls, "
        f"{found.mean_tokens_per_call:.2f} tokens per call, {found.tokens_per_second:.1f} tok/s"
    )


def main() -> None:
    """Run the command line; a foreseen error is one or two lines on stderr and its exit status."""
    _set_up_logging()
    try:
        app(standalone_mode=True)
    except ForedraftError as error:
        if _is_helper():
            raise SystemExit(error.exit_status) from None
        if "--json" in sys.argv:
            sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        _stderr.print(f"[bold red]error:[/] {_escaped(str(error))}", highlight=False, soft_wrap=True)
        raise SystemExit(error.exit_status) from None
    except KeyboardInterrupt:
        _stderr.print("Interrupted. The same command goes on where it was.")
        raise SystemExit(130) from None


def _is_helper() -> bool:
    """Return whether a launcher started this process beside the main one, which alone prints."""
    return os.environ.get("RANK", "0") != "0"


def _set_up_logging() -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(format="%(message)s", handlers=[RichHandler(console=_stderr, show_path=False, show_time=False)])
    logging.getLogger("foredraft").setLevel(logging.CRITICAL if _is_helper() else logging.INFO)


def _progress() -> "Progress":
    from foredraft.display import progress_for

    return progress_for(_stderr)


def _target(name: str, dtype: str, adapter: str, trust_remote_code: bool = False) -> "LocalTarget":
    from foredraft.models.target import load_target

    return load_target(name, dtype, trust_remote_code, adapter)


def _traces(folders: list[Path]) -> "list[Trace]":
    from foredraft.trace.store import open_trace

    return [open_trace(folder) for folder in folders]


def _show_report(report: dict[str, Any], folder: Path, as_json: bool) -> None:
    from foredraft.acceptance.terminal import leaderboard_table

    _print(report, leaderboard_table(report), as_json)
    if not as_json:
        _stdout.print(f"Report: {folder / 'report.html'}", soft_wrap=True)


def _fail_with(missed: list[str]) -> None:
    for sentence in missed:
        _stderr.print(f"[bold red]under:[/] {_escaped(sentence)}", highlight=False, soft_wrap=True)
    if missed:
        raise typer.Exit(1)


def _print_draft(out: Path, manifest: "DraftManifest", as_json: bool) -> None:
    figures = {"draft": str(out), "kind": manifest.kind, "digest": manifest.digest, "target": manifest.target}
    _print(figures, f"{manifest.kind} draft for {manifest.target}: {out}", as_json)


def _print_adapted(out: Path, manifest: "DraftManifest", as_json: bool) -> None:
    found = manifest.options["adapted"]
    figures = {"draft": str(out), "digest": manifest.digest, **found}
    change = found["held_out"]["mean_tokens_per_call"]
    gain = f"{change['before']:.3f} -> {change['after']:.3f} tokens per call on held-out answers"
    shown = f"The old draft stays, {found['reason']}: {out}" if found["reason"] else f"Adapted, {gain}: {out}"
    _print(figures, shown, as_json)


def _print(figures: dict[str, Any], shown: RenderableType, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(figures, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        _stdout.print(shown, highlight=False, markup=False, soft_wrap=isinstance(shown, str))


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


if __name__ == "__main__":
    main()
