"""Rows of tensors, one after the other."""

from holdfast.models.parameters import Part, stack_parts, stacked


def test_parts_begin_where_the_last_one_ended() -> None:
    tensors = [("q", (6, 4)), ("k", (2, 4)), ("v", (2, 4))]
    assert stack_parts(tensors) == (Part("q", 0, (6, 4)), Part("k", 6, (2, 4)), Part("v", 8, (2, 4)))
    parameter = stacked("qkv.weight", tensors, "linear", "rows")
    assert (parameter.name, parameter.shape, parameter.kind, parameter.split) == (
        "qkv.weight",
        (10, 4),
        "linear",
        "rows",
    )
    assert parameter.parts == stack_parts(tensors)
    parameter.check()


def test_vectors_too() -> None:
    bias = stacked("qkv.bias", [("q", (6,)), ("k", (2,))], "bias", "rows")
    assert bias.shape == (8,)
    bias.check()
