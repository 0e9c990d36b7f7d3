"""The draft's own law: which temperature and top-k of the draft make the target accept most."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from foredraft.acceptance.evaluate import score_rows
from foredraft.acceptance.intervals import PairedDifference, paired_difference, tokens_per_call
from foredraft.acceptance.report import AcceptanceReport
from foredraft.core.errors import TraceError, VocabMismatchError
from foredraft.core.law import SamplingLaw
from foredraft.core.progress import SILENT, Progress
from foredraft.core.protocols import Drafter
from foredraft.trace.rows import TraceRow
from foredraft.trace.store import Trace

FACTORS = (0.0, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
TOP_KS = (0, 10, 50)


@dataclass(frozen=True, slots=True)
class FittedLaw:
    """The law under which a draft was accepted most.

    Attributes:
        target_law: Of the trace.
        best: What was accepted most.
        tried: mean_tokens_per_call of every law tried.
        gain: The best law's figure minus that of the target's own law, paired by prompt, on the same text
            that the law was fitted on: a little too good.
        k: Draft length at which laws were compared.
        answers: Answers that they were compared on.
    """

    target_law: SamplingLaw
    best: SamplingLaw
    tried: Mapping[SamplingLaw, float]
    gain: PairedDifference
    k: int
    answers: int

    @property
    def law(self) -> SamplingLaw:
        """What the draft should draw from: the target's own law where the gain is inside the noise."""
        return self.target_law if self.gain.is_inside_noise else self.best

    def to_json(self) -> dict[str, Any]:
        return {
            "target": asdict(self.target_law),
            "draft": asdict(self.law),
            "best": asdict(self.best),
            "mean_tokens_per_call": {str(law): value for law, value in self.tried.items()},
            "gain": self.gain.difference.value,
            "interval": self.gain.difference.bounds,
            "k": self.k,
            "answers": self.answers,
        }


def fit_law(
    name: str,
    drafter: Drafter,
    trace: Trace,
    k: int,
    factors: Sequence[float] = FACTORS,
    top_ks: Sequence[int] = TOP_KS,
    answers: int = 0,
    seed: int = 0,
    progress: Progress = SILENT,
) -> FittedLaw:
    """Try multiples of the target's temperature, 0 for a greedy draft, then top-k at the best; keep the best law.

    Every law is lossless: the target tests a token by the law that it was drawn from. Use training text, so that
    evaluation text stays unseen.

    Args:
        k: Draft tokens of a block.
        factors: Draft temperature / target temperature; of a greedy target they are the temperatures.
        top_ks: Tokens that the draft keeps, 0 for all; tried where the best draft is not greedy.
        answers: Answers of the trace that decide, drawn by their hash; 0 takes all.
    """
    target_law = trace.info.law
    rows = _rows(name, drafter, trace, answers)
    scale = target_law.temperature or 1.0
    tried: dict[SamplingLaw, AcceptanceReport] = {}
    with progress.task(f"fitting the law of {name} to {target_law}", float(len(factors)), "temperatures") as task:

        def tokens(law: SamplingLaw) -> float:
            if law not in tried:
                tried[law] = AcceptanceReport.of([k], score_rows(f"{name} {law}", drafter.bind(law), rows, [k]))
            return tried[law].mean_tokens_per_call(k)

        tokens(target_law)
        for factor in factors:
            tokens(replace(target_law, temperature=scale * factor))
            task.advance()
        best = max(tried, key=tokens)
        if not best.is_greedy:
            best = max((best, *(replace(best, top_k=top_k) for top_k in top_ks)), key=tokens)
    generator = np.random.default_rng(seed)
    gain = paired_difference(tried[best], tried[target_law], tokens_per_call(k), generator)
    figures = {law: report.mean_tokens_per_call(k) for law, report in tried.items()}
    return FittedLaw(target_law, best, figures, gain, k, len(rows))


def _rows(name: str, drafter: Drafter, trace: Trace, answers: int) -> list[TraceRow]:
    if drafter.vocab_size != trace.info.vocab_size:
        raise VocabMismatchError(
            f"{name} speaks {drafter.vocab_size} tokens, the trace {trace.path} {trace.info.vocab_size}."
            " Make the draft from the target that wrote the trace."
        )
    chosen = trace.sample(answers) if answers else list(trace.rows(tops=False))
    rows = [row for row in chosen if len(row.answer_ids)]
    if not rows:
        raise TraceError(f"{trace.path} holds no answers: collect some before fitting a law to them.")
    return rows
