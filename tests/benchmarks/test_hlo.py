"""The count of a compiled program's work, by programs in HLO whose work is known."""

import pytest

from benchmarks._hlo import program_cost

BODY = """%body (p: (s32[], f32[8,16], s32[])) -> (s32[], f32[8,16], s32[]) {
  %p = (s32[], f32[8,16]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %w = f32[16,16]{1,0} constant({...})
  %y = f32[8,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (s32[], f32[8,16]{1,0}, s32[]) tuple(%next, %y, %n)
}"""


def loop(end: str, bound: str) -> str:
    """A loop from 1 in steps of 2, with one product of 8 x 16 by 16 x 16."""
    return f"""{BODY}
%condition (p: (s32[], f32[8,16], s32[])) -> pred[] {{
  %p = (s32[], f32[8,16]{{1,0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %end = s32[] {end}
  ROOT %less = pred[] compare(%i, %end), direction=LT
}}
ENTRY %main (x: f32[8,16], n: s32[]) -> f32[8,16] {{
  %x = f32[8,16]{{1,0}} parameter(0)
  %n = s32[] parameter(1)
  %ten = s32[] constant(10)
  %one = s32[] constant(1)
  %start = (s32[], f32[8,16]{{1,0}}, s32[]) tuple(%one, %x, {bound})
  %loop = (s32[], f32[8,16]{{1,0}}, s32[]) while(%start), condition=%condition, body=%body, {NAME}
}}"""


NAME, CARRIED = 'metadata={op_name="jit(f)/head/while"}', "get-tuple-element(%p), index=2"
OF_DATA, PRODUCT = loop(CARRIED, "%n"), 2 * 8 * 16 * 16
LOOPS = {"jit(f)/head/while": 1}
CONVOLUTION = """ENTRY %main (q: bf16[16,512,128]) -> bf16[16,512,512] {
  %q = bf16[16,512,128]{2,1,0} parameter(0)
  ROOT %s = bf16[16,512,512]{2,1,0} convolution(%q, %q), WINDOW, dim_labels=0bf_0oi->0bf
}""".replace("WINDOW", "window={size=16 stride=15 lhs_dilate=16}")
SLICE = """%slice (stack: f32[64,128], i: s32[]) -> f32[1,128] {
  %stack = f32[64,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %layer = f32[1,128]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,128}
}
ENTRY %main (stack: f32[64,128], i: s32[]) -> f32[1,128] {
  %stack = f32[64,128]{1,0} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  ROOT %layer = f32[1,128]{1,0:T(8,128)S(1)} fusion(%stack, %i), kind=kLoop, calls=%slice
}"""
SCATTER = """%scatter (x: f32[64], i: s32[]) -> f32[16] {
  %x = f32[64]{0} parameter(0)
  %i = s32[] parameter(1)
  %sum = f32[64]{0} all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %own = f32[16]{0} dynamic-slice(%sum, %i), dynamic_slice_sizes={16}
}
ENTRY %main (x: f32[64], i: s32[]) -> f32[16] {
  %x = f32[64]{0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %own = f32[16]{0} fusion(%x, %i), kind=kCustom, calls=%scatter
}"""


@pytest.mark.parametrize(
    ("text", "assumed", "expected"),
    [
        # over 1, 3, 5, 7, 9, with the end in the condition, and carried along
        (loop("constant(10)", "%n"), {}, {"flops": 5 * PRODUCT, "assumed_loops": {}}),
        (loop(CARRIED, "%ten"), {}, {"flops": 5 * PRODUCT, "assumed_loops": {}}),
        # whose end is data: as often as is assumed, else once
        (OF_DATA, {"head": 7}, {"flops": 7 * PRODUCT, "assumed_loops": dict.fromkeys(LOOPS, 7)}),
        (OF_DATA, {}, {"assumed_loops": LOOPS}),
        # a batch of products as a TPU writes them: positions of padding are not counted
        (CONVOLUTION, {}, {"flops": 2 * 16 * 512 * 512 * 128}),
        # one layer of a stack, and memory that is not HBM
        (SLICE, {}, {"hbm_bytes": 128 * 4}),
        # a fused all-reduce of which a slice is kept is a reduce-scatter
        (SCATTER, {}, {"wire_bytes": {"reduce-scatter": 64 * 4 * 3 // 4}}),
    ],
)
def test_the_cost_of_a_program_is_that_of_what_it_executes(text, assumed, expected):
    cost = vars(program_cost(text, assumed))
    assert {name: cost[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("groups", "n"),
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
def test_bytes_sent_by_collectives(groups, n):
    # Given collectives whose rings of n devices hold 4,096 bytes, each sends
    for kind, result, sent in (
        ("all-gather", "bf16[8192]", 4096 * (n - 1)),
        ("reduce-scatter", "bf16[512]", 4096 * (n - 1) // n),
        ("all-reduce", "bf16[2048]", 2 * 4096 * (n - 1) // n),
        ("collective-permute", "bf16[2048]", 4096),
    ):
        cost = program_cost(f"""ENTRY %main (x: bf16[2048]) -> {result} {{
  %x = bf16[2048]{{0}} parameter(0)
  ROOT %y = {result}{{0}} {kind}(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}
}}""")
        assert (cost.collectives, cost.wire_bytes) == ({kind: 1}, {kind: sent})
