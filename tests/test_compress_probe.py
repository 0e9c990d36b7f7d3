"""Laws of measuring changes to a draft from kept states, and of cuts that are decided by it."""

from collections.abc import Callable
from contextvars import Context
from functools import cache
from pathlib import Path

import pytest
import torch

from foredraft import compressing
from foredraft.acceptance.evaluate import score
from foredraft.acceptance.report import AcceptanceReport
from foredraft.compress.probe import Bench, Probe, measure
from foredraft.compress.prune import layers_to_keep
from foredraft.compress.quantize import quantize
from foredraft.core.errors import ModelError, OutputError, RecipeError, TraceError, UserError, VocabMismatchError
from foredraft.core.files import claimed
from foredraft.core.law import GREEDY, SamplingLaw
from foredraft.factoring import low_rank_draft
from foredraft.models.causal_lm import CausalLMDrafter
from foredraft.models.compressed import WeightFormat
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.layers import keep_layers, layer_stack
from foredraft.models.made_for import blank_manifest
from foredraft.models.target import load_target
from foredraft.searching import compress_draft
from foredraft.sensing import draft_sensitivity
from foredraft.steps import (
    AdaptStep,
    CompressStep,
    DistillStep,
    LowRankStep,
    MetaStep,
    PruneStep,
    QuantizeStep,
    SensitivitySettings,
)
from foredraft.trace.store import Trace
from foredraft.trainings import adapt_draft, distill_draft, meta_draft
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer
from tests.traces import build_trace, trace_row

K = 4


@cache
def texts() -> list[tuple[list[int], list[int]]]:
    """Return prompts and answers of lengths that differ; seven tokens in ten are the guess of the draft of seed 0."""
    generator, model, made = torch.Generator().manual_seed(3), tiny_model(num_layers=5), []
    for index in range(6):
        text = prompt = torch.randint(3, 259, (4 + index % 3,), generator=generator)
        for _ in range(6 + index):
            drawn = int(torch.randint(3, 259, (1,), generator=generator))
            if torch.rand(1, generator=generator) < 0.7:
                with torch.no_grad():
                    drawn = int(model(text[None]).logits[0, -1, :259].argmax())
            text = torch.cat([text, torch.tensor([drawn])])
        made.append((prompt.tolist(), text[len(prompt) :].tolist()))
    return made


def made_trace(path: Path, law: SamplingLaw = SamplingLaw(), **changes: object) -> Trace:
    rows = [trace_row(f"p{index}", *pair, greedy=law.is_greedy) for index, pair in enumerate(texts())]
    return build_trace(path, rows, law, **changes)


def figures(report: AcceptanceReport) -> list[float]:
    return [report.expected_acceptance, *(report.mean_tokens_per_call(k) for k in report.ks)]


def bench(trace: Trace) -> Bench:
    return Bench.of(list(trace.rows(tops=False)), trace.info.law, trace.info.vocab_size)


@pytest.mark.parametrize("law", [GREEDY, SamplingLaw(), SamplingLaw(0.7, top_k=20)], ids=str)
@pytest.mark.parametrize("head", [torch.empty(0, dtype=torch.long), torch.arange(0, 272, 2)], ids=["full", "trimmed"])
def test_a_bench_measures_what_replay_measures(law: SamplingLaw, head: torch.Tensor, tmp_path: Path) -> None:
    trace = made_trace(tmp_path / "trace", law)
    draft = Draft(tiny_model(num_layers=5), head)
    replayed = score("draft", CausalLMDrafter(draft, law, 272), trace, range(1, 9))
    assert figures(measure(draft, bench(trace))) == pytest.approx(figures(replayed), abs=1e-5)
    assert 0.005 < replayed.expected_acceptance < 0.95


def test_a_bench_ends_where_the_drafts_context_ends(tmp_path: Path) -> None:
    trace, model = made_trace(tmp_path / "trace"), tiny_model(num_layers=5)
    whole = figures(measure(Draft(model), bench(trace)))
    model.config.max_position_embeddings = 9
    replayed = figures(score("draft", CausalLMDrafter(Draft(model), SamplingLaw(), 272), trace, range(1, 9)))
    assert figures(measure(Draft(model), bench(trace))) == pytest.approx(replayed, abs=1e-5)
    assert replayed[0] < whole[0]


def test_a_probe_equals_measuring_the_changed_draft_anew(tmp_path: Path) -> None:
    on = bench(made_trace(tmp_path / "trace"))
    model = tiny_model(num_layers=5)
    probe = Probe(Draft(model), on)
    before = figures(probe.baseline)
    for layer in range(5):
        cut = Draft(keep_layers(tiny_model(num_layers=5), [one for one in range(5) if one != layer]))
        assert figures(probe.report_without(layer)) == pytest.approx(figures(measure(cut, on)), abs=1e-5)
    with torch.no_grad():
        layer_stack(model)[2].mlp.up_proj.weight.mul_(0.3)
    fresh = figures(measure(Draft(model), on))
    assert figures(probe.report_from(2)) == pytest.approx(fresh, abs=1e-5)
    assert fresh != pytest.approx(before, abs=1e-3)


