"""Sharding: the shares of all ranks are slices of the whole that tile it, in every layout; what does not divide is said."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from error_codes import raises_code
from holdfast.distributed.mesh import Mesh, meshes
from holdfast.errors import ConfigError, UnsupportedModelError
from holdfast.models.grouped_readers import parameters, read_spec
from holdfast.models.parameters import NAMES, Parameter, Part, list_parameters
from holdfast.models.sharding import shard_parameters, vocabulary_rows
from holdfast.models.spec import LatentSpec
from models.test_family_fields import CASES

LATENT_SHAPES = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
"""Parameters of the layers around latent attention."""


def filled(parameter, parts, tensors):
    """What the parts make of the tensors."""
    out = np.full((parameter.num_rows, parameter.num_columns), -1)
    for part in parts:
        part.check()
        array = tensors[part.tensor]
        if part.is_transposed:
            array = np.swapaxes(array, -1, -2)
        rows = array.reshape(part.source_rows, part.source_columns)
        (top, low), (left, right) = part.row_range, part.column_range
        out[part.row_start : part.row_start + part.num_rows] = rows[top:low, left:right]
    return out.reshape(parameter.shape)


def numbered(parameter, parts, values):
    """The tensors of a layout, with such numbers that the parameter becomes `values`."""
    tensors = {}
    rows = values.reshape(parameter.num_rows, parameter.num_columns)
    for part in parts:
        upright = tensors.setdefault(part.tensor, np.full((part.source_rows, part.source_columns), -1))
        top, low = part.row_range
        upright[top:low] = rows[part.row_start : part.row_start + part.num_rows]
    for part in parts:
        if part.is_transposed and tensors[part.tensor].shape != part.shape:
            shape = (*part.shape[:-2], part.shape[-1], part.shape[-2])
            tensors[part.tensor] = np.swapaxes(tensors[part.tensor].reshape(shape), -1, -2)
        else:
            tensors[part.tensor] = tensors[part.tensor].reshape(part.shape)
    return tensors


def stacked(name, heights, width, kind="linear", split="rows"):
    parts, row = [], 0
    for index, height in enumerate(heights):
        parts.append(Part(f"{name}.{index}", row, (height, width) if width else (height,)))
        row += height
    return Parameter(name, (row, width) if width else (row,), tuple(parts), kind, split)


def experts(count, halves, inner, hidden, split):
    apart, row = [], 0
    for expert in range(count):
        for half in range(halves):
            apart.append(Part(f"e{expert}.{half}", row, (inner, hidden)))
            row += inner
    fused, across = (
        tuple(
            Part("fused", start, shape, (start, start + inner), is_transposed=across) for start in range(0, row, inner)
        )
        for shape, across in (((count, halves * inner, hidden), False), ((count, hidden, halves * inner), True))
    )
    return Parameter("experts.weight", (count, halves * inner, hidden), tuple(apart), "expert", split, (fused, across))


@settings(deadline=None)
@given(st.data())
def test_rows_of_all_ranks_tile_every_part(data):
    size = data.draw(st.sampled_from([1, 2, 3, 4]))
    heights = [size * height for height in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))]
    width = data.draw(st.integers(0, 4))
    whole = stacked("layers.0.gate_up.weight", heights, width)
    values = np.arange(whole.num_elements).reshape(whole.shape)
    tensors = numbered(whole, whole.parts, values)
    shares = []
    for rank in range(size):
        (share,) = shard_parameters([whole], Mesh(rank, size), 1, 1)
        share.check()
        shares.append(filled(share, share.parts, tensors))
        assert share.seam_rows == whole.seam_rows
    row = 0
    starts = [0] * size
    for height in heights:
        pieces = []
        for rank, share in enumerate(shares):
            pieces.append(share[starts[rank] : starts[rank] + height // size])
            starts[rank] += height // size
        assert (np.concatenate(pieces) == values[row : row + height]).all()
        row += height
    assert all(start == len(share) for start, share in zip(starts, shares, strict=True))


@settings(deadline=None)
@given(st.data())
def test_experts_of_all_ranks_tile_the_stack_in_every_layout(data):
    """Ranks share every expert, or hold whole ones; where outputs are gathered, columns are shared as rows are."""
    tensor_size, expert_size = data.draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (3, 3)]))
    is_exact = data.draw(st.booleans())
    count, halves = expert_size * data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    split = data.draw(st.sampled_from(["rows", "columns"]))
    inner, hidden = tensor_size * data.draw(st.integers(1, 2)), tensor_size * data.draw(st.integers(1, 2))
    whole = experts(count, halves, inner, hidden, split)
    values = np.arange(whole.num_elements).reshape(count, halves, inner, hidden)
    layout = data.draw(st.integers(0, 2))
    tensors = numbered(whole, (whole.parts, *whole.layouts)[layout], values)
    found = np.full(values.shape, -1)
    axis = 0 if expert_size > 1 else 2 if split == "rows" or is_exact else 3
    for rank in range(tensor_size):
        mesh = Mesh(rank, tensor_size, rank if expert_size > 1 else 0, expert_size, is_exact=is_exact)
        (share,) = shard_parameters([whole], mesh, 1, 1)
        share.check()
        own = filled(share, (share.parts, *share.layouts)[layout], tensors)
        place, length = [slice(None)] * 4, values.shape[axis] // tensor_size
        place[axis] = slice(rank * length, (rank + 1) * length)
        assert (found[tuple(place)] == -1).all(), "two ranks hold the same"
        found[tuple(place)] = own.reshape(found[tuple(place)].shape)
    assert (found == values).all()


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_shard_parameters_uneven_vocabulary_needs_no_padding(size):
    for kind in ("embedding", "head"):
        whole = stacked("embed.weight", [23], 3, kind)
        values = np.arange(69).reshape(23, 3)
        shares = [shard_parameters([whole], Mesh(rank, size), 1, 1)[0] for rank in range(size)]
        rows = [filled(share, share.parts, {"embed.weight.0": values}) for share in shares]
        assert (np.concatenate(rows) == values).all()
        assert len({share.shape for share in shares[:-1]}) == 1
        assert shares[-1].shape[0] < shares[0].shape[0], "nothing is padded"
        assert [vocabulary_rows(23, Mesh(rank, size)) for rank in range(size)] == [
            share.parts[0].row_range for share in shares
        ]


def test_vocabulary_rows_too_few_for_ranks_refused():
    for rank in range(4):
        with pytest.raises(UnsupportedModelError, match="A vocabulary of 5 rows cannot be shared by 4 ranks"):
            vocabulary_rows(5, Mesh(rank, 4))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "kv_heads"),
    [
        (8, 8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (8, 4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (8, 2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (8, 1, 4, [(0, 1)] * 4),
    ],
)
@pytest.mark.parametrize("width", [6, 0], ids=["weight", "bias"])
def test_shard_parameters_divides_heads_and_shares_few_kv_heads(num_heads, num_kv_heads, size, kv_heads, width):
    head_dim = 3
    name = "layers.0.qkv.weight" if width else "layers.0.qkv.bias"
    whole = stacked(name, [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], width)
    for rank in range(size):
        (share,) = shard_parameters([whole], Mesh(rank, size), num_heads, num_kv_heads)
        share.check()
        q, k, v = share.parts
        assert q.row_range == (rank * num_heads // size * head_dim, (rank + 1) * num_heads // size * head_dim)
        first, last = kv_heads[rank]
        assert k.row_range == v.row_range == (first * head_dim, last * head_dim)
        if k.rows is not None:
            assert k.whole_range == (0, num_kv_heads * head_dim)


def test_shard_parameters_unsplit_stays_and_one_rank_has_all():
    parameters = [stacked("layers.0.norm.weight", [8], 0, "norm", "none"), stacked("layers.0.up.weight", [8], 4)]
    norm, up = shard_parameters(parameters, Mesh(1, 2), 1, 1)
    assert norm is parameters[0]
    assert up.whole is parameters[1]
    assert shard_parameters(parameters, Mesh(), 1, 1) == tuple(parameters)


def test_latent_attention_is_shared_by_whole_heads():
    """A rank has both halves of kv_b, of its own heads; the latents' projection is the same on all ranks."""
    latent = LatentSpec(q_rank=8, kv_rank=16, nope_dim=4, rope_dim=2, value_dim=6)
    spec = replace(read_spec(LATENT_SHAPES), num_heads=6, num_kv_heads=1, head_dim=18, latent=latent)
    by_name = {one.name: one for one in list_parameters(spec, NAMES["deepseek"])}
    shares = [
        {share.name: share for share in shard_parameters(by_name.values(), Mesh(rank, 3), 6, 1)} for rank in range(3)
    ]
    assert shares[1]["layers.0.qkv_a.weight"] == by_name["layers.0.qkv_a.weight"]
    assert shares[1]["layers.0.q_b.weight"].shape == (12, 8)
    assert shares[1]["layers.0.o.weight"].shape == (32, 12)
    whole = by_name["layers.0.kv_b.weight"]
    values = np.arange(whole.num_elements).reshape(whole.shape)
    for place, parts in enumerate((whole.parts, *whole.layouts)):
        tensors = numbered(whole, parts, values)
        for rank, share in enumerate(share["layers.0.kv_b.weight"] for share in shares):
            found = filled(share, (share.parts, *share.layouts)[place], tensors)
            assert (found == values[20 * rank : 20 * rank + 20]).all()
    with pytest.raises(UnsupportedModelError, match="are 6 heads, which do not divide by 4"):
        shard_parameters([whole], Mesh(0, 4), 6, 1)


