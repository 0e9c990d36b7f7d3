"""The draft's own law: which temperature of the draft makes the target accept most."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foredraft.acceptance.evaluate import score_bound
from foredraft.acceptance.intervals import PairedDifference, paired_difference, tokens_per_call
from foredraft.core.law import SamplingLaw
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Drafter
from foredraft.trace.store import Trace

FACTORS = (0.0, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)


@dataclass(frozen=True, slots=True)
class FittedLaw:
    """The law under which a draft was accepted most.

    Attributes:
        law: What the draft should draw from.
        tried: mean_tokens_per_call of every law tried.
        gain: The fitted law's figure minus that of the target's own law, paired by prompt, on the same text
            that the law was fitted on: a little too good.
    """

    law: SamplingLaw
    tried: Mapping[SamplingLaw, float]
    gain: PairedDifference


def fit_law(
    name: str,
    drafter: Drafter,
    trace: Trace,
    k: int,
    factors: Sequence[float] = FACTORS,
    seed: int = 0,
    progress: Progress = SILENT,
) -> FittedLaw:
    """Try multiples of the target's temperature, 0 for a greedy draft, and keep the best at k draft tokens.

    Every law is lossless: the target tests a token by the law that it was drawn from. Use training text, so that
    evaluation text stays unseen.

    Args:
        factors: Draft temperature / target temperature; of a greedy target they are the temperatures.
    """
    target_law = trace.info.law
    scale = target_law.temperature or 1.0
    laws = dict.fromkeys([target_law, *(replace(target_law, temperature=scale * factor) for factor in factors)])
    reports = {law: score_bound(f"{name} {law}", drafter.bind(law), trace, [k], progress) for law in laws}
    tried = {law: report.mean_tokens_per_call(k) for law, report in reports.items()}
    best = max(tried, key=lambda law: tried[law])
    generator = np.random.default_rng(seed)
    gain = paired_difference(reports[best], reports[target_law], tokens_per_call(k), generator)
    return FittedLaw(best, tried, gain)
