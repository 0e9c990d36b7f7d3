"""Laws of the search over bits, layers and draft length."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from foredraft import searching
from foredraft.checkpoint import read_manifest
from foredraft.compress.choice import Choice, Cutters, cut_draft, formats_of, simulated
from foredraft.compress.moves import Reach, Tries, moves
from foredraft.compress.probe import Bench, measure
from foredraft.compress.quantize import quantize
from foredraft.compress.search import Clock, Limits, Point, best_point, pareto_front, search
from foredraft.core.errors import OutputError, TraceError, UserError
from foredraft.core.progress import SILENT
from foredraft.core.roofline import Machine
from foredraft.distill.init.width import Importance, narrow_by
from foredraft.distill.init.widths import Widths
from foredraft.models.calibration import calibration_batches
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.made_for import blank_manifest
from foredraft.models.passes import pass_facts
from foredraft.models.target import LocalTarget, load_target
from foredraft.models.units import search_units
from foredraft.pool import _Run
from foredraft.recipe import parse_recipe
from foredraft.steps import CompressStep
from foredraft.trace.store import Trace
from foredraft.workspace import Workspace
from tests.test_compress_gptq import answers
from tests.test_compress_probe import bench, figures, made_trace
from tests.tiny import save_tiny, tiny_model
from tests.traces import build_trace, trace_row

SLOW_MEMORY = Machine(1e6, 1e6, {"bfloat16": 1e12, "float32": 1e12}, 1e9, 10.0, 1.0, 0.0, 0.0)
LIMITS = Limits(share=0.5)
REACH = Reach(tries=1, chunk=4)
SMALL = {"tries": 1, "chunk": 16, "gradients": 1, "answers": 4, "num_draft_tokens": 2, "share": 0.5}


def cutters(draft: Draft) -> Cutters:
    importance = Importance(draft.model, calibration_batches(answers()))
    return Cutters(
        lambda model, layers, ffn: narrow_by(model, Widths(ffn=ffn), importance.of_layers(layers)).model,
        lambda rows: torch.arange(rows),
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Draft, object, object, list[Point]]:
    trace = made_trace(tmp_path_factory.mktemp("search") / "trace")
    on, draft = bench(trace), Draft(tiny_model(num_layers=4))
    target = replace(pass_facts(draft.model), weight_bytes=1e6)
    clock = Clock(target, SLOW_MEMORY)
    return draft, on, target, search(draft, on, [on.rows[0].answer()], clock, LIMITS, REACH, cutters(draft))


def test_each_step_lowers_the_bytes_and_few_are_taken_that_bring_nothing(found: tuple) -> None:
    points = found[3]
    best = points.index(best_point(points, LIMITS))
    assert best > 2
    assert all(after.bytes < before.bytes for before, after in pairwise(points))
    assert len(points) - 1 - best <= LIMITS.lookahead + 1


@pytest.mark.parametrize("at", [Choice((0, 1, 2, 3)), Choice((0, 2, 3), {"layers.2.o": 4}, ffn=32, rows=136)])
def test_a_try_gives_the_figures_of_a_whole_pass_for_less(found: tuple, at: Choice) -> None:
    """From kept states, in place, as from the changed draft made anew."""
    draft, on, _, _ = found
    made = cutters(draft)
    tries, fisher = Tries(draft, at, on, made, 32), {unit.name: 1.0 for unit in search_units(draft.model)}
    some = list(moves(draft, at, fisher, Reach(tries=2, chunk=3)))
    assert len(some) >= 6
    for move in some:
        plain = cut_draft(draft, move.choice, made)
        whole = measure(simulated(plain, formats_of(draft, move.choice, 32)), on)
        assert figures(tries.report(move.choice)) == pytest.approx(figures(whole), abs=1e-6), move.name
    assert figures(tries.report(at)) == pytest.approx(figures(tries.baseline), abs=1e-6)
    assert 0.0 < tries.passes < len(some)


def test_a_try_costs_a_share_of_a_pass(found: tuple) -> None:
    spent = sum(point.passes for point in found[3]) / sum(point.tries for point in found[3])
    assert 0.0 < spent <= LIMITS.share


def test_what_was_measured_is_what_the_written_draft_gives(found: tuple) -> None:
    """The search rounds in place; what is stored are integers. 8-bit layers read bfloat16, hence the slack."""
    draft, on, _, points = found
    last = points[-1]
    plain = cut_draft(draft, last.choice, cutters(draft))
    formats = formats_of(draft, last.choice, 32)
    written = quantize(plain, formats) if formats else plain
    report = measure(written, on)
    assert report.expected_acceptance == pytest.approx(last.acceptance, abs=5e-3)
    assert report.mean_tokens_per_call(last.k) == pytest.approx(last.mean_tokens_per_call, abs=2e-2)
    assert _bytes_read(written) == pytest.approx(last.bytes)


def _bytes_read(draft: Draft) -> float:
    """Return the bytes of all matrices but the table, plain ones in 16 bits, without norms and stored shapes."""
    total = 0.0
    for name, weight in draft.model.state_dict().items():
        if not ("norm" in name or name.endswith("weight_shape") or "embed" in name):
            share = len(draft.head_token_ids) / 272 or 1.0 if "head" in name else 1.0
            total += share * weight.numel() * min(weight.element_size(), 4 if weight.dtype == torch.int32 else 2)
    return total


@pytest.mark.slow
def test_a_limit_is_met_even_where_fewer_bits_bring_no_speed(found: tuple) -> None:
    draft, on, target, points = found
    tight = replace(LIMITS, bytes=points[0].bytes * 0.6)
    # Memory without end and slow arithmetic: fewer bits bring nothing.
    idle = Machine(1e18, 1e18, {"bfloat16": 1e6, "float32": 1e6}, 1e9, 10.0, 1.0, 0.0, 0.0)
    forced = search(draft, on, [on.rows[0].answer()], Clock(target, idle), tight, REACH, cutters(draft))
    assert tight.meets(forced[-1])
    assert not tight.meets(forced[0])
    within = [point.predicted_speedup for point in forced if tight.meets(point)]
    assert best_point(forced, tight).predicted_speedup == max(within)
    assert best_point(forced, replace(tight, bytes=1.0)) is None


def test_a_search_that_was_stopped_goes_on_to_the_same_end(found: tuple) -> None:
    draft, on, target, points = found
    told: list[int] = []
    again = search(
        draft,
        on,
        [on.rows[0].answer()],
        Clock(target, SLOW_MEMORY),
        LIMITS,
        REACH,
        cutters(draft),
        done=[Point.from_json(point.to_json()) for point in points[:-1]],
        on_point=lambda seen: told.append(len(seen)),
    )
    assert again == points
    assert told == [len(points) - 1, len(points)]


@pytest.mark.parametrize("notes", ["", "{", "[]", "null", '{"schema": 2}', '{"schema": 2, "key": "k", "points": [{}]}'])
def test_a_search_with_damaged_notes_begins_anew(notes: str, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text(notes)
    assert searching._noted(tmp_path / "notes", "k") == []


def test_a_search_is_known_by_all_files_of_its_drafts_weights(tmp_path: Path) -> None:
    for name, content in (("model-00001-of-00002.safetensors", "a"), ("model-00002-of-00002.safetensors", "b")):
        (tmp_path / name).write_text(content)
    before = searching._weight_digests(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").write_text("c")
    assert searching._weight_digests(tmp_path)[0] == before[0] != searching._weight_digests(tmp_path)[1] != before[1]


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    def point(size: float, speedup: float) -> Point:
        return Point(Choice((0,)), "", size, 0.5, 1, 1.5, speedup, 1.0)

    small, dominated, large = point(10.0, 1.2), point(20.0, 1.1), point(30.0, 1.5)
    assert pareto_front([large, dominated, small]) == [small, large]
    assert pareto_front([point(10.0, 1.0), point(10.0, 1.3)]) == [point(10.0, 1.3)]


def test_names_follow_the_layers_that_stay() -> None:
    draft = Draft(tiny_model(num_layers=4))
    choice = Choice((0, 2, 3), {"layers.1.o": 4, "layers.2.o": 4, "layers.3.down": 8, "head": 4})
    found = formats_of(draft, choice, 32)
    assert {name: chosen.bits for name, chosen in found.items()} == {"layers.1.o": 4, "layers.2.down": 8, "head": 4}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LocalTarget, Trace]:
    root = tmp_path_factory.mktemp("search")
    target = load_target(str(save_tiny(root / "target")), "float32")
    save_draft(Draft(tiny_model()), root / "draft", blank_manifest(target, "causal-lm"), target.tokenizer)
    trace = made_trace(
        root / "trace",
        tokenizer_fingerprint=target.tokenizer_fingerprint,
        target_fingerprint=target.fingerprint,
    )
    return root / "draft", target, trace


def test_traces_that_scoring_or_healing_would_refuse_are_refused_before_the_search(
    workshop: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, trace = workshop

    def searched(*_: object) -> None:
        raise RuntimeError("the search began")

    monkeypatch.setattr(searching, "search", searched)
    foreign = made_trace(tmp_path / "foreign")
    with pytest.raises(TraceError, match="token ids mean other texts"):
        searching.compress_draft(source, target, [trace], CompressStep(**SMALL), tmp_path / "out", scored=[foreign])
    other = made_trace(tmp_path / "other", tokenizer_fingerprint=target.tokenizer_fingerprint)
    with pytest.raises(TraceError, match="collect a trace from that target"):
        searching.compress_draft(source, target, [other], CompressStep(**SMALL, heal=40), tmp_path / "out")
    with pytest.raises(RuntimeError, match="the search began"):
        searching.compress_draft(source, target, [other], CompressStep(**SMALL), tmp_path / "out")
    rows = [
        trace_row(row.id, row.prompt_ids.tolist(), row.answer_ids.tolist(), top=0, greedy=False) for row in trace.rows()
    ]
    made_by = {"tokenizer_fingerprint": target.tokenizer_fingerprint, "target_fingerprint": target.fingerprint}
    bare = build_trace(tmp_path / "bare", rows, trace.info.law, top=0, **made_by)
    with pytest.raises(TraceError, match=r"tvd_plus_plus needs them. It allows hard_cross_entropy; .* with top 64"):
        searching.compress_draft(source, target, [bare], CompressStep(**SMALL, heal=40), tmp_path / "out")


@pytest.mark.slow
def test_the_search_writes_what_it_chose_measured_again_and_goes_on_where_it_was(
    workshop: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, trace = workshop
    step, out = CompressStep(**SMALL, megabytes=0.03, moves=["bits", "head"]), tmp_path / "out"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(searching, "finish", stop)
        searching.compress_draft(source, target, [trace], step, out)
    assert not out.exists()
    kept = json.loads((tmp_path / ".out.search.json").read_text())["points"]
    found = searching.compress_draft(source, target, [trace], step, out, scored=[trace])
    assert found["points"] == kept
    assert not (tmp_path / ".out.search.json").exists()
    chosen = found["points"][found["chosen"]]
    assert chosen["bytes"] <= 30_000 < found["points"][0]["bytes"]
    drawn = ElementTree.parse(out / searching.PLOT).getroot()
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == len(kept)
    on = Bench.of(list(trace.rows(tops=False)), trace.info.law, trace.info.vocab_size, (1, 2))
    written = measure(load_draft(out, "float32"), on)
    before, after = found["stages"]
    assert (before["stage"], after["stage"]) == ("before the cut", "after it")
    assert after["expected_acceptance"] == pytest.approx(written.expected_acceptance, abs=1e-6)
    assert after["acceptance_change"][0] == pytest.approx(after["expected_acceptance"] - before["expected_acceptance"])
    with pytest.raises(OutputError, match="exists already"):
        searching.compress_draft(source, target, [trace], step, out)
    monkeypatch.setattr(searching, "best_point", lambda *_: None)
    with pytest.raises(UserError, match=r"No draft within the limits was found: the smallest reads 0\.0 MB"):
        searching.compress_draft(source, target, [trace], step, tmp_path / "other")


RECIPE = """
target: {{model: {target}}}
trace: {{prompts: [{{file: none.jsonl}}]}}
candidates:
  thin: [{{checkpoint: {draft}}}, {{low_rank: {{rank: 16, by: weights}}}}]
  small: [{{from: thin}}, {{compress: {{tries: 1, chunk: 16, gradients: 1, answers: 2, share: 1.0, moves: [head],
    num_draft_tokens: 2, heal: {{tokens: 40, batch_tokens: 20}}}}}}]
"""


def test_a_recipe_searches_and_cuts_ranks_as_steps_and_does_neither_twice(workshop: tuple, tmp_path: Path) -> None:
    source, target, trace = workshop
    recipe = parse_recipe(RECIPE.format(target=target.path, draft=source))
    for expected in (2, 0):
        workspace = Workspace.open(tmp_path / "run")
        before = len(list((tmp_path / "run").rglob("foredraft.json")))
        made = _Run(recipe, workspace, target, SILENT, False)._make("small", [trace])
        assert len(list((tmp_path / "run").rglob("foredraft.json"))) - before == expected
    steps = [next(iter(step)) for step in read_manifest(made.folder).steps]
    assert steps == ["low_rank", "compress"]
    stages = read_manifest(made.folder).options["search"]["stages"]
    assert [stage["stage"] for stage in stages] == ["before the cut", "after it", "healed"]


def stop(*_: object) -> Draft:
    raise KeyboardInterrupt
