"""What numpy's users do with an array, timed: prints one line of JSON.

    versus_numpy.py local|farpage|memmap BYTES FILE-OR-URL BUDGET_BYTES PAGE_BYTES

PAGE_BYTES are of farpage's array; 0 for the package's default. The array has rows of 1024 f8. Each
result goes into a digest, which is the same whatever memory the array has.
"""

import hashlib
import json
import sys
import time

import numpy as np

COLUMNS = 1024
#: Rows that are made at a time.
BAND = 1024
#: Elements that are read at random.
GATHERED = 50_000


def make(kind, shape, place, budget_bytes, page_bytes):
    """The array, zeroed."""
    if kind == "local":
        return np.zeros(shape)
    if kind == "memmap":
        return np.memmap(place, "f8", "w+", shape=shape)
    import farpage

    runtime = farpage.Runtime(place, budget=budget_bytes)
    return runtime.zeros(shape, "f8", page_size=page_bytes or None)


def steps(a):
    """Each step by its name; what one returns belongs to the result."""
    rows = a.shape[0]
    band = np.random.default_rng(7).random((BAND, COLUMNS))
    places = np.random.default_rng(8).integers(0, a.size, GATHERED)

    def fill():
        for first in range(0, rows, BAND):
            part = a[first : first + BAND]
            np.add(band[: len(part)], first, out=part)

    def scale():
        np.multiply(a, 1.5, out=a)

    def sort():
        # In place; an eighth of it, since sorting computes more than it moves.
        part = a.reshape(-1)[: a.size // 8]
        part.sort()
        return part[::4096]

    yield "fill", fill
    yield "sum", lambda: a.sum()
    yield "scale in place", scale
    yield "mean of columns", lambda: a.mean(axis=0)
    yield "random elements", lambda: a.reshape(-1)[places]
    yield "sort of an eighth", sort


def main():
    kind, size, place, budget, page = sys.argv[1:]
    a = make(kind, (int(size) // 8 // COLUMNS, COLUMNS), place, int(budget), int(page))
    hashed = hashlib.sha256()
    seconds = []
    for name, step in steps(a):
        since = time.perf_counter()
        result = step()
        seconds.append((name, time.perf_counter() - since))
        if result is not None:
            hashed.update(np.ascontiguousarray(result).tobytes())
    print(json.dumps({"digest": hashed.hexdigest(), "seconds": seconds}))


main()