def test_a_probe_costs_the_layers_behind_the_change(tmp_path: Path) -> None:
    probe = Probe(Draft(tiny_model(num_layers=5)), bench(made_trace(tmp_path / "trace")))
    assert probe.passes == 0.0
    probe.report_from(4)
    assert probe.passes == pytest.approx(0.2)
    probe.report_without(1)
    assert probe.passes == pytest.approx(0.2 + 0.6)


def test_acceptance_cuts_the_layer_whose_loss_costs_least(tmp_path: Path) -> None:
    trace, draft = made_trace(tmp_path / "trace"), Draft(tiny_model(num_layers=5))
    on = bench(trace)
    worth = {
        layer: measure(Draft(keep_layers(draft.model, [one for one in range(5) if one != layer])), on)
        for layer in (1, 2, 3)
    }
    best = max(worth, key=lambda layer: worth[layer].mean_tokens_per_call(K))
    kept = layers_to_keep(draft, 1, "acceptance", bench=on, k=K)
    assert kept == [layer for layer in range(5) if layer != best]
    assert len(layers_to_keep(draft, 3, "acceptance", bench=on)) == 2
    assert layers_to_keep(draft, 3, "acceptance", bench=on) == [0, 4]


def test_a_bench_and_a_cut_need_answers() -> None:
    with pytest.raises(UserError, match="collect a trace"):
        Bench.of([], GREEDY, 272)
    with pytest.raises(UserError, match="collect a trace"):
        layers_to_keep(Draft(tiny_model()), 1, "acceptance")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object, Trace]:
    """A target, a draft for it in a folder, and a trace of it."""
    root = tmp_path_factory.mktemp("prune")
    target = load_target(str(save_tiny(root / "target")), "float32")
    save_draft(Draft(tiny_model(num_layers=5)), root / "draft", blank_manifest(target, "causal-lm"), target.tokenizer)
    trace = made_trace(root / "trace", tokenizer_fingerprint=target.tokenizer_fingerprint)
    return root / "draft", target, trace


def test_everything_can_be_cut_at_once_and_what_is_left_is_plain(workshop: tuple, tmp_path: Path) -> None:
    source, target, trace = workshop
    step = PruneStep(layers=1, by="acceptance", heads=2, ffn=48, vocab=100, heal="linear", hidden=24)
    manifest = compressing.prune_draft(source, target, [trace], step, tmp_path / "out")
    pruned = load_draft(tmp_path / "out", "float32")
    config = pruned.model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (4, 2, 1)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (24, 48, 8)
    assert len(pruned.head_token_ids) == 100
    assert pruned.model.lm_head.weight is pruned.model.model.embed_tokens.weight
    assert manifest.options["pruned"]["layers"][0] == 0
    assert len(manifest.options["pruned"]["repairs"]) == 4
    assert all(one["error_after"] <= one["error_before"] for one in manifest.options["pruned"]["repairs"])


def test_units_are_ranked_and_probed_at_any_draft_length(workshop: tuple) -> None:
    """8 bits have no group, so that one that divides nothing does not matter."""
    source, target, trace = workshop
    settings = SensitivitySettings(bits=8, group=48, probes=2, answers=3, num_draft_tokens=12)
    found = draft_sensitivity(source, target, [trace], settings)
    assert (found["format"], found["probes"]) == ("int8", 2)
    assert len([unit for unit in found["units"] if unit["measured"] is not None]) == 2
    with pytest.raises(RecipeError, match="48 does not divide the 32 inputs"):
        draft_sensitivity(source, target, [trace], SensitivitySettings(group=48))


