"""The runtimes that a draft can be verified in: what runs them, what they read, how they count, what installs them."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foredraft.core.errors import MissingExtraError
from foredraft.ngram.prompt_lookup import PromptLookup
from foredraft.verification.counting import Counting
from foredraft.verification.lookups import EarliestLookup, Lookup, NgramSimple


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime that answers prompts in an environment of its own.

    Attributes:
        worker: Module beside workers/run.py.
        variable: Environment variable with the interpreter of its environment; empty: this one.
        tested: Beginnings of the versions that the worker was run with.
        form: What it reads, a key of forms.FORMS.
        install: Command that makes its environment.
        lookup: Its own prompt lookup; None where it has none.
    """

    worker: str
    variable: str
    tested: tuple[str, ...]
    form: Literal["folder", "gguf", "openvino", "onnx"]
    counting: Counting
    install: str
    lookup: Lookup | None = None

    def python(self, given: str = "") -> str:
        """Return the interpreter that runs it.

        Args:
            given: The user's choice; empty takes the environment variable's.

        Raises:
            MissingExtraError: there is none; the message names the command that installs it.
        """
        path = given or (os.environ.get(self.variable, "") if self.variable else sys.executable)
        if not path:
            raise MissingExtraError(
                f"Where is its environment? Make it with: {self.install}\n"
                f"Then set {self.variable}=DIR/bin/python, or give --python."
            )
        if not Path(path).is_file():
            raise MissingExtraError(f"There is no interpreter {path}. Make the environment with: {self.install}")
        return path


RUNTIMES: Mapping[str, Runtime] = {
    "transformers": Runtime(
        "in_transformers", "", ("5.24",), "folder", Counting(False, "spare"), "pip install foredraft",
        lookup=Lookup(Counting(False, "cropped"), lambda vocab_size, longest, *_: EarliestLookup(vocab_size, longest)),
    ),
    "vllm": Runtime(
        "in_vllm", "FOREDRAFT_VLLM_PYTHON", ("0.32",), "folder", Counting(True, "whole"),
        "tools/runtimes.sh vllm DIR",
        lookup=Lookup(
            Counting(True, "whole"),
            lambda vocab_size, longest, shortest, _: EarliestLookup(vocab_size, longest, shortest),
            has_shortest=True,
        ),
    ),
    "llama.cpp": Runtime(
        "in_llamacpp", "FOREDRAFT_XLLAMA_PYTHON", ("2026.10",), "gguf", Counting(True, "spare"),
        "tools/runtimes.sh llama DIR",
        lookup=Lookup(
            Counting(True, "spare"), lambda vocab_size, longest, _, k: NgramSimple(vocab_size, longest, k)
        ),
    ),
    "openvino": Runtime(
        "in_openvino", "FOREDRAFT_OPENVINO_PYTHON", ("2026.4",), "openvino", Counting(True, "spare"),
        "tools/runtimes.sh openvino DIR",
        lookup=Lookup(
            Counting(True, "spare"), lambda vocab_size, longest, *_: EarliestLookup(vocab_size, longest, halves=True)
        ),
    ),
    "onnxruntime-genai": Runtime(
        "in_ort", "FOREDRAFT_ORT_PYTHON", ("0.18",), "onnx", Counting(False, "room"), "tools/runtimes.sh ort DIR",
        lookup=Lookup(
            Counting(False, "room"), lambda vocab_size, longest, *_: PromptLookup(vocab_size, longest, longest)
        ),
    ),
    "mlx-lm": Runtime(
        "in_mlx", "FOREDRAFT_MLX_PYTHON", ("0.32",), "folder", Counting(False, "room"), "tools/runtimes.sh mlx DIR"
    ),
}  # fmt: skip
