"""What people do with tables and arrays: prints a digest of the result. Seeded, and the same each
time."""

import hashlib
import sys


def digest(*arrays):
    hashed = hashlib.sha256()
    for array in arrays:
        hashed.update(bytes(memoryview(array).cast("B")))
    print(hashed.hexdigest())


def use_numpy():
    import numpy as np

    rng = np.random.default_rng(7)
    table = rng.integers(0, 1 << 40, size=(8, 500_000))
    order = np.argsort(table[0], kind="stable")
    sums = np.cumsum(table[:, order], axis=1)
    digest(sums[:, ::1000].copy(), np.unique(table[1] % 1_000_003))


def use_duckdb():
    import duckdb

    base = duckdb.connect(config={"threads": 2, "temp_directory": "", "memory_limit": "8GB"})
    base.execute(
        "CREATE TABLE orders AS SELECT i AS id, i * 7919 % 200003 AS customer, i % 2557 AS day "
        "FROM range(1500000) r(i)"
    )
    base.execute(
        "CREATE TABLE lines AS SELECT i * 104729 % 1500000 AS order_id, "
        "i * 31 % 1000 AS price, i % 50 AS quantity FROM range(6000000) r(i)"
    )
    rows = base.execute(
        "SELECT customer, sum(price * quantity) AS total, count(*) AS n, max(day) "
        "FROM lines JOIN orders ON order_id = id "
        "GROUP BY customer ORDER BY total DESC, customer LIMIT 1000"
    ).fetchall()
    print(hashlib.sha256(repr(rows).encode()).hexdigest(), rows[:2])


def use_polars():
    import numpy as np
    import polars as pl

    rng = np.random.default_rng(7)
    left = pl.DataFrame(
        {"key": rng.integers(0, 400_000, 4_000_000), "value": rng.integers(0, 1000, 4_000_000)}
    )
    right = pl.DataFrame({"key": np.arange(400_000), "group": rng.integers(0, 5000, 400_000)})
    joined = left.join(right, on="key").group_by("group").agg(
        pl.col("value").sum().alias("total"), pl.len().alias("n")
    )
    joined = joined.sort("group")
    ordered = left.sort("key", "value")
    digest(joined["total"].to_numpy().copy(), ordered["value"].to_numpy()[::100].copy())


def use_pyarrow():
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    rng = np.random.default_rng(7)
    table = pa.table(
        {"key": rng.integers(0, 100_000, 4_000_000), "value": rng.integers(0, 1000, 4_000_000)}
    )
    grouped = table.group_by("key", use_threads=False).aggregate([("value", "sum")])
    taken = table.take(pc.sort_indices(table, [("value", "ascending"), ("key", "descending")]))
    digest(
        np.sort(grouped["value_sum"].to_numpy()), taken["key"].to_numpy()[::100].copy()
    )


def use_sklearn():
    import numpy as np
    from sklearn.cluster import MiniBatchKMeans
    from sklearn.decomposition import PCA

    rng = np.random.default_rng(7)
    points = rng.normal(size=(400_000, 40))
    reduced = PCA(n_components=8, svd_solver="covariance_eigh").fit_transform(points)
    labels = MiniBatchKMeans(8, random_state=7, n_init=1, max_iter=5).fit_predict(reduced)
    digest(np.round(np.abs(reduced), 6)[::100].copy(), labels)


def use_lightgbm():
    import lightgbm as lgb
    import numpy as np

    rng = np.random.default_rng(7)
    points = rng.normal(size=(400_000, 40))
    target = points[:, 0] * points[:, 1] + points[:, 2]
    options = {
        "objective": "regression",
        "deterministic": True,
        "force_col_wise": True,
        "num_threads": 2,
        "seed": 7,
        "verbose": -1,
    }
    model = lgb.train(options, lgb.Dataset(points, target), num_boost_round=15)
    digest(np.round(model.predict(points[::50], num_threads=1), 9))


def use_networkx():
    import networkx as nx

    graph = nx.gnm_random_graph(40_000, 160_000, seed=7)
    parts = sorted(len(part) for part in nx.connected_components(graph))
    core = nx.core_number(graph)
    lengths = nx.single_source_shortest_path_length(graph, 0)
    print(parts[-3:], sum(core.values()), sum(lengths.values()), nx.number_of_edges(graph))


globals()["use_" + sys.argv[1]]()
