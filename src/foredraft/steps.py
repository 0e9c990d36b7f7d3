"""The steps that a candidate is made by, and what each can be told."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from foredraft.adaptive_step import AdaptiveStep as AdaptiveStep
from foredraft.core.lengths import LONGEST_DRAFT
from foredraft.ngram_step import NgramStep as NgramStep
from foredraft.settings import LawSettings, Losses, Settings, from_number
from foredraft.shrink_steps import CompressStep as CompressStep
from foredraft.shrink_steps import LowRankStep as LowRankStep
from foredraft.shrink_steps import PruneStep as PruneStep
from foredraft.shrink_steps import QuantizeStep as QuantizeStep
from foredraft.shrink_steps import SensitivitySettings as SensitivitySettings


class InitStep(Settings):
    """Where a draft starts: layers of the target or of another model, or random weights."""

    source: str = Field(
        "target", alias="from", description="target, scratch, or a smaller model of its family: folder or hub id."
    )
    layers: str = Field(
        "first-6",
        coerce_numbers_to_str=True,
        description="first-6, every-5, first-4+last-2, a list 0,1,2,28,29, or all. Of another model all, unless given.",
    )
    vocab: int = Field(0, ge=0, description="Rows of the head kept, most frequent in the trace first; 0 keeps all.")
    hidden: int = Field(0, ge=0, description="Hidden channels kept, the most important ones; 0 keeps all.")
    heads: int = Field(0, ge=0, description="Attention heads kept, in whole key-value groups; 0 keeps all.")
    ffn: int = Field(0, ge=0, description="Feed-forward channels kept; 0 keeps all.")
    heal: Literal["none", "linear"] = Field(
        "none", description="linear: refit by least squares the layers from the first cut on, without training."
    )
    share_rank: int = Field(
        0, ge=0, description="Train each matrix as U V, U this many leading singular vectors of the target's; 0: whole."
    )
    transplant: bool = Field(
        False, description="Compose embeddings and head of another family for the target's tokens."
    )
    embeddings: Literal["target", "random"] = Field(
        "target", description="From scratch: the target's, projected where the draft is narrower, or random."
    )
    body: Literal["attention", "convolution", "linear_attention"] = Field(
        "attention", description="From scratch: the target's own layers, or a light net's way of seeing the past."
    )
    kernel: int = Field(8, ge=1, le=64, description="Tokens that a layer of a convolution sees.")
    active: int = Field(
        0, ge=0, description="Of a light net: feed-forward channels kept for each token, the strongest; 0 keeps all."
    )
    calibration: int = Field(96, ge=1, description="Answers that widths and repairs are measured on.")
    seed: int = Field(0, description="From scratch: of the random weights.")

    @model_validator(mode="before")
    @classmethod
    def _whole_siblings(cls, data: Any) -> Any:
        """Another model is small already: all of its layers are kept unless the recipe names some."""
        if isinstance(data, dict) and "layers" not in data:
            source = data.get("from", data.get("source", "target"))
            return data if source in ("target", "scratch") else {**data, "layers": "all"}
        return data

    @model_validator(mode="after")
    def _settings_have_effect(self) -> "InitStep":
        if self.transplant and not self.is_sibling:
            raise ValueError("transplant is about another model: name it, from: folder or hub id")
        if self.source == "scratch" and (self.heal != "none" or self.share_rank):
            raise ValueError(
                "random weights have nothing to heal and no factors to share: leave heal and share_rank out"
            )
        if self.source != "scratch" and (self.embeddings != "target" or self.seed):
            raise ValueError("embeddings and seed are about random weights: leave them out, or set from: scratch")
        if self.body != "attention" and self.source != "scratch":
            raise ValueError(f"body: {self.body} is a new net: set from: scratch")
        if self.body != "convolution" and self.kernel != 8:
            raise ValueError("kernel is about body: convolution")
        if self.active and self.body == "attention":
            raise ValueError("active is about light nets: set body: convolution or linear_attention")
        if self.share_rank and (self.is_sibling or self.is_narrower):
            raise ValueError(
                "factors are shared with layers of the target at its own width: leave out other sources and widths"
            )
        return self

    @property
    def is_sibling(self) -> bool:
        return self.source not in ("target", "scratch")

    @property
    def is_narrower(self) -> bool:
        return any((self.hidden, self.heads, self.ffn))

    @property
    def measures(self) -> bool:
        """Whether it is made by what activations on the target's answers are."""
        return self.source != "scratch" and (self.is_narrower or self.heal != "none")


