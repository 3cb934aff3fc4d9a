//! Pages with a lossy codec, and the bounds of their loss.

use super::*;

/// Returns a plane wave with a little noise, 64 doubles to a row.
fn field(first: usize, len: usize) -> Vec<u8> {
    let value = |at: usize| {
        let (x, y) = ((at % 64) as f64, (at / 64) as f64);
        (x * 0.1).sin() + (y * 0.07).cos() + f64::from((at * 7919 % 101) as u32) * 1e-5
    };
    (first..first + len)
        .flat_map(|at| value(at).to_ne_bytes())
        .collect()
}

fn lossy(cluster: &Arc<Cluster>, mode: ZfpMode, name: Option<&str>) -> Arc<PageStore> {
    let options = RemoteOptions {
        codec: Some(Codec::zfp(mode)),
        layout: Layout::new(Element::F64, [64, 64]),
        name: name.map(str::to_owned),
        ..RemoteOptions::default()
    };
    PageStore::remote(cluster, REGION, 8 * 4096, 4096, &options).unwrap()
}

#[test]
fn a_page_that_lost_is_clean_when_it_comes_back_and_never_drifts() {
    let cluster = cluster(1);
    for mode in [
        ZfpMode::Accuracy(1e-3),
        ZfpMode::Rate(10.0),
        ZfpMode::Precision(16),
    ] {
        let store = lossy(&cluster, mode, None);
        let mut io = queue(&cluster);
        let exact = field(0, 8 * 512);
        write_run(&mut io, &store, 0, &exact);
        let rounded = read_run(&mut io, &store, 0, 8).frame.bytes;
        assert!(rounded != exact, "{mode:?} loses nothing");
        let written = store.stats();
        assert_eq!(written.write_backs_zfp, 8);
        let worst = exact
            .as_chunks::<8>()
            .0
            .iter()
            .zip(rounded.as_chunks::<8>().0);
        let worst = worst
            .map(|(a, b)| (f64::from_ne_bytes(*a) - f64::from_ne_bytes(*b)).abs())
            .fold(0.0, f64::max);
        assert_eq!(written.largest_error(), worst, "{mode:?}");
        assert!(mode != ZfpMode::Accuracy(1e-3) || worst <= 1e-3);
        for _ in 0..1000 {
            let again = read_run(&mut io, &store, 0, 8).frame.bytes;
            assert!(again == rounded, "{mode:?} drifts");
            assert_eq!(write_run(&mut io, &store, 0, &again).outcome.clean, 8);
        }
        assert_eq!(store.stats().bytes_stored, written.bytes_stored);
        // Written again with its exact values, the page is rounded to the same: so does a flush of
        // a page that stays in memory.
        write_run(&mut io, &store, 0, &exact);
        assert!(read_run(&mut io, &store, 0, 8).frame.bytes == rounded);
    }
}

#[test]
fn a_page_that_cannot_meet_its_bound_is_stored_without_loss() {
    let cluster = cluster(1);
    let store = lossy(&cluster, ZfpMode::Accuracy(1e-3), None);
    let mut io = queue(&cluster);
    let mut pages = field(0, 8 * 512);
    for (page, odd) in [(1, f64::NAN), (3, f64::INFINITY), (4, 1e300)] {
        pages[page * 4096 + 800..][..8].copy_from_slice(&odd.to_ne_bytes());
    }
    write_run(&mut io, &store, 0, &pages);
    let back = read_run(&mut io, &store, 0, 8).frame.bytes;
    for page in 0..8 {
        let range = page * 4096..(page + 1) * 4096;
        let same = back[range.clone()] == pages[range];
        assert_eq!(same, [1, 3, 4].contains(&page), "page {page}");
    }
    let stats = store.stats();
    assert_eq!((stats.write_backs_zfp, stats.zfp_declined), (5, 3));
    assert!(stats.largest_error() <= 1e-3);
}

#[test]
fn a_lossy_region_is_opened_with_its_codec_and_shape() {
    let servers = servers();
    let rounded = {
        let cluster = client(&servers);
        let store = lossy(&cluster, ZfpMode::Accuracy(1e-3), Some("field"));
        let mut io = queue(&cluster);
        write_run(&mut io, &store, 0, &field(0, 8 * 512));
        store.publish().unwrap();
        read_run(&mut io, &store, 0, 8).frame.bytes
    };
    let cluster = client(&servers);
    let store = PageStore::open(&cluster, REGION, "field").unwrap();
    assert_eq!(store.codec(), Some(Codec::zfp(ZfpMode::Accuracy(1e-3))));
    assert_eq!(store.layout(), Some(&Layout::new(Element::F64, [64, 64])));
    let mut io = queue(&cluster);
    assert!(read_run(&mut io, &store, 0, 8).frame.bytes == rounded);
    assert_eq!(write_run(&mut io, &store, 0, &rounded).outcome.clean, 8);
}

#[test]
fn a_codec_that_does_not_fit_its_array_is_refused_with_what_does() {
    let cluster = cluster(1);
    for (codec, element, says) in [
        ("shuffle", Element::of::<u8>(), "choose lz4"),
        (
            "zfp:accuracy=1e-3",
            Element::of::<u32>(),
            "choose lz4 or shuffle",
        ),
        ("zfp:accuracy=1e-3", Element::I32, "zfp:precision"),
        ("zfp:rate=32", Element::F32, "choose a lower one"),
    ] {
        let options = RemoteOptions {
            codec: Some(codec.parse().unwrap()),
            layout: Layout::new(element, []),
            ..RemoteOptions::default()
        };
        let Err(error) = PageStore::remote(&cluster, REGION, 4096, 4096, &options) else {
            panic!("{codec} on {element}");
        };
        assert!(error.to_string().contains(says), "{error}");
    }
}
