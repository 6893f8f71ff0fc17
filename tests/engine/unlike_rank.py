"""A real rank in a process of its own that is not like rank 0, as $HOLDFAST_UNLIKE says: another model, version or dtype."""

import os
from dataclasses import replace

from holdfast.engine import rank_build
from holdfast.engine.rank_messages import RankStart
from holdfast.engine.rank_process import main, open_rank
from holdfast.engine.rank_server import Rank, RankServer
from holdfast.planning import ranks

UNLIKE = "HOLDFAST_UNLIKE"


def open_unlike(start: RankStart, server: RankServer) -> Rank:
    """As a rank opens its share, with one thing changed."""
    kind, versions, build = os.environ[UNLIKE], ranks.installed_versions, rank_build.build_runner
    if kind == "model":
        rank_build.headers_digest = lambda model: "of other files"
    elif kind == "version":
        ranks.installed_versions = lambda: versions() | {"torch": "1.0"}
    elif kind == "dtype":
        rank_build.build_runner = lambda config, *told, **named: build(
            replace(config, dtype="bfloat16"), *told, **named
        )
    return open_rank(start, server)


if __name__ == "__main__":
    main(open_unlike)
