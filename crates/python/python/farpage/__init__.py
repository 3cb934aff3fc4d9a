"""Arrays for numpy whose pages live in the memory of other machines.

    import farpage

    with farpage.local(budget="64MiB") as rt:   # or farpage.Runtime("tcp://10.0.0.2:7400")
        a = rt.zeros((1_000_000, 512), "f4")    # an ndarray; its pages come and go
        a[:1000] += 1
        print(a.sum(), rt.stats())
        del a

A page that is lost with its server ends the program by SIGBUS when it is touched: a line on
standard error names the array, the page and the server, and a traceback follows. `prefetch` and
`flush` raise `PageError` instead.
"""

from farpage._arrays import (
    RemoteArray,
    advise,
    flush,
    is_remote,
    pickle_bytes_max,
    prefetch,
)
from farpage._farpage import CapacityError, Error, InUseError, PageError, __version__
from farpage._runtime import Region, Runtime, Stats, local

__all__ = [
    "CapacityError",
    "Error",
    "InUseError",
    "PageError",
    "Region",
    "RemoteArray",
    "Runtime",
    "Stats",
    "__version__",
    "advise",
    "flush",
    "is_remote",
    "local",
    "pickle_bytes_max",
    "prefetch",
]
