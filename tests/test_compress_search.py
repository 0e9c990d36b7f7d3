"""Laws of the search over bits, layers and draft length."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from foredraft import searching
from foredraft.compress.probe import measure
from foredraft.compress.quantize import quantize
from foredraft.compress.search import Choice, Clock, Limits, Point, best_point, formats_of, pareto_front, search
from foredraft.core.errors import OutputError, UserError
from foredraft.core.roofline import Machine
from foredraft.lineage import blank_manifest
from foredraft.models.draft import Draft, load_draft, save_draft
from foredraft.models.layers import keep_layers
from foredraft.models.passes import pass_facts
from foredraft.models.target import load_target
from foredraft.steps import CompressSettings
from tests.test_compress_probe import bench, made_trace
from tests.tiny import save_tiny, tiny_model

SLOW_MEMORY = Machine(1e6, 1e6, {"bfloat16": 1e12, "float32": 1e12}, 1e9, 10.0, 1.0, 0.0, 0.0)
LIMITS = Limits(tries=1, chunk=4)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Draft, object, object, list[Point]]:
    trace = made_trace(tmp_path_factory.mktemp("search") / "trace")
    on, draft = bench(trace), Draft(tiny_model(num_layers=4))
    target = replace(pass_facts(draft.model), weight_bytes=1e6)
    return draft, on, target, search(draft, on, [on.rows[0].answer()], Clock(target, SLOW_MEMORY), LIMITS)


def test_each_step_raises_the_predicted_speedup_and_lowers_the_bytes(found: tuple) -> None:
    points = found[3]
    assert len(points) > 2
    speedups = [point.predicted_speedup for point in points]
    assert speedups == sorted(speedups)
    assert all(after.bytes < before.bytes for before, after in pairwise(points))


def test_what_was_measured_is_what_the_written_draft_gives(found: tuple) -> None:
    """The search rounds in place; what is stored are integers. 8-bit layers read bfloat16, hence the slack."""
    draft, on, _, points = found
    last = points[-1]
    model = keep_layers(draft.model, last.choice.layers)
    formats = formats_of(draft, last.choice, 32)
    written = quantize(Draft(model), formats) if formats else Draft(model)
    report = measure(written, on)
    assert report.expected_acceptance == pytest.approx(last.acceptance, abs=5e-3)
    assert report.mean_tokens_per_call(last.k) == pytest.approx(last.mean_tokens_per_call, abs=2e-2)
    assert _bytes_read(written) == pytest.approx(last.bytes)


def _bytes_read(draft: Draft) -> float:
    """Return the bytes of all matrices but the table, plain ones in 16 bits, without norms and stored shapes."""
    total = 0.0
    for name, weight in draft.model.state_dict().items():
        if not ("norm" in name or name.endswith("weight_shape") or "embed" in name):
            total += weight.numel() * min(weight.element_size(), 4 if weight.dtype == torch.int32 else 2)
    return total


@pytest.mark.slow
def test_a_limit_is_met_even_where_fewer_bits_bring_no_speed(found: tuple) -> None:
    draft, on, target, points = found
    tight = replace(LIMITS, bytes=points[0].bytes * 0.6)
    # Memory without end and slow arithmetic: fewer bits bring nothing.
    idle = Machine(1e18, 1e18, {"bfloat16": 1e6, "float32": 1e6}, 1e9, 10.0, 1.0, 0.0, 0.0)
    forced = search(draft, on, [on.rows[0].answer()], Clock(target, idle), tight)
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
        done=[Point.from_json(point.to_json()) for point in points[:-1]],
        on_point=lambda seen: told.append(len(seen)),
    )
    assert again == points
    assert told == [len(points) - 1, len(points)]


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


@pytest.mark.slow
def test_the_command_writes_what_it_chose_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(str(save_tiny(tmp_path / "target")), "float32")
    save_draft(Draft(tiny_model()), tmp_path / "draft", blank_manifest(target, "causal-lm"), target.tokenizer)
    trace = made_trace(tmp_path / "trace", tokenizer_fingerprint=target.tokenizer_fingerprint)
    settings = CompressSettings(tries=1, chunk=16, gradients=1, answers=4, num_draft_tokens=2, megabytes=0.045)
    monkeypatch.setattr(searching, "_made", stop)
    with pytest.raises(KeyboardInterrupt):
        searching.compress_draft(tmp_path / "draft", target, [trace], settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    kept = json.loads((tmp_path / ".out.search.json").read_text())["points"]
    found = searching.compress_draft(tmp_path / "draft", target, [trace], settings, tmp_path / "out")
    assert found["points"] == kept
    assert not (tmp_path / ".out.search.json").exists()
    chosen = found["points"][found["chosen"]]
    assert chosen["bytes"] <= 45_000 < found["points"][0]["bytes"]
    written = load_draft(tmp_path / "out", "float32")
    report = measure(written, bench(trace))
    assert written.model.config.num_hidden_layers == len(chosen["layers"])
    assert report.tokens > 0
    with pytest.raises(OutputError, match="exists already"):
        searching.compress_draft(tmp_path / "draft", target, [trace], settings, tmp_path / "out")
    monkeypatch.setattr(searching, "best_point", lambda *_: None)
    with pytest.raises(UserError, match=r"No draft within the limits was found: the smallest reads 0\.0 MB"):
        searching.compress_draft(tmp_path / "draft", target, [trace], settings, tmp_path / "other")


def stop(*_: object) -> Draft:
    raise KeyboardInterrupt
