"""The search for a smaller draft, from folder to folder; a search that was stopped goes on where it was."""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.compress.choice import Choice, Cutters, cut_draft, formats_of
from foredraft.compress.moves import Reach
from foredraft.compress.plan import unit_formats
from foredraft.compress.probe import Bench
from foredraft.compress.quantize import require_plain, unit_sizes
from foredraft.compress.search import Clock, Limits, Point, best_point, pareto_front, search
from foredraft.compressing import sample_answers
from foredraft.core.digest import digest_of, file_digest
from foredraft.core.errors import ModelError, UserError
from foredraft.core.files import claimed, write_json
from foredraft.core.multiples import MULTIPLES
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Answer
from foredraft.distill.init.head import frequent_rows
from foredraft.distill.init.width import Importance, narrow_by, require_plain_decoder
from foredraft.distill.init.widths import Widths
from foredraft.distill.limits import require_laws
from foredraft.distill.resume import forget_points
from foredraft.hardware.profile import load_profile
from foredraft.healing import Finish, finish
from foredraft.lineage import extended, manifest_for
from foredraft.models.calibration import calibration_batches
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.layers import keep_layers
from foredraft.models.reopened import refuse_changed_logits
from foredraft.models.target import LocalTarget
from foredraft.models.units import search_units
from foredraft.search_plot import search_svg
from foredraft.shrink_steps import CompressStep
from foredraft.trace.prompts import Prompt
from foredraft.trace.store import Trace, require_same

_log = logging.getLogger(__name__)

PLOT = "search.svg"
_SCHEMA = 2


def compress_draft(
    source: Path,
    target: LocalTarget,
    traces: Sequence[Trace],
    step: CompressStep,
    out: Path,
    progress: Progress = SILENT,
    scored: Sequence[Trace] = (),
    held_out: Sequence[Prompt] = (),
) -> dict[str, Any]:
    """Write the draft that the search ends with, healed if asked for; return the way there, the front, what was chosen,
    and what was measured of it before the cut, after it and after healing.

    Points are kept beside `out` after each step, in a hidden file that goes when the draft is written; so are the
    points of the training that heals.

    Args:
        scored: Traces that only score what is written; left out, the answers that the search was made on.
        held_out: Prompts that must not be learnt from.

    Raises:
        ModelError: the draft is quantized already.
        RecipeError: a group that does not divide the inputs of a matrix.
        TraceError: a trace in other tokens, or one to heal on that another target wrote or that keeps too little of
            its laws.
        UserError: there is no trace, or no point is within the limits.
        OutputError: the folder exists already, or another search writes it.
    """
    with claimed(out):
        return _compressed(source, target, traces, step, out, progress, scored, held_out)


def _compressed(
    source: Path,
    target: LocalTarget,
    traces: Sequence[Trace],
    step: CompressStep,
    out: Path,
    progress: Progress,
    scored: Sequence[Trace],
    held_out: Sequence[Prompt],
) -> dict[str, Any]:
    draft = load_draft(source, "float32")
    manifest = extended(manifest_for(source, target), "compress", step)
    require_plain(draft)
    unit_formats(draft.model, search_units(draft.model), {"*": 4}, step.group)
    _refuse_foreign(traces, scored, target, step)
    answers = sample_answers(traces, target, step.gradients)
    bench = _bench(traces[0], step.answers, step)
    clock = Clock(target.passes, load_profile(step.hardware).machine(), step.context)
    cutters = _cutters(draft, traces, target, answers)
    limits = Limits(step.megabytes * 1e6, step.milliseconds, step.share, step.lookahead)
    key = digest_of(
        [
            _weight_digests(source),
            draft.head_token_ids.tolist(),
            [trace.digest for trace in traces],
            step.model_dump(exclude={"heal", "method"}),
            asdict(clock),
        ]
    )
    notes, training = out.with_name(f".{out.name}.search.json"), out.with_name(f".{out.name}.training")
    note = partial(_note, notes, key)
    reach = _reach(draft, step)
    points = search(draft, bench, answers, clock, limits, reach, cutters, _noted(notes, key), note, progress)
    chosen = best_point(points, limits)
    if chosen is None:
        raise UserError(
            "No draft within the limits was found: the smallest reads "
            f"{min(point.bytes for point in points) / 1e6:.1f} MB a step. Raise the limits, or take a smaller draft."
        )
    final = _bench(scored[0], sys.maxsize, step) if scored else bench
    plain = _cut_apart(draft, chosen.choice, cutters)
    formats = formats_of(draft, chosen.choice, step.group)
    job = Finish(source, target, traces, final, chosen.k, training, held_out)
    written, stages = finish(draft, plain, formats, answers, step, job, progress)
    found = {
        "draft": str(out),
        "target": target.name,
        "points": [point.to_json() for point in points],
        "front": [points.index(point) for point in pareto_front(points)],
        "chosen": points.index(chosen),
        "k": chosen.k,
        "stages": stages,
        "scored": "held-out answers" if scored else "the answers of the search",
    }
    sizes = [asdict(size) for size in unit_sizes(written.model)]
    manifest = replace(manifest, options={**manifest.options, "units": sizes, "search": found})

    def draw(folder: Path, model: PreTrainedModel) -> None:
        refuse_changed_logits(folder, model)
        (folder / PLOT).write_text(search_svg(found), encoding="utf-8")

    save_draft(written, out, manifest, target.tokenizer, draw)
    notes.unlink(missing_ok=True)
    forget_points(training)
    return found


