import pytest
import torch

from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES

SCHEMES = pytest.mark.parametrize("scheme", WEIGHT_SCHEMES.values(), ids=WEIGHT_SCHEMES)


def make(scheme, shape):
    tensors = (torch.empty(plane.shape, dtype=getattr(torch, plane.dtype)) for plane in scheme.planes(shape))
    return QuantizedWeight(scheme, shape, *tensors)


@SCHEMES
@pytest.mark.parametrize("shape", [(256, 192), (3, 128, 64)], ids=str)
def test_planes_of_the_scheme_pass(scheme, shape):
    make(scheme, shape).check()


@SCHEMES
def test_other_planes_are_found(scheme):
    good, other = make(scheme, (256, 192)), make(scheme, (128, 192))
    wrong = {
        "shape": (other.codes, good.scales),
        "not": (good.codes, other.scales),
        "int16, not": (good.codes.to(torch.int16), good.scales),
        "float64, not": (good.codes, good.scales.to(torch.float64)),
        "strides": (good.codes.t().contiguous().t(), good.scales),
    }
    for message, planes in wrong.items():
        with pytest.raises(AssertionError, match=message):
            QuantizedWeight(scheme, good.shape, *planes).check()
