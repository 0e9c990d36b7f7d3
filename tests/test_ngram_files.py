"""Damaged n-gram files never crash a process and never give a wrong answer."""

import subprocess
import sys
from pathlib import Path

import pytest

from foredraft.ngram.jit import COMPILED

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.skipif(not COMPILED, reason="numba is missing or switched off")
def test_mutated_files_are_refused_or_answer_as_before(tmp_path: Path) -> None:
    script = ROOT / "tests" / "fuzz_ngram_files.py"
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "10000"],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("10000 mutated files: 98")
