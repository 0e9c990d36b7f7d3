"""A verification in the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table

from foredraft.acceptance.wording import number
from foredraft.verification.counting import Counted
from foredraft.verification.findings import Verification


def verification_table(found: Verification) -> RenderableType:
    """Return counts by position in the runtime and here, what of the text is equal, and every fault."""
    table = Table(title=f"{found.draft} in {found.runtime} {found.version}, k = {found.k}")
    for column in ("", "blocks", "drafted", "accepted", "by position", "tokens per guess"):
        table.add_column(column, justify="left" if not column else "right")
    for name, counted in ((found.runtime, found.counted), ("foredraft", found.expected)):
        table.add_row(name, *_cells(counted))
    count = len(found.prompts)
    lines = [
        f"Counts agree on {found.same_counts} of {count} prompts.",
        f"Text with the draft equals plain decoding on {found.same_text} of {count} prompts.",
        *found.warnings,
        *(found.faults or ["Passed."]),
    ]
    return Group(table, *lines)


def _cells(counted: Counted) -> list[str]:
    positions = "-" if counted.by_position is None else " ".join(map(str, counted.by_position))
    per_guess = number(1.0 + counted.accepted / counted.blocks) if counted.blocks else "-"
    known = ["-" if value is None else str(value) for value in (counted.blocks, counted.drafted)]
    return [*known, str(counted.accepted), positions, per_guess]
