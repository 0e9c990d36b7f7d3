"""The steps that make a draft smaller, and what each can be told."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from foredraft.core.bits import checked_plan
from foredraft.core.lengths import LONGEST_DRAFT
from foredraft.settings import Losses, Settings, from_number

WidthsRuntime = Literal["", "transformers", "openvino", "llama.cpp", "llama.cpp-q8_0", "vllm"]


class PruneStep(Settings):
    """Cut a draft down to a smaller one: fewer layers, narrower ones, fewer rows of the head."""

    layers: int = Field(1, ge=0, description="Number of layers to remove; 0 unless given where widths are.")
    by: Literal["block-influence", "acceptance", "last"] = Field(
        "block-influence", description="Which layers go first; acceptance replays the draft without each of them."
    )
    hidden: int = Field(0, ge=0, description="Hidden channels kept, the most important ones; 0 keeps all.")
    heads: int = Field(0, ge=0, description="Attention heads kept, in whole key-value groups; 0 keeps all.")
    ffn: int = Field(0, ge=0, description="Feed-forward channels kept; 0 keeps all.")
    vocab: int = Field(0, ge=0, description="Rows of the head kept, most frequent in the trace first; 0 keeps all.")
    runtime: WidthsRuntime = Field(
        "", description="Runtime whose multiples hidden and ffn are rounded up to; empty: none."
    )
    heal: Literal["none", "linear"] = Field("none", description="linear: refit what is left by least squares.")
    num_draft_tokens: int = Field(
        4, ge=1, le=LONGEST_DRAFT, description="acceptance: draft length at which layers are compared."
    )
    answers: int = Field(32, ge=1, description="Answers of the target that all of this is measured on.")

    @model_validator(mode="before")
    @classmethod
    def _no_layer_beside_widths(cls, data: Any) -> Any:
        if isinstance(data, dict) and "layers" not in data and {"hidden", "heads", "ffn", "vocab"} & set(data):
            return {**data, "layers": 0}
        return data

    @model_validator(mode="after")
    def _cuts_something(self) -> "PruneStep":
        if not (self.layers or self.is_narrower or self.vocab):
            raise ValueError("nothing is cut: give layers, hidden, heads, ffn or vocab")
        return self

    @property
    def is_narrower(self) -> bool:
        return any((self.hidden, self.heads, self.ffn))

    @property
    def measures(self) -> bool:
        """Whether answers of the target decide what goes."""
        return bool(self.layers and self.by != "last") or self.is_narrower or self.vocab > 0 or self.heal != "none"


class QuantizeStep(Settings):
    """Round a draft's weights."""

    bits: Annotated[Any, AfterValidator(checked_plan)] = Field(
        8,
        description="4 or 8 for the body; chapter; or patterns of units with bits, the first that matches decides: "
        "{head: 4, layers.*.down: 8, layers.*: 4/64}. What none matches keeps its weights, the embedding always.",
    )
    group: int = Field(32, ge=0, description="Inputs that share a scale in 4 bits; 8 bits have one scale a row.")
    method: Literal["nearest", "gptq"] = Field(
        "nearest", description="gptq makes up for each rounding in the weights behind it, on the target's answers."
    )
    calibration: int = Field(16, ge=1, description="gptq: answers that the draft's inputs are taken from.")
    activation_bits: Literal[8, 16] = Field(
        16, description="Bits of what each layer reads; 8 is the form that vLLM runs on CPUs, and accepted less."
    )
    plain: Literal["keep", "bfloat16"] = Field("keep", description="How weights that are not rounded are stored.")
    format: Literal["compressed-tensors", "nf4", "llm-int8"] = Field(
        "compressed-tensors",
        description="nf4 and llm-int8 are those of bitsandbytes: the whole body, for this process only.",
    )

    @model_validator(mode="after")
    def _bitsandbytes_chooses_for_itself(self) -> "QuantizeStep":
        given = self.model_fields_set - {"format"}
        if self.format != "compressed-tensors" and given:
            raise ValueError(f"format: {self.format} rounds the whole body its own way: leave out {min(given)}")
        return self


