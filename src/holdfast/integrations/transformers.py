"""TurboQuantCache: a `past_key_values` for `generate` of transformers that keeps older tokens quantized.

N sequences, K key/value heads, T tokens, R room for tokens, D head dim, B bytes of a head's codes, S bytes of its sign bits

The newest tokens, the tail, stay as they came. When there are enough of them, the oldest leave it in blocks and are quantized
for good. A token is quantized after the call that brought it, so a prompt attends to itself exactly. Keys and values come back
dequantized and rotated back, so that any implementation of attention reads them.

It saves memory, not time: all older tokens are dequantized again in every call, a bounded piece at a time.

Given the model and not only its config, the cache sees the biases of key projections. Layers with the largest ones are
protected, as in the engine, and keys are quantized without their bias, turned by the place of the token (R_p b), which is
added again when they are read. What was subtracted is added, so this is right whatever positions the model gives its tokens;
a layer whose keys do not become smaller by it, as its first block shows, is quantized as it is.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.errors import ConfigError, install_words, shown
from holdfast.observability.log import get_logger
from holdfast.planning.resolve import by_key_bias, by_position, numbers
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
    raise ConfigError(
        "TurboQuantCache was asked",
        f"transformers cannot be imported ({str(error).partition(chr(10))[0]})",
        install_words("transformers"),
    ) from error

log = get_logger(__name__)

KEY_PROJECTION = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)?k_proj$")
"""The module that makes the keys of a layer, in models with a projection for keys alone."""
BLOCK_TOKENS = 16
"""So many tokens leave the tail at once."""
ROOM_STEP = 64
"""Room is made for so many tokens at a time."""
MAX_NUMBERS = 2**22
"""So many numbers are quantized or dequantized at a time, which bounds the scratch however long the context is."""


@dataclass(frozen=True, slots=True)
class TurnedBias:
    """The bias of a layer's keys at every place: R_p b, or b where the model has no rope."""

    bias_X: torch.Tensor
    """The model's own."""
    inverse_frequency_C: torch.Tensor | None
    """As it was when the cache was made: what is subtracted must be what is added."""
    magnitude: float

    def rows(self, begin: int, end: int, like_NKTD: torch.Tensor) -> torch.Tensor:
        """float32 [K, T, D] for the tokens at these places."""
        bias_K1D = self.bias_X.detach().to(like_NKTD.device, torch.float32).view(like_NKTD.shape[1], 1, -1)
        if self.inverse_frequency_C is None:
            return bias_K1D.expand(-1, end - begin, -1)
        place_T = torch.arange(begin, end, dtype=torch.float32, device=like_NKTD.device)
        angle_TC = torch.outer(place_T, self.inverse_frequency_C.to(like_NKTD.device))
        cos_TC, sin_TC = angle_TC.cos() * self.magnitude, angle_TC.sin() * self.magnitude
        first_K1C, second_K1C = bias_K1D.chunk(2, dim=-1)
        return torch.cat((first_K1C * cos_TC - second_K1C * sin_TC, second_K1C * cos_TC + first_K1C * sin_TC), dim=-1)


