"""The normal form of PTX, and specializations without a partner."""

import pytest

import compare_ptx
from ptx_text import normal_form

PTX = """
//
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry add_kernel(
	.param .u64 .ptr .global .align 1 add_kernel_param_0,
	.param .u32 add_kernel_param_1
)
.reqntid 128
{
	.reg .b32 	%r<9>;
	.loc	1 12 0
	ld.param.b64 	%rd1, [add_kernel_param_0];
	ld.param.b32 	%r1, [add_kernel_param_1];
$L__tmp0:
	mov.u32 	%r2, %tid.x;  // a comment
	setp.lt.s32 	%p1, %r2, %r1;
	@%p1 bra 	$L__BB0_2;
	st.global.b32 	[%rd1], %r2;
$L__BB0_2:
	ret;
}
	.section	.debug_abbrev
	{
.b8 1
	}
"""


def test_normal_form_of_renamed_ptx_is_equal() -> None:
    renamed = (
        PTX.replace("add_kernel", "sum_kernel")
        .replace("%r2", "%r7")
        .replace("BB0_2", "BB4_9")
        .replace("1 12 0", "2 99 4")
    )
    assert normal_form(renamed) == normal_form(PTX)


def test_normal_form_with_parameters_reordered_is_equal() -> None:
    first, second = "\t.param .u64 .ptr .global .align 1 add_kernel_param_0,\n", "\t.param .u32 add_kernel_param_1\n"
    swapped = PTX.replace(
        first + second, "\t.param .u32 add_kernel_param_0,\n\t.param .u64 .ptr .global .align 1 add_kernel_param_1\n"
    )
    loads = ("\tld.param.b64 \t%rd1, [add_kernel_param_0];\n", "\tld.param.b32 \t%r1, [add_kernel_param_1];\n")
    swapped = swapped.replace(
        "".join(loads), "\tld.param.b32 \t%r1, [add_kernel_param_0];\n\tld.param.b64 \t%rd1, [add_kernel_param_1];\n"
    )
    assert normal_form(swapped) == normal_form(PTX)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("setp.lt.s32", "setp.le.s32"),
        ("%p1, %r2, %r1", "%p1, %r1, %r2"),
        ("[%rd1], %r2", "[%rd1+4], %r2"),
        (".reqntid 128", ".reqntid 256"),
        (".param .u32", ".param .u64"),
        ("\tst.global.b32 \t[%rd1], %r2;\n", ""),
        (".align 16", ".align 32"),
    ],
)
def test_normal_form_of_other_instructions_differs(old: str, new: str) -> None:
    assert old in PTX
    assert normal_form(PTX.replace(old, new)) != normal_form(PTX)


def test_unmatched_with_a_missing_duplicate_lists_it() -> None:
    entry = compare_ptx.Compiled("a", "k", "1", 3, 0)
    assert compare_ptx.unmatched([entry, entry], [entry, entry]) == []
    assert compare_ptx.unmatched([entry, entry], [entry]) == [("old", entry)]
    assert compare_ptx.unmatched([entry], [entry._replace(digest="2")]) == [
        ("old", entry),
        ("new", entry._replace(digest="2")),
    ]
