"""Weights that a checkpoint packs: in one scheme, in several, or in ways that cannot stay packed, with the reason."""

from holdfast.loading.planning.moves import EMBEDDING, HEAD, choose_all
from holdfast.loading.planning.packed_planes import TIED_APART, TURNED, form_of, packed_weights
from holdfast.loading.sources.source import TensorEntry
from holdfast.models.packed_rows import account_for
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.packed_schemes import Q4_K, Q6_K, PackedScheme
from holdfast.quant.weight_schemes import PackedPolicy, WeightRecipe

SHAPE = (64, 256)
RECIPE = WeightRecipe(packed=PackedPolicy("with_kernel"))


def entries_of(schemes: dict[str, PackedScheme | None]) -> dict[str, TensorEntry]:
    return {name: TensorEntry(name, "float32", SHAPE, "a.gguf", 9216, packed) for name, packed in schemes.items()}


def experts(is_transposed: bool = False) -> Parameter:
    parts = tuple(
        Part(f"e{i}", 64 * i, SHAPE[:: -1 if is_transposed else 1], is_transposed=is_transposed) for i in (0, 1)
    )
    return Parameter("experts.down.weight", (2, *SHAPE), parts, "expert")


def summary_of(parameter: Parameter, entries: dict[str, TensorEntry]) -> str:
    """What the plan says, and that a load holds the weight in the same way."""
    (choice,) = choose_all((parameter,), entries).fills
    form, found = form_of(choice, entries, "float32", RECIPE), packed_weights((parameter,), entries)
    assert form is not None
    assert bool(form.rows) == (not isinstance(found[parameter.name], str))
    return account_for([(parameter.kind, form)], RECIPE).summary


def test_packed_weights_experts_stored_alike_stay_packed():
    assert summary_of(experts(), entries_of({"e0": Q4_K, "e1": Q4_K})) == "1 of 1 packed weights stay as stored"


def test_packed_weights_experts_stored_apart_say_why_they_expand():
    mixed = summary_of(experts(), entries_of({"e0": Q4_K, "e1": Q6_K}))
    assert mixed.endswith("1 are expanded (its experts are stored in different ways: Q4_K, Q6_K)")
    half = summary_of(experts(), entries_of({"e0": None, "e1": Q6_K}))
    assert half.endswith("1 are expanded (its experts are stored in different ways: plain, Q6_K)")


def test_packed_weights_turned_experts_say_why_they_expand():
    entries = {name: TensorEntry(name, "float32", SHAPE[::-1], "a.gguf", 9216, Q4_K) for name in ("e0", "e1")}
    assert summary_of(experts(is_transposed=True), entries).endswith(f"1 are expanded ({TURNED})")


def test_packed_weights_tied_head_stored_apart_says_why_it_expands():
    tied = Parameter(EMBEDDING, SHAPE, (Part("model.embed_tokens.weight", 0, SHAPE),), "head")
    for head, expected in ((Q4_K, "1 of 1 packed weights stay as stored"), (Q6_K, TIED_APART), (None, TIED_APART)):
        entries = entries_of({"model.embed_tokens.weight": Q4_K, HEAD: head})
        assert expected in summary_of(tied, entries)


def test_packed_weights_of_plain_tensors_are_none():
    entries = entries_of({"e0": None, "e1": None})
    (choice,) = choose_all((experts(),), entries).fills
    assert packed_weights((experts(),), entries) == {}
    assert form_of(choice, entries, "float32", RECIPE) is None
