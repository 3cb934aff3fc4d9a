//! Registered memory, seen from a program: in the steady state nothing is registered any more.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic")]

mod common;

use std::thread;

use common::over_fabrics;
use farpage::{ByteSize, Codec, RegionOptions, RemoteArray, Runtime};
use farpage_testkit::{KIB, MIB};

const PAGE_BYTES: usize = 4 * KIB;
/// Budget of 256 pages. No more can travel at once: their buffers, of 5 KiB each, fit into one slab
/// of 2 MiB however the workers race.
const BUDGET_BYTES: usize = MIB;
const ELEMENTS: usize = MIB / size_of::<f64>();
const ITERATIONS: usize = 5;

#[test]
fn stream_registers_nothing_after_its_first_iteration() {
    over_fabrics(120, 64 * MIB, |memory| {
        let fabric = memory.fabric;
        let runtime = memory.builder(BUDGET_BYTES, PAGE_BYTES).build().unwrap();
        let [mut a, mut b, mut c] = [(); 3].map(|()| array(&runtime));
        // Smooth values, so that pages are stored compressed, and no two pages alike.
        for (i, value) in b.iter_mut().enumerate() {
            *value = i as f64;
        }
        let mut warm = None;
        for iteration in 0..ITERATIONS {
            let scalar = iteration as f64 + 0.5;
            triad(&mut a, &b, &c, scalar);
            triad(&mut c, &a, &b, scalar);
            let stats = runtime.stats();
            let now = (stats.registered.registrations, stats.registered.slabs);
            let before = *warm.get_or_insert(now);
            assert_eq!(now, before, "{fabric}: registered in iteration {iteration}");
        }
        let (mut expected_a, mut expected_c) = (0.0, 0.0);
        for iteration in 0..ITERATIONS {
            let scalar = iteration as f64 + 0.5;
            expected_a = 1000.0 + scalar * expected_c;
            expected_c = expected_a + scalar * 1000.0;
        }
        assert_eq!((a[1000], c[1000]), (expected_a, expected_c));

        let stats = runtime.stats();
        assert_eq!(stats.registered.registrations, 1, "{fabric}: {stats:?}");
        let staged = stats.store.write_backs_lz4;
        assert!(
            staged > 2000 && stats.registered.acquisitions >= staged,
            "{fabric}: the buffers were not used: {stats:?}"
        );
    });
}

fn array(runtime: &Runtime) -> RemoteArray<f64> {
    let options = RegionOptions::new()
        .codec(Codec::Lz4)
        .page_size(ByteSize(PAGE_BYTES as u64));
    runtime.array_with(ELEMENTS, options).unwrap()
}

/// Computes `to = x + scalar * y` by two threads.
fn triad(to: &mut [f64], x: &[f64], y: &[f64], scalar: f64) {
    let half = ELEMENTS / 2;
    thread::scope(|scope| {
        let parts = to.chunks_mut(half).zip(x.chunks(half).zip(y.chunks(half)));
        for (to, (x, y)) in parts {
            scope.spawn(move || {
                for (to, (x, y)) in to.iter_mut().zip(x.iter().zip(y)) {
                    *to = x + scalar * y;
                }
            });
        }
    });
}
