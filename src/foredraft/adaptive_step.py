"""The step that makes one candidate of several, which chooses among them for each block."""

from pydantic import Field

from foredraft.settings import BatchSizes, DraftLengths, Settings


class AdaptiveStep(Settings):
    """A drafter that chooses among candidates, their draft lengths and no speculation, anew for each block."""

    others: list[str] = Field([], description="Candidates beside the one that it starts from.")
    policy: str = Field(
        "contextual",
        description="What chooses, with options: score:speed=1,quality=0.2,resource=0.1 weighs; see docs/select.md.",
    )
    lengths: DraftLengths = Field([2, 4, 8], description="Draft lengths of each; evaluate up to the longest.")
    batch_sizes: BatchSizes = Field([1], description="Requests decoded together that costs are measured for.")
    cost_repeats: int = Field(9, ge=3, description="Timings behind each cost; the median counts.")
    context: int = Field(128, ge=1, description="Tokens of context of each request where batches are timed.")
