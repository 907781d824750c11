"""Doing the same in many places at once."""

import threading
from collections.abc import Callable


def in_threads(count: int, work: Callable[[int], object]) -> list[Exception]:
    """Do the same in many threads at once; return what was raised."""
    together, raised = threading.Barrier(count), []

    def run(index: int) -> None:
        together.wait()
        try:
            work(index)
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised
