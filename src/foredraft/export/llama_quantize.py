"""K-quants, which are llama.cpp's own work: its llama-quantize, run where it is found, and what it wrote read back."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from gguf import GGUFReader

from foredraft.core.errors import CapabilityError, CheckpointError
from foredraft.core.programs import last_words

VARIABLE = "FOREDRAFT_LLAMA_QUANTIZE"


def find_llama_quantize() -> str:
    """Return llama-quantize: what FOREDRAFT_LLAMA_QUANTIZE names, or what stands in PATH; empty where there is none."""
    return shutil.which(os.environ.get(VARIABLE, "llama-quantize")) or ""


def llama_quantize(plain: Path, out: Path, types: Mapping[str, str]) -> None:
    """Write a GGUF file anew, each tensor in a type of its own.

    llama-quantize stores another type in silence where blocks do not divide rows; that is found and refused.

    Args:
        plain: A file in float32 or float16.
        types: By the tensor's name in the file, such as blk.0.ffn_down.weight.

    Raises:
        CapabilityError: llama-quantize is not found.
        CheckpointError: it failed, or stored another type than it was asked for; `out` is removed.
    """
    program = find_llama_quantize()
    if not program:
        raise CapabilityError(
            f"{', '.join(sorted(set(types.values())))} are written by llama-quantize of llama.cpp, not found in PATH. "
            f"Build it, name it in {VARIABLE}, or choose f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0."
        )
    chosen = [f"--tensor-type={name.removesuffix('.weight')}={kind}" for name, kind in types.items()]
    command = [program, "--allow-requantize", *chosen, str(plain), str(out), next(iter(types.values()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        if done.returncode or not out.is_file():
            raise CheckpointError(f"{program} failed: {last_words(done)}. Nothing was kept.")
        _refuse_other_types(out, types)
    except CheckpointError:
        out.unlink(missing_ok=True)
        raise


def _refuse_other_types(file: Path, types: Mapping[str, str]) -> None:
    stored = {str(tensor.name): tensor.tensor_type.name.lower() for tensor in GGUFReader(file).tensors}
    for name, kind in types.items():
        if stored.get(name) != kind:
            raise CheckpointError(
                f"llama-quantize stored {name} as {stored.get(name, 'nothing')} and not as {kind}. Nothing was kept: "
                "choose a type whose blocks divide its rows."
            )
