"""Planning: what a shape of draft needs before it is trained."""

from dataclasses import replace

import pytest

from foredraft.core.errors import UserError
from foredraft.core.roofline import PassFacts, block_seconds, pass_seconds
from foredraft.core.speedup import expected_tokens_per_call
from foredraft.hardware.profile import load_profile
from foredraft.plan import Shape, default_shapes, draft_facts, plan_json, plan_shapes, plan_table

# Thirty layers of 3.5 million weights and a head of 49152 x 576, in bfloat16.
HEAD = 49152 * 576
TARGET = PassFacts(2.0 * (30 * 3_538_944 + HEAD), 2.0 * (30 * 3_538_944 + HEAD), 2.0 * (30 * 3_538_944 + HEAD),
                   69_120.0, 23_040.0, 30, "bfloat16")  # fmt: skip
UNTIED = replace(TARGET, resident_bytes=TARGET.resident_bytes + 2.0 * HEAD)


def test_the_whole_target_is_its_own_draft() -> None:
    for target in (TARGET, UNTIED):
        assert draft_facts(target, 576, 49152, Shape(30, 49152)) == target


def test_a_draft_holds_the_table_of_embeddings_and_the_rows_of_its_head() -> None:
    for target in (TARGET, UNTIED):
        trimmed = draft_facts(target, 576, 49152, Shape(30, 8192))
        assert trimmed.resident_bytes - trimmed.weight_bytes == pytest.approx(2.0 * HEAD)


def test_fewer_layers_and_tokens_pay_sooner() -> None:
    found = {one.shape: one for one in plan_shapes(TARGET, 576, 49152, "h100", default_shapes(30, 49152))}
    for rows in (8192, 49152):
        needs = [found[Shape(depth, rows)].break_even for depth in (1, 2, 6, 15)]
        assert needs == sorted(needs)
        assert needs[0] < needs[-1]
    assert found[Shape(6, 8192)].cost_ratio < found[Shape(6, 49152)].cost_ratio
    assert 0.0 < found[Shape(1, 8192)].break_even < 0.5


def test_at_break_even_the_block_costs_what_it_brings() -> None:
    """At its length the tokens of a block pay for its time, and a little less acceptance pays at no length."""
    (one,) = plan_shapes(TARGET, 576, 49152, "h100", [Shape(6, 8192)], context=512)
    machine = load_profile("h100").machine()
    draft = draft_facts(TARGET, 576, 49152, Shape(6, 8192))
    plain = pass_seconds(TARGET, machine, 1, 1, 512)
    assert one.cost_ratio == pytest.approx(pass_seconds(draft, machine, 1, 1, 512) / plain)
    blocks = {
        k: block_seconds(draft, machine, 1, k, 512) + pass_seconds(TARGET, machine, 1, k + 1, 512) for k in range(1, 9)
    }
    assert expected_tokens_per_call(one.break_even, one.k) * plain == pytest.approx(blocks[one.k])
    for k in (1, 2, 3, 4, 6, 8):
        assert expected_tokens_per_call(one.break_even - 1e-3, k) * plain < blocks[k]


def test_a_large_batch_pays_for_nothing() -> None:
    """Verification is not free any more: at thousands of requests no length of a draft that pays alone does."""
    few = plan_shapes(TARGET, 576, 49152, "h100", [Shape(6, 49152)], rows=1, context=16)[0]
    many = plan_shapes(TARGET, 576, 49152, "h100", [Shape(6, 49152)], rows=4096, context=16)[0]
    assert few.break_even < 0.5
    assert many.break_even == 1.0
    assert many.at_best < 1.0 < few.at_best


def test_the_table_says_what_is_too_large_and_impossible_shapes_are_refused() -> None:
    found = plan_json(plan_shapes(TARGET, 576, 49152, "h100", default_shapes(30, 49152)), "h100", 1, 1024)
    assert any(not one["fits"] for one in found["shapes"])
    assert "too large" in plan_table(found)
    with pytest.raises(UserError, match="cannot be cut from a target of 30 and 49152"):
        plan_shapes(TARGET, 576, 49152, "h100", [Shape(31, 8192)])
