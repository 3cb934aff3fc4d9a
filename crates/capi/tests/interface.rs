//! The functions of `farpage.h` with wrong arguments, failing stores, and names.
//!
//! The rule it keeps: whatever is passed, short of a wild pointer, the result is a code and a
//! message.

#[path = "interface/codecs.rs"]
mod codecs;
mod common;
#[path = "interface/names.rs"]
mod names;

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    fs::File,
    io::Read,
    mem, ptr, slice,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

use common::{blank, serve};
use farpage_capi::*;
use farpage_testkit::wait_until;
use nix::{
    sys::wait::{WaitStatus, waitpid},
    unistd::{ForkResult, fork},
};

const PAGE: usize = 4096;

fn message() -> String {
    // SAFETY: the text stays as it is, since nothing fails in this thread meanwhile.
    let text = unsafe { CStr::from_ptr(farpage_error_message()) };
    text.to_str().expect("errors are UTF-8").to_owned()
}

/// Asserts that the last message contains `part`.
#[track_caller]
fn assert_said(part: &str) {
    let said = message();
    assert!(said.contains(part), "{said}");
}

/// A runtime of this process.
struct Runtime(*mut farpage_runtime);

impl Runtime {
    fn new(servers: Option<&str>) -> Result<Runtime, farpage_code> {
        let servers = servers.map(|servers| CString::new(servers).expect("no zero bytes"));
        let mut options: farpage_runtime_options = blank();
        options.servers = servers.as_ref().map_or(ptr::null(), |it| it.as_ptr());
        options.budget_bytes = 64 * PAGE as u64;
        options.page_bytes = PAGE as u64;
        options.deadline_seconds = 2.0;
        let mut runtime = ptr::null_mut();
        // SAFETY: all pointers are good.
        match unsafe { farpage_runtime_new(&options, &mut runtime) } {
            FARPAGE_OK => Ok(Runtime(runtime)),
            code => Err(code),
        }
    }

    fn map(
        &self,
        bytes: usize,
        options: &farpage_region_options,
    ) -> Result<*mut farpage_region, farpage_code> {
        let mut region = ptr::null_mut();
        // SAFETY: all pointers are good.
        match unsafe { farpage_region_map(self.0, bytes as u64, options, &mut region) } {
            FARPAGE_OK => Ok(region),
            code => {
                assert!(region.is_null(), "a failure leaves null");
                Err(code)
            }
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // SAFETY: made by `new`.
        unsafe { farpage_runtime_free(self.0) };
    }
}

/// A store in this process's memory. The context of the C store is a `Pages`.
#[derive(Default)]
struct Pages {
    fails: AtomicBool,
    writes: AtomicUsize,
    releases: AtomicUsize,
}

impl Pages {
    fn store(&self) -> farpage_store {
        let mut store: farpage_store = blank();
        store.context = ptr::from_ref(self).cast_mut().cast();
        store.read = Some(read);
        store.write = Some(write);
        store.release = Some(release);
        store.name = c"a store".as_ptr();
        store
    }

