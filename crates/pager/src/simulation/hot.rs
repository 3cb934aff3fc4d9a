//! Hot sets: how often the most used pages are not there.

use super::{plain::Plain, *};

const REGION_PAGES: usize = 4096;
const ACCESSES: usize = 200_000;

/// Returns the share of accesses that miss when nine in ten go to a tenth of the pages, at random.
fn misses(local: usize) -> f64 {
    let options = RegionOptions {
        read_ahead: Some(0),
        ..RegionOptions::default()
    };
    let mut plain = Plain::new(REGION_PAGES, local, options);
    let (hot, mut random) = (REGION_PAGES / 10, 1);
    for _ in 0..ACCESSES {
        let is_hot = next(&mut random) % 10 < 9;
        let of = if is_hot { 0..hot } else { hot..REGION_PAGES };
        let page = of.start + (next(&mut random) % of.len() as u64) as usize;
        assert_eq!(plain.access(page, None), 0);
    }
    let fills = plain.mapped().pager().stats().fills;
    plain.end();
    fills as f64 / ACCESSES as f64
}

/// Least recently used would miss 0.151 and 0.085; the best possible is 0.097 and 0.083.
#[test]
fn hot_pages_stay_while_others_come_and_go() {
    let (eighth, quarter) = (misses(REGION_PAGES / 8), misses(REGION_PAGES / 4));
    println!("misses per access: {eighth:.3} with an eighth local, {quarter:.3} with a quarter");
    assert!(eighth < 0.17, "{eighth:.3} with an eighth local");
    assert!(quarter < 0.105, "{quarter:.3} with a quarter local");
}
