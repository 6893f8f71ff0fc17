"""Parts that attention kernels over tiles share: the soft cap to the last bits of float32."""

import torch

from for_each import for_each
from holdfast.kernels.attention.split_kv import LOG2_E, soft_capped
from holdfast.kernels.triton_compat import constexpr, jit, tl
from kernels.quantized_kv_cases import QUIET

pytestmark = QUIET


@jit
def _cap_kernel(p_score, p_out, cap, BLOCK: constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p_out + o, soft_capped(tl.load(p_score + o), cap))


@for_each("cap", [0.5, 30.0])
def test_soft_cap_of_any_score_is_exact_in_float32(device, cap):
    """From scores that the cap leaves as they are to those that it holds; both forms of tanh meet at a quarter."""
    shares = torch.cat((torch.logspace(-6, 2, 400), torch.linspace(0.2, 0.3, 111), torch.tensor([0.0])))
    score = torch.cat((shares, -shares)) * cap * LOG2_E
    padded = torch.nn.functional.pad(score, (0, 1024 - len(score))).to(device)
    out = torch.empty_like(padded)
    _cap_kernel[(1,)](padded, out, cap * LOG2_E, BLOCK=1024)
    expected = cap * LOG2_E * torch.tanh(score.double() / (cap * LOG2_E))
    # A GPU's exp2 and division are a few units off.
    rtol = 4e-7 if device.type == "cpu" else 4e-6
    torch.testing.assert_close(out[: len(score)].cpu().double(), expected, rtol=rtol, atol=0)