class QuantizedTokens:
    """One side of one layer. Numbers go in as they are and come out as they are: the rotation is its own affair."""

    def __init__(
        self,
        planes: Sequence[Plane],
        bits: int,
        like_NKTD: torch.Tensor,
        rotation_DD: torch.Tensor | None,
        bias: TurnedBias | None = None,
    ) -> None:
        """The planes of this side, as its format has them; the tensor says sequences, heads and device."""
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
        """What tokens are stored without; settled by the first of them."""

    @property
    def used_bytes(self) -> dict[str, int]:
        """By plane, of the tokens that are there."""
        return {name: plane_NKR[:, :, : self.length].nbytes for name, plane_NKR in self._planes.items()}

    @property
    def held_bytes(self) -> int:
        """With the room for tokens to come."""
        return sum(plane_NKR.nbytes for plane_NKR in self._planes.values())

    # Planes outlive the call: one made in inference mode could not be written outside of it.
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
        """Write what was stored, dequantized, into a tensor of as many tokens."""
        for begin, piece_NKTD in _pieces(out_NKTD):
            place = slice(begin, begin + piece_NKTD.shape[2])
            read_NKTD = self._dequantize({name: plane[:, :, place] for name, plane in self._planes.items()})
            if self._bias is not None:
                read_NKTD = read_NKTD + self._bias.rows(place.start, place.stop, out_NKTD)
            piece_NKTD.copy_(read_NKTD)

    def truncate(self, length: int) -> None:
        """Forget the newest tokens; their room stays."""
        assert 0 <= length <= self.length, f"{length} of {self.length} tokens"
        self.length = length

    @torch.inference_mode(False)
    def select(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Repeat, reorder or drop sequences: the same change of the first dimension for every plane."""
        self._planes = {name: change(plane_NKR) for name, plane_NKR in self._planes.items()}

    def _make_room(self, length: int) -> None:
        """One plane at a time, so that hardly more than all of them is ever held."""
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
        """float32 [N, K, T, D]."""
        side = "k" if self._is_keys else "v"
        heads = QuantizedHeads(planes[f"{side}_codes"], planes.get(f"{side}_signs"), planes[f"{side}_scale"])
        x_NKTD = (dequantize_keys if self._is_keys else dequantize_values)(heads, self._bits, self._head_dim)
        return x_NKTD if self._rotation_DD is None else x_NKTD @ self._rotation_DD

    def _by_plane(self, heads: QuantizedHeads) -> list[tuple[str, torch.Tensor]]:
        side = "k" if self._is_keys else "v"
        quantized = {"codes": heads.codes_XB, "signs": heads.signs_XS, "scale": heads.scale_X}
        return [(f"{side}_{name}", plane) for name, plane in quantized.items() if plane is not None]


def _pieces(x_NKTD: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Views of some tokens each, with the number of the first."""
    per_token = max(1, x_NKTD.shape[0] * x_NKTD.shape[1] * x_NKTD.shape[3])
    step = max(1, MAX_NUMBERS // per_token)
    return [(begin, x_NKTD[:, :, begin : begin + step]) for begin in range(0, x_NKTD.shape[2], step)]


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Bytes of a cache."""

    planes: dict[str, int] = field(default_factory=dict)
    """By plane: the quantized tokens, exactly what the format says of them."""
    spare: int = 0
    """Room in the planes for tokens to come."""
    tail: int = 0
    """The newest tokens, as they came."""
    plain: int = 0
    """Layers that are not quantized, such as those with a sliding window."""

    @property
    def total(self) -> int:
        return sum(self.planes.values()) + self.spare + self.tail + self.plain

    def __add__(self, other: "CacheMemory") -> "CacheMemory":
        names = dict.fromkeys((*self.planes, *other.planes))
        planes = {name: self.planes.get(name, 0) + other.planes.get(name, 0) for name in names}
        return CacheMemory(planes, self.spare + other.spare, self.tail + other.tail, self.plain + other.plain)


class Rotations:
    """The rotation of each head dim and device, once for all layers."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device], torch.Tensor] = {}

    def of(self, head_dim: int, device: torch.device) -> torch.Tensor:
        """[D, D] in float32; symmetric, and its own inverse."""
        key = head_dim, device
        if key not in self._made:
            self._made[key] = rotate_heads(torch.eye(head_dim, device=device))
        return self._made[key]


class QuantizedLayer(DynamicLayer):
    """The keys and values of one layer. Its own `keys` and `values` are the tail alone."""

    # After a rollback tokens that left the tail stay quantized: what comes next could differ in a late digit.
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
        """Nothing is stored yet; shapes, type and device are those of the tensors."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0].clone(), value_states[:, :, :0].clone()
        bits = (self.format.key_bits, self.format.value_bits)
        quantized = []
        for side, like_NKTD, side_bits in zip("kv", (self.keys, self.values), bits, strict=True):
            assert side_bits is not None, f"{self.format.name} is not quantized"
            num_heads, head_dim = like_NKTD.shape[1], like_NKTD.shape[-1]
            if head_dim % QUANTIZED_HEAD_DIM:
                raise ConfigError(
                    f"TurboQuantCache was asked for heads of {head_dim}",
                    f"codes take multiples of {QUANTIZED_HEAD_DIM}",
                    "leave past_key_values out for this model",
                )
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
        """Take in the newest tokens, and give back all."""
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
            # Copies: a view would keep the tokens that left.
            tails = tails[0][:, :, leaving:].clone(), tails[1][:, :, leaving:].clone()
        self.keys, self.values = tails
        return keys_NKTD, values_NKTD

    def get_seq_length(self) -> int:
        """Tokens that are stored, quantized or not."""
        return self._quantized[0].length + self._tails[0].shape[-2] if self.is_initialized else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many of the newest tokens, given as a negative number, as transformers does."""
        if tokens_to_remove > 0:
            raise ConfigError(
                f"crop({tokens_to_remove}) was asked",
                "the number of tokens to remove is negative",
                f"pass {-tokens_to_remove} to remove {tokens_to_remove}",
            )
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        length = max(0, self.get_seq_length() + tokens_to_remove)
        for quantized in self._quantized:
            quantized.truncate(min(quantized.length, length))
        in_tail = length - self._quantized[0].length
        self.keys, self.values = (tail_NKTD[:, :, :in_tail].clone() for tail_NKTD in self._tails)

    def reset(self) -> None:
        """Forget everything, shapes and type too."""
        self._quantized = ()
        super().reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """The sequences in another order, some of them perhaps twice."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence so many times."""
        if self.is_initialized:
            self._select(torch.arange(self._tails[0].shape[0], device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """These sequences alone, by number or by mask."""
        if self.is_initialized:
            self._select(torch.arange(self._tails[0].shape[0], device=self.device)[indices])

    def memory_bytes(self) -> CacheMemory:
        """What this layer holds."""
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

    A config in the place of the model serves too; then nobody sees key biases, and protected layers are those at both ends.
    Layers with a sliding window, and those that keep something else than keys and values, get the cache layer that
    transformers has for them; `memory_bytes().plain` is theirs. Without a config every layer is quantized.
    """

    def __init__(
        self,
        config: Any = None,  # noqa: ANN401 - classes of transformers
        format: str = "turboquant_k8v4",
        protected_layers: int | Sequence[int] | None = None,
        protected_format: str = "fp8",
        tail: int = 64,
    ) -> None:
        """`config` is a model or its config. Protected layers are numbers of layers, or how many; None is the format's default."""
        self.format, self.protected_format = _quantized_format(format), _quantized_format(protected_format)
        if not isinstance(tail, int) or isinstance(tail, bool) or tail < 0:
            raise ConfigError(f"tail={shown(tail)} was asked", "it is a number of tokens", "pass 0 or more, such as 64")
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

    def _choose_layers(self, asked: int | Sequence[int] | None, num_layers: int | None, is_blind: bool) -> None:
        """Where only the number of protected layers is settled: those with the largest key biases, as in the engine."""
        count = len(self.protected_layers)
        if not count or num_layers is None or not (asked is None or isinstance(asked, int)):
            return
        reason = "they are the first and the last"
        if self._biases.keys() >= set(range(num_layers)) and count < num_layers:
            norms = [
                torch.linalg.vector_norm(self._biases[layer].bias_X.detach(), dtype=torch.float64).item()
                for layer in range(num_layers)
            ]
            self.protected_layers, reason = by_key_bias(count, norms)
        words = f"layers {numbers(self.protected_layers)} stay in {self.protected_format.name} because {reason}"
        if is_blind:
            log.warning(
                "%s: keys of this model have biases, which only the model shows: pass it, not its config", words
            )
        else:
            log.info("%s", words)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ANN401 - what a newer transformers may pass
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in the newest tokens of a layer, and give back all of that layer."""
        while len(self.layers) <= layer_idx:
            self.layers.append(self._quantized_layer(len(self.layers)))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def memory_bytes(self) -> CacheMemory:
        """What is held: codes and scales by plane, the tail, and the rest."""
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
    """Of each layer that has one, with the rotation of the model; of keys that are normed behind it there is no such part."""
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
    """Whether models of this kind have key biases, as far as a config says."""
    kind = str(getattr(config, "model_type", ""))
    return kind in ("qwen2", "qwen2_moe", "opt") or bool(getattr(config, "attention_bias", False))


def _tensors_of(layer: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - a cache layer of transformers
    """What it keeps, be it keys and values or states by number."""
    for value in vars(layer).values():
        kept = value.values() if isinstance(value, dict) else (value,)
        yield from (tensor for tensor in kept if isinstance(tensor, torch.Tensor))


def _whole(quantized: QuantizedTokens, tail_NKTD: torch.Tensor) -> torch.Tensor:
    """Dequantized tokens and the tail behind them."""
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
        raise ConfigError(f"{name} was asked of TurboQuantCache", "it has no codes", f"pass {' or '.join(names)}")
    return found


def _plain_layers(config: Any) -> list[Any]:  # noqa: ANN401 - classes of transformers
    """The cache layers that transformers would use, of which some can be quantized."""
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"TurboQuantCache was asked for {type(config).__name__}",
            "it has an encoder, whose cross attention keeps another cache",
            "leave past_key_values out for this model",
        )
    layers = DynamicCache(config=config).layers
    if not any(type(layer) is DynamicLayer for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise ConfigError(
            f"TurboQuantCache was asked for {type(config).__name__}",
            f"none of its layers keeps the keys and values of all tokens ({kinds})",
            "leave past_key_values out for this model",
        )
    return layers


def _protected(asked: int | Sequence[int] | None, default: int, num_layers: int | None) -> tuple[int, ...]:
    """Numbers of layers, rising. Where only their number is said, they are those at both ends, which suffer most."""
    count = default if asked is None else asked
    highest = None if num_layers is None else num_layers - 1
    if not isinstance(count, int):
        if all(isinstance(layer, int) and layer >= 0 and (highest is None or layer <= highest) for layer in count):
            return tuple(sorted(set(count)))
    elif count == 0:
        return ()
    elif num_layers is None:
        raise ConfigError(
            f"{count} protected layers {'are the default' if asked is None else 'were asked'}",
            "without a config nobody knows which layers are the last",
            "pass model.config, or the numbers of the layers as protected_layers",
        )
    elif asked is None or 0 < count <= num_layers:
        return by_position(min(count, num_layers // 2) if asked is None else count, num_layers)
    raise ConfigError(
        f"protected_layers={shown(asked)} was asked",
        f"the layers are {'0 and higher' if highest is None else f'0 to {highest}'}",
        "list some of these, or say how many",
    )
