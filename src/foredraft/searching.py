"""The search for a smaller draft, from folder to folder; a search that was stopped goes on where it was."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from foredraft.compress.gptq import GptqRounder
from foredraft.compress.plan import unit_formats
from foredraft.compress.probe import Bench
from foredraft.compress.quantize import Rounder, quantize, require_plain, round_to_nearest, unit_sizes
from foredraft.compress.search import Clock, Limits, Point, best_point, formats_of, pareto_front, search
from foredraft.compress.units import search_units
from foredraft.compressing import sample_answers, stored_as
from foredraft.core.digest import digest_of, file_digest
from foredraft.core.errors import UserError
from foredraft.core.files import refuse_existing, write_json
from foredraft.core.progress import SILENT, Progress
from foredraft.hardware.profile import load_profile
from foredraft.lineage import extended, manifest_for
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.layers import keep_layers
from foredraft.models.target import LocalTarget
from foredraft.steps import CompressSettings
from foredraft.trace.store import Trace

_SCHEMA = 1


def compress_draft(
    source: Path,
    target: LocalTarget,
    traces: Sequence[Trace],
    settings: CompressSettings,
    out: Path,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Write the draft that the search ends with; return the way there, the front, and what was chosen.

    Points are kept beside `out` after each step, in a hidden file that goes when the draft is written.

    Raises:
        ModelError: the draft is quantized already.
        RecipeError: a group that does not divide the inputs of a matrix.
        UserError: there is no trace, or no point is within the limits.
        OutputError: the folder exists already.
    """
    refuse_existing(out)
    draft = load_draft(source, "float32")
    manifest = extended(manifest_for(source, target), "compress", settings)
    require_plain(draft)
    unit_formats(draft.model, search_units(draft.model), {"*": 4}, settings.group)
    answers = sample_answers(traces, target, settings.gradients)
    info = traces[0].info
    bench = Bench.of(
        traces[0].sample(settings.answers), info.law, info.vocab_size, range(1, settings.num_draft_tokens + 1)
    )
    limits = Limits(settings.megabytes * 1e6, settings.milliseconds, settings.tries, settings.chunk, settings.group)
    clock = Clock(target.passes, load_profile(settings.hardware).machine(), settings.context)
    key = digest_of(
        [
            file_digest(source / "model.safetensors"),
            draft.head_token_ids.tolist(),
            [trace.digest for trace in traces],
            settings.model_dump(),
            asdict(clock),
        ]
    )
    notes = out.with_name(f".{out.name}.search.json")
    points = search(
        draft, bench, answers, clock, limits, _noted(notes, key), lambda all_: _note(notes, key, all_), progress
    )
    chosen = best_point(points, limits)
    if chosen is None:
        raise UserError(
            "No draft within the limits was found: the smallest reads "
            f"{min(point.bytes for point in points) / 1e6:.1f} MB a step. Raise the limits, or take a smaller draft."
        )
    written = _made(draft, chosen, settings, answers, source, progress)
    sizes = [asdict(size) for size in unit_sizes(written.model)]
    found = {
        "draft": str(out),
        "target": target.name,
        "points": [point.to_json() for point in points],
        "front": [points.index(point) for point in pareto_front(points)],
        "chosen": points.index(chosen),
        "k": chosen.k,
    }
    manifest = replace(manifest, options={**manifest.options, "units": sizes, "search": found})
    save_draft(written, out, manifest, target.tokenizer)
    notes.unlink(missing_ok=True)
    return found


def _made(
    draft: Draft, point: Point, settings: CompressSettings, answers: Sequence[Any], source: Path, progress: Progress
) -> Draft:
    """Return the draft that a point stands for, rounded if any of its units is; the rest in 16 bits, as it counts."""
    smaller = Draft(keep_layers(draft.model, point.choice.layers), draft.head_token_ids)
    formats = formats_of(draft, point.choice, settings.group)
    if formats:
        rounder: Rounder = GptqRounder(smaller.model, answers) if settings.method == "gptq" else round_to_nearest
        smaller = quantize(smaller, formats, rounder, progress)
    return stored_as(smaller, source, "bfloat16")


def _noted(notes: Path, key: str) -> list[Point]:
    """Return the points of a search for the same thing that was stopped."""
    if not notes.is_file():
        return []
    found = json.loads(notes.read_text(encoding="utf-8"))
    if (found.get("schema"), found.get("key")) != (_SCHEMA, key):
        return []
    return [Point.from_json(point) for point in found["points"]]


def _note(notes: Path, key: str, points: Sequence[Point]) -> None:
    write_json(notes, {"schema": _SCHEMA, "key": key, "points": [point.to_json() for point in points]})
