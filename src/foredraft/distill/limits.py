"""Which losses a trace allows, by how much of the target's law it stores."""

import logging
from collections.abc import Iterable, Sequence

import torch

from foredraft.catalog import names
from foredraft.core.errors import TraceError
from foredraft.distill.losses import loss_name
from foredraft.trace.store import Trace

_log = logging.getLogger(__name__)

# Losses that read the emitted token and nothing else of the target.
_OF_TOKENS = frozenset({"hard_cross_entropy"})
_OF_ACCEPTANCE = frozenset({"tvd", "tvd_plus_plus", "neg_log_acceptance", "lk_hybrid"})
# Acceptance over events can be too high by the whole tail: beyond this more than a good training gains.
_MOST_TAIL = 0.1


def require_laws(losses: Iterable[str], traces: Sequence[Trace]) -> None:
    """Refuse losses for which traces store too little of the target's law; warn where they store little.

    Raises:
        TraceError: a trace stores no probable tokens, and a loss needs them.
    """
    asked = sorted({loss_name(loss) for loss in losses} - _OF_TOKENS)
    for trace in traces:
        if asked and not trace.info.top:
            raise TraceError(
                f"{trace.path} keeps no probable tokens of the target (top 0), and {', '.join(asked)} "
                f"{'needs' if len(asked) == 1 else 'need'} them. It allows {', '.join(sorted(_OF_TOKENS))}; for "
                f"{', '.join(sorted(set(names('losses')) - _OF_TOKENS))} collect it with top 64."
            )
        doubtful = sorted(_OF_ACCEPTANCE & set(asked))
        if doubtful and (tail := _mean_tail(trace)) > _MOST_TAIL:
            _log.warning(
                "%s keeps %d tokens of each law, %.2f of the target's mass lies outside them: %s cannot tell how "
                "much of it the draft gets right. Collect with a larger top, or use forward_kl.",
                trace.path, trace.info.top, tail, ", ".join(doubtful),
            )  # fmt: skip


def _mean_tail(trace: Trace) -> float:
    tails = [row.tail_mass for row in trace.rows(tops=False)]
    return float(torch.cat(tails).mean()) if tails else 0.0