class SensitivitySettings(Settings):
    """How the sensitivity of a draft's units is found."""

    bits: Literal[4, 8] = Field(4, description="What units are rounded to.")
    group: int = Field(32, ge=1, description="Inputs that share a scale in 4 bits.")
    answers: int = Field(16, ge=1, description="Answers of the trace that are read.")
    probes: int = Field(20, ge=0, description="Units, those that rank highest, whose loss of acceptance is measured.")
    by: Literal["fisher", "grad_over_weight", "first_order"] = Field("fisher", description="What ranks the units.")
    channels: int = Field(64, ge=1, description="Feed-forward channels that are ranked, and cut, together.")
    parts: int = Field(0, ge=0, description="Groups of heads and channels, those that rank highest, cut one at a time.")
    masks: list[str] = Field(
        [], description="Masks of single weights to measure, for analysis: 2:4 keeps 2 of each 4, 0.5 cuts half."
    )
    num_draft_tokens: int = Field(4, ge=1, le=LONGEST_DRAFT, description="Draft length at which tokens per call count.")


class HealSettings(Settings):
    """A short distillation of what is left, with its rounding in place: what is trained is what is written."""

    tokens: int = Field(0, ge=0, description="Answer positions trained on, repeats included; 0: none.")
    loss: Losses = Field(
        {"tvd_plus_plus": 1.0},
        description="Loss names with weights; all but hard_cross_entropy need a trace that keeps likely tokens.",
    )
    learning_rate: float = Field(1e-4, gt=0.0)
    batch_tokens: int = Field(256, ge=1, description="Answer positions in one optimizer step, about.")
    seed: int = 0


class CompressStep(Settings):
    """How far a draft is compressed, and for what machine."""

    hardware: str = Field("desktop-cpu", description="Machine that seconds are predicted for: see foredraft hardware.")
    context: int = Field(256, ge=0, description="Tokens of context that steps are timed at.")
    megabytes: float = Field(0.0, ge=0.0, description="Most that a draft step reads; 0 is no limit.")
    milliseconds: float = Field(0.0, ge=0.0, description="Longest draft step; 0 is no limit.")
    num_draft_tokens: int = Field(8, ge=1, le=LONGEST_DRAFT, description="Longest draft length to choose from.")
    answers: int = Field(40, ge=2, description="Answers of the trace that acceptance is measured on.")
    share: float = Field(0.2, gt=0.0, le=1.0, description="Share of them that moves are tried on.")
    gradients: int = Field(8, ge=1, description="Answers that the shortlist, widths and gptq are made on.")
    moves: list[Literal["bits", "head", "layers", "ffn", "rows"]] = Field(
        ["bits", "head", "layers", "ffn", "rows"],
        min_length=1,
        description="Kinds of moves. Rows need an empty runtime.",
    )
    tries: int = Field(2, ge=1, description="Moves of each kind that are tried before one is taken.")
    lookahead: int = Field(
        1, ge=0, description="Steps that are taken although they do not pay, before the search ends."
    )
    chunk: int = Field(8, ge=1, description="Units whose bits are lowered together.")
    group: int = Field(32, ge=1, description="Inputs that share a scale in 4 bits.")
    runtime: WidthsRuntime = Field(
        "", description="Runtime whose multiples widths keep; empty: this process, which alone computes chosen rows."
    )
    method: Literal["nearest", "gptq"] = Field("nearest", description="How the draft that is chosen is rounded.")
    heal: Annotated[HealSettings, from_number("tokens")] = Field(
        HealSettings(), description="Training of what is chosen; a number is its tokens."
    )


class LowRankStep(Settings):
    """Replace matrices by products of two thin ones."""

    units: str = Field("layers.*", description="Pattern of the units that are cut, such as layers.*.down.")
    rank: int = Field(0, ge=0, description="Of each matrix; 0: by `share`.")
    share: float = Field(
        0.0, ge=0.0, lt=1.0, description="Of the parameters of those units that their factors may hold; 0: by `rank`."
    )
    by: Literal["inputs", "weights"] = Field(
        "inputs",
        description="What a factor keeps most of: outputs on the draft's own inputs, or the matrix (plain SVD).",
    )
    answers: int = Field(32, ge=1, description="inputs: answers of the target that they are taken from.")
    form: Literal["dense", "factored"] = Field(
        "dense",
        description="dense writes the product, which every runtime reads; factored the factors, read here only.",
    )

    @model_validator(mode="after")
    def _rank_or_share(self) -> "LowRankStep":
        if bool(self.rank) == bool(self.share):
            raise ValueError("give either rank or share")
        return self
