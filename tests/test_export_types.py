"""Laws of GGUF types by unit, of integers stored as they are, of llama-quantize and of OpenVINO's exporter."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize

from foredraft.compress.quantize import quantize
from foredraft.core.errors import (
    CapabilityError,
    CheckpointError,
    MissingExtraError,
    ModelError,
    OutputError,
    RecipeError,
    UserError,
)
from foredraft.export import llama_quantize
from foredraft.export.gguf_types import integer_blocks, module_types
from foredraft.export.openvino import OPTIMUM_VARIABLE, export_openvino
from foredraft.export.plan import PLAN
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.made_for import blank_manifest
from foredraft.models.packed import PackedLinear
from foredraft.models.target import LocalTarget, load_target
from foredraft.verification.forms import FORMS
from tests.test_models_gguf import _write_gguf as write_by_hand
from tests.tiny import save_tiny, tiny_model

MIXED = {
    "layers.0.qkv": WeightFormat(4, 32),
    "layers.0.down": WeightFormat(4, 64),
    "layers.1.o": WeightFormat(8, 0),
} | {"layers.1.down": WeightFormat(8, 32)}


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path) -> LocalTarget:
    return load_target(str(tiny_target_folder), "float32")


def test_the_first_pattern_decides_and_the_rest_is_stored_as_it_is() -> None:
    model = quantize(Draft(tiny_model(num_layers=2)), MIXED).model
    model.model.layers[1].mlp.up_proj.to(torch.bfloat16)
    types = module_types(model, {"layers.0.o": "Q4_1", "layers.0.*": "q5_0", "head": "q4_0"})
    layers = "model.layers"
    assert types[f"{layers}.0.self_attn.o_proj"] == "q4_1"
    assert types[f"{layers}.0.self_attn.q_proj"] == types[f"{layers}.0.mlp.down_proj"] == "q5_0"
    assert (types[f"{layers}.1.self_attn.o_proj"], types[f"{layers}.1.mlp.up_proj"]) == ("q8_0", "bf16")
    assert (types["lm_head"], types["model.embed_tokens"]) == ("q4_0", "f16")
    assert len(types) == 2 * 7 + 2
    plain = module_types(model, {})
    assert (plain[f"{layers}.0.self_attn.q_proj"], plain[f"{layers}.0.mlp.gate_proj"]) == ("q4_0", "f16")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"head": "q9"}, "head: 'q9' is no GGUF type"),
        ({"layers.7.*": "q8_0"}, "The pattern 'layers.7.*' matches no unit"),
        ({"layers.*": "q4_k"}, "q4_k holds blocks of 256 inputs, and rows of layers.0.qkv have 32: .*q4_0 or q8_0"),
    ],
)
def test_types_that_cannot_be_are_refused(given: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        module_types(tiny_model(num_layers=2), given)


def test_rounded_modules_keep_their_very_integers() -> None:
    model = quantize(Draft(tiny_model(num_layers=2)), MIXED).model
    for name in ("0.self_attn.k_proj", "0.mlp.down_proj", "1.self_attn.o_proj", "1.mlp.down_proj"):
        module = model.get_submodule(f"model.layers.{name}")
        kind = module_types(model, {})[f"model.layers.{name}"]
        found = dequantize(integer_blocks(module, kind), GGMLQuantizationType[kind.upper()])
        packed = isinstance(module, PackedLinear)
        plain = module.unpacked(torch.float32) if packed else module.weight.float() * module.weight_scale.float()
        assert np.array_equal(found, plain.detach().numpy()), name
    four = model.model.layers[0].self_attn.k_proj
    assert integer_blocks(four, "q8_0") is None
    assert integer_blocks(model.model.layers[0].mlp.up_proj, "q8_0") is None
    four.weight_scale.data *= 1e-9  # no number of float16
    assert integer_blocks(four, "q4_0") is None


COPIES = """#!{python}
import shutil, sys
assert "--tensor-type=blk.0.ffn_down=q4_k" in sys.argv
shutil.copyfile(sys.argv[-3], sys.argv[-2])
"""


def test_llama_quantize_is_named_where_it_is_missing_and_its_fallbacks_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program here only copies: the types stay what they were."""
    plain = write_by_hand(tmp_path / "plain.gguf", tiny_model(num_layers=1))
    asked = {"blk.0.ffn_down.weight": "q4_k"}
    monkeypatch.setenv(llama_quantize.VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(CapabilityError, match="q4_k are written by llama-quantize of llama.cpp, not found in PATH"):
        llama_quantize.llama_quantize(plain, tmp_path / "out.gguf", asked)
    program = tmp_path / "llama-quantize"
    program.write_text(COPIES.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv(llama_quantize.VARIABLE, str(program))
    with pytest.raises(CheckpointError, match=r"stored blk.0.ffn_down.weight as f32 and not as q4_k. Nothing was kept"):
        llama_quantize.llama_quantize(plain, tmp_path / "out.gguf", asked)
    assert not (tmp_path / "out.gguf").exists()
    with pytest.raises(CheckpointError, match="failed: AssertionError"):
        llama_quantize.llama_quantize(plain, tmp_path / "out.gguf", {"blk.0.ffn_up.weight": "f32"})


OPTIMUM = """#!{python}
import pathlib, sys
if "int4" in sys.argv:
    raise SystemExit("no such weights")
out = pathlib.Path(sys.argv[-1])
(out / "openvino_model.xml").write_text(" ".join(sys.argv[1:-1]))
"""


def test_openvino_is_exported_by_optimum_in_its_own_environment(
    target: LocalTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = save_tiny(tmp_path / "draft", num_layers=1)
    monkeypatch.setenv(OPTIMUM_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(
        MissingExtraError, match=r"tools/runtimes.sh openvino DIR, and FOREDRAFT_OPTIMUM_CLI=DIR/bin/optimum-cli"
    ):
        export_openvino(draft, target, 4, tmp_path / "out")
    program = tmp_path / "optimum-cli"
    program.write_text(OPTIMUM.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv(OPTIMUM_VARIABLE, str(program))
    export_openvino(draft, target, 4, tmp_path / "out", "int8")
    asked = (tmp_path / "out" / "openvino_model.xml").read_text()
    assert asked.startswith("export openvino --model")
    assert "--weight-format int8" in asked
    assert f"--model {tmp_path / '.out.partial' / 'plain'}" in asked
    assert "num_assistant_tokens=4" in (tmp_path / "out" / "README.md").read_text()
    plan = json.loads((tmp_path / "out" / PLAN).read_text())
    assert (plan["runtime"], plan["num_draft_tokens"], plan["stored_weights"]) == ("openvino", 4, "int8")
    found = FORMS["openvino"].served(str(tmp_path / "out"))
    assert (found.weights, found.is_exact) == (str(tmp_path / "out" / "plain"), False)
    assert len(load_draft(Path(found.weights)).head_token_ids) == 0
    with pytest.raises(OutputError, match="exists already"):
        export_openvino(draft, target, 4, tmp_path / "out", "int8")
    with pytest.raises(CheckpointError, match="failed: no such weights. Nothing was kept"):
        export_openvino(draft, target, 4, tmp_path / "other", "int4", 64)
    assert not (tmp_path / "other").exists()
    with pytest.raises(UserError, match="weights are fp32, fp16, int8, int4, not 'int3'"):
        export_openvino(draft, target, 4, tmp_path / "other", "int3")
    rounded = quantize(Draft(tiny_model(num_layers=2)), MIXED)
    save_draft(rounded, tmp_path / "rounded", blank_manifest(target, "causal-lm"), target.tokenizer)
    with pytest.raises(ModelError, match="rounded already: export its plain parent"):
        export_openvino(tmp_path / "rounded", target, 4, tmp_path / "other")
