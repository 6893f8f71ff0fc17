"""Ranks that exchange by gloo: threads of one process, or, run as a program, a rank that may be killed."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from holdfast.distributed.collectives import CollectiveExchange, open_collectives
from holdfast.distributed.exchange_plan import ExchangeNeeds
from holdfast.distributed.mesh import Mesh, meshes
from holdfast.distributed.rendezvous import listen_for_ranks
from holdfast.errors import HoldfastError
from holdfast.memory.ledger import Ledger

Result = TypeVar("Result")
CPU = torch.device("cpu")


def run_gloo(
    ranks: Sequence[Mesh],
    needs: ExchangeNeeds,
    function: Callable[[Mesh, CollectiveExchange], Result],
    ledgers: Sequence[Ledger] | None = None,
) -> list[Result]:
    """Each rank a thread with an exchange of its own; the first failure is raised."""
    place = listen_for_ranks()
    host, port = place.getsockname()[:2]
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def work(mesh: Mesh) -> None:
        try:
            ledger = Ledger() if ledgers is None else ledgers[mesh.rank]
            own = (host, port) if mesh.rank else place
            exchange = open_collectives(mesh, needs, own, CPU, ledger, timeout_s=20, call_timeout_s=20)
            try:
                results[mesh.rank] = function(mesh, exchange)
            finally:
                exchange.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(mesh,), daemon=True) for mesh in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[mesh.rank] for mesh in ranks]


def main() -> None:
    """Sum forever, a line for each; a test that kills a peer reads the lines."""
    rank, size, port = map(int, sys.argv[1:])
    mesh = meshes(size)[rank]
    place = listen_for_ranks() if rank == 0 else ("127.0.0.1", port)
    if rank == 0 and not isinstance(place, tuple):
        print(place.getsockname()[1], flush=True)
    needs = ExchangeNeeds(room_bytes=64, num_logit_rows=1, vocab_size=4, hidden_bytes=0)
    try:
        exchange = open_collectives(mesh, needs, place, CPU, Ledger(), timeout_s=30)
        for i in range(10**9):
            exchange.sum_rows(exchange.room(1, 4, torch.float32).fill_(i), torch.empty(1, 4))
            if i == 0:
                print("sums", os.getpid(), flush=True)
    except HoldfastError as error:
        doing = error.values.get("doing", "")
        print(json.dumps([time.monotonic(), type(error).__name__, error.code, doing]), flush=True)


if __name__ == "__main__":
    main()
