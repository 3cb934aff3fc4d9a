"""Heat that spreads over a plate four times as large as the memory that it may use.

    python3 examples/python/heat.py            # with a memory server of its own
    FARPAGE_SERVER=tcp://10.0.0.2:7400 python3 examples/python/heat.py --side 16384

The plate is a numpy array in remote memory, worked through in bands of rows. At the end a picture
of it is written to heat.png, and the heat of the whole is compared with what was put in.
"""

import argparse
import os
import struct
import time
import zlib

import farpage
import numpy as np

BAND_ROWS = 64


def step(plate, rate):
    """One step of diffusion, in place: each band reads the row above as it was before."""
    rows = plate.shape[0]
    above = plate[0].copy()
    for first in range(1, rows - 1, BAND_ROWS):
        last = min(first + BAND_ROWS, rows - 1)
        # The band with a row on either side, as it was.
        old = np.vstack([above[None], plate[first : last + 1]])
        above = old[-2].copy()
        middle = old[1:-1, 1:-1]
        around = old[:-2, 1:-1] + old[2:, 1:-1] + old[1:-1, :-2] + old[1:-1, 2:]
        plate[first:last, 1:-1] = middle + rate * (around - 4 * middle)


def picture(plate, file, side=512):
    """Writes a grey PNG of the plate."""
    every = max(1, plate.shape[0] // side)
    small = np.sqrt(np.asarray(plate[::every, ::every]))
    grey = (255 * small / small.max()).astype(np.uint8)

    def chunk(kind, data):
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    height, width = grey.shape
    rows = b"".join(b"\0" + row.tobytes() for row in grey)
    with open(file, "wb") as out:
        out.write(b"\x89PNG\r\n\x1a\n")
        out.write(chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)))
        out.write(chunk(b"IDAT", zlib.compress(rows)))
        out.write(chunk(b"IEND", b""))


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--side", type=int, default=4096, help="rows and columns [4096]")
    arguments.add_argument("--steps", type=int, default=10, help="steps of time [10]")
    arguments.add_argument("--picture", default="heat.png", help="file to write [heat.png]")
    given = arguments.parse_args()

    plate_bytes = 4 * given.side**2
    budget_bytes = max(plate_bytes // 4, 4 << 20)
    if "FARPAGE_SERVER" in os.environ:
        runtime = farpage.Runtime(budget=budget_bytes)
    else:
        runtime = farpage.local(budget=budget_bytes, capacity=2 * plate_bytes)
    with runtime as rt:
        plate = rt.zeros((given.side, given.side), "f4", codec="adaptive")
        farpage.advise(plate, "sequential")
        rng = np.random.default_rng(1)
        for row, column in rng.integers(given.side // 8, given.side * 7 // 8, (20, 2)):
            spot = given.side // 32
            plate[row - spot : row + spot, column - spot : column + spot] += 1
        before = plate.sum(dtype="f8")

        begun = time.perf_counter()
        for _ in range(given.steps):
            step(plate, 0.2)
        seconds = time.perf_counter() - begun

        after = plate.sum(dtype="f8")
        picture(plate, given.picture)
        print(f"{given.steps} steps in {seconds:.1f} s; heat {before:.0f} before, {after:.0f} after")
        print(rt.stats())
        assert abs(after - before) < 1e-3 * before, "heat is neither made nor lost"
        del plate


if __name__ == "__main__":
    main()
