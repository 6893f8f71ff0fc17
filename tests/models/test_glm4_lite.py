"""GLM-4.7-Flash against transformers: latent attention with dense layers at any place, whole, in chunks and in company."""

import pytest

from models.tiny_latents import LATENT_MODELS, alone, judge, make_drive, make_request, tiny

CASES = [case for case in LATENT_MODELS if case.startswith("glm")]


@pytest.mark.parametrize("case", CASES)
def test_logits_of_single_sequence_match_transformers(case):
    for length in (1, 33):
        alone(case, length, 8)


@pytest.mark.parametrize("case", CASES)
def test_logits_batched_and_chunked_match_transformers(case):
    theirs, ours = tiny(case)
    requests = [make_request(length, 12, 3 * index) for index, length in enumerate((1, 2, 17, 33, 61))]
    drive = make_drive(ours, max_rows=11, page_tokens=8)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)