def _refuse_foreign(traces: Sequence[Trace], scored: Sequence[Trace], target: LocalTarget, step: CompressStep) -> None:
    """Raise before the search for what scoring and healing would refuse behind it."""
    for trace in scored:
        require_same(trace, target.name, tokenizer_fingerprint=target.tokenizer_fingerprint)
    if step.heal.tokens:
        for trace in traces:
            require_same(trace, target.name, target_fingerprint=target.fingerprint)
        require_laws(step.heal.loss, traces)


def _bench(trace: Trace, answers: int, step: CompressStep) -> Bench:
    rows = trace.sample(answers)
    return Bench.of(rows, trace.info.law, trace.info.vocab_size, range(1, step.num_draft_tokens + 1))


def _reach(draft: Draft, step: CompressStep) -> Reach:
    """Return what moves the search may make; those that this draft cannot are left out, unless no other was asked for.

    Raises:
        ModelError: no other was.
    """
    multiple = MULTIPLES.get(step.runtime, 1)
    kinds = [kind for kind in step.moves if kind != "rows" or not step.runtime]
    if "ffn" in kinds:
        try:
            require_plain_decoder(draft.model)
        except ModelError as error:
            kinds.remove("ffn")
            if not kinds:
                raise
            _log.warning("moves: ffn is left out. %s", error)
    return Reach(kinds, step.tries, step.chunk, step.group, max(multiple, step.group))


def _cutters(draft: Draft, traces: Sequence[Trace], target: LocalTarget, answers: Sequence[Answer]) -> Cutters:
    """Return what cuts widths by importance and rows by how often the target says them; both are measured once."""

    @cache
    def importance() -> Importance:
        return Importance(draft.model, calibration_batches(answers))

    def narrow(model: PreTrainedModel, layers: Sequence[int], ffn: int) -> PreTrainedModel:
        return narrow_by(model, Widths(ffn=ffn), importance().of_layers(layers)).model

    @cache
    def rows(count: int) -> Int[Tensor, " kept"]:
        return frequent_rows(traces, target.tokenizer, count)

    return Cutters(narrow, rows)


def _cut_apart(draft: Draft, choice: Choice, cutters: Cutters) -> Draft:
    """Return the draft of a choice with weights of its own, tied where they were."""
    plain = cut_draft(draft, choice, cutters)
    layers = range(plain.model.config.get_text_config().num_hidden_layers)
    return Draft(keep_layers(plain.model, layers), plain.head_token_ids)


def _weight_digests(source: Path) -> list[str]:
    return [file_digest(file) for file in sorted(source.glob("*.safetensors"))]


def _noted(notes: Path, key: str) -> list[Point]:
    """Return the points of a search for the same thing that was stopped; none where its notes cannot be read."""
    if not notes.is_file():
        return []
    try:
        found = json.loads(notes.read_text(encoding="utf-8"))
        if (found["schema"], found["key"]) == (_SCHEMA, key):
            return [Point.from_json(point) for point in found["points"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.info("%s cannot be read (%s): the search begins anew.", notes, error)
    return []


def _note(notes: Path, key: str, points: Sequence[Point]) -> None:
    write_json(notes, {"schema": _SCHEMA, "key": key, "points": [point.to_json() for point in points]})