def test_widths_alone_cut_no_layer_and_are_rounded_for_a_runtime(
    workshop: tuple, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target, trace = workshop
    with caplog.at_level("INFO"):
        compressing.prune_draft(source, target, [trace], PruneStep(ffn=20, runtime="openvino"), tmp_path / "out")
        step = PruneStep(layers=1, by="last", ffn=20, runtime="vllm")
        compressing.prune_draft(source, target, [trace], step, tmp_path / "whole")
    config = load_draft(tmp_path / "out", "float32").model.config
    assert (config.num_hidden_layers, config.intermediate_size) == (5, 32)
    assert "ffn: 20 is rounded to 32, a multiple that openvino takes" in caplog.text
    assert "ffn: 20 is rounded to 64, which is all of it, and no multiple of 128 as vllm takes them" in caplog.text


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"heads": 3}, RecipeError, "heads: 3 breaks the grouping.*Nearest: 2 or 4"),
        ({"layers": 4}, UserError, "4 of 5 layers cannot be cut"),
        ({"ffn": 999}, RecipeError, "ffn: 999 is more than the 64"),
        ({"ffn": 64, "heads": 4}, UserError, "Nothing would be cut: the draft has hidden 32, 4 heads and ffn 64"),
        ({"ffn": 40, "runtime": "openvino"}, UserError, "Nothing would be cut.*multiples that leave something out"),
        ({"vocab": 259}, UserError, "vocab: 259 rows are no fewer than the 259 tokens that the draft can say"),
    ],
)
def test_cuts_that_cannot_be_are_refused(
    workshop: tuple, tmp_path: Path, settings: dict, kind: type, message: str
) -> None:
    source, target, trace = workshop
    with pytest.raises(kind, match=message):
        compressing.prune_draft(source, target, [trace], PruneStep(**settings), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_runtime_that_would_misread_the_heads_is_named(workshop: tuple, tmp_path: Path) -> None:
    _, target, trace = workshop
    save_tiny(tmp_path / "qwen", family="qwen2")
    (tmp_path / "qwen" / "tokenizer_config.json").unlink()  # read for a qwen2, it cuts text otherwise than the target
    with pytest.raises(UserError, match=r"vllm takes the heads of qwen2 to be hidden / heads wide, 16 and not 8"):
        compressing.prune_draft(
            tmp_path / "qwen", target, [trace], PruneStep(heads=2, runtime="vllm"), tmp_path / "out"
        )


@pytest.fixture(scope="module")
def rounded(workshop: tuple, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target, _ = workshop
    folder = tmp_path_factory.mktemp("rounded") / "draft"
    draft = quantize(load_draft(source, "float32"), {"layers.0.down": WeightFormat(4, 32)})
    save_draft(draft, folder, blank_manifest(target, "causal-lm"), target.tokenizer)
    return folder


@pytest.fixture(scope="module")
def factored(workshop: tuple, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target, trace = workshop
    folder = tmp_path_factory.mktemp("factored") / "draft"
    low_rank_draft(source, target, [trace], LowRankStep(rank=2, by="weights", form="factored"), folder)
    return folder


SHRINKS = pytest.mark.parametrize(
    "shrink",
    [
        lambda *given: compressing.prune_draft(*given[:3], PruneStep(ffn=32), given[3]),
        lambda *given: compressing.quantize_draft(*given[:3], QuantizeStep(), given[3]),
        lambda *given: low_rank_draft(*given[:3], LowRankStep(rank=2), given[3]),
        lambda *given: compress_draft(*given[:3], CompressStep(), given[3]),
        lambda *given: draft_sensitivity(*given[:3], SensitivitySettings()),
    ],
    ids=["prune", "quantize", "low-rank", "compress", "sensitivity"],
)


@pytest.mark.parametrize("form", ["rounded", "factored"])
@SHRINKS
def test_nothing_shrinks_a_draft_that_is_not_plain(
    shrink: Callable, form: str, workshop: tuple, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    _, target, trace = workshop
    with pytest.raises(ModelError, match=r"(is quantized|holds factors) already.*take its parent"):
        shrink(request.getfixturevalue(form), target, [trace], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@SHRINKS
def test_nothing_shrinks_a_draft_of_other_tokens(shrink: Callable, workshop: tuple, tmp_path: Path) -> None:
    """What is written gets the target's tokenizer, whatever the draft's own was."""
    _, target, trace = workshop
    tiny_tokenizer(("sea",)).save_pretrained(save_tiny(tmp_path / "foreign", num_layers=2))
    with pytest.raises(VocabMismatchError, match="token 259 is 'sea' here and nothing there"):
        shrink(tmp_path / "foreign", target, [trace], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "make",
    [
        *SHRINKS.args[1][:4],
        lambda *given: distill_draft(*given[:3], DistillStep(tokens=40), given[3]),
        lambda *given: adapt_draft(*given[:2], [], [], [], AdaptStep(), given[3]),
        lambda *given: meta_draft(*given[:3], MetaStep(), given[3]),
    ],
    ids=["prune", "quantize", "low-rank", "compress", "distill", "adapt", "meta"],
)
def test_of_two_that_make_one_folder_the_second_is_refused_at_once(
    make: Callable, workshop: tuple, tmp_path: Path
) -> None:
    """Before the draft is read: there is none."""
    _, target, trace = workshop
    with claimed(tmp_path / "out"), pytest.raises(OutputError, match="is being written by another process"):
        Context().run(make, tmp_path / "none", target, [trace], tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    with pytest.raises(OutputError, match="exists already"):
        make(tmp_path / "none", target, [trace], tmp_path / "out")


def test_calibration_does_not_depend_on_the_order_of_a_trace(workshop: tuple, tmp_path: Path) -> None:
    _, target, trace = workshop
    rows = list(trace.rows())[::-1]
    other = build_trace(tmp_path / "other", rows, tokenizer_fingerprint=target.tokenizer_fingerprint)
    one, two = (compressing.sample_answers([some], target, 3) for some in (trace, other))
    assert [answer.token_ids.tolist() for answer in one] == [answer.token_ids.tolist() for answer in two]
    assert len(one) == 3


def test_answers_in_other_tokens_are_refused(workshop: tuple, tmp_path: Path) -> None:
    source, target, _ = workshop
    foreign = made_trace(tmp_path / "foreign")
    with pytest.raises(TraceError, match="token ids mean other texts"):
        compressing.prune_draft(source, target, [foreign], PruneStep(ffn=32), tmp_path / "out")
    with pytest.raises(TraceError, match="token ids mean other texts"):
        compressing.quantize_draft(source, target, [foreign], QuantizeStep(method="gptq"), tmp_path / "out")
