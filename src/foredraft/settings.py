"""What can be set, part by part. Every default lives in a settings class, here or in steps.py, and nowhere else."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from foredraft.core.law import SamplingLaw
from foredraft.core.lengths import LONGEST_DRAFT

QUICKSTART_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHIPPED_PROMPTS = "shipped"


def _draft_lengths(value: Any) -> Any:
    """Read `1..8`, `4` or `[1, 2, 4]`."""
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)\.\.(\d+)", value)):
        if int(match[2]) > LONGEST_DRAFT:
            raise ValueError(f"{value} goes beyond the longest draft, {LONGEST_DRAFT} tokens")
        return list(range(int(match[1]), int(match[2]) + 1))
    return [value] if isinstance(value, int) else value


DraftLengths = Annotated[
    list[Annotated[int, Field(ge=1, le=LONGEST_DRAFT)]], BeforeValidator(_draft_lengths), Field(min_length=1)
]


def from_number(name: str) -> BeforeValidator:
    """Read a plain number as the settings in which only `name` is given."""
    return BeforeValidator(lambda value: {name: value} if isinstance(value, int | float) else value)


Losses = Annotated[
    dict[str, Annotated[float, Field(gt=0.0)]],
    BeforeValidator(lambda value: {value: 1.0} if isinstance(value, str) else value),
    Field(min_length=1),
]

BatchSizes = Annotated[list[Annotated[int, Field(ge=1, le=1024)]], Field(min_length=1)]


class Settings(BaseModel):
    """A part of a recipe: unknown keys are errors, values are frozen, numbers finite."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, populate_by_name=True, allow_inf_nan=False
    )


class TargetSettings(Settings):
    """The model whose output law must be kept."""

    model: str = Field(description="Folder, GGUF file, or hub id.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: bfloat16 where the processor computes in it, else float32."
    )
    adapter: str = Field("", description="Folder or hub id of a LoRA adapter that the target is served with.")


class LawSettings(Settings):
    """A sampling law under which the target answers."""

    temperature: float = Field(1.0, ge=0.0)
    top_k: int = Field(0, ge=0, description="0 keeps all tokens.")
    top_p: float = Field(1.0, gt=0.0, le=1.0)

    def law(self) -> SamplingLaw:
        return SamplingLaw(self.temperature, self.top_k, self.top_p)


class PromptSource(Settings):
    """Where prompts come from, and how many are for training and for evaluation."""

    file: str = Field(
        "",
        description="JSONL with prompt, messages or turns, or a question file of Spec-Bench, MT-bench, HumanEval or "
        "GSM8K; may be packed by gzip. `shipped` for the package's own set.",
    )
    dataset: str = Field("", description="A `datasets` id or folder, instead of file.")
    split: str = Field("train", description="Split of the dataset.")
    domains: list[str] = Field([], description="Keep only these domains; empty keeps all.")
    train: int = Field(0, ge=0, description="Prompts whose answers teach drafts. Both 0: all, a fifth for eval.")
    eval: int = Field(0, ge=0, description="Prompts that only score. Never overlaps train.")

    @model_validator(mode="after")
    def _one_source(self) -> "PromptSource":
        if bool(self.file) == bool(self.dataset):
            raise ValueError("give either file or dataset")
        return self


class ServerSettings(Settings):
    """A server that serves the target's own weights and writes the answers, instead of this process."""

    url: str = Field(description="Address of an OpenAI-compatible server that gives log-probabilities.")
    model: str = Field("", description="Name of the target there; needed where it serves several.")
    in_flight: int = Field(32, ge=1, description="Requests at the same time.")


class TraceSettings(Settings):
    """Collecting the target's answers."""

    prompts: list[PromptSource] = Field(min_length=1)
    laws: list[LawSettings] = Field([LawSettings(temperature=0.0), LawSettings(temperature=1.0)], min_length=1)
    max_new_tokens: int = Field(128, ge=1, description="Longest answer, in tokens.")
    top: int = Field(64, ge=0, description="Most probable tokens kept for each position; 0 keeps none.")
    batch_size: int = Field(48, ge=1, description="Answers written at once; also the rows of a shard.")
    seed: int = 0
    server: ServerSettings | None = Field(
        None, description="Who writes the answers; none: this process. vLLM needs --max-logprobs of at least `top`."
    )


