//! Named regions, which outlive runtimes, and lists of names.

use super::*;

#[test]
fn named_region_outlives_its_runtime() {
    let folder = tempfile::tempdir().expect("a folder for the socket");
    let endpoint = format!("shm://{}/s", folder.path().display());
    assert_eq!(
        Runtime::new(Some(&endpoint)).err(),
        Some(FARPAGE_UNREACHABLE)
    );
    assert!(message().contains(&endpoint), "{}", message());
    assert_eq!(Runtime::new(Some("ftp://x")).err(), Some(FARPAGE_INVALID));
    let server = serve(&endpoint);
    let mut options: farpage_region_options = blank();
    options.name = c"it".as_ptr();
    options.codec = c"lz4".as_ptr();
    for round in 0..2u8 {
        let runtime = Runtime::new(Some(&endpoint)).expect("the server runs");
        let mut region = ptr::null_mut();
        // SAFETY: all pointers are good, and the region is mapped until it is unmapped.
        unsafe {
            if round == 0 {
                assert_eq!(
                    farpage_region_open(runtime.0, c"it".as_ptr(), &mut region),
                    FARPAGE_NOT_FOUND
                );
                region = runtime.map(10_000, &options).expect("a region");
            } else {
                assert_eq!(
                    farpage_region_open(runtime.0, c"it".as_ptr(), &mut region),
                    FARPAGE_OK
                );
            }
            assert_eq!(farpage_region_bytes(region), 10_000);
            let last = farpage_region_address(region).cast::<u8>().add(9_999);
            assert_eq!(last.read_volatile(), round * 7);
            last.write_volatile(7);
            let mut stats: farpage_stats = mem::zeroed();
            assert_eq!(
                farpage_runtime_stats(runtime.0, &mut stats, mem::size_of_val(&stats)),
                FARPAGE_OK
            );
            assert_eq!(stats.budget_bytes, 64 * PAGE as u64);
            assert_eq!(farpage_region_unmap(region), FARPAGE_OK, "{}", message());
        }
    }
    // Two readers beside a writer each keep the version that they opened.
    let runtime = Runtime::new(Some(&endpoint)).expect("the server runs");
    let (mut first, mut writer, mut second) = Default::default();
    // SAFETY: all pointers are good, and the regions are mapped until they are unmapped.
    unsafe {
        let open = farpage_region_open_to_read;
        let none = open(runtime.0, c"none".as_ptr(), &mut first);
        assert_eq!(none, FARPAGE_NOT_FOUND);
        assert_eq!(open(runtime.0, c"it".as_ptr(), &mut first), FARPAGE_OK);
        let opened = farpage_region_open(runtime.0, c"it".as_ptr(), &mut writer);
        assert_eq!(opened, FARPAGE_OK, "{}", message());
        let last = |region| farpage_region_address(region).cast::<u8>().add(9_999);
        last(writer).write_volatile(8);
        assert_eq!(farpage_region_flush(writer), FARPAGE_OK);
        assert_eq!(open(runtime.0, c"it".as_ptr(), &mut second), FARPAGE_OK);
        for (region, value) in [(first, 7), (second, 8)] {
            assert_eq!(last(region).read_volatile(), value);
            assert_eq!(farpage_region_flush(region), FARPAGE_OK, "{}", message());
            let byte = 1u8;
            let forged = farpage_region_overwrite(region, 0, 1, (&raw const byte).cast());
            assert_eq!(forged, FARPAGE_INVALID);
        }
        for region in [first, writer, second] {
            assert_eq!(farpage_region_unmap(region), FARPAGE_OK, "{}", message());
        }
    }
    drop(runtime);
    server.shutdown();
}

/// Appends its arguments to a list of names, bytes, and whether they are in use: the context.
unsafe extern "C" fn keep(context: *mut c_void, name: *const c_char, bytes: u64, in_use: u32) {
    // SAFETY: the context is what the test passed, and the name is a string.
    let (list, name) = unsafe {
        (
            &mut *context.cast::<Vec<(String, bool, u32)>>(),
            CStr::from_ptr(name),
        )
    };
    list.push((name.to_string_lossy().into_owned(), bytes > 0, in_use));
}

#[test]
fn names_are_listed_and_removed() {
    let server = serve("tcp://127.0.0.1:0");
    let runtime = Runtime::new(Some(&server.endpoints()[0].to_string())).expect("a runtime");
    let list = || {
        let mut names: Vec<(String, bool, u32)> = Vec::new();
        // SAFETY: all pointers are good.
        let code =
            unsafe { farpage_names(runtime.0, Some(keep), ptr::from_mut(&mut names).cast()) };
        assert_eq!(code, FARPAGE_OK, "{}", message());
        names
    };
    assert_eq!(list(), []);
    let mut options: farpage_region_options = blank();
    options.name = c"listed".as_ptr();
    let region = runtime.map(PAGE, &options).expect("a region");
    // SAFETY: mapped until it is unmapped.
    unsafe {
        assert_eq!(farpage_region_flush(region), FARPAGE_OK, "{}", message());
        assert_eq!(list(), [("listed".to_owned(), true, 1)]);
        assert_eq!(runtime.map(PAGE, &options), Err(FARPAGE_IN_USE));
        assert_eq!(
            farpage_name_remove(runtime.0, c"listed".as_ptr()),
            FARPAGE_IN_USE
        );
        assert_eq!(farpage_region_unmap(region), FARPAGE_OK, "{}", message());
        assert_eq!(list(), [("listed".to_owned(), true, 0)]);
        // Another region of that name is refused at once, or replaces the first.
        assert_eq!(runtime.map(PAGE, &options), Err(FARPAGE_EXISTS));
        assert_said("open it");
        options.replace = 1;
        let region = runtime.map(2 * PAGE, &options).expect("it replaces");
        assert_eq!(farpage_region_unmap(region), FARPAGE_OK, "{}", message());
        assert_eq!(
            farpage_name_remove(runtime.0, c"listed".as_ptr()),
            FARPAGE_OK
        );
        assert_eq!(
            farpage_name_remove(runtime.0, c"listed".as_ptr()),
            FARPAGE_NOT_FOUND
        );
        assert_eq!(
            farpage_names(runtime.0, None, ptr::null_mut()),
            FARPAGE_INVALID
        );
    }
    assert_eq!(list(), []);
}