class ValidationSettings(Settings):
    """Replaying a draft in training on held-out prompts of its traces, to keep the best weights."""

    prompts: int = Field(
        16, ge=0, description="Training prompts held out, at most a tenth of them, none of fewer than 40; 0: no replay."
    )
    every: int = Field(
        0, ge=0, description="Positions trained on between replays; 0: a few percent of the time, 20 replays at most."
    )
    patience: int = Field(6, ge=0, description="Replays without a gain before training stops; 0 never stops it.")
    num_draft_tokens: int = Field(4, ge=1, le=LONGEST_DRAFT, description="Draft length at which tokens per call count.")


class LoraSettings(Settings):
    """Training low-rank updates of a draft's matrices instead of the matrices; merged when the draft is saved."""

    rank: int = Field(0, ge=0, description="0 trains the matrices themselves.")
    alpha: int = Field(0, ge=0, description="The update counts alpha/rank times; 0 is twice the rank.")
    modules: list[str] = Field([], description="Names such as q_proj, down_proj; empty takes every matrix of the body.")


class PhaseSettings(Settings):
    """A part of a training with a loss of its own."""

    share: float = Field(gt=0.0, le=1.0, description="Share of the steps.")
    loss: Losses = Field(description="Loss names with weights.")
    fade: float = Field(
        0.0, ge=0.0, le=1.0, description="Share of the steps, from its start, in which the loss before it gives way."
    )

    @model_validator(mode="after")
    def _fade_within(self) -> "PhaseSettings":
        if self.fade > self.share:
            raise ValueError(f"fade {self.fade:g} is longer than the phase, {self.share:g}")
        return self


class LayerMatchingSettings(Settings):
    """Draw hidden states towards the target's."""

    weight: float = Field(0.0, ge=0.0, description="At the start; at most 0.1 is usual.")
    until: float = Field(0.25, gt=0.0, le=1.0, description="Share of the steps in which the weight falls to 0.")
    distance: Literal["normalised_mse", "mse", "cosine"] = Field(
        "normalised_mse", description="Of states behind a layer; states of another width are projected first."
    )
    layers: dict[int, int] = Field({}, description="Draft layer: target layer, from 0; empty spreads them evenly.")


class AttentionMatchingSettings(Settings):
    """Draw attention towards the target's."""

    weight: float = Field(0.0, ge=0.0, description="At the start; at most 0.1 is usual.")
    until: float = Field(0.25, gt=0.0, le=1.0, description="Share of the steps in which the weight falls to 0.")
    layers: dict[int, int] = Field({}, description="Draft layer: target layer, from 0; empty matches the last ones.")


class SelectiveSettings(Settings):
    """Learn only from the tokens with most to learn."""

    share: float = Field(1.0, gt=0.0, le=1.0, description="Share of each answer's tokens that is kept.")
    reference: str = Field("", description="Draft folder to compare with; empty: the draft before this training.")


class TextSettings(Settings):
    """General text mixed into a training. The target reads it, and decodes nothing."""

    files: list[str] = Field(
        [],
        description="JSONL with text, prompt and reference, or messages, packed by gzip or not; any other file is one "
        "text.",
    )
    dataset: str = Field("", description="A `datasets` id or folder, instead of files.")
    split: str = Field("train", description="Split of the dataset.")
    share: float = Field(0.3, gt=0.0, lt=1.0, description="Share of the positions trained on.")
    max_tokens: int = Field(256, ge=2, description="Longest window that a document is cut into, in tokens.")
    tokens: int = Field(
        0, ge=0, description="Positions of text read at most, and then repeated; 0: as many as the training asks for."
    )
    law: LawSettings | None = Field(None, description="Law that is taught on text; left out, that of the first trace.")
    laws: Literal["cached", "live"] = Field(
        "cached", description="cached: the target reads it once, for all candidates and epochs; live: at each step."
    )
    top: int = Field(64, ge=1, description="cached: most probable tokens kept for each position.")
    leaks: Literal["refuse", "drop"] = Field(
        "refuse", description="What becomes of documents that hold an evaluation prompt."
    )
    seed: int = Field(0, description="Draws which windows come first.")

    @model_validator(mode="after")
    def _one_source(self) -> "TextSettings":
        if bool(self.files) == bool(self.dataset):
            raise ValueError("give either files or dataset")
        return self


