"""Bad input to export and verify: a clear error before anything is run, and nothing lost."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foredraft.core.errors import CheckpointError, ForedraftError, MissingExtraError, ModelError, ServerError, UserError
from foredraft.export import onnxruntime_genai as onnx
from foredraft.export.openvino import MODEL as OPENVINO_MODEL
from foredraft.models.target import LocalTarget, load_target
from foredraft.verbs import export_draft
from foredraft.verification import child
from foredraft.verification.child import Job, Question, ask
from foredraft.verification.forms import FORMS
from foredraft.verification.runtimes import RUNTIMES
from foredraft.verification.verify import VerifySettings, verify
from tests.test_export_gguf import save_named

HERE = VerifySettings(k=3, max_new_tokens=4, python=sys.executable)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LocalTarget:
    return load_target(str(save_named(tmp_path_factory.mktemp("models") / "tiny-named")), "float32")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("runtime", "harm", "message"),
    [
        ("transformers", lambda out: cut(out / "model.safetensors"), "cannot be loaded .* not fully covered"),
        ("transformers", lambda out: (out / "model.safetensors").unlink(), "it has no .*safetensors"),
        ("llama.cpp", lambda out: cut(out / "draft.gguf"), "draft.gguf"),
        (
            "llama.cpp",
            lambda out: (out / "draft.gguf").unlink(),
            "holds no draft.gguf: write one with foredraft export",
        ),
    ],
)
def test_a_half_written_export_is_named_before_the_runtime_starts(
    runtime: str, harm: Callable[[Path], None], message: str, target: LocalTarget, tmp_path: Path
) -> None:
    out = tmp_path / "served"
    export_draft(target.path, target, runtime, 3, out)
    harm(out)
    with pytest.raises(ForedraftError, match=message):
        verify(str(out), target, runtime, [], HERE)


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        ("openvino", f"holds no {OPENVINO_MODEL} beside plain/: write them .* openvino:weights=fp32"),
        ("onnxruntime-genai", "holds no genai_config.json beside plain/: write them .* onnxruntime-genai"),
    ],
)
def test_an_export_for_another_runtime_is_told_apart(
    runtime: str, message: str, target: LocalTarget, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        verify(str(target.path), target, runtime, [], HERE)


BUILDER = """#!{python}
import json, pathlib, sys
if "int4" in sys.argv:
    raise SystemExit("no such weights")
out = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
out.mkdir(parents=True, exist_ok=True)
(out / "model.onnx").write_text(sys.argv[4])
(out / "tokenizer.json").write_text("t")
decoder = {{"filename": "model.onnx", "num_hidden_layers": len(sys.argv[4])}}
(out / "genai_config.json").write_text(json.dumps({{"model": {{"decoder": decoder}}}}))
"""


def test_the_composite_folder_holds_both_models_and_nothing_is_kept_of_a_failure(
    target: LocalTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(onnx.PYTHON_VARIABLE, raising=False)
    with pytest.raises(MissingExtraError, match="tools/runtimes.sh ort DIR, and FOREDRAFT_ORT_PYTHON=DIR/bin/python"):
        export_draft(target.path, target, "onnxruntime-genai", 3, tmp_path / "out")
    python = tmp_path / "python"
    python.write_text(BUILDER.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setenv(onnx.PYTHON_VARIABLE, str(python))
    export_draft(target.path, target, "onnxruntime-genai", 3, tmp_path / "out")
    assert (FORMS["onnx"].write(target, tmp_path / "alone") / "model.onnx").is_file()
    config = onnx._config(tmp_path / "out")
    models = config["model"]
    assert (models["decoder"]["filename"], models["draft"]["filename"]) == ("target/model.onnx", "draft/model.onnx")
    assert models["decoder"]["num_hidden_layers"] != models["draft"]["num_hidden_layers"]
    assert config["speculative"] == {"max_draft_tokens": 3}
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    with pytest.raises(CheckpointError, match="failed: no such weights. Nothing was kept"):
        export_draft(target.path, target, "onnxruntime-genai:weights=int4", 3, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(UserError, match="weights are fp32 or int4, not 'int3'"):
        export_draft(target.path, target, "onnxruntime-genai:weights=int3", 3, tmp_path / "other")
    with pytest.raises(UserError, match="at most 16 draft tokens, not 17"):
        export_draft(target.path, target, "onnxruntime-genai", 17, tmp_path / "other")


def test_a_port_in_use_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import json, socket\n"
        "one, other = socket.socket(), socket.socket()\n"
        "one.bind(('127.0.0.1', 0)); one.listen()\n"
        "try: other.bind(one.getsockname())\n"
        "except OSError as error: print(json.dumps({'error': f'OSError: {error}'}))\n"
    )
    (tmp_path / "run.py").write_text(script)
    monkeypatch.setattr(child, "_RUN", tmp_path / "run.py")
    job = Job(tmp_path, "", 3, (Question((1, 2), 4),), {})
    with pytest.raises(ServerError, match="Address already in use .another program holds the port .* unset VLLM_PORT"):
        ask(RUNTIMES["vllm"], sys.executable, job, True, 30.0)
