"""Making a drafter that chooses among others: what each costs is measured here, and kept with the selection."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from foredraft.acceptance.batches import measure_batch
from foredraft.acceptance.cost import measure_costs
from foredraft.adaptive_step import AdaptiveStep
from foredraft.core.own_law import bound_for
from foredraft.core.progress import SILENT, Progress
from foredraft.drafters import load_drafter
from foredraft.models.target import LocalTarget
from foredraft.scoring import timing_text
from foredraft.select.block_costs import BlockCosts
from foredraft.select.saved import Saved, save_selection
from foredraft.trace.store import Trace


def make_portfolio(
    specs: Mapping[str, str],
    target: LocalTarget,
    trace: Trace,
    step: AdaptiveStep,
    out: Path,
    progress: Progress = SILENT,
) -> Saved:
    """Write the selection of a step: its drafters, with the times of blocks at each batch size.

    Args:
        specs: Of the drafters, by name.
        trace: Whose text and law the drafters are timed under.

    Raises:
        OutputError: `out` is there already.
        UserError: the trace's answers are too short to be timed on.
    """
    law, text, lengths = trace.info.law, timing_text(trace), sorted(set(step.lengths))
    drafters = {name: bound_for(load_drafter(spec, target), law) for name, spec in specs.items()}
    ks: Sequence[int] = range(1, max(lengths) + 1)
    single = measure_costs(target, drafters, text, law, ks, step.cost_repeats, progress)
    timed = {1: single} | {
        rows: measure_batch(
            target, drafters, text[-step.context :], law, ks, rows, single, step.cost_repeats, progress
        )
        for rows in step.batch_sizes
        if rows > 1
    }  # fmt: skip
    costs = {rows: BlockCosts.of(one, list(drafters), max(lengths)) for rows, one in timed.items()}
    saved = Saved.of(target, specs, lengths, step.policy, costs, target.num_bytes)
    save_selection(out, saved)
    return saved
