"""Costs read from HLO text, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from learner_jax.hlo import program_cost
from tests.learner_jax.hlo_arrays import arrays

LOOP = """HloModule loop

%body (p: (s32[], f32[8,16], s32[])) -> (s32[], f32[8,16], s32[]) {
  %p = (s32[], f32[8,16]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %w = f32[16,16]{1,0} constant({...})
  %y = f32[8,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (s32[], f32[8,16]{1,0}, s32[]) tuple(%next, %y, %n)
}

%condition (p: (s32[], f32[8,16], s32[])) -> pred[] {
  %p = (s32[], f32[8,16]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %end = s32[] END
  ROOT %less = pred[] compare(%i, %end), direction=LT
}

ENTRY %main (x: f32[8,16], n: s32[]) -> (s32[], f32[8,16], s32[]) {
  %x = f32[8,16]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %ten = s32[] constant(10)
  %one = s32[] constant(1)
  %start = (s32[], f32[8,16]{1,0}, s32[]) tuple(%one, %x, BOUND)
  %loop = (s32[], f32[8,16]{1,0}, s32[]) while(%start), condition=%condition, body=%body, NAME
  ROOT %done = f32[8,16]{1,0} get-tuple-element(%loop), index=1
}
""".replace("NAME", 'metadata={op_name="jit(f)/head/while"}')
CARRIED = "get-tuple-element(%p), index=2"


def test_a_loop_counts_as_often_as_it_runs() -> None:
    # Given a loop over 1, 3, 5, 7, 9 with one product of 8 x 16 by 16 x 16
    inside = LOOP.replace("END", "constant(10)").replace("BOUND", "%n")
    carried = LOOP.replace("END", CARRIED).replace("BOUND", "%ten")
    for text in (inside, carried):
        cost = program_cost(text)
        # Then five products are counted
        assert cost.flops == 5 * 2 * 8 * 16 * 16
        assert cost.assumed_loops == {}


def test_a_loop_whose_end_is_data_is_assumed_and_said_so() -> None:
    text = LOOP.replace("END", CARRIED).replace("BOUND", "%n")
    cost = program_cost(text, {"head": 7})
    assert cost.flops == 7 * 2 * 8 * 16 * 16
    assert cost.assumed_loops == {"jit(f)/head/while": 7}
    assert program_cost(text).assumed_loops == {"jit(f)/head/while": 1}


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['a'=2,'b'=4] {'b'}", 4),
        ("mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("mesh['a'=64,'b'=4], device_ids=([4,64]T(1,0)) {'b'}", 4),
        ("mesh['a'=8,'b'=4] {'a':(2)4}", 4),
    ],
)
@pytest.mark.parametrize(
    ("kind", "result", "sent"),
    [
        # Bytes that a device sends in a ring of n, holding 4,096
        ("all-gather", "bf16[8192]", lambda n: 4096 * (n - 1)),
        ("reduce-scatter", "bf16[512]", lambda n: 4096 * (n - 1) // n),
        ("all-reduce", "bf16[2048]", lambda n: 2 * 4096 * (n - 1) // n),
        ("collective-permute", "bf16[2048]", lambda n: 4096),
    ],
)
def test_bytes_sent_by_collectives(
    groups: str, size: int, kind: str, result: str, sent: object
) -> None:
    text = f"""HloModule m

ENTRY %main (x: bf16[2048]) -> {result} {{
  %x = bf16[2048]{{0}} parameter(0)
  ROOT %y = {result}{{0}} {kind}(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}
}}
"""
    cost = program_cost(text)
    assert cost.collectives == {kind: 1}
    assert cost.wire_bytes == {kind: sent(size)}


def test_products_that_a_tpu_writes_as_convolutions() -> None:
    # Given a batch of 16 products of 512 x 128 by 128 x 512, whose window slides over padding
    text = """HloModule m

ENTRY %main (q: bf16[16,512,128]) -> bf16[16,512,512] {
  %q = bf16[16,512,128]{2,1,0} parameter(0)
  ROOT %s = bf16[16,512,512]{2,1,0} convolution(%q, %q), WINDOW, dim_labels=0bf_0oi->0bf
}
""".replace("WINDOW", "window={size=16 stride=15 lhs_dilate=16}")
    # Then only the positions that lie on the input are counted
    assert program_cost(text).flops == 2 * 16 * 512 * 512 * 128


def test_a_slice_of_a_stack_costs_the_slice() -> None:
    # Given a fusion that reads one layer of a stack of 64, and memory that is not HBM
    text = """HloModule m

%slice (stack: f32[64,128], i: s32[]) -> f32[1,128] {
  %stack = f32[64,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %layer = f32[1,128]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,128}
}

ENTRY %main (stack: f32[64,128], i: s32[]) -> f32[1,128] {
  %stack = f32[64,128]{1,0} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  ROOT %layer = f32[1,128]{1,0:T(8,128)S(1)} fusion(%stack, %i), kind=kLoop, calls=%slice
}
"""
    assert program_cost(text).hbm_bytes == 128 * 4
    assert [array.space for array in arrays(text)].count(1) == 1


def test_a_fused_all_reduce_of_which_a_slice_is_kept_is_a_reduce_scatter() -> None:
    text = """HloModule m

%scatter (x: f32[64], i: s32[]) -> f32[16] {
  %x = f32[64]{0} parameter(0)
  %i = s32[] parameter(1)
  %sum = f32[64]{0} all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %own = f32[16]{0} dynamic-slice(%sum, %i), dynamic_slice_sizes={16}
}

ENTRY %main (x: f32[64], i: s32[]) -> f32[16] {
  %x = f32[64]{0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %own = f32[16]{0} fusion(%x, %i), kind=kCustom, calls=%scatter
}
"""
    assert program_cost(text).wire_bytes == {"reduce-scatter": 64 * 4 * 3 // 4}
