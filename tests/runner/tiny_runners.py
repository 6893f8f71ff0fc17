"""Runners of tiny models, built as an engine builds them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from weakref import ref

import pytest
import torch

from holdfast.config import EngineConfig
from holdfast.loading.model_files import open_model
from holdfast.memory import arena
from holdfast.memory.storages import held_storages as held_storages
from holdfast.runner.build import BuiltRunner, build_runner
from loading.tiny_models import save_tiny

SMALL = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 32, "page_tokens": 4}


class UnreadableSource:
    """Headers only: reading a weight fails the test."""

    def __init__(self, source) -> None:
        self._source = source

    @property
    def entries(self):
        return self._source.entries

    @property
    def ignorable(self):
        return self._source.ignorable

    @property
    def scratch_bytes_per_reader(self):
        return self._source.scratch_bytes_per_reader

    def read_into(self, name, row_start, row_end, out, columns=None):
        raise AssertionError(f"{name} was read")

    def close(self) -> None: ...


class TinyBuilder:
    """build(family, readable=..., on_progress=..., max_position=..., text_ids=..., **options) -> a runner and its account."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self,
        family: str = "llama",
        *,
        readable: bool = True,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        max_position: int | None = None,
        text_ids: Sequence[int] = (),
        **options,
    ) -> BuiltRunner:
        path = self.folder / family
        if not path.exists():
            path.mkdir()
            save_tiny(family, path)
        model = open_model(str(path), "auto")
        if max_position is not None:
            model = replace(model, spec=replace(model.spec, max_position=max_position))
        source = model.source if readable else UnreadableSource(model.source)
        config = EngineConfig.from_options(**(SMALL | options))
        try:
            return build_runner(config, replace(model, source=source), on_progress, text_ids=text_ids)
        finally:
            model.source.close()


@contextmanager
def watched_arenas(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ref[torch.UntypedStorage]]]:
    """Every arena that is allocated inside, as a reference that is dead once its memory is free."""
    taken: list[ref[torch.UntypedStorage]] = []
    allocate = arena.allocate_bytes

    def allocate_and_watch(num_bytes: int, device: torch.device) -> torch.Tensor:
        buffer = allocate(num_bytes, device)
        taken.append(ref(buffer.untyped_storage()))
        return buffer

    with monkeypatch.context() as patch:
        patch.setattr(arena, "allocate_bytes", allocate_and_watch)
        yield taken
