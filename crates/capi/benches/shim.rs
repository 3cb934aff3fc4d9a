//! Cost of libumap over farpage itself: the same sweeps over a file in memory, by `umap` and by
//! `FileStore`, in turn.
//!
//! The rule it keeps: both have the same buffer, workers and pages, and the result is a ratio
//! within one run. `cargo bench -p farpage-capi`.
#![expect(
    clippy::unwrap_used,
    reason = "a benchmark that cannot run fails by panicking"
)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::{
    env,
    ffi::{CString, c_int, c_void},
    fs::{self, File},
    mem,
    os::{fd::AsRawFd, unix::ffi::OsStrExt},
    path::Path,
    ptr, slice,
    time::{Duration, Instant},
};

use farpage::{ByteSize, FileStore, RegionOptions, Runtime};

const FILE_BYTES: usize = 256 << 20;
const BUFFER_BYTES: usize = 64 << 20;
const ROUNDS: usize = 15;

type Umap = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;
type Uunmap = unsafe extern "C" fn(*mut c_void, usize) -> c_int;

fn main() {
    // `cargo bench -- FILTER` and `cargo test --benches` pass arguments without a meaning here.
    let page_bytes: usize = env::var("UMAP_PAGESIZE").map_or(65536, |text| text.parse().unwrap());
    let settings = [
        ("UMAP_PAGESIZE", page_bytes),
        ("UMAP_BUFSIZE", BUFFER_BYTES / page_bytes),
        ("UMAP_PAGE_FILLERS", 2),
        ("UMAP_PAGE_EVICTORS", 1),
        ("UMAP_EVICT_HIGH_WATER_THRESHOLD", 95),
        ("UMAP_EVICT_LOW_WATER_THRESHOLD", 90),
    ];
    for (name, value) in settings {
        // SAFETY: no other thread runs yet.
        unsafe { env::set_var(name, value.to_string()) };
    }
    let path = Path::new("/dev/shm").join(format!("farpage-shim-{}", std::process::id()));
    File::create(&path)
        .unwrap()
        .set_len(FILE_BYTES as u64)
        .unwrap();
    let mut shim = Shim::load(&path);
    let mut own = Own::new(&path, page_bytes);

    let mut times = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        let pair = [time(|| shim.sweep()), time(|| own.sweep())];
        // The first round allocates.
        if round > 0 {
            (0..2).for_each(|which| times[which].push(pair[which]));
        }
    }
    fs::remove_file(&path).unwrap();

    let rate = |time: Duration| 2.0 * FILE_BYTES as f64 / time.as_secs_f64() / 1e6;
    println!(
        "pages of {page_bytes} bytes, {} MiB through a buffer of {} MiB, written and read",
        FILE_BYTES >> 20,
        BUFFER_BYTES >> 20
    );
    let [shim, own] = times.map(|mut times| {
        times.sort();
        (times[0], times[times.len() / 2])
    });
    for (name, (best, median)) in [("libumap", shim), ("farpage", own)] {
        println!(
            "{name}: best {:.0} MB/s, median {:.0} MB/s",
            rate(best),
            rate(median)
        );
    }
    let more = |a: Duration, b: Duration| (a.as_secs_f64() / b.as_secs_f64() - 1.0) * 100.0;
    println!(
        "libumap takes {:+.1} % (best), {:+.1} % (median) of farpage's time",
        more(shim.0, own.0),
        more(shim.1, own.1)
    );
}

fn time(sweep: impl FnOnce()) -> Duration {
    let start = Instant::now();
    sweep();
    start.elapsed()
}

/// Writes a word per cache line, then reads them.
fn work(words: &mut [u64], seed: u64) {
    for at in (0..words.len()).step_by(8) {
        words[at] = seed ^ at as u64;
    }
    let wrong = (0..words.len())
        .step_by(8)
        .filter(|&at| words[at] != seed ^ at as u64)
        .count();
    assert_eq!(wrong, 0);
}

struct Shim {
    umap: Umap,
    uunmap: Uunmap,
    file: File,
    seed: u64,
}

impl Shim {
    fn load(path: &Path) -> Shim {
        let library = common::prefix().join("lib/libumap.so");
        let library = CString::new(library.as_os_str().as_bytes()).unwrap();
        // SAFETY: the library's initialisers are ours; the names are those of functions of these
        // types.
        unsafe {
            let handle = libc::dlopen(library.as_ptr(), libc::RTLD_NOW);
            assert!(!handle.is_null(), "{library:?} cannot be loaded");
            let symbol = |name: &std::ffi::CStr| {
                let at = libc::dlsym(handle, name.as_ptr());
                assert!(!at.is_null(), "no {name:?}");
                at
            };
            Shim {
                umap: mem::transmute::<*mut c_void, Umap>(symbol(c"umap")),
                uunmap: mem::transmute::<*mut c_void, Uunmap>(symbol(c"uunmap")),
                file: File::options().read(true).write(true).open(path).unwrap(),
                seed: 1,
            }
        }
    }

    fn sweep(&mut self) {
        self.seed += 2;
        // SAFETY: the region is as long as asked for, aligned, ours, and not used after it is
        // unmapped.
        unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let at = (self.umap)(
                ptr::null_mut(),
                FILE_BYTES,
                protection,
                libc::MAP_PRIVATE,
                self.file.as_raw_fd(),
                0,
            );
            assert_ne!(at, libc::MAP_FAILED);
            work(
                slice::from_raw_parts_mut(at.cast(), FILE_BYTES / 8),
                self.seed,
            );
            assert_eq!((self.uunmap)(at, FILE_BYTES), 0);
        }
    }
}

struct Own<'a> {
    runtime: Runtime,
    path: &'a Path,
    seed: u64,
}

impl Own<'_> {
    fn new(path: &Path, page_bytes: usize) -> Own<'_> {
        let runtime = Runtime::builder()
            .budget(ByteSize(BUFFER_BYTES as u64))
            .page_size(ByteSize(page_bytes as u64))
            .fillers(2)
            .evictors(1)
            .water_marks(0.90, 0.95)
            .build()
            .unwrap();
        Own {
            runtime,
            path,
            seed: 0,
        }
    }

    fn sweep(&mut self) {
        self.seed += 2;
        let store = FileStore::open(self.path, 0, FILE_BYTES as u64).unwrap();
        let mut array = self
            .runtime
            .array_with::<u64>(FILE_BYTES / 8, RegionOptions::new().store(store))
            .unwrap();
        work(&mut array, self.seed);
        array.close().unwrap();
    }
}
