//! Codecs, by their names.

use super::*;

/// The field is smooth and twice the budget, so that every page is absent when it is read.
#[test]
fn every_codec_has_a_name_and_keeps_its_bound() {
    let folder = tempfile::tempdir().expect("a folder for the socket");
    let endpoint = format!("shm://{}/s", folder.path().display());
    let server = serve(&endpoint);
    let field: Vec<f64> = (0..128 * PAGE / 8)
        .map(|at| (at as f64 * 1e-3).sin())
        .collect();
    // The largest error of each codec.
    for (codec, bound) in [
        (c"raw", 0.0),
        (c"lz4", 0.0),
        (c"shuffle8", 0.0),
        (c"zfp:reversible,f64", 0.0),
        (c"zfp:accuracy=1e-6,f64", 1e-6),
        (c"adaptive,f64", 0.0),
        (c"adaptive:accuracy=1e-6,f64", 1e-6),
    ] {
        let runtime = Runtime::new(Some(&endpoint)).expect("the server runs");
        let mut options: farpage_region_options = blank();
        options.codec = codec.as_ptr();
        let region = (runtime.map(field.len() * 8, &options)).expect("a region");
        let mut stats: farpage_stats = blank();
        // SAFETY: all pointers are good, and the region is mapped until it is unmapped.
        let error = unsafe {
            let address = farpage_region_address(region).cast::<f64>();
            slice::from_raw_parts_mut(address, field.len()).copy_from_slice(&field);
            let back = slice::from_raw_parts(address, field.len());
            let errors = back.iter().zip(&field).map(|(is, was)| (is - was).abs());
            let error = errors.fold(0.0, f64::max);
            let bytes = mem::size_of_val(&stats);
            // All pages are written then.
            assert_eq!(farpage_region_flush(region), FARPAGE_OK, "{}", message());
            assert_eq!(
                farpage_runtime_stats(runtime.0, &mut stats, bytes),
                FARPAGE_OK
            );
            assert_eq!(farpage_region_unmap(region), FARPAGE_OK, "{}", message());
            error
        };
        assert!(error <= bound, "{codec:?}: {error}");
        let is_plain = stats.bytes_written >= size_of_val(&field[..]) as u64;
        match codec.to_bytes() {
            b"raw" => assert!(is_plain),
            b"shuffle8" | b"zfp:reversible,f64" => assert!(!is_plain, "{codec:?}"),
            b"zfp:accuracy=1e-6,f64" => assert!(!is_plain && error > 0.0),
            _ => {}
        }
    }
    server.shutdown();
}

#[test]
fn a_codec_that_is_none_or_does_not_fit_is_refused_with_the_names_of_those_there_are() {
    let runtime = Runtime::new(None).expect("a runtime without servers");
    for (codec, why) in [
        (c"lz5", "zfp:accuracy=ERROR"),
        (c"adaptive:accuracy=-1,f64", "a number above 0"),
        (c"zfp:accuracy=1e-3,i32", "for f32 and f64"),
        (c"\xff", "UTF-8"),
    ] {
        let mut options: farpage_region_options = blank();
        options.codec = codec.as_ptr();
        assert_eq!(runtime.map(PAGE, &options), Err(FARPAGE_INVALID));
        assert!(message().contains(why), "{}", message());
        let mut options: farpage_runtime_options = blank();
        options.codec = codec.as_ptr();
        let mut other = ptr::null_mut();
        // SAFETY: all pointers are good.
        let code = unsafe { farpage_runtime_new(&options, &mut other) };
        assert_eq!((code, other.is_null()), (FARPAGE_INVALID, true));
        assert!(message().contains(why), "{}", message());
    }
}
