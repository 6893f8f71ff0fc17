"""Where a sequence's keys and values lie in the pages, and a way to read them without a copy where they lie in a row."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The slots of positions [first, end) of one sequence: a run of neighbours, or a list of pages to gather."""

    num_tokens: int
    first_slot: int
    pages_P: torch.Tensor | None
    """None where the slots are neighbours."""

    @classmethod
    def locate(cls, pages: list[int], first: int, end: int, page_tokens: int, device: torch.device) -> "PagedRows":
        """Find the tokens [first, end) of a sequence on these pages."""
        page_start, page_end = first // page_tokens, -(-end // page_tokens)
        held = pages[page_start:page_end]
        offset = first - page_start * page_tokens
        if held == list(range(held[0], held[0] + len(held))):
            return cls(end - first, held[0] * page_tokens + offset, None)
        return cls(end - first, offset, torch.tensor(held, device=device))

    def read(self, plane_SKD: torch.Tensor, page_tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """The tokens as [K, L, D] in the given dtype: a view of the plane where that is possible."""
        if self.pages_P is None:
            rows_LKD = plane_SKD.narrow(0, self.first_slot, self.num_tokens)
        else:
            pages_PBKD = plane_SKD.unflatten(0, (-1, page_tokens)).index_select(0, self.pages_P)
            rows_LKD = pages_PBKD.flatten(0, 1).narrow(0, self.first_slot, self.num_tokens)
        rows_KLD = rows_LKD.permute(1, 0, 2)
        return rows_KLD if rows_KLD.dtype == dtype else rows_KLD.to(dtype)

    def read_by_head(self, plane_PKtX: torch.Tensor) -> torch.Tensor:
        """The tokens as [K, L, ...] of a plane whose pages lie head by head."""
        page_tokens = plane_PKtX.shape[2]
        if self.pages_P is None:
            first_page, offset = divmod(self.first_slot, page_tokens)
            pages_PKtX = plane_PKtX.narrow(0, first_page, -(-(offset + self.num_tokens) // page_tokens))
        else:
            offset = self.first_slot
            pages_PKtX = plane_PKtX.index_select(0, self.pages_P)
        return pages_PKtX.transpose(0, 1).flatten(1, 2).narrow(1, offset, self.num_tokens)
