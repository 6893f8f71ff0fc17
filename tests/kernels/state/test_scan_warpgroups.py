"""The scan of chunks in warpgroups, in plain torch: against the token loop, and its choice by sizes and types."""

from unittest.mock import patch

import pytest
import torch

from holdfast.kernels.state import delta_chunks, scan_warpgroups
from holdfast.kernels.state.scan_warpgroups import has_wide_rows
from kernels.exactness import same_bits
from kernels.gluon_tiles import modelled_tiles
from kernels.state.test_delta_rule import KERNELS, in_pieces
from kernels.state_cases import Heads, delta_recurrence, make_layer, make_tokens
from kernels.triton_cases import QUIET

pytestmark = QUIET
HEADS = Heads(1, 2, 64, 64)


def in_warpgroups(tokens, layer, cuts=()):
    taken = patch.object(
        delta_chunks, "takes_warpgroups", lambda inputs, state: has_wide_rows(*inputs[:3]) and not inputs.by_channel
    )
    with taken, modelled_tiles(scan_warpgroups, "warpgroup_scan_kernel"):
        return in_pieces(layer, tokens, cuts, KERNELS, "cpu")


@pytest.mark.parametrize("num_tokens", [64, 131])
def test_scan_in_warpgroups_matches_token_loop(num_tokens) -> None:
    layer, tokens = make_layer(HEADS), make_tokens(HEADS, num_tokens, dtype=torch.float16)
    exact_THV, exact_HKV = delta_recurrence(layer, tokens)
    out_THV, state_HKV = in_warpgroups(tokens, layer)
    assert (out_THV.double() - exact_THV).norm() <= 5e-4 * exact_THV.norm()
    assert (state_HKV.double() - exact_HKV).norm() <= 3e-6 * exact_HKV.norm()


def test_scan_in_warpgroups_cut_at_64_changes_no_bit() -> None:
    layer, tokens = make_layer(HEADS), make_tokens(HEADS, 131, dtype=torch.float16)
    assert all(map(same_bits, in_warpgroups(tokens, layer, (64,)), in_warpgroups(tokens, layer)))
