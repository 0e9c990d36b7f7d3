"""Programs of other environments: what they are given, and what they say when they fail."""

import os
from subprocess import CompletedProcess


def environment_elsewhere() -> dict[str, str]:
    """Return the variables for a program of another environment, whose imports this one's PYTHONPATH would change."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def last_words(done: CompletedProcess[str]) -> str:
    """Return the last line that a program wrote to its captured stderr."""
    return (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