class RolloutSettings(Settings):
    """What the last part of a training adds to answers: the draft's own continuations, and where it is rejected."""

    fraction: float = Field(0.2, gt=0.0, le=1.0, description="Share of the steps, the last ones.")
    share: float = Field(
        0.5, ge=0.0, le=1.0, description="Share of the prompts of those steps whose answers the draft goes on with."
    )
    max_new_tokens: int = Field(16, ge=1, description="Tokens that the draft writes in a row; a block is no longer.")
    temperature: float = Field(1.0, ge=0.0, description="Of the law it writes under; 0 is greedy.")
    replay: float = Field(
        0.0, ge=0.0, le=1.0, description="Share of the prompts whose positions are drawn again by P(rejected)."
    )

    @model_validator(mode="after")
    def _shares_fit(self) -> "RolloutSettings":
        if not 0.0 < self.share + self.replay <= 1.0:
            raise ValueError("share and replay together must lie above 0 and not above 1")
        return self


class DistillStep(Settings):
    """Teach the draft the target's law on the target's own answers."""

    laws: Literal["cached", "live"] = Field(
        "cached", description="The target's laws on answers: cached, as the trace stores them, or live, in full."
    )
    text: TextSettings | None = Field(None, description="General text mixed in; left out, none.")
    rollouts: RolloutSettings | None = Field(None, description="On-policy text at the end; left out, none.")
    loss: Losses = Field({"forward_kl": 1.0}, description="Loss names with weights.")
    finish: str = Field("", description="Loss of the last part of training; empty keeps `loss` to the end.")
    finish_fraction: float = Field(0.3, ge=0.0, le=1.0, description="Share of the steps under `finish`.")
    phases: list[PhaseSettings] = Field([], description="Instead of loss and finish: parts of the training, in order.")
    temperature: float = Field(1.0, gt=0.0, description="Softens both laws in forward_kl; scaled by its square.")
    layer_matching: Annotated[LayerMatchingSettings, from_number("weight")] = Field(
        LayerMatchingSettings(), description="Matching of hidden states; a number is its weight."
    )
    attention_matching: Annotated[AttentionMatchingSettings, from_number("weight")] = Field(
        AttentionMatchingSettings(), description="Matching of attention; a number is its weight."
    )
    position_weights: str = Field(
        "", description="What an answer's tokens weigh: decay:rate=0.99, confidence:power=1 or reach:k=4; empty: all 1."
    )
    selective: Annotated[SelectiveSettings, from_number("share")] = Field(
        SelectiveSettings(), description="Selective tokens; a number is the share that is kept."
    )
    tokens: int = Field(100_000, ge=1, description="Answer positions trained on, repeats included.")
    batch_tokens: int = Field(256, ge=1, description="Answer positions in one optimizer step, about.")
    learning_rate: float = Field(6e-4, gt=0.0)
    warmup: float = Field(0.05, ge=0.0, lt=1.0, description="Share of the steps in which the rate rises.")
    weight_decay: float = Field(0.0, ge=0.0)
    clip: float = Field(1.0, gt=0.0, description="Largest gradient norm.")
    optimizer: Literal["adamw", "adamw-8bit"] = Field("adamw", description="adamw-8bit needs an NVIDIA GPU.")
    train: Literal["body", "all"] = Field(
        "body", description="body leaves embeddings and head the target's; all trains them too, and needs a whole head."
    )
    lora: LoraSettings = LoraSettings()
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="What matrix products are computed in; weights, losses and steps stay float32."
    )
    pack_tokens: int = Field(
        1024, ge=1, description="Tokens read at once, about; a step takes as many passes as needed."
    )
    gradient_checkpointing: bool = Field(False, description="Compute layers twice to hold less memory.")
    validation: ValidationSettings = ValidationSettings()
    divergence: float = Field(
        3.0, ge=0.0, description="A loss above this many times its running minimum is taken back; 0 never."
    )
    divergence_steps: int = Field(20, ge=1, description="Steps for which it must be, and over which it is averaged.")
    track: str = Field(
        "", description="Where figures are sent too: tensorboard, wandb, trackio, or another of accelerate's."
    )
    checkpoint_every: float = Field(20.0, gt=0.0, description="Seconds between points a killed run resumes from.")
    seed: int = 0

    @model_validator(mode="after")
    def _phases_fill_the_training(self) -> "DistillStep":
        if not self.phases:
            return self
        if {"loss", "finish", "finish_fraction"} & self.model_fields_set:
            raise ValueError("phases take the place of loss, finish and finish_fraction: give one or the other")
        if abs((total := sum(phase.share for phase in self.phases)) - 1.0) > 1e-6:
            raise ValueError(f"the shares of phases must add up to 1, not {total:g}")
        if self.phases[0].fade:
            raise ValueError("the first phase has nothing to fade from")
        return self

    @model_validator(mode="after")
    def _head_learns_evenly(self) -> "DistillStep":
        if self.train == "all" and (self.position_weights or self.selective.share < 1.0):
            raise ValueError("position_weights and selective are for train: body; a head that learns takes all alike")
        return self

    @property
    def last_loss(self) -> dict[str, float]:
        """The losses, with weights, that the training ends with."""
        if self.phases:
            return self.phases[-1].loss
        return {self.finish: 1.0} if self.finish else self.loss

    @property
    def losses(self) -> tuple[str, ...]:
        """Every loss of the training as it is written, some perhaps twice."""
        if self.phases:
            return tuple(loss for phase in self.phases for loss in phase.loss)
        return (*self.loss, *filter(None, [self.finish]))


