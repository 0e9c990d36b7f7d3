"""What the benchmarks beside this file share: their four inputs, and changes paired by prompt."""

import argparse
from pathlib import Path

import numpy as np

from foredraft.acceptance.intervals import expected_acceptance, paired_difference
from foredraft.acceptance.report import AcceptanceReport


def parser_for_target(usage: str | None) -> argparse.ArgumentParser:
    """Return a parser of DRAFT TARGET TRAIN_TRACE EVAL_TRACE."""
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path)
    parser.add_argument("target")
    parser.add_argument("train")
    parser.add_argument("evaluation")
    return parser


def change(one: AcceptanceReport, other: AcceptanceReport) -> str:
    """Return by how much the expected acceptance of one is above the other's, with its 95 % interval."""
    found = paired_difference(one, other, expected_acceptance, np.random.default_rng(0)).difference
    return f"{found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
