"""MirrorExchange: an exchange of one process alone, whose peers say what it says itself; no call waits, allocates or looks at a value."""

import torch

from holdfast.distributed.exchange_plan import ExchangeNeeds
from holdfast.distributed.mesh import Mesh
from holdfast.kernels.exchange.add_rows import DeferredStream, add_rows


class MirrorExchange:
    """Every part comes as many times as there are ranks: what of a rank's step can be captured shows without its peers.

    From a stage before come rows that are always the same; rows to the next are kept.
    """

    def __init__(self, mesh: Mesh, needs: ExchangeNeeds, device: torch.device) -> None:
        self._mesh = mesh
        self.sent = torch.zeros(needs.hidden_bytes, dtype=torch.uint8, device=device)
        self._given: dict[torch.dtype, torch.Tensor] = {}
        self._turn = 0
        self._rooms = torch.empty(2, needs.room_bytes, dtype=torch.uint8, device=device)
        self._whole = torch.zeros(needs.num_logit_rows, needs.vocab_size, device=device)

    @property
    def rank(self) -> int:
        return self._mesh.tensor_rank

    @property
    def size(self) -> int:
        return self._mesh.tensor_size

    def room(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return self._rooms[self._turn, : num_rows * width * dtype.itemsize].view(dtype).view(num_rows, width)

    def sum_rows(self, part_TH: torch.Tensor, out_TH: torch.Tensor) -> torch.Tensor:
        self._turn = 1 - self._turn
        return torch.mul(part_TH, self.size, out=out_TH)

    def add_rows(self, part_TH: torch.Tensor, onto: DeferredStream) -> int:
        self._turn = 1 - self._turn
        return add_rows([part_TH] * self.size, onto)

    def gather_columns(self, part_TX: torch.Tensor, out_TY: torch.Tensor) -> torch.Tensor:
        self._turn = 1 - self._turn
        num_rows, width = part_TX.shape
        out_TY.view(num_rows, self.size, width).copy_(part_TX[:, None].expand(-1, self.size, -1))
        return out_TY

    def whole_logits(self, num_rows: int) -> torch.Tensor:
        return self._whole[:num_rows]

    def gather_logits(self, part_RV: torch.Tensor | None, out_RW: torch.Tensor | None) -> None:
        if out_RW is not None and part_RV is not None:
            width = part_RV.shape[1]
            for start in range(0, out_RW.shape[1], width):
                columns = out_RW[:, start : start + width]
                columns.copy_(part_RV[:, : columns.shape[1]])

    def gather_small(self, part_RX: torch.Tensor | None, out_SRX: torch.Tensor) -> torch.Tensor:
        return out_SRX if part_RX is None else out_SRX.copy_(part_RX.expand(out_SRX.shape))

    def share_tokens(self, ids_T: torch.Tensor) -> None: ...

    def send_rows(self, x_TH: torch.Tensor) -> None:
        self.sent_rows(*x_TH.shape, x_TH.dtype).copy_(x_TH)

    def sent_rows(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The first of those that were sent last."""
        return self.sent[: num_rows * width * dtype.itemsize].view(dtype).view(num_rows, width)

    def receive_rows(self, out_TH: torch.Tensor) -> torch.Tensor:
        if out_TH.dtype not in self._given:  # before anything is captured or counted
            places = torch.arange(self.sent.numel() // out_TH.dtype.itemsize, device=out_TH.device)
            self._given[out_TH.dtype] = torch.sin(places * 0.7).to(out_TH.dtype)
        return out_TH.copy_(self._given[out_TH.dtype][: out_TH.numel()].view(out_TH.shape))

    def end_step(self) -> None:
        self._turn = 0

    def abandon(self) -> None: ...

    def close(self) -> None: ...
