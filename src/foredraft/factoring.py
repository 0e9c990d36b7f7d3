"""What the verb `low-rank` makes, from folder to folder."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path

from foredraft.checkpoint import DraftManifest
from foredraft.compress.low_rank import cut_ranks
from foredraft.compress.quantize import require_plain
from foredraft.compressing import sample_answers
from foredraft.core.errors import RecipeError
from foredraft.core.files import claimed
from foredraft.core.progress import SILENT, Progress
from foredraft.lineage import extended, manifest_for
from foredraft.models.calibration import calibration_batches
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.factored import multiply_out
from foredraft.models.reopened import refuse_changed_logits
from foredraft.models.target import LocalTarget
from foredraft.models.units import Unit, search_units
from foredraft.shrink_steps import LowRankStep
from foredraft.trace.store import Trace


def low_rank_draft(
    source: Path,
    target: LocalTarget,
    traces: Sequence[Trace],
    step: LowRankStep,
    out: Path,
    progress: Progress = SILENT,
) -> DraftManifest:
    """Write a draft some of whose matrices have a lower rank, as their factors or as the plain matrices these make.

    The manifest's options hold, under "low_rank", what each matrix lost and what its factors take.

    Raises:
        RecipeError: a pattern that matches no unit, a rank that a matrix does not have, or factors that would hold more
            than their matrix.
        ModelError: the draft is quantized or factored already.
        UserError: there are no answers to take inputs from.
        OutputError: the folder exists already.
    """
    with claimed(out):
        draft = load_draft(source, "float32")
        manifest = extended(manifest_for(source, target), "low_rank", step)
        require_plain(draft)
        units = [unit for unit in search_units(draft.model) if unit.layer >= 0 and fnmatchcase(unit.name, step.units)]
        if not units:
            raise RecipeError(f"units: the pattern {step.units!r} matches no unit of a layer, such as layers.0.qkv.")
        ranks = {unit.name: step.rank or rank_within(draft, unit, step.share) for unit in units}
        if step.form == "factored":
            _refuse_growth(draft, units, ranks)
        batches = calibration_batches(sample_answers(traces, target, step.answers)) if step.by == "inputs" else []
        cut, cuts = cut_ranks(draft, ranks, batches, progress)
        if step.form == "dense":
            multiply_out(cut.model)
        manifest = replace(manifest, options={**manifest.options, "low_rank": [asdict(one) for one in cuts]})
        return save_draft(cut, out, manifest, target.tokenizer, refuse_changed_logits)


def rank_within(draft: Draft, unit: Unit, share: float) -> int:
    """Return the largest rank at which the factors of every matrix of a unit hold at most that share of its weights."""
    shapes = [draft.model.get_submodule(module).weight.shape for module in unit.modules]
    return max(1, min(int(share * rows * columns / (rows + columns)) for rows, columns in shapes))


def _refuse_growth(draft: Draft, units: Sequence[Unit], ranks: Mapping[str, int]) -> None:
    for unit in units:
        for module in unit.modules:
            (rows, columns), rank = draft.model.get_submodule(module).weight.shape, ranks[unit.name]
            if rank * (rows + columns) >= rows * columns:
                raise RecipeError(
                    f"rank: two factors of rank {rank} hold {rank * (rows + columns):,} weights, {module} itself "
                    f"{rows * columns:,}. Lower the rank, or write form: dense."
                )
