"""A draft as OpenVINO takes it, through optimum: its own exporter, in an environment of its own.

optimum-intel asks for another transformers than this package does, so that the two do not share an environment: its
optimum-cli is run as a program.
"""

import os
import shutil
import subprocess
from pathlib import Path

from foredraft.core.errors import CheckpointError, MissingExtraError, ModelError, UserError
from foredraft.core.files import whole_folder
from foredraft.core.programs import last_words
from foredraft.models.draft import load_draft
from foredraft.models.target import LocalTarget

OPTIMUM_VARIABLE = "FOREDRAFT_OPTIMUM_CLI"
_WEIGHTS = ("fp32", "fp16", "int8", "int4")
_MODEL = "openvino_model.xml"


def export_openvino(
    source: Path, target: LocalTarget, k: int, out: Path, weights: str = "fp16", group: int = 0
) -> None:
    """Write the folder that openvino_genai.draft_model reads. The head is whole, whatever rows the draft computes here.

    Args:
        weights: fp32, fp16, int8 or int4.
        group: Inputs that share a scale in 4 bits; 0 leaves it to optimum.

    Raises:
        MissingExtraError: there is no optimum-cli.
        ModelError: the draft is rounded already, which optimum does not read.
        UserError: weights that optimum does not write.
        CheckpointError: optimum failed; nothing is kept.
    """
    if weights not in _WEIGHTS:
        raise UserError(f"openvino: weights are {', '.join(_WEIGHTS)}, not {weights!r}.")
    if getattr(load_draft(source).model.config, "quantization_config", None):
        raise ModelError("The draft is rounded already: export its plain parent, with weights int8 or int4.")
    program = shutil.which(os.environ.get(OPTIMUM_VARIABLE, "optimum-cli"))
    if not program:
        raise MissingExtraError(
            "OpenVINO drafts are written by optimum-cli, which is not in PATH. It needs an environment of its own: "
            f'pip install "optimum-intel[openvino]" there, and name its optimum-cli in {OPTIMUM_VARIABLE}.'
        )
    with whole_folder(out) as folder:
        command = [program, "export", "openvino", "--model", str(source.resolve())]
        command += ["--task", "text-generation-with-past", "--weight-format", weights]
        command += ["--group-size", str(group)] if group else []
        done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
        if done.returncode or not (folder / _MODEL).is_file():
            raise CheckpointError(f"{program} failed: {last_words(done)}. Nothing was kept.")
        (folder / "run.txt").write_text(
            f'LLMPipeline(TARGET, "CPU", draft_model=draft_model("{out.name}", "CPU")) with num_assistant_tokens={k}\n',
            encoding="utf-8",
        )
