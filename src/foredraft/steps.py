"""The steps that a candidate is made by, and what each can be told."""

from typing import Any, Literal

from pydantic import Field, model_validator

from foredraft.settings import Settings


class InitStep(Settings):
    """Start a draft from layers of the target."""

    source: Literal["target"] = Field("target", alias="from")
    layers: str = Field("first-6", description="first-6, every-5, first-4+last-2, or a list 0,1,2,28,29.")
    vocab: int = Field(0, ge=0, description="Rows of the head kept, most frequent in the trace first; 0 keeps all.")


class DistillStep(Settings):
    """Teach the draft the target's law on the target's own answers."""

    loss: dict[str, float] = Field({"forward_kl": 1.0}, min_length=1, description="Loss names with weights.")
    finish: str = Field("", description="Loss of the last part of training; empty keeps `loss` to the end.")
    finish_fraction: float = Field(0.3, ge=0.0, le=1.0, description="Share of the steps under `finish`.")
    temperature: float = Field(1.0, gt=0.0, description="Softens both laws in forward_kl; scaled by its square.")
    layer_matching: float = Field(0.0, ge=0.0, description="Weight of hidden-state matching, decayed to zero.")
    tokens: int = Field(100_000, ge=1, description="Answer positions trained on, repeats included.")
    batch_tokens: int = Field(256, ge=1, description="Answer positions in one optimizer step, about.")
    learning_rate: float = Field(6e-4, gt=0.0)
    warmup: float = Field(0.05, ge=0.0, lt=1.0, description="Share of the steps in which the rate rises.")
    weight_decay: float = Field(0.0, ge=0.0)
    clip: float = Field(1.0, gt=0.0, description="Largest gradient norm.")
    checkpoint_every: float = Field(20.0, gt=0.0, description="Seconds between points a killed run resumes from.")
    seed: int = 0


class AdaptStep(Settings):
    """Learn from what was served: lambda_distill * KL(target || draft) there + lambda_task * the draft's old loss."""

    buffer: list[str] = Field([], description="Folders that `generate --gather` filled; --buffer on the command line.")
    lambda_distill: float = Field(1.0, gt=0.0, description="Weight of the loss on the buffer.")
    lambda_task: float = Field(1.0, ge=0.0, description="Weight of the old loss on old answers; 0 lets it forget.")
    loss: dict[str, float] = Field({"forward_kl": 1.0}, min_length=1, description="On the buffer: names with weights.")
    passes: float = Field(3.0, gt=0.0, description="Times that each answer of the buffer is replayed.")
    steps: int = Field(0, ge=0, description="Most optimizer steps; 0 leaves it to passes and minutes.")
    minutes: float = Field(5.0, gt=0.0, description="Longest training; scoring before and after comes on top.")
    batch_tokens: int = Field(256, ge=1, description="Answer positions of the buffer in one optimizer step, about.")
    task_tokens: int = Field(256, ge=1, description="Answer positions of old answers in one optimizer step, about.")
    task_answers: int = Field(512, ge=1, description="Old answers held in memory, drawn by hash.")
    learning_rate: float = Field(1e-4, gt=0.0)
    warmup: float = Field(0.05, ge=0.0, lt=1.0, description="Share of the steps in which the rate rises.")
    clip: float = Field(1.0, gt=0.0, description="Largest gradient norm.")
    held_out: float = Field(0.2, gt=0.0, lt=1.0, description="Share of the prompts that only score.")
    num_draft_tokens: int = Field(4, ge=1, le=64, description="Draft length at which old and new are compared.")
    max_old_loss: float = Field(
        0.01, ge=0.0, description="mean_tokens_per_call that old domains may lose before the old draft is kept."
    )
    seed: int = 0


class MetaStep(Settings):
    """Weights from which few steps adapt to a new domain: learnt over the domains of the training answers."""

    algorithm: Literal["reptile", "fomaml"] = Field(
        "reptile", description="reptile moves to the adapted weights; fomaml along the gradient found there."
    )
    loss: dict[str, float] = Field({"forward_kl": 1.0}, min_length=1, description="Loss names with weights.")
    outer_steps: int = Field(40, ge=1, description="Domains visited, in turn.")
    inner_steps: int = Field(8, ge=1, description="Optimizer steps on a domain before the outer step.")
    outer_rate: float = Field(0.5, gt=0.0, le=1.0, description="Share of the way that is gone; falls linearly to 0.")
    inner_rate: float = Field(1e-4, gt=0.0, description="Learning rate of the inner steps.")
    batch_tokens: int = Field(256, ge=1, description="Answer positions in one inner step, about.")
    clip: float = Field(1.0, gt=0.0, description="Largest gradient norm.")
    seed: int = 0


