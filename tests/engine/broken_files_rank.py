"""A rank whose own copy of the model's files breaks between plan and load: what happens to them is in HOLDFAST_BROKEN_FILES.

The copy stands in for a node whose disk is not rank 0's.
"""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from holdfast.engine.rank_messages import RankPlanned, RankStart
from holdfast.engine.rank_process import main, open_rank
from holdfast.engine.rank_server import Rank, RankServer

HOW = "HOLDFAST_BROKEN_FILES"


class BreakingServer(RankServer):
    """Breaks the files when rank 0 has planned, before this rank reads a weight."""

    folder: Path

    def expect(self, kind):
        message = super().expect(kind)
        if kind is RankPlanned:
            for file in self.folder.glob("*.safetensors"):
                break_file(file, os.environ[HOW])
        return message


def break_file(file: Path, how: str) -> None:
    """Gone, cut short, or a folder in its place."""
    size = file.stat().st_size
    if how == "short":
        os.truncate(file, size // 2)
        return
    file.unlink()
    if how == "folder":
        file.mkdir()


def open_broken(start: RankStart, server: RankServer) -> Rank:
    """As ever, with a folder of its own."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        shutil.copytree(start.config.model or "", folder)
        server.__class__ = BreakingServer
        assert isinstance(server, BreakingServer)
        server.folder = folder
        return open_rank(replace(start, config=replace(start.config, model=str(folder))), server)


if __name__ == "__main__":
    main(open_broken)
