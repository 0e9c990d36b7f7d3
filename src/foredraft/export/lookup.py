"""Prompt lookup as a runtime has it itself: nothing to load, only settings, in foredraft-plan.json."""

from pathlib import Path

from foredraft.core.files import whole_folder
from foredraft.core.options import read_options
from foredraft.export.plan import RuntimePlan
from foredraft.models.target import LocalTarget

_LOOKUP, _MATCH = "prompt-lookup", 3


def lookup_match(source: Path) -> int:
    """Return the longest match of `prompt-lookup:max_match=3`, in tokens; 0 for any other drafter.

    Raises:
        UserError: another option; the runtimes asked here have no shortest match to set.
    """
    if source.name.partition(":")[0] != _LOOKUP:
        return 0
    return int(read_options(source.name, {"max_match": int}).get("max_match", _MATCH))


def write_lookup(plan: RuntimePlan, target: LocalTarget, out: Path) -> None:
    """Write the plan alone into a new folder.

    Raises:
        OutputError: the folder exists, or the disk is full.
    """
    with whole_folder(out) as folder:
        plan.write(folder, target.name, {}, (), {})