def test_shard_parameters_share_of_share_keeps_whole():
    whole = stacked("layers.0.up.weight", [8], 4)
    (half,) = shard_parameters([whole], Mesh(1, 2), 1, 1)
    (quarter,) = shard_parameters([half], Mesh(1, 2), 1, 1)
    assert quarter.whole is whole
    assert (quarter.parts[0].row_range, quarter.parts[0].whole_range) == ((6, 8), (0, 8))


@pytest.mark.parametrize(
    ("parameter", "mesh", "heads", "words"),
    [
        (stacked("layers.0.up.weight", [8, 9], 4), Mesh(0, 2), (1, 1), "9 of its rows belong together"),
        (stacked("layers.0.o.weight", [8], 9, split="columns"), Mesh(0, 2), (1, 1), "it has 9 columns"),
        (stacked("layers.0.qkv.weight", [9, 3, 3], 4), Mesh(0, 2), (3, 1), "are 3 heads"),
        (stacked("layers.0.qkv.weight", [12, 9, 9], 4), Mesh(0, 2), (4, 3), "rows 12 to 20 of it are 3 heads"),
        (stacked("layers.0.qkv.weight", [32, 24, 24], 4), Mesh(0, 4), (4, 3), "are 3 heads"),
        (experts(3, 2, 2, 2, "rows"), Mesh(0, 1, 0, 2), (1, 1), "it has 3 experts"),
        (experts(2, 2, 3, 2, "rows"), Mesh(0, 2), (1, 1), "3 of its rows belong together"),
    ],
)
def test_shard_parameters_indivisible_is_refused(parameter, mesh, heads, words):
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        shard_parameters([parameter], mesh, *heads)
    assert str(caught.value).startswith(f"{parameter.name} {list(parameter.shape)} cannot be shared by ")


