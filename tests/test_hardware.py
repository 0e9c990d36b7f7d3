"""Rooflines and profiles: what passes move and compute, machines in figures, predictions from a finished report."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from foredraft.acceptance.prediction import with_hardware
from foredraft.core.errors import RecipeError, UnknownNameError, UserError
from foredraft.core.roofline import Machine, PassFacts, block_seconds, free_positions, needed_bytes, pass_seconds
from foredraft.hardware.measure import measure_profile
from foredraft.hardware.profile import HardwareProfile, load_profile, profile_yaml, shipped, shipped_profiles
from foredraft.models.head import Head
from foredraft.models.layers import keep_layers
from foredraft.models.passes import pass_facts
from foredraft.models.target import load_target
from foredraft.models.timing import EqualTexts
from tests.tiny import tiny_model

REAL_MODEL = os.environ.get("FOREDRAFT_REAL_MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
FACTS = PassFacts(2e9, 2.5e9, 2e9, 1e5, 1e5, 20, "bfloat16")
IDEAL = Machine(1e12, 1e12, {"bfloat16": 1e14, "float32": 1e13}, 8e9, 100.0, 1.0, 0.0, 0.0)
PROFILE = """
name: mine
memory_bandwidth: 1e12
flops: {float32: 1e20}
memory: 8e9
watts: 100
sources: {memory_bandwidth: data sheet, flops: data sheet, memory: data sheet, watts: assumed}
"""


def test_one_token_takes_as_long_as_its_weights_take_to_arrive() -> None:
    no_context = replace(FACTS, kv_bytes_per_token=0.0, attention_flops=0.0)
    assert pass_seconds(no_context, IDEAL, 1, 1, 0) == pytest.approx(2e9 / 1e12)
    assert pass_seconds(FACTS, IDEAL, 8, 1, 1000) == pytest.approx((2e9 + 8 * 1001 * 1e5) / 1e12)


def test_verifying_is_free_until_computing_takes_longer_than_moving() -> None:
    facts = replace(FACTS, kv_bytes_per_token=0.0, attention_flops=0.0)
    free = free_positions(facts, IDEAL, 0)
    # MATHS section 6: (FLOP/s / bandwidth) * bytes per weight / 2, with two bytes a weight.
    assert free == pytest.approx(1e14 / 1e12 * 2 / 2)
    one = pass_seconds(facts, IDEAL, 1, 1, 0)
    assert pass_seconds(facts, IDEAL, 1, int(free) - 1, 0) == pytest.approx(one)
    assert pass_seconds(facts, IDEAL, 1, 2 * int(free), 0) == pytest.approx(2 * one)
    assert pass_seconds(facts, IDEAL, 4, 25, 0) == pytest.approx(pass_seconds(facts, IDEAL, 1, 100, 0))


def test_time_never_falls_with_work_and_overlap_only_helps() -> None:
    serial = replace(IDEAL, overlap=0.0, pass_seconds=1e-3, layer_seconds=1e-5)
    for machine in (IDEAL, serial):
        times = [pass_seconds(FACTS, machine, rows, n, 100) for rows in (1, 2, 8) for n in (1, 2, 9)]
        assert all(pass_seconds(FACTS, machine, 8, n, 100) >= pass_seconds(FACTS, machine, 1, n, 100) for n in (1, 9))
        assert times[:3] == sorted(times[:3])
    fixed = 1e-3 + 20 * 1e-5
    assert pass_seconds(FACTS, serial, 2, 3, 100) > pass_seconds(FACTS, IDEAL, 2, 3, 100) + fixed
    slow = replace(IDEAL, batch_bandwidth=2.5e11)
    assert pass_seconds(FACTS, slow, 1, 1, 0) == pass_seconds(FACTS, IDEAL, 1, 1, 0)
    assert pass_seconds(FACTS, slow, 1, 2, 0) > 3 * pass_seconds(FACTS, IDEAL, 1, 2, 0)
    assert block_seconds(FACTS, IDEAL, 1, 1, 50) == pass_seconds(FACTS, IDEAL, 1, 2, 50)


def test_memory_is_weights_and_every_request_s_context() -> None:
    assert needed_bytes(FACTS, 4, 1000) == pytest.approx(2.5e9 + 4 * 1000 * 1e5)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_that_torch_counts(family: str, tied: bool) -> None:
    model, rows, tokens = tiny_model(family=family, tied=tied), 3, 5
    model.config._attn_implementation = "eager"  # so that every product is counted, masked ones included
    facts = pass_facts(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.ones(rows, tokens, dtype=torch.long), use_cache=False)
    attended = rows * tokens * tokens * facts.attention_flops
    assert counter.get_total_flops() == rows * tokens * facts.flops_per_token + attended


def test_bytes_count_a_tied_head_once_and_only_the_rows_that_are_computed() -> None:
    tied, untied = tiny_model(tied=True), tiny_model(tied=False)
    table = 272 * 32 * 4
    assert pass_facts(tied).weight_bytes == pass_facts(tied).resident_bytes == 4 * tied.num_parameters()
    assert pass_facts(untied).resident_bytes - pass_facts(untied).weight_bytes == table
    trimmed = pass_facts(tied, head_rows=16, copied_bytes=16 * 32 * 4)
    assert trimmed.weight_bytes == pass_facts(tied).weight_bytes - table + 16 * 32 * 4
    assert trimmed.resident_bytes == pass_facts(tied).resident_bytes + 16 * 32 * 4
    assert trimmed.flops_per_token == pass_facts(tied).flops_per_token - 2 * (272 - 16) * 32
    assert pass_facts(tied).kv_bytes_per_token == 2 * 4 * 2 * 8 * 4  # K and V, layers, heads, width, bytes


def test_texts_that_go_on_from_the_same_point_say_what_one_pass_says() -> None:
    model = tiny_model()
    context, new = torch.randint(3, 259, (3, 20)), torch.randint(3, 259, (3, 4))
    texts = EqualTexts(model, Head(model), context)
    first = texts.logits(new)
    texts.again()
    assert torch.equal(texts.logits(new), first)
    with torch.no_grad():
        whole = model(input_ids=torch.cat([context, new], 1)).logits[:, -4:]
    torch.testing.assert_close(first, whole, atol=1e-4, rtol=1e-4)


def test_every_shipped_profile_is_read_and_says_where_its_figures_are_from() -> None:
    assert {
        "h100-sxm",
        "a100-80gb",
        "rtx-4090",
        "rtx-4060",
        "apple-m4-max",
        "snapdragon-8-gen-3",
        "desktop-cpu",
    } == set(shipped_profiles())
    for name, profile in shipped().items():
        assert set(profile.sources) == profile.model_fields_set - {"name", "sources"}, name
        machine = profile.machine()
        assert 1e10 < machine.bandwidth < 1e13
        assert machine.flops_in("bfloat16") > machine.bandwidth, name
    assert load_profile("h100").name == load_profile("h100-sxm").name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("colour: red", "colour: unknown key"),
        ("layer_seconds: 1e-6", "sources say nothing of layer_seconds"),
        ("overlap: 2", "overlap: Input should be less than or equal to 1"),
        ("memory_bandwidth: 1e12", "memory_bandwidth: given twice"),
    ],
)
def test_a_profile_s_faults_are_named_with_their_lines(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(PROFILE + change + "\n")
    with pytest.raises(RecipeError, match=message):
        load_profile(str(path))


def test_an_unknown_machine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"'h10O'.*h100-sxm.*A profile of your own"):
        load_profile("h10O")


def report(draft_passes: PassFacts | None, tokens: dict[str, float]) -> dict:
    """A report of one law with one drafter, as far as predictions read it."""
    entry = {
        "name": "draft", "bytes": 10, "mean_tokens_per_call": tokens, "guess_share": dict.fromkeys(tokens, 1.0),
        "draft_seconds": {"1": 1e-4, "4": 4e-4}, "passes": _plain(draft_passes),
    }  # fmt: skip
    return {"target": {"passes": _plain(replace(FACTS, dtype="float32"))}, "laws": [{"drafters": [entry]}]}


def _plain(facts: PassFacts | None) -> dict | None:
    return facts and {name: getattr(facts, name) for name in PassFacts.__slots__}


def mine(tmp_path: Path, **changes: object) -> HardwareProfile:
    (tmp_path / "mine.yaml").write_text(PROFILE)
    return load_profile(str(tmp_path / "mine.yaml")).model_copy(update=changes)


def test_where_only_weights_count_the_prediction_is_the_formula(tmp_path: Path) -> None:
    target = replace(FACTS, kv_bytes_per_token=0.0, dtype="float32")
    draft = replace(target, weight_bytes=2e8, resident_bytes=2e8)
    made = report(draft, {"1": 1.7, "4": 3.0})
    made["target"]["passes"] = _plain(target)
    (entry,) = with_hardware(made, ["mine"], [mine(tmp_path)], [1, 16], 100)["laws"][0]["drafters"]
    for figures in entry["hardware"]["mine"].values():
        assert figures["predicted_speedup"] == pytest.approx({"1": 1.7 / 1.1, "4": 3.0 / 1.4})
        assert (figures["best_k"], figures["fits"]) == (4, True)
    single, many = entry["hardware"]["mine"]["1"], entry["hardware"]["mine"]["16"]
    assert single["tokens_per_second"] == pytest.approx(3.0 / 1.4 / 2e-3)
    assert many["joules_per_token"] == pytest.approx(single["joules_per_token"] / 16)


def test_a_pair_that_does_not_fit_is_called_so_and_a_slow_draft_is_left_out(tmp_path: Path) -> None:
    draft = replace(FACTS, weight_bytes=1.9e9, resident_bytes=5.6e9, dtype="float32")
    made = with_hardware(report(draft, {"1": 1.2, "4": 1.3}), ["mine"], [mine(tmp_path)], [1], 100)
    figures = made["laws"][0]["drafters"][0]["hardware"]["mine"]["1"]
    assert figures["bytes"] > 8e9
    assert not figures["fits"]
    assert figures["best_k"] == 0
    assert max(figures["predicted_speedup"].values()) < 1.0


def test_large_batches_end_what_speculation_gains(tmp_path: Path) -> None:
    draft = replace(FACTS, weight_bytes=2e8, flops_per_token=2e8, kv_bytes_per_token=1e4, layers=4, dtype="float32")
    profile = mine(tmp_path, flops={"float32": 2e13})
    made = with_hardware(report(draft, {"1": 1.7, "4": 3.0}), ["mine"], [profile], [1, 4, 64], 100)
    batches = made["laws"][0]["drafters"][0]["hardware"]["mine"]
    best = [max(figures["predicted_speedup"].values()) for figures in batches.values()]
    assert best == sorted(best, reverse=True)
    assert best[0] > 1.5 > 1.0 > best[-1]
    assert all(figures["break_even_acceptance"]["4"] <= 1.0 for figures in batches.values())


def test_a_drafter_without_a_model_keeps_its_time_and_runs_request_by_request(tmp_path: Path) -> None:
    made = with_hardware(report(None, {"1": 1.7, "4": 3.0}), ["mine"], [mine(tmp_path)], [1, 8], 0)
    batches = made["laws"][0]["drafters"][0]["hardware"]["mine"]
    for rows in (1, 8):
        step = pass_seconds(FACTS, mine(tmp_path).machine(), rows, 1, 0)
        verify = pass_seconds(FACTS, mine(tmp_path).machine(), rows, 5, 0)
        assert batches[str(rows)]["predicted_speedup"]["4"] == pytest.approx(3.0 * step / (rows * 4e-4 + verify))


def test_an_older_report_is_refused() -> None:
    with pytest.raises(UserError, match="evaluate again"):
        with_hardware({"target": {"name": "t"}, "laws": []}, [], [], [1], 0)


def test_this_machine_s_profile_is_one_that_can_be_read_again(tmp_path: Path) -> None:
    measured = measure_profile("this", repeats=1)
    (tmp_path / "this.yaml").write_text(profile_yaml(measured))
    again = load_profile(str(tmp_path / "this.yaml"))
    assert json.loads(again.model_dump_json()) == json.loads(measured.model_dump_json())
    machine = measured.machine()
    assert machine.batch_bandwidth <= machine.bandwidth
    # What reads twice as many weights takes longer; a factor that even a busy machine keeps.
    assert pass_seconds(replace(FACTS, weight_bytes=4e9), machine, 1, 1, 0) > pass_seconds(FACTS, machine, 1, 1, 0)


@pytest.mark.real_model
def test_predicted_steps_lie_within_twice_the_measured_ones() -> None:
    """Needs SmolLM2-135M-Instruct, at FOREDRAFT_REAL_MODEL if that is set."""
    target = load_target(REAL_MODEL, "float32")
    draft = keep_layers(target.model, range(6))
    machine, context = measure_profile().machine(), torch.randint(3, 40000, (1, 128))
    models = {"target": target.model, "draft": draft}
    texts = {name: EqualTexts(model, Head(model), context) for name, model in models.items()}
    wanted = [("draft", 1), *(("target", width) for width in range(1, 10))]
    timings: dict[tuple[str, int], list[float]] = {key: [] for key in wanted}
    for _ in range(9):
        for name, width in wanted:
            texts[name].again()
            began = time.perf_counter()
            texts[name].logits(context[:, :width])
            timings[name, width].append(time.perf_counter() - began)
    for (name, width), values in timings.items():
        measured = float(np.median(values[2:]))
        predicted = pass_seconds(pass_facts(models[name]), machine, 1, width, 128)
        print(f"{name} {width}: predicted {predicted * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms")
        assert 0.5 < predicted / measured < 2.0