    /// Waits for the release, which may come a moment after the call that ends the region.
    fn wait_for_release(&self) {
        wait_until("the store is released", || {
            self.releases.load(Ordering::SeqCst) > 0
        });
        assert_eq!(self.releases.load(Ordering::SeqCst), 1);
    }
}

/// Makes a runtime without servers, and the options of a region with a store, whose context is the
/// pages. Pages and store have to outlive the region.
fn stored() -> (
    Runtime,
    Box<Pages>,
    Box<farpage_store>,
    farpage_region_options,
) {
    let runtime = Runtime::new(None).expect("a runtime without servers");
    let pages = Box::<Pages>::default();
    let store = Box::new(pages.store());
    let mut options: farpage_region_options = blank();
    options.store = &*store;
    (runtime, pages, store, options)
}

unsafe extern "C" fn read(_: *mut c_void, offset: u64, buffer: *mut c_void, bytes: usize) -> c_int {
    // SAFETY: the buffer is ours for the call.
    let buffer = unsafe { slice::from_raw_parts_mut(buffer.cast::<u8>(), bytes) };
    for (page, bytes) in buffer.chunks_mut(PAGE).enumerate() {
        bytes.fill(1 + (offset as usize / PAGE + page) as u8);
    }
    0
}

unsafe extern "C" fn write(context: *mut c_void, _: u64, _: *const c_void, _: usize) -> c_int {
    // SAFETY: the context is what `store` put there.
    let pages = unsafe { &*context.cast::<Pages>() };
    pages.writes.fetch_add(1, Ordering::SeqCst);
    if pages.fails.load(Ordering::SeqCst) {
        28
    } else {
        0
    }
}

unsafe extern "C" fn release(context: *mut c_void) {
    // SAFETY: as above.
    unsafe { &*context.cast::<Pages>() }
        .releases
        .fetch_add(1, Ordering::SeqCst);
}

#[test]
fn null_is_an_error_everywhere_and_freeing_it_is_none() {
    // SAFETY: null is what these functions check for.
    unsafe {
        assert_eq!(
            farpage_runtime_new(ptr::null(), ptr::null_mut()),
            FARPAGE_INVALID
        );
        let mut region = ptr::null_mut();
        assert_eq!(
            farpage_region_map(ptr::null(), 1, ptr::null(), &mut region),
            FARPAGE_INVALID
        );
        assert_eq!(message(), "no runtime: it is null");
        assert_eq!(
            farpage_region_open(ptr::null(), ptr::null(), &mut region),
            FARPAGE_INVALID
        );
        assert_eq!(farpage_region_flush(ptr::null()), FARPAGE_INVALID);
        assert_eq!(farpage_region_vacate(ptr::null_mut()), FARPAGE_INVALID);
        let split = farpage_region_split(&raw mut region, 0, &raw mut region);
        assert_eq!(split, FARPAGE_INVALID);
        assert_eq!(farpage_region_prefetch(ptr::null(), 0, 0), FARPAGE_INVALID);
        assert_eq!(message(), "no region: it is null");
        assert!(farpage_region_address(ptr::null()).is_null());
        assert_eq!(farpage_region_bytes(ptr::null()), 0);
        assert_eq!(
            farpage_runtime_stats(ptr::null(), ptr::null_mut(), 8),
            FARPAGE_INVALID
        );
        assert_eq!(farpage_region_unmap(ptr::null_mut()), FARPAGE_OK);
        assert_eq!(farpage_region_discard(ptr::null_mut()), FARPAGE_OK);
        farpage_runtime_free(ptr::null_mut());
    }
}

#[test]
fn options_of_older_and_newer_headers_are_understood() {
    let (runtime, _pages, _store, mut options) = stored();

    let mut newer = [0u8; 256];
    // SAFETY: the array is larger than the struct, and begins with it.
    unsafe {
        ptr::from_ref(&options)
            .cast::<u8>()
            .copy_to(newer.as_mut_ptr(), mem::size_of_val(&options))
    };
    newer[..8].copy_from_slice(&256usize.to_ne_bytes());
    let map = |newer: &[u8; 256]| {
        let mut region = ptr::null_mut();
        // SAFETY: as above.
        let code = unsafe {
            farpage_region_map(runtime.0, PAGE as u64, newer.as_ptr().cast(), &mut region)
        };
        // SAFETY: null, or mapped just now.
        assert_eq!(unsafe { farpage_region_unmap(region) }, FARPAGE_OK);
        code
    };
    assert_eq!(map(&newer), FARPAGE_OK);
    newer[255] = 1;
    assert_eq!(map(&newer), FARPAGE_INVALID);
    assert_said("older than the farpage.h");

    // An older header ended before `store`: without that field, the region needs a server.
    options.struct_bytes = mem::offset_of!(farpage_region_options, store);
    assert_eq!(runtime.map(PAGE, &options), Err(FARPAGE_INVALID));
    assert_said("no server");
    options.struct_bytes = 0;
    assert_eq!(runtime.map(PAGE, &options), Err(FARPAGE_INVALID));
    assert_said("struct_bytes");
}

#[test]
fn region_whose_store_fails_stays_until_it_is_discarded() {
    let (runtime, pages, _store, options) = stored();
    let region = runtime.map(3 * PAGE, &options).expect("a region");
    // SAFETY: the region is mapped until it is discarded.
    unsafe {
        let bytes = farpage_region_address(region).cast::<u8>();
        assert_eq!(farpage_region_bytes(region), 3 * PAGE as u64);
        assert_eq!(farpage_region_page_bytes(region), PAGE as u64);
        assert_eq!(bytes.add(2 * PAGE).read_volatile(), 3);
        bytes.write_volatile(9);
        let offset = 2 * PAGE as u64;
        assert_eq!(
            farpage_region_advise(region, offset, 1, FARPAGE_ADVICE_DISCARD),
            FARPAGE_OK
        );
        assert_eq!(bytes.add(2 * PAGE).read_volatile(), 0);
        assert_eq!(bytes.read_volatile(), 9);
        pages.fails.store(true, Ordering::SeqCst);
        assert_eq!(farpage_region_flush(region), FARPAGE_PAGES);
        assert_said("a store");
        assert_eq!(farpage_region_unmap(region), FARPAGE_PAGES);
        assert_eq!(bytes.read_volatile(), 9);
        assert_eq!(
            farpage_region_advise(region, PAGE as u64, 3 * PAGE as u64, FARPAGE_ADVICE_NORMAL),
            FARPAGE_INVALID
        );
        assert_eq!(
            farpage_region_advise(region, 0, 1, FARPAGE_ADVICE_ZERO_COPY),
            FARPAGE_OK
        );
        assert_eq!(farpage_region_advise(region, 0, 1, 99), FARPAGE_INVALID);
        assert_eq!(
            farpage_region_prefetch(region, u64::MAX, 2),
            FARPAGE_INVALID
        );
        assert_eq!(pages.releases.load(Ordering::SeqCst), 0);
        assert_eq!(farpage_region_discard(region), FARPAGE_OK);
    }
    pages.wait_for_release();
}

#[test]
fn store_of_a_region_that_cannot_be_mapped_is_released() {
    let (runtime, pages, _store, mut options) = stored();
    options.page_bytes = 5000;
    assert_eq!(runtime.map(PAGE, &options), Err(FARPAGE_INVALID));
    pages.wait_for_release();

    let pages = Pages::default();
    let mut store = pages.store();
    store.write = None;
    options.store = &store;
    options.page_bytes = 0;
    assert_eq!(runtime.map(PAGE, &options), Err(FARPAGE_INVALID));
    pages.wait_for_release();
    assert_eq!(runtime.map(0, &options), Err(FARPAGE_INVALID));
    assert_eq!(runtime.map(1 << 60, &blank()), Err(FARPAGE_NO_MEMORY));
}

#[test]
fn read_only_region_cannot_be_written_and_goes_without_a_word() {
    let runtime = Runtime::new(None).expect("a runtime without servers");
    let pages = Pages::default();
    let mut store = pages.store();
    store.write = None;
    let mut options: farpage_region_options = blank();
    options.read_only = 1;
    assert_eq!(runtime.map(PAGE, &options), Err(FARPAGE_INVALID));
    assert_eq!(message(), "a read-only region needs a store");
    options.store = &store;
    let region = runtime.map(PAGE, &options).expect("a region");
    // SAFETY: mapped until it is unmapped.
    unsafe {
        let bytes = farpage_region_address(region).cast::<u8>();
        assert_eq!(bytes.read_volatile(), 1);
        assert!(!can_write(bytes));
        assert_eq!(bytes.read_volatile(), 1);
        assert_eq!(farpage_region_flush(region), FARPAGE_OK);
        assert_eq!(farpage_region_unmap(region), FARPAGE_OK);
    }
    assert_eq!(pages.writes.load(Ordering::SeqCst), 0);
    pages.wait_for_release();
}

/// True if `byte` is writable; it becomes zero. A system call tells this without a signal.
fn can_write(byte: *mut u8) -> bool {
    let mut zeros = File::open("/dev/zero").expect("every system has it");
    // SAFETY: the kernel writes where it may, and looks first whether it may.
    match zeros.read(unsafe { slice::from_raw_parts_mut(byte, 1) }) {
        Ok(1) => true,
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => false,
        other => panic!("{other:?}"),
    }
}

/// Maps memory of the program's own, `pages` long, all bytes `b'x'`.
fn own_memory(pages: usize) -> *mut u8 {
    let (rw, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: a new mapping, which nothing else knows.
    unsafe {
        let start = libc::mmap(ptr::null_mut(), pages * PAGE, rw, flags, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        ptr::write_bytes(start.cast::<u8>(), b'x', pages * PAGE);
        start.cast()
    }
}

#[test]
fn region_at_an_address_replaces_what_is_there_and_nothing_beside_it() {
    let (runtime, pages, _store, mut options) = stored();
    // More than the budget, so that pages come and go; the last page is not whole.
    let (count, bytes) = (100, 99 * PAGE + 1);
    let before = own_memory(count + 2);
    let (inside, after) = (
        before.wrapping_add(PAGE),
        before.wrapping_add((count + 1) * PAGE),
    );
    let neighbours_are_intact = || {
        [before, after].into_iter().all(|start| {
            // SAFETY: mapped above, and never unmapped.
            let page = unsafe { slice::from_raw_parts(start, PAGE) };
            page.iter().all(|&byte| byte == b'x')
        })
    };

    options.address = inside.wrapping_add(8).cast();
    assert_eq!(runtime.map(bytes, &options), Err(FARPAGE_INVALID));
    assert_said("need a multiple of its page size, 4096");
    options.address = usize::MAX.wrapping_sub(PAGE - 1) as *mut c_void;
    assert_eq!(runtime.map(bytes, &options), Err(FARPAGE_INVALID));

    options.address = inside.cast();
    let region = runtime.map(bytes, &options).expect("a region");
    assert!(neighbours_are_intact());
    // Another region that overlaps this one is refused; this one goes on.
    for taken in [before, inside, inside.wrapping_add((count - 1) * PAGE)] {
        options.address = taken.cast();
        assert_eq!(runtime.map(2 * PAGE, &options), Err(FARPAGE_INVALID));
        assert_said("belong to another region");
    }
    // SAFETY: mapped until it is unmapped.
    unsafe {
        assert_eq!(farpage_region_address(region), inside.cast());
        for _ in 0..2 {
            for page in 0..count {
                let byte = inside.add(page * PAGE);
                assert_eq!(byte.read_volatile(), 1 + page as u8);
                byte.write_volatile(1 + page as u8);
            }
        }
        assert!(can_write(inside));
        assert_eq!(farpage_region_unmap(region), FARPAGE_OK, "{}", message());
    }
    assert!(neighbours_are_intact());
    assert!(!can_write(inside), "the region's addresses are given up");

    // The addresses are free for the next region.
    options.address = inside.cast();
    let region = runtime.map(PAGE, &options).expect("a region");
    // SAFETY: as above.
    assert_eq!(unsafe { farpage_region_unmap(region) }, FARPAGE_OK);
    assert!(neighbours_are_intact());

    // A part of a region gives its place to another region; the rest of it stays.
    let mut region = runtime.map(bytes, &options).expect("a region");
    let mut rest = ptr::null_mut();
    let half = count / 2 * PAGE;
    // SAFETY: mapped until it is unmapped, and touched by this thread alone.
    unsafe {
        for wrong in [0, 8, bytes, bytes + PAGE] {
            let code = farpage_region_split(&raw mut region, wrong as u64, &raw mut rest);
            assert_eq!(code, FARPAGE_INVALID);
            assert_said("need a multiple of its page size");
        }
        inside.add(half).write_volatile(99);
        let writes = pages.writes.load(Ordering::SeqCst);
        let code = farpage_region_split(&raw mut region, half as u64, &raw mut rest);
        assert_eq!(code, FARPAGE_OK, "{}", message());
        assert_eq!(farpage_region_address(region), inside.cast());
        assert_eq!(farpage_region_bytes(region), half as u64);
        assert_eq!(farpage_region_address(rest), inside.add(half).cast());
        assert_eq!(farpage_region_bytes(rest), (bytes - half) as u64);
        // The change went to the store, which computes a page's number from its offset.
        assert_eq!(pages.writes.load(Ordering::SeqCst), writes + 1);
        for page in [0, count / 2 - 1, count / 2, count - 1] {
            let byte = inside.add(page * PAGE).read_volatile();
            assert_eq!(byte, 1 + page as u8);
        }
        assert_eq!(farpage_region_vacate(rest), FARPAGE_OK, "{}", message());
        assert!(!can_write(inside.add(half)) && can_write(inside));
        options.address = inside.add(half).cast();
        let second = runtime.map(PAGE, &options).expect("a region");
        assert_eq!(farpage_region_unmap(second), FARPAGE_OK);
        assert_eq!(farpage_region_unmap(region), FARPAGE_OK);
    }
    assert!(neighbours_are_intact());
}

#[test]
fn absurd_sizes_are_refused_with_what_is_possible() {
    let runtime = Runtime::new(None).expect("a runtime without servers");
    let pages = Pages::default();
    let mut store = pages.store();
    store.release = None;
    let mut options: farpage_region_options = blank();
    options.store = &store;
    for (bytes, code) in [
        (0, FARPAGE_INVALID),
        (1 << 47, FARPAGE_NO_MEMORY),
        (1 << 60, FARPAGE_NO_MEMORY),
        (usize::MAX, FARPAGE_NO_MEMORY),
    ] {
        assert_eq!(runtime.map(bytes, &options), Err(code), "{bytes}");
        let said = message();
        assert!(said.contains(&format!("{bytes} bytes")), "{said}");
    }
    for struct_bytes in [0, 7, 4097, usize::MAX] {
        store.struct_bytes = struct_bytes;
        options.store = &store;
        assert_eq!(runtime.map(PAGE, &options), Err(FARPAGE_INVALID));
        let said = message();
        assert!(
            said.contains(&format!("options of {struct_bytes} bytes")),
            "{said}"
        );
        assert!(said.contains("`struct_bytes`"), "{said}");
    }
    // A range that lies beyond the end of any file.
    let mut region = ptr::null_mut();
    // SAFETY: all pointers are good.
    let code = unsafe {
        farpage_region_map_fd(
            runtime.0,
            0,
            u64::MAX - 4095,
            1 << 20,
            ptr::null(),
            &mut region,
        )
    };
    assert_eq!(code, FARPAGE_INVALID);
    assert_said("beyond what a file can hold");
    assert!(region.is_null());
}

#[test]
fn child_of_fork_gets_a_code_and_frees_nothing() {
    let (runtime, pages, _store, options) = stored();
    let region = runtime.map(PAGE, &options).expect("a region");
    // SAFETY: the child calls nothing but these functions, which take no lock that another thread
    // of this process holds, and ends.
    match unsafe { fork() }.expect("a child") {
        // SAFETY: handles that the parent made.
        ForkResult::Child => unsafe {
            let mut other = ptr::null_mut();
            let codes = [
                farpage_region_map(runtime.0, PAGE as u64, &options, &mut other),
                farpage_region_flush(region),
                farpage_region_unmap(region),
                farpage_region_discard(region),
            ];
            farpage_runtime_free(runtime.0);
            libc::_exit(i32::from(codes != [FARPAGE_FORKED; 4]));
        },
        ForkResult::Parent { child } => {
            assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
        }
    }
    // SAFETY: mapped until it is unmapped.
    unsafe {
        assert_eq!(
            farpage_region_address(region).cast::<u8>().read_volatile(),
            1
        );
        assert_eq!(farpage_region_unmap(region), FARPAGE_OK);
    }
    pages.wait_for_release();
}
