"""`allocate`: numpy's own arrays in remote memory."""

import asyncio
import gc
import os
import threading

import numpy as np
import pytest

import farpage
from conftest import MIB, is_running, run, wait_until


def test_large_arrays_lie_in_remote_memory_and_small_ones_do_not(rt):
    with rt.allocate(min_bytes="1MiB"):
        large, small = np.zeros(MIB // 8), np.zeros(MIB // 8 - 1)
    after = np.zeros(MIB)
    assert farpage.is_remote(large) and not farpage.is_remote(small) and not farpage.is_remote(after)
    assert type(large) is np.ndarray
    del large


def test_unmodified_code_gives_the_same_results_beyond_the_budget(rt):
    def work():
        rng = np.random.default_rng(7)
        table = rng.random((1 << 18, 6))
        table[:, 3] *= 2
        order = np.argsort(table[:, 0])
        joined = np.concatenate([table, table[::-1]])
        return (joined @ rng.random((6, 3))).sum(axis=0), np.sort(joined[:, 1])[::9999], order

    expected = work()
    with rt.allocate(min_bytes="64KiB"):
        results = work()
    for result, wanted in zip(results, expected):
        assert np.array_equal(result, wanted)
    stats = rt.stats()
    assert stats.evictions > 100 and stats.peak_resident_bytes <= 8 * MIB
    del result, results


def test_memory_of_freed_arrays_is_given_back(rt):
    with rt.allocate(min_bytes="64KiB"):
        np.ones(MIB)

        def mapped():
            with open("/proc/self/maps") as maps:
                return sum(1 for _ in maps)

        before = mapped()
        for _ in range(2000):
            np.empty(16 << 10)[0] = 1
        kept = [np.full(16 << 10, number) for number in range(50)]
        assert rt._arena.allocated_bytes() == 50 * (128 << 10)
        assert all(array[7] == number for number, array in enumerate(kept))
        assert mapped() < before + 20
    with pytest.raises(BufferError, match="made under `allocate`"):
        rt.close()
    del kept
    assert rt._arena.allocated_bytes() == 0
    # Less than was allocated at once: read-ahead may have brought in zeros of free pages.
    wait_until("pages are given back", lambda: rt.stats().resident_bytes <= 2 * MIB)


def test_array_that_is_resized_keeps_its_contents(rt):
    with rt.allocate(min_bytes="64KiB"):
        a = np.arange(64 << 10)
        for length in (300 << 10, 20 << 10, 1 << 20):
            a.resize(length, refcheck=False)
            kept = min(length, 20 << 10)
            assert np.array_equal(a[:kept], np.arange(kept))
        assert a[-1] == 0 and farpage.is_remote(a)
        small = np.arange(10)
        small.resize(1 << 20, refcheck=False)
        assert small[9] == 9 and small[-1] == 0
    del a


def test_array_outlives_block_and_runtime():
    rt = farpage.local(budget="8MiB", capacity="256MiB")
    server = rt._server.process.pid
    with rt.allocate(min_bytes="64KiB"):
        a = np.arange(4 * MIB)
    del rt
    gc.collect()
    assert a.sum() == (4 * MIB) * (4 * MIB - 1) // 2
    assert is_running(server) and farpage.is_remote(a[::2])
    del a
    gc.collect()
    assert not is_running(server)


def test_block_holds_for_its_context(rt):
    inside = {}

    def in_thread():
        inside["thread"] = farpage.is_remote(np.zeros(MIB))

    async def task():
        return farpage.is_remote(np.zeros(MIB))

    async def tasks():
        before = asyncio.create_task(task())
        with rt.allocate():
            assert await asyncio.create_task(task())
        assert not await before

    with rt.allocate():
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
        with rt.allocate(min_bytes="64MiB"):
            # Of the outer block.
            assert farpage.is_remote(np.zeros(MIB))
        with pytest.raises(ZeroDivisionError):
            with rt.allocate():
                1 / 0
        assert farpage.is_remote(np.zeros(MIB))
    assert not farpage.is_remote(np.zeros(MIB))
    asyncio.run(tasks())


def test_arena_that_is_full_is_a_memory_error():
    with farpage.local(budget="8MiB", capacity="64MiB") as rt:
        with pytest.raises(farpage.Error):
            rt.allocate(capacity="1GiB")
        with rt.allocate(capacity="32MiB"):
            a = np.zeros(3 * MIB)
            with pytest.raises(MemoryError):
                np.zeros(2 * MIB)
            with pytest.raises(ValueError, match="first"):
                rt.allocate(capacity="1MiB")
            del a
            assert np.ones(3 * MIB).sum() == 3 * MIB


def test_block_that_outlives_its_runtime_makes_local_arrays_and_says_so():
    program = run(
        """
        import farpage, numpy as np
        rt = farpage.local(budget="8MiB", capacity="64MiB", deadline=5)
        with rt.allocate(min_bytes="64KiB"):
            np.ones(1 << 20)
            rt.close()
            a, b = np.arange(4 << 20), np.ones(1 << 20)
            print(a.sum() == (4 << 20) * ((4 << 20) - 1) // 2, b.sum() == 1 << 20)
            a.resize(8 << 20, refcheck=False)
            print(a[-1])
        """
    )
    assert program.out == "True True\n0\n", (program.signal, program.err)
    assert program.err.count("closed within a block of its `allocate`") == 1, program.err


def test_child_made_by_fork_allocates_locally(rt):
    with rt.allocate():
        a = np.ones(MIB)
        child = os.fork()
        if child == 0:
            import signal

            signal.alarm(60)
            b = np.ones(MIB)
            del a
            os._exit(0 if b.sum() == MIB else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert a.sum() == MIB
    del a


def test_arrays_at_the_programs_end_are_no_matter():
    program = run(
        """
        import farpage, numpy as np
        rt = farpage.local(budget="8MiB", capacity="64MiB")
        rt.allocate(min_bytes=1).__enter__()
        kept = np.ones(1 << 20)
        class Late:
            def __del__(self):
                print(float(kept[7]))
        late = Late()
        """
    )
    assert program.code == 0 and program.out == "1.0\n", (program.signal, program.err)
