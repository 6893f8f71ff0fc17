"""TurboQuantCache: a `past_key_values` for `generate` of transformers that keeps older tokens quantized.

N sequences, K key/value heads, T tokens, R room for tokens, D head dim, B bytes of a head's codes, S bytes of its sign bits

The newest tokens, the tail, stay plain. The oldest of them leave it in blocks and are quantized for good, after the call that
brought them, so a prompt attends to itself exactly. Keys and values come back dequantized and rotated back, so any attention
implementation reads them. It saves memory, not time: every call dequantizes all older tokens, a bounded piece at a time.

Given the model and not only its config, the cache sees the biases of key projections. It protects the layers with the largest
ones, as the engine does, and quantizes keys without their bias after RoPE (R_p b), which it adds again on reading. A layer
whose first block does not become smaller by that is quantized with its bias.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.errors import ConfigError
from holdfast.observability.log import get_logger
from holdfast.planning.protected_layers import by_key_bias, by_position, numbers
from holdfast.quant.formats import DEFAULT_PROTECTED_LAYERS, KV_FORMATS, QUANTIZED_HEAD_DIM, KVFormat, Plane, kv_format
from holdfast.quant.kv_quantize import (
    QuantizedHeads,
    dequantize_keys,
    dequantize_values,
    quantize_keys,
    quantize_values,
    rotate_heads,
)

try:
    from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
except ImportError as error:
    raise ConfigError("transformers.not_importable", reason=str(error).partition(chr(10))[0]) from error

log = get_logger(__name__)

KEY_PROJECTION = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)?k_proj$")
"""The key projection of a layer."""
BLOCK_TOKENS = 16
"""Tokens that leave the tail at once."""
ROOM_STEP = 64
"""Tokens by which the planes grow."""
MAX_NUMBERS = 2**22
"""Maximum numbers of a piece, which bounds the scratch buffer."""


@dataclass(frozen=True, slots=True)
class TurnedBias:
    """The key bias of a layer at every position: R_p b, or b without RoPE."""

    bias_X: torch.Tensor
    inverse_frequency_C: torch.Tensor | None
    """A copy, so that reading adds exactly what was subtracted."""
    magnitude: float

    def rows(self, begin: int, end: int, like_NKTD: torch.Tensor) -> torch.Tensor:
        """Return float32 [K, T, D] for these positions."""
        bias_K1D = self.bias_X.detach().to(like_NKTD.device, torch.float32).view(like_NKTD.shape[1], 1, -1)
        if self.inverse_frequency_C is None:
            return bias_K1D.expand(-1, end - begin, -1)
        place_T = torch.arange(begin, end, dtype=torch.float32, device=like_NKTD.device)
        angle_TC = torch.outer(place_T, self.inverse_frequency_C.to(like_NKTD.device))
        cos_TC, sin_TC = angle_TC.cos() * self.magnitude, angle_TC.sin() * self.magnitude
        first_K1C, second_K1C = bias_K1D.chunk(2, dim=-1)
        return torch.cat((first_K1C * cos_TC - second_K1C * sin_TC, second_K1C * cos_TC + first_K1C * sin_TC), dim=-1)


class QuantizedTokens:
    """Quantized keys or values of one layer; the rotation is internal."""

    def __init__(
        self,
        planes: Sequence[Plane],
        bits: int,
        like_NKTD: torch.Tensor,
        rotation_DD: torch.Tensor | None,
        bias: TurnedBias | None = None,
    ) -> None:
        """`planes` are those of this side; the tensor gives sequences, heads and device."""
        assert (rotation_DD is not None) == (bits < 8), f"{bits} bits"
        self._is_keys = planes[0].name.startswith("k")
        self._bits, self._head_dim, self._rotation_DD = bits, like_NKTD.shape[-1], rotation_DD
        batch, heads, device = like_NKTD.shape[0], like_NKTD.shape[1], like_NKTD.device
        self._planes = {
            plane.name: torch.empty(
                (batch, heads, 0, *plane.token_shape[1:]), dtype=getattr(torch, plane.dtype), device=device
            )
            for plane in planes
        }
        self.length = 0
        self._bias = bias
        """Subtracted from stored tokens; decided by the first block."""

    @property
    def used_bytes(self) -> dict[str, int]:
        """Bytes of stored tokens by plane."""
        return {name: plane_NKR[:, :, : self.length].nbytes for name, plane_NKR in self._planes.items()}

    @property
    def held_bytes(self) -> int:
        """Bytes with spare capacity."""
        return sum(plane_NKR.nbytes for plane_NKR in self._planes.values())

    # A plane made in inference mode could not be written outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def append(self, x_NKTD: torch.Tensor) -> None:
        """Quantize the newest tokens."""
        end = self.length + x_NKTD.shape[2]
        if self.length == 0 and self._bias is not None:
            first_NKTD = x_NKTD[:, :, :BLOCK_TOKENS].float()
            rest_NKTD = first_NKTD - self._bias.rows(0, first_NKTD.shape[2], x_NKTD)
            if not bool(rest_NKTD.square().sum() < first_NKTD.square().sum()):
                self._bias = None
        self._make_room(end)
        for begin, piece_NKTD in _pieces(x_NKTD):
            place = slice(self.length + begin, self.length + begin + piece_NKTD.shape[2])
            if self._bias is not None:
                heads = self._quantize(piece_NKTD - self._bias.rows(place.start, place.stop, x_NKTD))
            else:
                heads = self._quantize(piece_NKTD)
            for name, quantized in self._by_plane(heads):
                self._planes[name][:, :, place] = quantized
        self.length = end

    @torch.no_grad()
    def read(self, out_NKTD: torch.Tensor) -> None:
        """Dequantize all tokens into a tensor."""
        for begin, piece_NKTD in _pieces(out_NKTD):
            place = slice(begin, begin + piece_NKTD.shape[2])
            read_NKTD = self._dequantize({name: plane[:, :, place] for name, plane in self._planes.items()})
            if self._bias is not None:
                read_NKTD = read_NKTD + self._bias.rows(place.start, place.stop, out_NKTD)
            piece_NKTD.copy_(read_NKTD)

    def truncate(self, length: int) -> None:
        """Drop the newest tokens; the capacity stays."""
        assert 0 <= length <= self.length, f"{length} of {self.length} tokens"
        self.length = length

    @torch.inference_mode(False)
    def select(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension to every plane."""
        self._planes = {name: change(plane_NKR) for name, plane_NKR in self._planes.items()}

    def _make_room(self, length: int) -> None:
        """Grow one plane at a time, which bounds the peak memory."""
        for name, old_NKR in self._planes.items():
            if old_NKR.shape[2] >= length:
                continue
            room = -(-length // ROOM_STEP) * ROOM_STEP
            new_NKR = old_NKR.new_empty((*old_NKR.shape[:2], room, *old_NKR.shape[3:]))
            new_NKR[:, :, : self.length] = old_NKR[:, :, : self.length]
            self._planes[name] = new_NKR

    def _quantize(self, x_NKTD: torch.Tensor) -> QuantizedHeads:
        if self._rotation_DD is not None:
            x_NKTD = x_NKTD.float() @ self._rotation_DD
        return (quantize_keys if self._is_keys else quantize_values)(x_NKTD, self._bits)

    def _dequantize(self, planes: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return float32 [N, K, T, D]."""
        side = "k" if self._is_keys else "v"
        heads = QuantizedHeads(planes[f"{side}_codes"], planes.get(f"{side}_signs"), planes[f"{side}_scale"])
        x_NKTD = (dequantize_keys if self._is_keys else dequantize_values)(heads, self._bits, self._head_dim)
        return x_NKTD if self._rotation_DD is None else x_NKTD @ self._rotation_DD

    def _by_plane(self, heads: QuantizedHeads) -> list[tuple[str, torch.Tensor]]:
        side = "k" if self._is_keys else "v"
        quantized = {"codes": heads.codes_XB, "signs": heads.signs_XS, "scale": heads.scale_X}
        return [(f"{side}_{name}", plane) for name, plane in quantized.items() if plane is not None]


def _pieces(x_NKTD: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Split into views of bounded size, with the index of their first token."""
    per_token = max(1, x_NKTD.shape[0] * x_NKTD.shape[1] * x_NKTD.shape[3])
    step = max(1, MAX_NUMBERS // per_token)
    return [(begin, x_NKTD[:, :, begin : begin + step]) for begin in range(0, x_NKTD.shape[2], step)]


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Bytes of a cache."""

    planes: dict[str, int] = field(default_factory=dict)
    """Quantized tokens by plane, exactly as the format declares."""
    spare: int = 0
    """Spare capacity of the planes."""
    tail: int = 0
    """The newest tokens, plain."""
    plain: int = 0
    """Layers that are not quantized, such as sliding windows."""

    @property
    def total(self) -> int:
        return sum(self.planes.values()) + self.spare + self.tail + self.plain

    def __add__(self, other: "CacheMemory") -> "CacheMemory":
        names = dict.fromkeys((*self.planes, *other.planes))
        planes = {name: self.planes.get(name, 0) + other.planes.get(name, 0) for name in names}
        return CacheMemory(planes, self.spare + other.spare, self.tail + other.tail, self.plain + other.plain)


class Rotations:
    """Caches the rotation by head dim and device."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device], torch.Tensor] = {}

    def of(self, head_dim: int, device: torch.device) -> torch.Tensor:
        """Return [D, D] in float32; symmetric, and its own inverse."""
        key = head_dim, device
        if key not in self._made:
            self._made[key] = rotate_heads(torch.eye(head_dim, device=device))
        return self._made[key]


class QuantizedLayer(DynamicLayer):
    """Keys and values of one layer; `keys` and `values` are the tail."""

    # After a rollback, tokens that left the tail stay quantized, so later digits could differ.
    is_croppable = False

    def __init__(self, format: KVFormat, tail: int, rotations: Rotations, bias: TurnedBias | None = None) -> None:
        super().__init__()
        self.format = format
        self._bias = bias
        self._rotations = rotations
        self._tail = tail
        self._block = BLOCK_TOKENS if tail else 1
        self._quantized: tuple[QuantizedTokens, ...] = ()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take shapes, dtype and device of the tensors; store nothing."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0].clone(), value_states[:, :, :0].clone()
        bits = (self.format.key_bits, self.format.value_bits)
        quantized = []
        for side, like_NKTD, side_bits in zip("kv", (self.keys, self.values), bits, strict=True):
            assert side_bits is not None, f"{self.format.name} is not quantized"
            num_heads, head_dim = like_NKTD.shape[1], like_NKTD.shape[-1]
            if head_dim % QUANTIZED_HEAD_DIM:
                raise ConfigError("transformers.head_dim", head_dim=head_dim, multiple=QUANTIZED_HEAD_DIM)
            planes = [plane for plane in self.format.planes(num_heads, head_dim) if plane.name.startswith(side)]
            rotation_DD = self._rotations.of(head_dim, self.device) if side_bits < 8 else None
            bias = self._bias if side == "k" else None
            quantized.append(QuantizedTokens(planes, side_bits, like_NKTD, rotation_DD, bias))
        self._quantized = tuple(quantized)
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401 - what a newer transformers may pass
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the newest tokens and return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys_NKTD, values_NKTD = self._tails
        tails = torch.cat([keys_NKTD, key_states], dim=-2), torch.cat([values_NKTD, value_states], dim=-2)
        keys_NKTD, values_NKTD = (
            _whole(quantized, tail) for quantized, tail in zip(self._quantized, tails, strict=True)
        )
        leaving = (tails[0].shape[-2] - self._tail) // self._block * self._block
        if leaving > 0:
            for quantized, tail_NKTD in zip(self._quantized, tails, strict=True):
                quantized.append(tail_NKTD[:, :, :leaving])
            # A view would keep the memory of the tokens that left.
            tails = tails[0][:, :, leaving:].clone(), tails[1][:, :, leaving:].clone()
        self.keys, self.values = tails
        return keys_NKTD, values_NKTD

    def get_seq_length(self) -> int:
        """Return the number of tokens, quantized or not."""
        return self._quantized[0].length + self._tails[0].shape[-2] if self.is_initialized else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens; the number is negative, as in transformers."""
        if tokens_to_remove > 0:
            raise ConfigError("transformers.positive_crop", value=tokens_to_remove, negative=-tokens_to_remove)
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        length = max(0, self.get_seq_length() + tokens_to_remove)
        for quantized in self._quantized:
            quantized.truncate(min(quantized.length, length))
        in_tail = length - self._quantized[0].length
        self.keys, self.values = (tail_NKTD[:, :, :in_tail].clone() for tail_NKTD in self._tails)

    def reset(self) -> None:
        """Drop everything, shapes and dtype too."""
        self._quantized = ()
        super().reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder sequences; an index may occur twice."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        if self.is_initialized:
            self._select(torch.arange(self._tails[0].shape[0], device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, by index or by mask."""
        if self.is_initialized:
            self._select(torch.arange(self._tails[0].shape[0], device=self.device)[indices])

    def memory_bytes(self) -> CacheMemory:
        """Return the bytes of this layer."""
        if not self.is_initialized:
            return CacheMemory()
        planes = {name: size for quantized in self._quantized for name, size in quantized.used_bytes.items()}
        spare = sum(quantized.held_bytes for quantized in self._quantized) - sum(planes.values())
        return CacheMemory(planes, spare, tail=sum(tail_NKTD.nbytes for tail_NKTD in self._tails))

    def _select(self, indices: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        indices = indices.to(self.device)
        for quantized in self._quantized:
            quantized.select(lambda plane_NKR: plane_NKR.index_select(0, indices))
        self.keys, self.values = (tail_NKTD.index_select(0, indices) for tail_NKTD in self._tails)

    @property
    def _tails(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None, "no keys were stored yet"
        assert self.values is not None, "no values were stored yet"
        return self.keys, self.values


class TurboQuantCache(Cache):
    """`model.generate(..., past_key_values=TurboQuantCache(model))`, for decoders with standard attention.

    A config works in place of the model; then key biases are unknown, and protected layers are those at both ends. Layers with
    a sliding window or without keys and values get the cache layer of transformers (`memory_bytes().plain`). Without a config
    every layer is quantized.
    """

    def __init__(
        self,
        config: Any = None,  # noqa: ANN401 - classes of transformers
        format: str = "turboquant_k8v4",
        protected_layers: int | Sequence[int] | None = None,
        protected_format: str = "fp8",
        tail: int = 64,
    ) -> None:
        """`config` is a model or its config. `protected_layers` is a list, a count, or None for the format's default."""
        self.format, self.protected_format = _quantized_format(format), _quantized_format(protected_format)
        if not isinstance(tail, int) or isinstance(tail, bool) or tail < 0:
            raise ConfigError("value.too_small", name="tail", minimum=0, value=tail)
        self.tail = tail
        self._rotations = Rotations()
        model = config if isinstance(config, torch.nn.Module) else None
        config = config if model is None else getattr(model, "config", None)
        layers = [] if config is None else _plain_layers(config)
        num_layers = None if config is None else len(layers)
        self._biases = {} if model is None else _key_biases(model)
        default = DEFAULT_PROTECTED_LAYERS[self.format.name]
        self.protected_layers = _protected(protected_layers, default, num_layers)
        self._choose_layers(protected_layers, num_layers, model is None and _may_have_biases(config))
        super().__init__(
            layers=[
                self._quantized_layer(number) if type(layer) is DynamicLayer else layer
                for number, layer in enumerate(layers)
            ]
        )

    def _choose_layers(self, given: int | Sequence[int] | None, num_layers: int | None, is_blind: bool) -> None:
        """Choose a count of protected layers by the largest key biases, as the engine does."""
        count = len(self.protected_layers)
        if not count or num_layers is None or not (given is None or isinstance(given, int)):
            return
        reason = "they are the first and the last"
        if self._biases.keys() >= set(range(num_layers)) and count < num_layers:
            norms = [
                torch.linalg.vector_norm(self._biases[layer].bias_X.detach(), dtype=torch.float64).item()
                for layer in range(num_layers)
            ]
            self.protected_layers, reason = by_key_bias(count, norms)
        choice = f"layers {numbers(self.protected_layers)} stay in {self.protected_format.name} because {reason}"
        if is_blind:
            log.warning(
                "%s: keys of this model have biases, which only the model shows: pass it, not its config", choice
            )
        else:
            log.info("%s", choice)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ANN401 - what a newer transformers may pass
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the newest tokens of a layer and return all of them."""
        while len(self.layers) <= layer_idx:
            self.layers.append(self._quantized_layer(len(self.layers)))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def memory_bytes(self) -> CacheMemory:
        """Return the bytes of codes and scales by plane, of the tail, and of plain layers."""
        found = CacheMemory()
        for layer in self.layers:
            if isinstance(layer, QuantizedLayer):
                found += layer.memory_bytes()
            else:
                found += CacheMemory(plain=sum(tensor.nbytes for tensor in _tensors_of(layer)))
        return found

    def _quantized_layer(self, number: int) -> QuantizedLayer:
        is_protected = number in self.protected_layers
        own = self.protected_format if is_protected else self.format
        return QuantizedLayer(own, self.tail, self._rotations, self._biases.get(number))


def _key_biases(model: torch.nn.Module) -> dict[int, TurnedBias]:
    """Find the key bias of each layer with the model's RoPE; keys with a norm after the projection have none."""
    modules = dict(model.named_modules())
    frequencies = [
        (frequency_C.detach().clone().float(), float(getattr(module, "attention_scaling", 1.0)))
        for module in modules.values()
        if isinstance(frequency_C := getattr(module, "inv_freq", None), torch.Tensor)
    ]
    found: dict[int, TurnedBias] = {}
    for name, module in modules.items():
        match, bias_X = KEY_PROJECTION.search(name), getattr(module, "bias", None)
        if match is None or not isinstance(bias_X, torch.Tensor) or bias_X.is_meta:
            continue
        if isinstance(getattr(modules[name.rpartition(".")[0]], "k_norm", None), torch.nn.Module):
            continue
        head_dim = getattr(modules[name.rpartition(".")[0]], "head_dim", None)
        turns = [turn for turn in frequencies if head_dim is not None and 2 * len(turn[0]) == head_dim]
        if frequencies and not turns:
            continue
        found[int(match[1])] = TurnedBias(bias_X, *(turns[0] if turns else (None, 1.0)))
    return found


def _may_have_biases(config: Any) -> bool:  # noqa: ANN401 - a config class of transformers
    """Return True if the config suggests key biases."""
    kind = str(getattr(config, "model_type", ""))
    return kind in ("qwen2", "qwen2_moe", "opt") or bool(getattr(config, "attention_bias", False))


def _tensors_of(layer: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - a cache layer of transformers
    """Yield the tensors of a cache layer."""
    for value in vars(layer).values():
        kept = value.values() if isinstance(value, dict) else (value,)
        yield from (tensor for tensor in kept if isinstance(tensor, torch.Tensor))


def _whole(quantized: QuantizedTokens, tail_NKTD: torch.Tensor) -> torch.Tensor:
    """Join dequantized tokens and the tail."""
    if quantized.length == 0:
        return tail_NKTD
    batch, heads, in_tail, head_dim = tail_NKTD.shape
    whole_NKTD = tail_NKTD.new_empty((batch, heads, quantized.length + in_tail, head_dim))
    quantized.read(whole_NKTD[:, :, : quantized.length])
    whole_NKTD[:, :, quantized.length :] = tail_NKTD
    return whole_NKTD


def _quantized_format(name: str) -> KVFormat:
    found = kv_format(name)
    if not found.is_quantized:
        names = [other.name for other in KV_FORMATS.values() if other.is_quantized]
        raise ConfigError("value.not_one_of", name="format", accepted=names, value=name)
    return found


def _plain_layers(config: Any) -> list[Any]:  # noqa: ANN401 - classes of transformers
    """Return the cache layers that transformers would use; refuse a model without quantizable ones."""
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError("transformers.encoder", kind=type(config).__name__)
    layers = DynamicCache(config=config).layers
    if not any(type(layer) is DynamicLayer for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise ConfigError("transformers.no_plain_layers", kind=type(config).__name__, kinds=kinds)
    return layers


def _protected(given: int | Sequence[int] | None, default: int, num_layers: int | None) -> tuple[int, ...]:
    """Return sorted layer indices; a count means the layers at both ends, which lose most."""
    count = default if given is None else given
    highest = None if num_layers is None else num_layers - 1
    if not isinstance(count, int):
        if all(isinstance(layer, int) and layer >= 0 and (highest is None or layer <= highest) for layer in count):
            return tuple(sorted(set(count)))
    elif count == 0:
        return ()
    elif num_layers is None:
        raise ConfigError("transformers.layers_without_config", count=count)
    elif given is None or 0 < count <= num_layers:
        return by_position(min(count, num_layers // 2) if given is None else count, num_layers)
    last = "up" if highest is None else f"to {highest}"
    raise ConfigError("transformers.bad_protected_layers", value=given, last=last)
