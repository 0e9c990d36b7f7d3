"""Commands that make things without training: traces, drafters without a model, laws of drafts."""

from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.commands.common import (
    Adapter,
    DraftFolder,
    Dtype,
    Json,
    Out,
    Overrides,
    TargetName,
    Trust,
    named_target,
    opened_traces,
    print_draft,
    print_figures,
    progress_bars,
)
from foredraft.core.errors import UserError

app = typer.Typer()


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
            named_target(target, dtype, adapter, trust_remote_code), answers, settings, law, out, progress_bars()
        )
        info, figures["logged"], sentence = found.trace.info, found.checks.to_json(), found.checks.sentence
    else:
        speaker = (
            connect(target, tokenizer, model, in_flight, trust_remote_code=trust_remote_code)
            if remote
            else named_target(target, dtype, adapter, trust_remote_code)
        )
        info = collect_trace(speaker, asked, settings, law, out, progress_bars()).info
    figures |= {"trace": str(out), "law": str(law), "answers": info.num_rows, "tokens": info.num_tokens}
    said = f"{info.num_rows} answers, {info.num_tokens:,} tokens, {law}: {out}\n{sentence}".strip()
    print_figures(figures, said, as_json)


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
    loaded = named_target(target, dtype, adapter)
    written = verbs.set_law(draft, loaded, opened_traces(traces, loaded), step, out, progress_bars())
    print_draft(out, written, as_json)


@app.command(
    "build-ngram",
    epilog="""
Examples:

    foredraft build-ngram --target my-model --trace trace --set order=5 --out table

    foredraft build-ngram --kind suffix --target my-model --text src.jsonl --text manual.txt::0.5 --out index

    foredraft build-ngram --target my-model --lookup-cache cache.bin --out table

    foredraft build-ngram --verify --out index
""",
)
def build_ngram(
    out: Out,
    overrides: Overrides,
    traces: Annotated[
        list[Path],
        typer.Option("--trace", help="Trace folder; can be repeated.", default_factory=list, show_default=False),
    ],
    texts: Annotated[
        list[str],
        typer.Option(
            "--text", help="JSONL or plain text; file::2 counts it twice.", default_factory=list, show_default=False
        ),
    ],
    datasets: Annotated[
        list[str],
        typer.Option(
            "--dataset", help="A `datasets` id or folder; id::2 too.", default_factory=list, show_default=False
        ),
    ],
    target: Annotated[str, typer.Option(help="The target; left out, what the traces say of it.")] = "",
    kind: Annotated[str, typer.Option(help="What to build.")] = "ngram",
    lookup_cache: Annotated[
        Path | None, typer.Option(help="llama.cpp's lookup cache, to read counts from instead.", show_default=False)
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all of it back; one that is there already is only read.")
    ] = False,
    dtype: Dtype = "auto",
    adapter: Adapter = "",
    as_json: Json = False,
) -> None:
    """Build a drafter without a model from what the target wrote, from text, or from both."""
    from foredraft import corpora
    from foredraft.checkpoint import MANIFEST, read_manifest
    from foredraft.recipe import settings_from
    from foredraft.steps import NgramStep
    from foredraft.trace.store import absent_target

    if not (verify and (out / MANIFEST).is_file()):
        given = corpora.sources(bool(traces), texts, datasets)
        step = settings_from(NgramStep, [f"kind={kind}", *given, *overrides])
        opened = opened_traces(traces)
        loaded = named_target(target, dtype, adapter) if target else absent_target(opened)
        if lookup_cache:
            corpora.import_lookup(loaded, lookup_cache, out)
        else:
            corpora.build_drafter(loaded, opened, step, out, progress_bars())
    manifest = corpora.verify_built(out) if verify else read_manifest(out)
    print_draft(out, manifest, as_json)