@pytest.mark.parametrize("values", [(2, 2), (-1, 2), (0, 0), (True, 2), (0, 1.0), (0, 1, 4, 4), (0, 1, "0", 1)])
def test_mesh_invalid_values_refused(values):
    with raises_code("rank.not_a_rank", ConfigError):
        Mesh(*values)


def test_biases_and_sinks_of_gpt_oss_go_with_their_weights():
    """Ranks that share experts hold the columns of their rows of gate and up, which alternate; those with whole ones their rows of biases."""
    config = {"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 1, "num_local_experts": 4}
    listed = parameters(read_spec(config | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}))
    kinds = {"sliced": Mesh(1, 2), "exact": Mesh(1, 2, is_exact=True), "whole": Mesh(1, 2, 1, 2)}
    shares = {}
    for kind, mesh in kinds.items():
        shares[kind] = {one.name.removeprefix("layers.0."): one for one in shard_parameters(listed, mesh, 8, 8)}
        for one in shares[kind].values():
            one.check()
        assert shares[kind]["sinks"].shape == (4,)
        assert shares[kind]["router.bias"].shape == (4,)
    names = ("gate_up.weight", "gate_up.bias", "down.weight", "down.bias")
    shapes = {kind: [share[f"experts.{name}"].shape for name in names] for kind, share in shares.items()}
    assert shapes["sliced"] == [(4, 96, 64), (4, 96), (4, 64, 48), (4, 64)]
    assert shapes["exact"] == [(4, 96, 64), (4, 96), (4, 32, 96), (4, 32)]
    assert shapes["whole"] == [(2, 192, 64), (2, 192), (2, 64, 96), (2, 64)]
    (bias,) = shares["sliced"]["experts.gate_up.bias"].parts
    assert (bias.rows, bias.columns) == (None, (96, 192))
    assert [part.rows for part in shares["sliced"]["experts.gate_up.weight"].parts][:2] == [(96, 192), (288, 384)]
    assert [shares[kind]["o.bias"].shape for kind in kinds] == [(64,), (32,), (64,)]
    assert [shares[kind]["o.weight"].shape for kind in kinds] == [(64, 256), (32, 512), (64, 256)]


@pytest.mark.parametrize("name", CASES)
def test_stages_hold_every_parameter_once_and_a_tied_head_twice(name):
    """Layers are those of the slice of the spec, counted from 0; what is not in a layer is in the first or the last stage."""
    spec = CASES[name][1]
    listed = {parameter.name: parameter for parameter in parameters(spec)}
    for cuts in ([(0, 1), (1, 4)], [(0, 2), (2, 3), (3, 4)]):
        held = []
        for mesh, (start, end) in zip(meshes(1, cuts), cuts, strict=True):
            own = shard_parameters(listed.values(), mesh, spec.num_heads, spec.num_kv_heads)
            layers = {one.name: one.shape for one in own if one.name.startswith("layers.")}
            part = parameters(spec.layer_slice(start, end))
            assert layers == {one.name: one.shape for one in part if one.name.startswith("layers.")}
            for one in own:
                first, number, *rest = one.name.split(".")
                whole = ".".join((first, str(int(number) + start), *rest)) if first == "layers" else one.name
                assert (one.whole or one) == listed[whole]
                held.append(whole)
            others = {one.name.partition(".")[0] for one in own} - {"layers"}
            before = {"embed", "positions", "embed_in"} if mesh.is_first_stage else set()
            behind = {"final_norm", "lm_head", "embed_out", "head_streams"} if mesh.is_last_stage else set()
            tied = {"embed"} if mesh.is_last_stage and spec.tied_embeddings else set()
            assert others == (before | behind | tied) & {one.partition(".")[0] for one in listed}
        assert sorted(held) == sorted([*listed, *(["embed.weight"] if spec.tied_embeddings else [])])
