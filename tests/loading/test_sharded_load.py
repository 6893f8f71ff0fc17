"""Ranks that share a model hold, to the bit, slices of what one device would hold: every scheme, every mesh, every layout."""

from dataclasses import replace

import torch

from for_each import for_each
from holdfast.distributed.mesh import Mesh
from holdfast.loading.execution.execute import load_weights
from holdfast.loading.planning.plan import plan_load
from holdfast.loading.sources.dummy import DummySource
from holdfast.memory.ledger import Ledger
from holdfast.models.parameters import Parameter, Part
from holdfast.models.sharding import shard_parameters, vocabulary_rows
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES, WeightRecipe
from loading.header_source import experts, stacked

NUM_HEADS, NUM_KV_HEADS, NUM_EXPERTS = 8, 4, 4
EMBED = Parameter("embed.weight", (301, 256), (Part("model.embed_tokens.weight", 0, (301, 256)),), "head", "rows")
QKV = stacked("layers.0.qkv.weight", [1024, 512, 512], 128, split="rows", prefix="qkv")
OUT = stacked("layers.0.o.weight", [128], 1024, split="columns", prefix="o")
GATE_UP = experts(NUM_EXPERTS, 512, 64)
MESHES = [(tensor, expert) for tensor in (1, 2, 4) for expert in (1, 2, 4)]


def load(parameters, source, recipe):
    plan = plan_load(parameters, source, "bfloat16", recipe)
    return load_weights(plan, source, "cpu", Ledger(), lambda done, total: None).weights


def planes(weight):
    """Bits of a weight, or of its codes and its scales."""
    if isinstance(weight, torch.Tensor):
        return [weight.view(torch.int16)]
    return [weight.codes.view(torch.uint8), weight.scales.contiguous()]


def rows_of(plane, heights, mesh, dim):
    """A rank's share of every part, where parts have rows in this proportion."""
    unit = plane.shape[dim] // sum(heights)
    parts = plane.split([unit * height for height in heights], dim)
    return torch.cat([part.chunk(mesh.tensor_size, dim)[mesh.tensor_rank] for part in parts], dim)


def expected(name, plane, mesh):
    if name == EMBED.name:
        return plane[slice(*vocabulary_rows(301, mesh))]
    if name == QKV.name:
        return rows_of(plane, (2, 1, 1), mesh, 0)
    if name == OUT.name:
        return plane if plane.dim() == 1 else plane.chunk(mesh.tensor_size, dim=1)[mesh.tensor_rank]
    if mesh.expert_size > 1:  # whole ones
        return plane.chunk(mesh.expert_size)[mesh.expert_rank]
    return rows_of(plane, (1, 1), mesh, 1)


@for_each("scheme", [None, *WEIGHT_SCHEMES.values()])
def test_load_sharded_weights_are_slices_of_the_whole(scheme):
    parameters = [EMBED, QKV, OUT, GATE_UP]
    recipe = WeightRecipe(scheme)
    source = DummySource(parameters, "float32")
    whole = {name: planes(weight) for name, weight in load(parameters, source, recipe).items()}
    for tensor_size, expert_size in MESHES:
        mesh = Mesh(tensor_size - 1, tensor_size, expert_size // 2, expert_size)
        share = load(shard_parameters(parameters, mesh, NUM_HEADS, NUM_KV_HEADS), source, recipe)
        for name, weight in share.items():
            for all_of_it, own in zip(whole[name], planes(weight), strict=True):
                assert torch.equal(expected(name, all_of_it, mesh), own), (name, mesh)


class Relaid:
    """The tensors of separate experts, as one tensor of all, either way round."""

    def __init__(self, source, layout):
        part = layout[0]
        self._source, self._name = source, part.tensor
        upright = torch.cat([self._read(part) for part in GATE_UP.parts]).view(GATE_UP.shape)
        self._tensor = (upright.transpose(1, 2) if part.is_transposed else upright).contiguous()
        first = next(iter(source.entries.values()))
        self.entries = {part.tensor: replace(first, name=part.tensor, shape=part.shape, num_bytes=upright.nbytes)}
        self.ignorable: frozenset[str] = frozenset()
        self.scratch_bytes_per_reader = 0

    def _read(self, part):
        out = torch.empty(part.shape)
        self._source.read_into(part.tensor, 0, part.shape[0], memoryview(out.view(-1).numpy()).cast("B"))
        return out

    def read_into(self, name, row_start, row_end, out, columns=None):
        assert name == self._name
        rows = self._tensor.view(-1, self._tensor.shape[-1])[row_start:row_end]
        rows = rows if columns is None else rows[:, columns[0] : columns[1]]
        out[:] = memoryview(rows.contiguous().view(-1).numpy()).cast("B")

    def close(self): ...


@for_each("scheme", [None, *WEIGHT_SCHEMES.values()])
def test_load_sharded_expert_layouts_give_the_same_bytes(scheme):
    recipe = WeightRecipe(scheme)
    apart = DummySource([GATE_UP], "float32")
    wanted = planes(load([GATE_UP], apart, recipe)[GATE_UP.name])
    for layout in GATE_UP.layouts:
        source = Relaid(apart, layout)
        for found, plane in zip(planes(load([GATE_UP], source, recipe)[GATE_UP.name]), wanted, strict=True):
            assert torch.equal(found, plane), layout[0]
        mesh = Mesh(1, 2)
        share = load(shard_parameters([GATE_UP], mesh, 1, 1), source, recipe)[GATE_UP.name]
        for found, plane in zip(planes(share), wanted, strict=True):
            assert torch.equal(found, expected(GATE_UP.name, plane, mesh)), layout[0]
