"""The contract, held to by every backend that can be selected."""

import inspect

import pytest
import torch

from attention.steps import Geometry, make_batch, run_layer, run_steps, steps_of, texts
from holdfast.attention.backend import AttentionBackend
from holdfast.attention.select import CANDIDATES
from holdfast.memory.planner import Term

EVERY_BACKEND = pytest.mark.parametrize("backend_type", CANDIDATES, ids=lambda candidate: candidate.name)
GEOMETRY = Geometry(windows=(None, 5))


@pytest.fixture
def usable(backend_type):
    reason = backend_type.unsupported(GEOMETRY.specs[0])
    if reason is not None:
        pytest.skip(f"{backend_type.name} declines: {reason}")
    return backend_type


def test_names_are_unique():
    assert len({candidate.name for candidate in CANDIDATES}) == len(CANDIDATES)


@EVERY_BACKEND
def test_the_verbs_of_the_contract_are_there_with_its_arguments(backend_type):
    for verb in ("unsupported", "terms", "plan", "write", "attend"):
        wanted = list(inspect.signature(getattr(AttentionBackend, verb)).parameters)
        assert list(inspect.signature(getattr(backend_type, verb)).parameters) == wanted


@EVERY_BACKEND
def test_bytes_are_known_before_anything_is_built(backend_type):
    terms = backend_type.terms(GEOMETRY.specs)
    assert all(isinstance(term, Term) and term.owner.startswith("attention/") for term in terms)
    assert len({term.owner for term in terms}) == len(terms)


@EVERY_BACKEND
def test_keys_and_values_are_written_before_they_are_attended_to(usable):
    """A lone token sees itself, so what comes out is its own value."""
    made, num_pages = texts(GEOMETRY, [1], consecutive=True)
    backend = usable(GEOMETRY.specs, GEOMETRY.storage(num_pages))
    (out,) = run_steps(backend, GEOMETRY, made, [[(made[0], 0, 1)]])
    value = made[0].qkv[:, -32:].view(1, 2, 1, 16).expand(1, 2, 3, 16).reshape(1, -1)
    torch.testing.assert_close(out, value)


@EVERY_BACKEND
def test_layers_keep_to_their_own_planes(usable):
    made, num_pages = texts(GEOMETRY, [9], consecutive=False)
    storage = GEOMETRY.storage(num_pages)
    backend = usable(GEOMETRY.specs, storage)
    batch, qkv = make_batch(GEOMETRY, [(made[0], 0, 9)])
    run_layer(backend, qkv, batch, layer=1)
    assert storage.plane(0, "k").isnan().all()
    assert storage.plane(1, "k").isfinite().any()


@EVERY_BACKEND
def test_the_projection_stays_as_it_was(usable):
    made, num_pages = texts(GEOMETRY, [9, 1], consecutive=False)
    backend = usable(GEOMETRY.specs, GEOMETRY.storage(num_pages))
    batch, qkv = make_batch(GEOMETRY, [(made[0], 0, 9), (made[1], 0, 1)])
    before = qkv.clone()
    run_layer(backend, qkv, batch, GEOMETRY.head_norm(), GEOMETRY.rotary())
    assert torch.equal(qkv, before)


@EVERY_BACKEND
def test_the_window_counts_the_current_token(usable):
    made, num_pages = texts(GEOMETRY, [40], consecutive=False)
    backend = usable(GEOMETRY.specs, GEOMETRY.storage(num_pages))
    (out,) = run_steps(backend, GEOMETRY, made, steps_of(made, 7), layer=1)
    torch.testing.assert_close(out.double(), made[0].exact(5), rtol=2e-5, atol=2e-5)
    assert (out.double() - made[0].exact(4)).abs().max() > 0.01
    assert (out.double() - made[0].exact(6)).abs().max() > 0.01


def test_somebody_takes_what_every_machine_has():
    assert any(candidate.unsupported(spec) is None for candidate in CANDIDATES for spec in GEOMETRY.specs)
