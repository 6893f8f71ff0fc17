"""transformers in a race: the same tokens from the same weights, by either way of loading them."""

from pathlib import Path

import pytest

from holdfast.cli import bench_transformers
from holdfast.cli.bench_cases import Case
from holdfast.cli.bench_holdfast import HoldfastContestant
from holdfast.cli.bench_transformers import TransformersContestant, check_installed, open_transformers
from holdfast.cli.opening import open_quietly
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, UnsupportedModelError
from holdfast.loading.model_files import open_model


def contestants(model: str | None, max_batch: int) -> tuple[HoldfastContestant, TransformersContestant]:
    config = EngineConfig(model=model, dtype="float32", enable_prefix_caching=False, max_num_seqs=8, max_model_len=128)
    opened = open_model(model, "auto")
    theirs = TransformersContestant(open_transformers(opened, "float32", "cpu"), max_batch)
    opened.source.close()
    return HoldfastContestant(open_quietly(config).engine), theirs


def test_a_folder_gives_the_same_tokens(tiny: Path) -> None:
    ours, theirs = contestants(str(tiny), max_batch=2)
    prompts = tuple(tuple(range(3 + start, 12 + 3 * start)) for start in range(5))
    case = Case("throughput", "throughput", prompts, (9, 1, 4, 12, 7))
    timing = theirs.run(case)
    assert timing.token_ids == ours.run(case).token_ids
    assert tuple(map(len, timing.token_ids)) == case.num_new
    assert 0 < timing.first_seconds <= timing.total_seconds


def test_a_gguf_file_gives_the_same_tokens() -> None:
    ours, theirs = contestants(None, max_batch=2)
    case = Case("decode", "decode", ((504, 3575, 282, 4649, 314), (28, 198, 9, 1012, 7)), (6, 6))
    assert theirs.run(case).token_ids == ours.run(case).token_ids


def test_no_end_token_ends_it(tiny: Path) -> None:
    _, theirs = contestants(str(tiny), max_batch=8)
    assert [len(ids) for ids in theirs.run(Case("decode", "decode", ((5, 6),), (100,))).token_ids] == [100]


def test_tensors_that_it_does_not_have_are_named() -> None:
    opened = open_model(None, "auto")
    with pytest.raises(UnsupportedModelError, match=r"other tensors \(model\.extra\)"):
        bench_transformers._copy_weights(opened, dict.fromkeys([*opened.source.entries, "model.extra"]))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=r"other tensors \(model\."):
        bench_transformers._copy_weights(opened, {})
    opened.source.close()


def test_without_it_there_is_a_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_transformers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[transformers\]'"):
        check_installed()