class DecodeSettings(Settings):
    """Literal speculative decoding. Every choice keeps the target's law."""

    k: int = Field(
        4,
        ge=1,
        le=LONGEST_DRAFT,
        description="Draft tokens of a block, levels of a tree; the first length if it adapts.",
    )
    rule: Literal["chain", "block"] = Field("chain", description="Token by token, or the block as a whole.")
    length: Literal["fixed", "window", "marginal"] = Field(
        "fixed", description="window: by recent acceptance (0.85 / 0.6); marginal: while one more token pays."
    )
    longest: int = Field(16, ge=1, le=LONGEST_DRAFT, description="Largest k of a length that adapts.")
    cost_ratio: float = Field(0.1, gt=0.0, description="marginal: time of a draft step / of a target step.")
    target_growth: float = Field(
        0.0, ge=0.0, description="marginal: what one more token adds to a target step, as a share of it."
    )
    fallback_after: int = Field(0, ge=0, description="Failed blocks in a row before decoding plainly; 0 never.")
    pause: int = Field(16, ge=1, description="Plain steps before drafting is tried again.")
    batch_size: int = Field(1, ge=1, description="Prompts answered at once.")


class EvaluateSettings(Settings):
    """Scoring by replay, and the audit by literal decoding."""

    num_draft_tokens: DraftLengths = Field(list(range(1, 9)), description="1..8, 4 or [1, 2, 4].")
    audit_prompts: int = Field(8, ge=0, description="Prompts decoded literally; 0 leaves the audit out.")
    audit_tokens: int = Field(64, ge=1, description="Tokens decoded for each audit prompt.")
    cost_repeats: int = Field(15, ge=3, description="Timings behind each cost; the median counts.")
    batch_sizes: BatchSizes = Field(
        [1], description="Requests decoded together, such as [1, 4, 16]; 1 is always timed."
    )
    batch_context: int = Field(128, ge=1, description="Tokens of context of each request where batches are timed.")
    hardware: list[str] = Field([], description="Machines to predict for: names of shipped profiles, or YAML files.")
    criteria_answers: int = Field(8, ge=0, description="Answers behind the criteria of each draft; 0 leaves them out.")


class SelectSettings(Settings):
    """Choosing the winner."""

    memory_fraction: float = Field(
        0.1, gt=0.0, description="Largest draft, as a share of the target's bytes; both with their context."
    )
    runtime: Literal["foredraft", "transformers"] = Field("foredraft", description="Where the draft will be served.")
    context: int = Field(0, ge=0, description="Tokens of context whose keys and values count as memory of both.")
    max_bytes: int = Field(0, ge=0, description="Largest draft in bytes, its context included; 0 sets no limit.")
    watts: float = Field(0.0, ge=0.0, description="Power of the machine that was timed, while it decodes.")
    max_joules: float = Field(0.0, ge=0.0, description="Most energy that a token may take; needs watts; 0: no limit.")
    full_vocabulary: bool = Field(False, description="Only drafts that can say every token of the target.")
    batch_size: int = Field(1, ge=1, description="Requests decoded together; the report must have timed it.")
    mix: dict[str, float] = Field({}, description="Share of the tokens by domain; empty: as in the report.")
    portfolio: int = Field(1, ge=1, le=8, description="Most drafters of the best portfolio.")

    @model_validator(mode="after")
    def _energy_needs_power(self) -> "SelectSettings":
        if self.max_joules and not self.watts:
            raise ValueError("max_joules needs watts, the power of the machine while it decodes")
        return self

    @property
    def most_bytes(self) -> float:
        """The limit in bytes; inf where none is set."""
        return float(self.max_bytes or "inf")


class SimulateSettings(Settings):
    """Running policies over recorded traffic."""

    lengths: DraftLengths = Field([2, 4, 8], description="Draft lengths of each drafter.")
    limit: int = Field(0, ge=0, description="Answers that are simulated; 0 takes all.")
    cost_ratio: float = Field(
        0.2,
        gt=0.0,
        description="Time of a draft step of a model that the report did not time / of a target step.",
    )
    target_seconds: float = Field(0.03, gt=0.0, description="Seconds of a target step of one token, without a report.")
    target_growth: float = Field(
        0.05, ge=0.0, description="What one more token adds to it, as a share, without a report."
    )
    deciding_seconds: float = Field(20e-6, ge=0.0, description="Seconds that a choice is charged a block.")
    batch_size: int = Field(
        1, ge=1, le=1024, description="Requests decoded together, whose times count; a report must have timed it."
    )
    target_bytes: int = Field(
        0, ge=0, description="Memory of the target, which scores weigh drafters' against; 0: the report's."
    )
    seed: int = 0
