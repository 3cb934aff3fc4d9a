"""Does with memory what the seed says, and prints what it reads: the same under any paging.

The first argument is the seed, the second how many steps. Addresses are not printed: they differ.
"""

import ctypes
import random
import sys
import zlib
from ctypes import c_int, c_long, c_size_t, c_ubyte, c_void_p, memmove, memset, string_at

seed, steps = int(sys.argv[1]), int(sys.argv[2])
rng = random.Random(seed)
libc = ctypes.CDLL(None, use_errno=True)


def function(name, result, *types):
    found = getattr(libc, name)
    found.restype, found.argtypes = result, types
    return found


mmap = function("mmap", c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_long)
munmap = function("munmap", c_int, c_void_p, c_size_t)
mremap = function("mremap", c_void_p, c_void_p, c_size_t, c_size_t, c_int, c_void_p)
mprotect = function("mprotect", c_int, c_void_p, c_size_t, c_int)
madvise = function("madvise", c_int, c_void_p, c_size_t, c_int)
mlock = function("mlock", c_int, c_void_p, c_size_t)
munlock = function("munlock", c_int, c_void_p, c_size_t)
mincore = function("mincore", c_int, c_void_p, c_size_t, ctypes.POINTER(c_ubyte))
malloc = function("malloc", c_void_p, c_size_t)
calloc = function("calloc", c_void_p, c_size_t, c_size_t)
realloc = function("realloc", c_void_p, c_void_p, c_size_t)
free = function("free", None, c_void_p)

PAGE = 4096
NONE, READ, RW = 0, 1, 3
PRIVATE, FIXED, ANONYMOUS, NORESERVE = 0x2, 0x10, 0x20, 0x4000
FAILED = c_void_p(-1).value
DONTNEED = 4

digest = 0
maps = []  # [address, protection of each page, whether it is one mapping of the kernel's]
blocks = []  # [address, bytes]


def mix(data):
    global digest
    digest = zlib.crc32(data, digest)


def check(outcome, what):
    if outcome != 0:
        sys.exit(f"{what}: errno {ctypes.get_errno()}")


def protection_for(pages):
    kind = rng.choice([RW, RW, RW, NONE])
    address = mmap(None, pages * PAGE, kind, PRIVATE | ANONYMOUS | rng.choice([0, NORESERVE]), -1, 0)
    if address == FAILED:
        sys.exit(f"mmap: errno {ctypes.get_errno()}")
    maps.append([address, [kind] * pages, True])


def part(pages, most=40):
    first = rng.randrange(len(pages))
    return first, min(len(pages), first + 1 + rng.randrange(most))


def stretch(pages, allowed):
    """A stretch of pages that may all be used so."""
    first, end = part(pages)
    at = first
    while at < end and pages[at] in allowed:
        at += 1
    return (first, at) if at > first else None


def step():
    if len(maps) < 6:
        protection_for(40 + rng.randrange(120))
    if len(blocks) < 4:
        size = 130_000 + rng.randrange(600_000)
        blocks.append([calloc(1, size), size])
    which = rng.randrange(len(maps))
    address, pages, is_one = maps[which]
    kind = rng.randrange(24)
    if kind < 6:
        if found := stretch(pages, [RW]):
            start = found[0] * PAGE + rng.randrange(PAGE)
            size = 1 + rng.randrange(found[1] * PAGE - start)
            memset(address + start, rng.randrange(256), size)
    elif kind < 10:
        if found := stretch(pages, [RW, READ]):
            mix(string_at(address + found[0] * PAGE, (found[1] - found[0]) * PAGE))
    elif kind < 13:
        first, end = part(pages, rng.choice([1, 2, 40]))
        if rng.random() < 0.2:
            first, end = 0, len(pages)
        maps[which][2] = is_one and end - first == len(pages)
        new = rng.choice([NONE, READ, RW, RW])
        check(mprotect(address + first * PAGE, (end - first) * PAGE, new), "mprotect")
        pages[first:end] = [new] * (end - first)
    elif kind < 15:
        first, end = part(pages)
        if rng.random() < 0.3:
            first, end = 0, len(pages)
        check(munmap(address + first * PAGE, (end - first) * PAGE), "munmap")
        del maps[which]
        for start, stop in [(0, first), (end, len(pages))]:
            if start < stop:
                maps.append([address + start * PAGE, pages[start:stop], is_one])
    elif kind < 17:
        if is_one:
            new = 1 + rng.randrange(200)
            moved = mremap(address, len(pages) * PAGE, new * PAGE, 1, None)
            if moved == FAILED:
                sys.exit(f"mremap: errno {ctypes.get_errno()}")
            maps[which] = [moved, (pages + pages[:1] * new)[:new], True]
    elif kind == 17:
        first, end = part(pages)
        check(madvise(address + first * PAGE, (end - first) * PAGE, DONTNEED), "madvise")
    elif kind == 18:
        first, end = part(pages, rng.choice([1, 40]))
        new = rng.choice([NONE, RW])
        flags = PRIVATE | ANONYMOUS | FIXED
        if mmap(address + first * PAGE, (end - first) * PAGE, new, flags, -1, 0) == FAILED:
            sys.exit(f"mmap of a fixed address: errno {ctypes.get_errno()}")
        maps[which][2] = False
        pages[first:end] = [new] * (end - first)
    elif kind == 19:
        if found := stretch(pages, [RW, READ]):
            first, end = found[0], min(found[1], found[0] + 3)
            at, size = address + first * PAGE, (end - first) * PAGE
            check(mlock(at, size), "mlock")
            here = (c_ubyte * (end - first))()
            check(mincore(at, size, here), "mincore")
            mix(bytes(page & 1 for page in here))
            mix(string_at(at, size))
            check(munlock(at, size), "munlock")
    else:
        which = rng.randrange(len(blocks))
        block, size = blocks[which]
        mix(string_at(block, size))
        if kind == 20:
            free(block)
            del blocks[which]
        else:
            new = 130_000 + rng.randrange(900_000)
            block = realloc(block, new)
            mix(string_at(block, min(size, new)))
            if new > size:
                memset(block + size, rng.randrange(256), new - size)
            blocks[which] = [block, new]
            start = rng.randrange(new)
            memset(block + start, rng.randrange(256), rng.randrange(new - start))


for number in range(steps):
    step()
    if number % 100 == 0:
        print(number, digest, len(maps), len(blocks))
for address, pages, _ in maps:
    check(mprotect(address, len(pages) * PAGE, READ), "mprotect")
    mix(string_at(address, len(pages) * PAGE))
for block, size in blocks:
    mix(string_at(block, size))
print(digest)
