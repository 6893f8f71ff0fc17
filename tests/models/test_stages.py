"""Pipeline stages: logits of the last are those of one process to the bit, and each has the pages of its own layers."""

from pathlib import Path

import pytest
import torch

from holdfast.distributed.mesh import ALONE, meshes
from kernels.exactness import same_bits
from models.staged_runners import LAYERS, Ranks, pages_by_group, pages_of, row_logits, save_model

CUTS = {
    3: {2: [(0, 2), (2, 3)], 3: [(0, 1), (1, 2), (2, 3)]},
    4: {2: [(0, 3), (3, 4)], 3: [(0, 2), (2, 3), (3, 4)]},
}
"""By layers and stages. Of Gemma 3 one stage has no layer of the whole context, or nothing else."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """Where a family's model lies; made once."""
    base = tmp_path_factory.mktemp("stages")

    def find(family: str) -> Path:
        path = base / family
        if not path.exists():
            path.mkdir()
            save_model(family, path)
        return path

    return find


def compare(path: Path, ranks: tuple, num_layers: int, **options) -> None:
    """Ranks against one process: every logit, and every byte of every page."""
    alone, shared = Ranks(path, [ALONE], **options), Ranks(path, ranks, **options)
    try:
        for built in (*alone.built, *shared.built):
            for planes in pages_of(built):
                for plane in planes.values():
                    plane.view(torch.uint8).zero_()  # what nobody writes is the same too
        (expected,) = alone.run(lambda built, mesh, exchange: row_logits(built, mesh))
        found = shared.run(lambda built, mesh, exchange: row_logits(built, mesh))
        last = [own for own, mesh in zip(found, ranks, strict=True) if mesh.is_last_stage]
        assert all(not own for own, mesh in zip(found, ranks, strict=True) if not mesh.is_last_stage)
        for number, right_RV in enumerate(expected):
            whole_RV = torch.cat([own[number] for own in last], dim=1)
            assert same_bits(whole_RV, right_RV), f"step {number}: {(whole_RV - right_RV).abs().max()}"
        compare_pages(alone, shared, num_layers)
    finally:
        alone.release()
        shared.release()


def compare_pages(alone: Ranks, shared: Ranks, num_layers: int) -> None:
    """Of each layer the pages that its group has taken: in columns that groups share, others hold other layers."""
    whole, (one,), seen = pages_of(alone.built[0]), alone.built, set()
    spec, num_pages, num_tokens = one.storage.spec, one.storage.num_pages, one.storage.spec.page_tokens
    taken = pages_by_group(one.runner.groups)
    for built, mesh in zip(shared.built, shared.meshes, strict=True):
        if mesh.tensor_size > 1:
            continue
        assert built.runner.groups == one.runner.groups
        assert built.storage.num_pages == num_pages
        layers = mesh.layer_range(num_layers)
        assert len(pages_of(built)) == len(layers)
        for layer, planes in zip(layers, pages_of(built), strict=True):
            group = spec.group_of(layer)
            shape = spec.groups[group].chunks_per_page, num_pages, num_tokens
            seen.add(layer)
            assert planes.keys() == whole[layer].keys()
            for name, plane in planes.items():
                found, right = (
                    tensor.view(torch.uint8).unflatten(0, shape)[:, taken[group]]
                    for tensor in (plane, whole[layer][name])
                )
                assert right.any(), "nothing was written"
                assert torch.equal(found, right), (layer, name)
    assert seen in (set(), set(range(num_layers)))


@pytest.mark.each_value
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("family", LAYERS)
def test_stages_compute_what_one_process_computes(folder, family: str, num_stages: int) -> None:
    num_layers = LAYERS[family]
    compare(folder(family), meshes(1, CUTS[num_layers][num_stages]), num_layers)
