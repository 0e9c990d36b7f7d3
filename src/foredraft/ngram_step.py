"""The step that makes a drafter without a model, and the corpora that it is made from."""

from typing import Literal

from pydantic import Field, model_validator

from foredraft.settings import Settings


class CorpusSettings(Settings):
    """Text that a drafter without a model is built from, tokenized as the target does."""

    files: list[str] = Field(
        [],
        description="JSONL with text, prompt and reference, or messages, packed by gzip or not; any other file is one "
        "text.",
    )
    dataset: str = Field("", description="A `datasets` id or folder, instead of files.")
    split: str = Field("train", description="Split of the dataset.")
    weight: float = Field(
        1.0,
        gt=0.0,
        le=1000.0,
        description="What an occurrence in it counts; a whole number but for the kind suffix.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "CorpusSettings":
        if bool(self.files) == bool(self.dataset):
            raise ValueError("give either files or dataset")
        return self

    @property
    def name(self) -> str:
        return self.dataset or ", ".join(self.files)


class NgramStep(Settings):
    """A drafter without a model."""

    kind: str = Field(description="prompt-lookup, suffix-automaton, traffic, ngram, ngram-law, lookup-table or suffix.")
    order: int = Field(4, ge=1, le=16, description="ngram, ngram-law: longest context, in tokens.")
    min_count: int = Field(1, ge=1, description="Contexts and keys seen less often are dropped (not suffix).")
    key: int = Field(8, ge=1, le=64, description="lookup-table: tokens looked up.")
    continuation: int = Field(16, ge=1, le=256, description="lookup-table: tokens stored for each key.")
    smoothing: Literal["interpolated", "stupid-backoff"] = Field("interpolated", description="ngram-law.")
    max_match: int = Field(3, ge=1, description="prompt-lookup: longest suffix looked up, in tokens.")
    min_match: int = Field(1, ge=1, description="prompt-lookup: shortest suffix looked up, in tokens.")
    capacity: int = Field(1 << 20, ge=80, description="traffic: tokens of earlier requests that are kept, about.")
    policy: Literal["lru", "frequency", "cluster"] = Field(
        "lru",
        description="traffic: what is given up first, the least recently or least often useful, or the most alike.",
    )
    depth: int = Field(32, ge=1, le=64, description="suffix: longest match, in tokens.")
    shard_tokens: int = Field(
        200_000_000, ge=1, description="suffix: tokens of a file; building takes about 16 bytes of memory for each."
    )
    corpus: Literal["trace", "texts", "trace+texts"] = Field(
        "trace", description="What kinds that are built are built from: what the target wrote, texts, or both."
    )
    texts: list[CorpusSettings] = Field([], description="Corpora beside the trace, or instead of it.")

    @model_validator(mode="after")
    def _texts_are_used(self) -> "NgramStep":
        if bool(self.texts) != ("texts" in self.corpus):
            raise ValueError("texts go with corpus: texts or trace+texts, and these with texts")
        return self

    @model_validator(mode="after")
    def _matches_have_a_length(self) -> "NgramStep":
        if self.kind == "prompt-lookup" and self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is longer than max_match {self.max_match}")
        return self

    @property
    def reads_trace(self) -> bool:
        return "trace" in self.corpus
