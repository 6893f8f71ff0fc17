"""Patterns of modules: plain expressions give what re gives, and others are said not to be followed."""

import re

import pytest

from holdfast.loading.planning.stored_schemes import is_followed, matches

MODULES = ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
MODULES += ["model.layers.11.mlp.gate_proj", "model.layers.11.self_attn.q_proj", "model.layers.2.mlp.experts.7.up_proj"]


@pytest.mark.parametrize(
    "text",
    [
        r".*layers\.0\.mlp\.(gate|up)_proj",
        r".*layers\.0\.mlp\.(?:gate|up)_proj$",
        r"model\.layers\.(11|2)\.(mlp|self_attn)\.(gate|q)_proj",
        r"^model.layers.11.self_attn.*",
        r"(lm_head|.*experts\.7\.(up|down)_proj)$",
        r".*(q|k|v)_proj|lm_head",
        r".*mlp.gate$",
        r"(|lm_)head",
        r"layers",
        r"model.*mlp.*proj$",
        r"model\.layers\..*\.up_proj$",
        r"",
    ],
)
def test_expressions_match_as_re_matches(text):
    assert is_followed(f"re:{text}")
    wanted = [module for module in MODULES if re.match(text, module)]
    assert [module for module in MODULES if matches(f"re:{text}", module)] == wanted


def test_an_expression_takes_no_longer_than_the_name_is():
    """Python's own would try for as long as the machine stands."""
    assert not matches("re:" + ".*a" * 60 + "b", "a" * 150 + "!")
    assert not is_followed("re:" + "(a|a)" * 60 + "b")
    assert not is_followed("re:" + "(" * 5000 + "a" + ")" * 5000 + "+")


@pytest.mark.parametrize(
    "text",
    ["(?!.*experts).*", "a{2}", "(a", "a)", "[ab]", r"\d+", "*a", "a+", "a?", "(a|b)*", "(a|b)?c", r"\bx", "(?i)a",
     "\\", r"(a)\1", "a^b", "a$b", r"model\.*mlp", r"a\\.*b", "(?P<x>a)"],
)  # fmt: skip
def test_what_is_not_understood_is_not_followed_and_matches_nothing(text):
    assert not is_followed(f"re:{text}")
    assert not any(matches(f"re:{text}", module) for module in MODULES)


def test_names_are_always_followed():
    assert is_followed("model.layers.0(")
    assert [module for module in MODULES if matches("mlp.gate", module)] == MODULES[1:2]
