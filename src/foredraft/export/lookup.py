"""Prompt lookup as a runtime has it itself: nothing to load, only settings."""

from pathlib import Path

from foredraft.core.options import read_options

LOOKUP, LONGEST_MATCH = "prompt-lookup", 3


def lookup_match(source: Path) -> int:
    """Return the longest match of `prompt-lookup:max_match=3`, in tokens; 0 for any other drafter.

    Raises:
        UserError: another option; the runtimes asked here have no shortest match to set.
    """
    if source.name.partition(":")[0] != LOOKUP:
        return 0
    return int(read_options(source.name, {"max_match": int}).get("max_match", LONGEST_MATCH))
