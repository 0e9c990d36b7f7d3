"""What other programs say when they fail."""

from subprocess import CompletedProcess


def last_words(done: CompletedProcess[str]) -> str:
    """Return the last line that a program wrote to its captured stderr."""
    return (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
