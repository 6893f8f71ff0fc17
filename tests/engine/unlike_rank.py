"""A real rank in a process of its own that is not like rank 0, as $HOLDFAST_UNLIKE says: another model, version or dtype; or sizes of steps."""

import os
from dataclasses import replace

from holdfast.engine import rank_build
from holdfast.engine.rank_messages import RankStart
from holdfast.engine.rank_process import main, open_rank
from holdfast.engine.rank_server import Rank, RankServer
from holdfast.planning import ranks
from holdfast.runner.build import RunnerBuild

UNLIKE = "HOLDFAST_UNLIKE"


def take_sizes(*sizes: int) -> None:
    """From here on every build of this process finds that products are alike in these numbers of rows alone."""

    def compare(build: RunnerBuild, *_: object) -> None:
        build.row_sizes = sizes

    RunnerBuild._compare_products = compare  # type: ignore[method-assign]


def open_unlike(start: RankStart, server: RankServer) -> Rank:
    """As a rank opens its share, with one thing changed."""
    kind, versions, build = os.environ[UNLIKE], ranks.installed_versions, rank_build.build_runner
    if kind == "model":
        rank_build.headers_digest = lambda model: "of other files"
    elif kind == "version":
        ranks.installed_versions = lambda: versions() | {"torch": "1.0"}
    elif kind == "dtype":
        rank_build.build_runner = lambda config, *reported, **named: build(
            replace(config, dtype="bfloat16"), *reported, **named
        )
    elif kind.startswith("rows "):
        take_sizes(*map(int, kind.split()[1:]))
    return open_rank(start, server)


if __name__ == "__main__":
    main(open_unlike)
