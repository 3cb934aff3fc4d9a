"""Other people's code on arrays in remote memory: numpy's own tests, and pandas."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from conftest import MIB


def run_numpys_tests(*arguments, seconds):
    """Runs tests of numpy under `allocate`; returns how many passed."""
    here = os.path.dirname(__file__)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
        + ["-p", "under_allocate", "-W", "ignore", "--pyargs", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])},
    )
    assert ended.returncode == 0, ended.stdout[-8000:]
    assert int(re.search(r"^evictions: (\d+)$", ended.stdout, re.MULTILINE)[1]) > 1000
    return int(re.search(r"(\d+) passed", ended.stdout)[1])


#: Selecting, casting, and dates.
SOME = [f"numpy._core.tests.test_{it}" for it in ("item_selection", "casting_unittests", "datetime")]
#: All that numpy's wheels have tests of, but `f2py`, whose tests need files of the source tree.
PACKAGES = ("_core", "fft", "lib", "linalg", "ma", "matrixlib", "polynomial", "random", "testing")
def test_some_of_numpys_own_tests_pass():
    assert run_numpys_tests(*SOME, seconds=200) > 1500


@pytest.mark.long
@pytest.mark.parametrize("package", PACKAGES)
def test_all_of_numpys_own_tests_pass(package):
    # The first compiles handlers of memory of its own, the second makes a list of 16 GiB, and the
    # third arrays of as much, which the server here does not have.
    but = "not test_mem_policy and not test_huge_list_error and not test_huge_vectordot"
    assert run_numpys_tests(f"numpy.{package}", "-k", but, seconds=3000) > 10


def frames(rows):
    """A group-by, a merge and a sort."""
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(7)
    left = pd.DataFrame(
        {
            "key": rng.integers(0, 1000, rows),
            "value": rng.random(rows),
            "other": rng.integers(0, rows, rows),
        }
    )
    evens = np.arange(0, rows, 2)
    right = pd.DataFrame({"other": evens, "weight": rng.random(evens.size)})
    grouped = left.groupby("key").agg({"value": ["mean", "max"], "other": "sum"})
    merged = left.merge(right, on="other")
    return grouped, merged, merged.sort_values(["key", "value"])


def test_frames_of_pandas_equal_local_ones_at_four_times_the_budget(rt):
    pd = pytest.importorskip("pandas")
    expected = frames(1_000_000)
    assert sum(frame.memory_usage().sum() for frame in expected) > 4 * 8 * MIB
    with rt.allocate(min_bytes="64KiB"):
        results = frames(1_000_000)
    for result, wanted in zip(results, expected):
        pd.testing.assert_frame_equal(result, wanted, check_exact=True)
    stats = rt.stats()
    assert stats.evictions > 500 and stats.peak_resident_bytes <= 8 * MIB
    del result, results
