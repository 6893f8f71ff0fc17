"""What a wrong reading of DeepSeek-V4 would change: each is planted by itself, and moves logits far beyond the tolerance of the tests against transformers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from holdfast.distributed.mesh import ALONE
from holdfast.families.compressed import torch_backend as torch_compressed
from holdfast.families.compressed.torch_backend import TorchCompressedAttention
from holdfast.kernels.latent import compress
from holdfast.layers import hyper_connections as stream_layers
from holdfast.models import decoder_layer
from holdfast.models.compressed_declaration import CompressedDeclaration
from holdfast.models.declared_model import declare_decoder
from holdfast.models.spec import CompressedSpec, IndexSpec
from models.tiny_compressed import alone, make_compressed_drive, tiny_compressed
from models.tiny_latents import TOLERANCE, make_request, moved
from runner.drive import LoadedModel, Request

FLASH = "like V4-Flash"
LENGTH = 41
Mutation = Callable[[LoadedModel, pytest.MonkeyPatch], LoadedModel]
"""A wrong reading of a model: what it makes of a right one."""


def compressed_of(model: LoadedModel) -> CompressedSpec:
    assert model.spec.compressed is not None
    return model.spec.compressed


def index_of(model: LoadedModel) -> IndexSpec:
    index = compressed_of(model).index
    assert index is not None
    return index


def respecified(change: Callable[[LoadedModel], dict[str, Any]]) -> Mutation:
    return lambda model, _: replace(model, spec=replace(model.spec, **change(model)))


def compressed(change: Callable[[LoadedModel], dict[str, Any]]) -> Mutation:
    return respecified(lambda model: {"compressed": replace(compressed_of(model), **change(model))})


def indexed(change: Callable[[LoadedModel], dict[str, Any]]) -> Mutation:
    return compressed(lambda model: {"index": replace(index_of(model), **change(model))})


def streamed(**changes: Any) -> Mutation:
    def change(model: LoadedModel) -> dict[str, Any]:
        assert model.spec.streams is not None
        return {"streams": replace(model.spec.streams, **changes)}

    return respecified(change)


def routed(**changes: Any) -> Mutation:
    def change(model: LoadedModel) -> dict[str, Any]:
        assert model.spec.experts is not None
        return {"experts": replace(model.spec.experts, **changes)}

    return respecified(change)


def weights_made(ending: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Mutation:
    def mutate(model: LoadedModel, _: pytest.MonkeyPatch) -> LoadedModel:
        weights = dict(model.weights)
        names = [name for name in weights if name.endswith(ending)]
        assert names, ending
        for name in names:
            weight = weights[name]
            assert isinstance(weight, torch.Tensor)
            weights[name] = make(weight)
        return replace(model, weights=weights)

    return mutate


def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Mutation:
    """Something else in the place of a function: what `make` makes of it."""

    def mutate(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))
        return model

    return mutate


def yarns_own_factor(model: LoadedModel, _: pytest.MonkeyPatch) -> LoadedModel:
    """cos and sin multiplied by what follows from the factor."""
    assert model.spec.rope is not None
    return replace(model, spec=replace(model.spec, rope=replace(model.spec.rope, attention_factor=None)))


def halves_swapped(model: LoadedModel, _: pytest.MonkeyPatch) -> LoadedModel:
    """The first columns of overlapped layers make their own entry, the last ones the next."""
    weights, dim = dict(model.weights), model.spec.head_dim
    overlapped = [name.removesuffix("index_q.weight") for name in weights if name.endswith("index_q.weight")]
    assert overlapped
    for prefix in overlapped:
        pool, positions = weights[f"{prefix}pool.weight"], weights[f"{prefix}compressor.positions"]
        assert isinstance(pool, torch.Tensor)
        assert isinstance(positions, torch.Tensor)
        own = pool[: 4 * dim].unflatten(0, (2, 2, dim)).flip(1).flatten(0, 2)
        weights[f"{prefix}pool.weight"] = torch.cat((own, pool[4 * dim :]))
        weights[f"{prefix}compressor.positions"] = positions.roll(dim, 1)
    return replace(model, weights=weights)


def transposed_shares(combine: Any) -> Any:
    """What goes from stream j to stream k goes from k to j."""

    def transposed(x: torch.Tensor, y: torch.Tensor | None, shares: torch.Tensor | None, *others: Any) -> Any:
        if shares is None:
            return combine(x, y, shares, *others)
        size = x.shape[1]
        comb = shares[:, 2 * size :].unflatten(1, (size, size)).transpose(1, 2).flatten(1)
        return combine(x, y, torch.cat((shares[:, : 2 * size], comb), dim=1), *others)

    return transposed


def one_early(num_seen: Any) -> Any:
    """An entry is seen by the last token but one that it is made of."""
    return lambda own, spec, position, num_rows: num_seen(own, spec, position + 1, num_rows)


def one_late(num_seen: Any) -> Any:
    return lambda own, spec, position, num_rows: num_seen(own, spec, position - 1, num_rows)


def entries_at_the_last_token(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """Entries are rotated by the position of their last token, which is that of the row that ends them."""
    write, compress_rows, held = TorchCompressedAttention.write, TorchCompressedAttention.compress, {}

    def keep(own: Any, kv: Any, q: Any, batch: Any, norm: Any, q_eps: float, rotary: Any, layer: int) -> None:
        held[layer] = rotary
        write(own, kv, q, batch, norm, q_eps, rotary, layer)

    def rotate(own: Any, pooled: Any, batch: Any, compressor: Any, _: Any, layer: int) -> None:
        compress_rows(own, pooled, batch, compressor, held[layer], layer)

    monkeypatch.setattr(TorchCompressedAttention, "write", keep)
    monkeypatch.setattr(TorchCompressedAttention, "compress", rotate)
    return model


def index_at_the_last_token(compress_index: Any) -> Any:
    return lambda own, pooled, q, batch, compressor, _, q_rotary, *others: compress_index(
        own, pooled, q, batch, compressor, q_rotary, q_rotary, *others
    )


def without_head_norm(write: Any) -> Any:
    """For queries. An eps that is far above all squares leaves them as they are but for a factor, which is taken back."""

    def unnormed(own: Any, kv: Any, q_TND: torch.Tensor, batch: Any, norm: Any, q_eps: float, *others: Any) -> None:
        size_TN1 = q_TND.square().mean(-1, keepdim=True).add(q_eps).sqrt()
        write(own, kv, q_TND, batch, norm, q_eps, *others)
        q_TND.mul_(size_TN1)

    return unnormed


def shared_without_limit(make: Any) -> Any:
    return lambda gate_up, down, activation, limit=None: make(gate_up, down, activation)


def never_joined(compress_rows: Any) -> Any:
    """The second half of an overlapped entry alone: what the window before it left is forgotten."""

    def forgetful(step: Any, own: Any, entries: Any) -> None:
        if not own.is_overlapped:
            compress_rows(step, own, entries)
            return
        pooled = step.pooled_TX
        width, dim = pooled.shape[1] // 2, entries.shape[1]
        last = torch.cat((pooled[:, width - dim : width], pooled[:, -dim:]), dim=1)
        plain = own._replace(is_overlapped=False, positions_RX=own.positions_RX[:, -dim:])
        rows = step._replace(pooled_TX=last, state_PK3D=step.state_PK3D[:, :1].contiguous())
        compress_rows(rows, plain, entries)

    return forgetful


MUTATIONS: dict[str, Mutation] = {
    "entries rotated at their last token": entries_at_the_last_token,
    "index entries rotated at their last token": patched(
        TorchCompressedAttention, "compress_index", index_at_the_last_token
    ),
    "outputs not rotated back": patched(torch_compressed, "rotate_back", lambda _: lambda *_: None),
    "a mix of streams transposed": patched(stream_layers, "combine_streams", transposed_shares),
    "a window of one token less": compressed(lambda model: {"window": compressed_of(model).window - 1}),
    "a window of one token more": compressed(lambda model: {"window": compressed_of(model).window + 1}),
    "overlapped halves swapped": halves_swapped,
    "entries of their own window alone": patched(compress, "compress_rows_reference", never_joined),
    "no sinks": weights_made(".sinks", lambda weight: torch.full_like(weight, -torch.inf)),
    "theta of windows everywhere": respecified(lambda model: {"rope": model.spec.local_rope}),
    "theta of entries everywhere": respecified(lambda model: {"local_rope": model.spec.rope}),
    "YaRN's own factor": yarns_own_factor,
    "places in an entry not reported": weights_made("compressor.positions", torch.zeros_like),
    "places in an entry of the index not reported": weights_made("index.positions", torch.zeros_like),
    "an entry seen one token early": patched(TorchCompressedAttention, "_num_seen", one_early),
    "an entry seen one token late": patched(TorchCompressedAttention, "_num_seen", one_late),
    "entries without gamma": weights_made("compressor.norm.weight", torch.ones_like),
    "keys of the index without gamma": weights_made("index.norm.weight", torch.ones_like),
    "one entry short": indexed(lambda model: {"top_k": index_of(model).top_k - 1}),
    "one entry more": indexed(lambda model: {"top_k": index_of(model).top_k + 1}),
    "query heads not normed": patched(TorchCompressedAttention, "write", without_head_norm),
    "the shared expert without its limit": patched(decoder_layer, "GatedMLP", shared_without_limit),
    "experts without limits": routed(silu_limit=None),
    "shares not scaled": routed(share_scale=1.0),
    "scores of a sigmoid": routed(scoring="sigmoid"),
    "experts chosen without their bias": weights_made("router.score_bias", torch.zeros_like),
    "other experts in the table": weights_made("router.table", lambda weight: weight.roll(1, 0)),
    "one iteration of Sinkhorn-Knopp less": streamed(num_iterations=3),
    "streams with another eps": streamed(eps=1e-6),
    "mixes without their bias": weights_made("_streams.bias", torch.zeros_like),
    "mixes without their scale": weights_made("_streams.scale", torch.ones_like),
}
"""Those of the reference, and some of each part of a layer."""


@pytest.mark.slow  # it judges tests, and no code of the engine
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_logits_planted_fault_exceeds_tolerance(mutation, monkeypatch):
    """The tolerance tells each of them from what is right, by far."""
    answer = alone(FLASH, LENGTH, 8)
    drive = make_compressed_drive(MUTATIONS[mutation](tiny_compressed(FLASH)[1], monkeypatch), max_rows=LENGTH)
    request = make_request(LENGTH, 1)
    drive.run([request])
    assert moved(drive, request, answer) > 50 * TOLERANCE


@pytest.mark.parametrize("lost", ["nothing", "window", "entries", "index", "state"])
def test_prefix_hit_without_a_plane_changes_logits(lost):
    """Window, entries and index are read from what was found; a state is not, since its last tokens are computed again."""
    answer = alone(FLASH, 70, 3)
    drive = make_compressed_drive(tiny_compressed(FLASH)[1], max_rows=70)
    drive.run([Request(list(answer.prompt), 1)])
    rig = drive.rig
    for place, layer in enumerate(rig.storage.spec.layers):
        for plane in layer.planes:
            part = "index" if plane.name == "index" else layer.name
            if part == lost:
                rig.storage.plane(place, plane.name).zero_()
    if lost == "state":
        declaration = declare_decoder(rig.model.spec, "tiny").declaration
        assert isinstance(declaration, CompressedDeclaration)
        for kind in declaration.heads(ALONE).states:
            for layer in kind.layers:
                rig.states.state(layer, kind.name).fill_(float("nan"))
    request = Request(list(answer.prompt), 3)
    drive.run([request])
    assert request.sequence is not None
    assert request.sequence.num_cached_tokens == 64
    is_right = moved(drive, request, answer) <= TOLERANCE
    assert is_right == (lost in ("nothing", "state"))