class AdaptStep(Settings):
    """Learn from what was served: lambda_distill * KL(target || draft) there + lambda_task * the draft's old loss."""

    buffer: list[str] = Field([], description="Folders that `generate --gather` filled; --buffer on the command line.")
    lambda_distill: float = Field(1.0, gt=0.0, description="Weight of the loss on the buffer.")
    lambda_task: float = Field(1.0, ge=0.0, description="Weight of the old loss on old answers; 0 lets it forget.")
    loss: Losses = Field({"forward_kl": 1.0}, description="On the buffer: names with weights.")
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
    num_draft_tokens: int = Field(
        4, ge=1, le=LONGEST_DRAFT, description="Draft length at which old and new are compared."
    )
    max_old_loss: float = Field(
        0.01, ge=0.0, description="mean_tokens_per_call that old domains may lose before the old draft is kept."
    )
    seed: int = 0


class MetaStep(Settings):
    """Weights from which few steps adapt to a new domain: learnt over the domains of the training answers."""

    algorithm: Literal["reptile", "fomaml"] = Field(
        "reptile", description="reptile moves to the adapted weights; fomaml along the gradient found there."
    )
    loss: Losses = Field({"forward_kl": 1.0}, description="Loss names with weights.")
    outer_steps: int = Field(40, ge=1, description="Domains visited, in turn.")
    inner_steps: int = Field(8, ge=1, description="Optimizer steps on a domain before the outer step.")
    outer_rate: float = Field(0.5, gt=0.0, le=1.0, description="Share of the way that is gone; falls linearly to 0.")
    inner_rate: float = Field(1e-4, gt=0.0, description="Learning rate of the inner steps.")
    batch_tokens: int = Field(256, ge=1, description="Answer positions in one inner step, about.")
    clip: float = Field(1.0, gt=0.0, description="Largest gradient norm.")
    seed: int = 0


class HeadStep(Settings):
    """Which rows of the head a draft computes."""

    rows: Annotated[int, Field(ge=1)] | Literal["full"] = Field(
        "full",
        description="How many: the tokens that the target writes most often. full: every row, as runtimes without a "
        "map of token ids run it.",
    )


class LawStep(Settings):
    """The law that a draft draws from itself, where the target samples; fitted for acceptance unless it is given.

    Under a greedy target a draft is greedy: there is nothing to choose.
    """

    temperature: float | None = Field(
        None, ge=0.0, description="0 is greedy. Left out with top_k: the best on training answers."
    )
    top_k: int | None = Field(None, ge=0, description="0 keeps all tokens.")
    num_draft_tokens: int = Field(4, ge=1, le=LONGEST_DRAFT, description="Draft length at which laws are compared.")
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
    low_rank: LowRankStep | None = None
    compress: CompressStep | None = None
    head: HeadStep | None = None
    wrap: str | None = Field(
        None, description="Another way of drafting with it: tree:max_nodes=16, confident:threshold=0.4."
    )
    law: LawStep | None = None
    adaptive: AdaptiveStep | None = None

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
