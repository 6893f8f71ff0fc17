"""CodedTokens: the keys or the values of a batch as codes and scales, in planes that grow with the tokens.

N sequences, K key/value heads, T tokens, R room for tokens, D head dim, B bytes of a head's codes, S bytes of its sign bits
"""

from collections.abc import Callable, Sequence

import torch

from holdfast.quant.formats import Plane
from holdfast.quant.head_codes import CodedHeads, decode_keys, decode_values, encode_keys, encode_values

ROOM_STEP = 64
"""Room is made for so many tokens at a time."""
MAX_NUMBERS = 2**22
"""So many numbers are coded or decoded at a time, which bounds the scratch however long the context is."""


class CodedTokens:
    """One side of one layer. Numbers go in as they are and come out as they are: the rotation is its own affair."""

    def __init__(
        self, planes: Sequence[Plane], bits: int, like_NKTD: torch.Tensor, rotation_DD: torch.Tensor | None
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
        """Code the newest tokens."""
        end = self.length + x_NKTD.shape[2]
        self._make_room(end)
        for begin, piece_NKTD in _pieces(x_NKTD):
            heads = self._encode(piece_NKTD)
            place = slice(self.length + begin, self.length + begin + piece_NKTD.shape[2])
            for name, coded in self._by_plane(heads):
                self._planes[name][:, :, place] = coded
        self.length = end

    @torch.no_grad()
    def read(self, out_NKTD: torch.Tensor) -> None:
        """Write what was stored, decoded, into a tensor of as many tokens."""
        for begin, piece_NKTD in _pieces(out_NKTD):
            place = slice(begin, begin + piece_NKTD.shape[2])
            piece_NKTD.copy_(self._decode({name: plane[:, :, place] for name, plane in self._planes.items()}))

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

    def _encode(self, x_NKTD: torch.Tensor) -> CodedHeads:
        if self._rotation_DD is not None:
            x_NKTD = x_NKTD.float() @ self._rotation_DD
        return (encode_keys if self._is_keys else encode_values)(x_NKTD, self._bits)

    def _decode(self, planes: dict[str, torch.Tensor]) -> torch.Tensor:
        """float32 [N, K, T, D]."""
        side = "k" if self._is_keys else "v"
        heads = CodedHeads(planes[f"{side}_codes"], planes.get(f"{side}_signs"), planes[f"{side}_scale"])
        x_NKTD = (decode_keys if self._is_keys else decode_values)(heads, self._bits, self._head_dim)
        return x_NKTD if self._rotation_DD is None else x_NKTD @ self._rotation_DD

    def _by_plane(self, heads: CodedHeads) -> list[tuple[str, torch.Tensor]]:
        side = "k" if self._is_keys else "v"
        coded = {"codes": heads.codes_XB, "signs": heads.signs_XS, "scale": heads.scale_X}
        return [(f"{side}_{name}", plane) for name, plane in coded.items() if plane is not None]


def _pieces(x_NKTD: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Views of some tokens each, with the number of the first."""
    per_token = max(1, x_NKTD.shape[0] * x_NKTD.shape[1] * x_NKTD.shape[3])
    step = max(1, MAX_NUMBERS // per_token)
    return [(begin, x_NKTD[:, :, begin : begin + step]) for begin in range(0, x_NKTD.shape[2], step)]