class PruneStep(Settings):
    """Cut layers out of a draft."""

    layers: int = Field(1, ge=1, description="Number of layers to remove.")
    by: Literal["block-influence", "last"] = Field("block-influence", description="Which layers go first.")


class QuantizeStep(Settings):
    """Round a draft's weights."""

    bits: Literal[8] = Field(8, description="Bits of each body weight; one scale a row.")
    activation_bits: Literal[8, 16] = Field(
        16, description="Bits of what each layer reads; 8 is the form that vLLM runs on CPUs, and accepted less."
    )


class NgramStep(Settings):
    """A drafter without a model."""

    kind: str = Field(description="prompt-lookup, suffix-automaton, ngram, ngram-law, lookup-table or suffix.")
    order: int = Field(4, ge=1, le=16, description="ngram, ngram-law: longest context, in tokens.")
    min_count: int = Field(1, ge=1, description="Contexts and keys seen less often are dropped (not suffix).")
    key: int = Field(8, ge=1, le=64, description="lookup-table: tokens looked up.")
    continuation: int = Field(16, ge=1, le=256, description="lookup-table: tokens stored for each key.")
    smoothing: Literal["interpolated", "stupid-backoff"] = Field("interpolated", description="ngram-law.")
    max_match: int = Field(3, ge=1, description="prompt-lookup: longest suffix looked up, in tokens.")
    min_match: int = Field(1, ge=1, description="prompt-lookup: shortest suffix looked up, in tokens.")
    depth: int = Field(32, ge=1, le=64, description="suffix: longest match, in tokens.")
    shard_tokens: int = Field(
        200_000_000, ge=1, description="suffix: tokens of a file; building takes about 16 bytes of memory for each."
    )
    corpus: Literal["trace"] = Field("trace", description="What kinds that are built are built from.")


class HeadStep(Settings):
    """Which rows of the head a draft computes."""

    rows: Literal["full"] = Field("full", description="full: every row, as runtimes without a map of token ids run it.")


class LawStep(Settings):
    """The law that a draft draws from itself, where the target samples; fitted for acceptance unless it is given.

    Under a greedy target a draft is greedy: there is nothing to choose.
    """

    temperature: float | None = Field(
        None, ge=0.0, allow_inf_nan=False, description="0 is greedy. Left out with top_k: the best on training answers."
    )
    top_k: int | None = Field(None, ge=0, description="0 keeps all tokens.")
    num_draft_tokens: int = Field(4, ge=1, le=64, description="Draft length at which laws are compared.")
    answers: int = Field(48, ge=2, description="Training answers that the law is fitted on.")

    @property
    def is_fitted(self) -> bool:
        return self.temperature is None and self.top_k is None


class Step(Settings):
    """One step of a candidate; exactly one key."""

    ngram: NgramStep | None = None
    init: InitStep | None = None
    checkpoint: str | None = Field(None, description="A draft that exists: folder or hub id.")
    source: str | None = Field(None, alias="from", description="The result of another candidate.")
    distill: DistillStep | None = None
    adapt: AdaptStep | None = None
    meta: MetaStep | None = None
    prune: PruneStep | None = None
    quantize: QuantizeStep | None = None
    head: HeadStep | None = None
    wrap: str | None = Field(
        None, description="Another way of drafting with it: tree:max_nodes=16, confident:threshold=0.4."
    )
    law: LawStep | None = None

    @model_validator(mode="after")
    def _one_key(self) -> "Step":
        if len(self.model_fields_set) != 1:
            raise ValueError(f"a step has exactly one of: {', '.join(_step_keys())}")
        return self

    @property
    def verb(self) -> str:
        """The key that was given, as written in a recipe."""
        (name,) = self.model_fields_set
        return "from" if name == "source" else name

    @property
    def settings(self) -> Any:
        """What was given under that key."""
        (name,) = self.model_fields_set
        return getattr(self, name)


def _step_keys() -> list[str]:
    return [field.alias or name for name, field in Step.model_fields.items()]
