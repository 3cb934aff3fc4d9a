//! [`Runtime`]: memory servers, a budget, and the workers that move pages between them.
//!
//! The rule it keeps: a call that waits for a server, or for a lock that a worker can need, holds
//! signals back ([`SignalGuard`]).

use std::{
    io, mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use bytemuck::Pod;
use bytesize::ByteSize;
use farpage_pager::Pager;
use farpage_signals::SignalGuard;
use farpage_store::{
    BlockingOptions, DrainReport, Element, ElementType, Elements, Layout, PageStore,
};
use farpage_tables::Held;
use farpage_vm::{KernelSpace, sigbus::keep_stack};
use farpage_wire::{Endpoint, control::check_name};

use crate::{
    Arena, BuildError, CreateError, NamedRegion, OpenError, Region, RegionOptions, RemoteArray,
    Session, Stats,
    error::{AddServerError, DrainError, NamesError},
    fork,
    setup::Setup,
};

/// Connections to memory servers, and the threads that move pages between them and regions. Clones
/// share the same runtime; regions keep it alive.
#[derive(Clone, Debug)]
pub struct Runtime {
    pager: Held<Arc<Pager<KernelSpace>>>,
    /// Number of regions without a name that were created.
    unnamed: Arc<AtomicU64>,
    setup: Arc<Setup>,
}

/// Access for which a named region is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opening {
    Read,
    Write,
}

impl Runtime {
    pub(crate) fn new(pager: Held<Arc<Pager<KernelSpace>>>, setup: Setup) -> Runtime {
        fork::attend(&pager);
        Runtime {
            pager,
            unnamed: Arc::default(),
            setup: Arc::new(setup),
        }
    }

    /// Builds a runtime with the options of this one, which a parent has: for memory that a child
    /// made by `fork` gets by itself. Filler threads serve its faults, whoever serves the parent's:
    /// they need no descriptors in the program's table, where other threads of the child may make
    /// some meanwhile. See [`Builder::starts_late`](crate::Builder::starts_late).
    ///
    /// # Errors
    /// See [`BuildError`].
    #[doc(hidden)]
    pub fn of_child(&self, starts_late: bool) -> Result<Runtime, BuildError> {
        let setup = self.setup.for_child(starts_late);
        Ok(Runtime::new(setup.start()?, setup))
    }

    /// Creates an array of `len` zeroed elements on the memory servers.
    ///
    /// # Errors
    /// See [`CreateError`].
    pub fn array<T: Pod>(&self, len: usize) -> Result<RemoteArray<T>, CreateError> {
        self.array_with(len, RegionOptions::new())
    }

    /// Creates a zeroed array of several dimensions, `[planes, rows, columns]` as in C, under a
    /// [name](RegionOptions::name). Codecs that look at neighbours do much better when they know
    /// the shape. [`RemoteArray::shape`] returns it, for example for an ndarray view. For an array
    /// without a name: [`array_with`](Self::array_with) and [`RegionOptions::shape`].
    ///
    /// ```no_run
    /// use farpage::{Codec, Runtime, ZfpMode};
    ///
    /// let runtime = Runtime::builder()
    ///     .server("shm:///run/farpage.sock")
    ///     .codec(Codec::zfp(ZfpMode::Accuracy(1e-6)))
    ///     .build()?;
    /// let mut u = runtime.array_nd::<f64>("u", [512, 512, 64])?;
    /// u[0] = 1.0;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// See [`CreateError`].
    pub fn array_nd<T: Pod>(
        &self,
        name: impl Into<String>,
        shape: impl AsRef<[usize]>,
    ) -> Result<RemoteArray<T>, CreateError> {
        let shape = shape.as_ref();
        let len = (shape.iter()).try_fold(1usize, |len, &side| len.checked_mul(side));
        let len = len.ok_or(CreateError::TooLarge {
            len: usize::MAX,
            element_bytes: mem::size_of::<T>(),
        })?;
        self.array_with(len, RegionOptions::new().name(name).shape(shape))
    }

    /// Creates an array of `len` elements: zeroed, or as its [store](RegionOptions::store) holds
    /// them.
    ///
    /// # Errors
    /// See [`CreateError`].
    pub fn array_with<T: Pod>(
        &self,
        len: usize,
        options: RegionOptions,
    ) -> Result<RemoteArray<T>, CreateError> {
        let element_bytes = mem::size_of::<T>();
        let bytes = len
            .checked_mul(element_bytes)
            .filter(|&bytes| bytes < isize::MAX as usize);
        let bytes = bytes.ok_or(CreateError::TooLarge { len, element_bytes })?;
        let shaped = (options.shape.iter()).try_fold(1usize, |len, &side| len.checked_mul(side));
        if !options.shape.is_empty() && shaped != Some(len) {
            let shape = options.shape;
            return Err(CreateError::Shape { shape, len });
        }
        // A region has at least one byte; an empty array just does not use it.
        let layout = Layout::new(Element::of::<T>(), sides(&options.shape));
        let layout = layout.elements(Elements::new::<T>(len));
        let region = self.create(bytes.max(1), options, layout)?;
        Ok(RemoteArray::new(region, len))
    }

    /// Opens the array that was published under `name`, to read and write it. No other program can
    /// do so until it is closed; any number can [read](Self::open_array_to_read) the published
    /// version.
    ///
    /// `T` must be the type that the array was created with: the same number type, or, for other
    /// types, one of the same size and alignment. A region that was created as bytes opens as any
    /// type whose size divides its length. [`open_region`](Self::open_region) opens each array as
    /// bytes; an array without elements is one byte there.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_array<T: Pod>(&self, name: &str) -> Result<RemoteArray<T>, OpenError> {
        self.array_of(name, Opening::Write)
    }

    /// Opens the array that is published under `name` now, to read it. Any number of programs can
    /// at a time, also while another one has it open for writing and publishes it anew, or removes
    /// it. The opened array never changes: [`RemoteArray::close`] and open it again to see the
    /// newest version. It is [read-only](RegionOptions::read_only).
    ///
    /// A version that is open takes memory on the servers beside the newer ones. Over a network, a
    /// program loses its version if the server hears nothing of the program for longer than the
    /// lease. Absent pages cannot be brought in then, and touching one raises SIGBUS.
    ///
    /// ```no_run
    /// use farpage::Runtime;
    ///
    /// let runtime = Runtime::builder().server("shm:///run/farpage.sock").build()?;
    /// let weights = runtime.open_array_to_read::<f64>("weights")?;
    /// println!("{}", weights.iter().sum::<f64>());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// See [`OpenError`]. An array that another program has open is no error.
    pub fn open_array_to_read<T: Pod>(&self, name: &str) -> Result<RemoteArray<T>, OpenError> {
        self.array_of(name, Opening::Read)
    }

    fn array_of<T: Pod>(&self, name: &str, opening: Opening) -> Result<RemoteArray<T>, OpenError> {
        let pages = self.open("array", name, opening)?;
        let asked = ElementType::of::<T>();
        let elements = pages
            .get()
            .layout()
            .and_then(|layout| layout.elements.clone());
        let (len, stored) = match elements {
            Some(elements) if elements.of == asked => (Some(elements.len), elements.to_string()),
            Some(elements) => (None, elements.to_string()),
            None => {
                let (bytes, one) = (pages.get().bytes(), asked.bytes);
                let len = bytes.is_multiple_of(one).then(|| bytes / one);
                (len, format!("{bytes} bytes"))
            }
        };
        let Some(len) = len else {
            return Err(OpenError::Type {
                name: name.to_owned(),
                stored,
                asked: asked.to_string(),
            });
        };
        Ok(RemoteArray::new(
            self.map_opened(name, pages, opening)?,
            len as usize,
        ))
    }

    /// Returns the arrays and regions that this user has published under names on the runtime's
    /// servers, ordered by name. Names belong to the user's [key](crate::Builder::key_file).
    ///
    /// # Errors
    /// See [`NamesError`].
    pub fn names(&self) -> Result<Vec<NamedRegion>, NamesError> {
        let _signals = SignalGuard::new();
        self.pager.with(|pager| pager.cluster().names())
    }

    /// Removes the array or region that this user has published under `name`, and frees its memory.
    /// Programs that have it open for reading keep it until they close it.
    ///
    /// # Errors
    /// [`NamesError::NotFound`] if `name` does not exist, [`NamesError::Held`] or
    /// [`NamesError::InUse`] if this runtime or another program has it open for writing,
    /// [`NamesError::Remove`] if a server cannot be reached.
    pub fn remove(&self, name: &str) -> Result<(), NamesError> {
        let _signals = SignalGuard::new();
        self.pager.with(|pager| pager.cluster().remove(name))
    }

    /// Creates a region of `bytes` zeroed bytes on the memory servers.
    ///
    /// # Errors
    /// See [`CreateError`].
    pub fn region(&self, bytes: usize) -> Result<Region, CreateError> {
        self.region_with(bytes, RegionOptions::new())
    }

    /// Creates a region of `bytes` bytes. Bytes have no number type, so a codec for numbers has to
    /// name one (`zfp:accuracy=1e-6,f32`, `shuffle4`), or the region its [element
    /// type](RegionOptions::element_type).
    ///
    /// # Errors
    /// See [`CreateError`].
    pub fn region_with(&self, bytes: usize, options: RegionOptions) -> Result<Region, CreateError> {
        let layout = match &options.element_type {
            Some(of) => {
                let elements = Elements::of(bytes as u64 / of.bytes.max(1), of.clone());
                Layout::new(Element::of_type(of), sides(&options.shape)).elements(elements)
            }
            None => Layout::new(Element::of::<u8>(), sides(&options.shape)),
        };
        self.create(bytes, options, layout)
    }

    fn create(
        &self,
        bytes: usize,
        mut options: RegionOptions,
        layout: Layout,
    ) -> Result<Region, CreateError> {
        if self.pager.get().is_parents() {
            return Err(CreateError::Forked);
        }
        let _signals = SignalGuard::new();
        if let Some(name) = &options.remote.name {
            check_name(name)?;
        }
        let label = self.label(&options, bytes as u64, layout.elements.as_ref());
        options.remote.layout = layout;
        options.take_defaults(&self.setup.regions);
        let page_bytes = (options.page_bytes).unwrap_or_else(|| default_page_bytes(bytes));
        let read_only = options.paging.read_only;
        let mapped = self.pager.with(|pager| {
            if options.remote.name.is_some() {
                fork::settle(pager);
            }
            let cluster = pager.cluster();
            let pages = match options.store.clone() {
                Some(store) => PageStore::blocking(
                    cluster,
                    label,
                    bytes as u64,
                    page_bytes,
                    store,
                    &BlockingOptions::default(),
                )?,
                None => {
                    let remote = &options.remote;
                    PageStore::remote(cluster, label, bytes as u64, page_bytes, remote)?
                }
            };
            let mapped = pager.map(pages, options.paging)?;
            Ok::<_, CreateError>(Held::new(mapped))
        })?;
        let name = options.remote.name;
        let keeps = name.is_some() || options.store.is_some();
        Ok(Region::new(mapped, name, keeps, read_only)?)
    }

    /// Creates an arena of `capacity_bytes`, rounded up to whole pages. All of it is reserved at
    /// the servers, so that no eviction fails for lack of remote memory.
    ///
    /// # Errors
    /// See [`CreateError`].
    pub fn arena(&self, capacity_bytes: usize) -> Result<Arena, CreateError> {
        self.arena_with(capacity_bytes, RegionOptions::new())
    }

    /// Creates an [`arena`](Self::arena) with options. With
    /// [`Reserve::OnDemand`](crate::Reserve::OnDemand) the servers grant memory as pages are
    /// written back, and get freed memory back. When the servers are full, pages stay in local
    /// memory. When local memory is full, too, a thread that touches an absent page waits until the
    /// deadline, which raises SIGBUS; a line names the full server. Options that give a region
    /// other contents than zeros (`name`, `store`, `read_only`), or a `shape`, are not accepted.
    ///
    /// # Errors
    /// See [`CreateError`].
    ///
    /// # Panics
    /// If `options` has a name, a store, `read_only` or a shape of several dimensions.
    pub fn arena_with(
        &self,
        capacity_bytes: usize,
        options: RegionOptions,
    ) -> Result<Arena, CreateError> {
        assert!(
            options.remote.name.is_none()
                && options.store.is_none()
                && !options.paging.read_only
                && options.shape.len() <= 1,
            "an arena has no name, no store of its own and no shape, and is not read-only"
        );
        let page_bytes = (options.page_bytes.or(self.setup.regions.page_bytes))
            .unwrap_or_else(|| default_page_bytes(capacity_bytes));
        let whole = capacity_bytes.max(1).checked_next_multiple_of(page_bytes);
        let bytes = whole.ok_or(CreateError::TooLarge {
            len: capacity_bytes,
            element_bytes: 1,
        })?;
        if options.paging.ordinary {
            // Paging begins on such a stack, also when all mappings are used up. What cannot be
            // mapped now is missing below, too.
            let _ = keep_stack();
        }
        let region = self.region_with(bytes, options)?;
        Ok(Arena::new(region))
    }

    /// Opens the region that was published under `name`, to read and write it. No other program can
    /// do so until it is closed; any number can [read](Self::open_region_to_read) the published
    /// version.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_region(&self, name: &str) -> Result<Region, OpenError> {
        self.region_of(name, Opening::Write)
    }

    /// Opens the region that is published under `name` now, to read it: see
    /// [`open_array_to_read`](Self::open_array_to_read).
    ///
    /// # Errors
    /// See [`OpenError`]. A region that another program has open is no error.
    pub fn open_region_to_read(&self, name: &str) -> Result<Region, OpenError> {
        self.region_of(name, Opening::Read)
    }

    fn region_of(&self, name: &str, opening: Opening) -> Result<Region, OpenError> {
        self.map_opened(name, self.open("region", name, opening)?, opening)
    }

    fn open(
        &self,
        kind: &str,
        name: &str,
        opening: Opening,
    ) -> Result<Held<Arc<PageStore>>, OpenError> {
        if self.pager.get().is_parents() {
            return Err(OpenError::Forked);
        }
        let _signals = SignalGuard::new();
        let label = format!("{kind} `{name}`");
        let pages = self.pager.with(|pager| {
            fork::settle(pager);
            let pages = match opening {
                Opening::Write => PageStore::open(pager.cluster(), label, name),
                Opening::Read => PageStore::open_to_read(pager.cluster(), label, name),
            };
            pages.map(Held::new)
        });
        Ok(pages?)
    }

    fn map_opened(
        &self,
        name: &str,
        pages: Held<Arc<PageStore>>,
        opening: Opening,
    ) -> Result<Region, OpenError> {
        let _signals = SignalGuard::new();
        let reads = opening == Opening::Read;
        let mut options = RegionOptions::new();
        options.paging.read_only = reads;
        options.take_defaults(&self.setup.regions);
        let pages = pages.get().clone();
        let mapped = self.pager.with(|pager| {
            let mapped = pager.map(pages, options.paging);
            mapped.map(Held::new)
        })?;
        // A region that is only read is never published, so it needs no name.
        let name = (!reads).then(|| name.to_owned());
        Ok(Region::new(mapped, name, !reads, reads)?)
    }

    /// Returns the text that stands for a new region in messages.
    fn label(&self, options: &RegionOptions, bytes: u64, elements: Option<&Elements>) -> String {
        let kind = elements.map_or("region", |_| "array");
        if let Some(name) = &options.remote.name {
            return format!("{kind} `{name}`");
        }
        let number = 1 + self.unnamed.fetch_add(1, Ordering::Relaxed);
        let of = elements.map_or(String::new(), |elements| format!("{}, ", elements.of));
        format!("{kind} {number} ({of}{})", ByteSize(bytes))
    }

    /// Adds the memory server at `server` (an endpoint such as `tcp://10.0.0.5:7400`), which takes
    /// part in what is granted from now on. Existing arrays stay where they are, but for copies
    /// that lacked a server. Does nothing if the server is one of the runtime's and answers, except
    /// that it ends a [drain](Self::drain_server) of it. A server that was started anew at the
    /// address of one that has ended is a new one. Waits for the server, at most for the deadline.
    ///
    /// ```no_run
    /// use farpage::Runtime;
    ///
    /// let runtime = Runtime::builder().server("tcp://10.0.0.4:7400").build()?;
    /// // The machine 10.0.0.4 is to be switched off: the program moves house.
    /// runtime.add_server("tcp://10.0.0.5:7400")?;
    /// let report = runtime.drain_server("tcp://10.0.0.4:7400")?;
    /// println!("{} bytes moved", report.moved_bytes);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// See [`AddServerError`]. Nothing has changed then.
    pub fn add_server(&self, server: &str) -> Result<(), AddServerError> {
        if self.pager.get().is_parents() {
            return Err(AddServerError::Forked);
        }
        let endpoint: Endpoint = server.parse()?;
        let _signals = SignalGuard::new();
        self.pager.with(|pager| {
            let connect = || Session::connect(&endpoint, &self.setup.session);
            pager.cluster().add_server(&endpoint, connect)?;
            pager.meet_servers();
            Ok(())
        })
    }

    /// Empties the memory server at `server`, one of the runtime's (for `auto://`, as
    /// [`sessions`](Self::sessions) name it): moves all that unnamed arrays,
    /// regions and arenas have there to the other servers, at up to 256 MiB/s, while the program
    /// uses them. Waits until the server holds nothing of them, so that it can be ended. Nothing
    /// new is put there from the first moment on, until it is [added](Self::add_server) again. Does
    /// nothing if the server is empty. `stats().store.draining_bytes` says how much is left.
    ///
    /// Named arrays stay where they are: [`DrainReport::named_bytes`] says how much. For an array
    /// with [copies](crate::Redundancy), its copy moves to a server that has none of it.
    ///
    /// # Errors
    /// See [`DrainError`]. What was moved stays moved.
    pub fn drain_server(&self, server: &str) -> Result<DrainReport, DrainError> {
        if self.pager.get().is_parents() {
            return Err(DrainError::Forked);
        }
        let endpoint: Endpoint = server.parse()?;
        let begin = || {
            let _signals = SignalGuard::new();
            (self.pager).with(|pager| pager.cluster().begin_drain(&endpoint).map(Held::new))
        };
        let drain = begin()?;
        // Signals come in meanwhile: the wait is as long as the server has memory.
        drain.get().wait()?;
        let _signals = SignalGuard::new();
        Ok(drain.get().report())
    }

    /// Changes the budget while the program runs, to that of [`Builder::budget`] at most. Pages
    /// beyond a smaller budget leave in the background. Returns their bytes: call again until it
    /// returns 0. Pinned pages do not leave. The read-ahead of an array follows from the budget at
    /// its creation. In a child made by `fork`: does nothing.
    ///
    /// [`Builder::budget`]: crate::Builder::budget
    pub fn set_budget(&self, budget: ByteSize) -> ByteSize {
        if self.pager.get().is_parents() {
            return ByteSize(0);
        }
        ByteSize(self.pager.with(|pager| pager.set_budget(budget.as_u64())))
    }

    /// Starts the workers' threads, unless they are there (see
    /// [`Builder::starts_late`](crate::Builder::starts_late)). In a child made by `fork`: does
    /// nothing.
    ///
    /// # Errors
    /// The operating system's. The next call starts what is missing.
    #[doc(hidden)]
    pub fn begin_work(&self) -> io::Result<()> {
        if self.pager.get().is_parents() {
            return Ok(());
        }
        self.pager.with(|pager| pager.begin_work())
    }

    /// Returns the number of threads that [`begin_work`](Self::begin_work) would start.
    #[doc(hidden)]
    pub fn threads_to_come(&self) -> usize {
        self.pager.get().threads_to_come()
    }

    /// Returns figures since the runtime was built. In a child made by `fork`: none.
    pub fn stats(&self) -> Stats {
        if self.pager.get().is_parents() {
            return Stats::default();
        }
        let _signals = SignalGuard::new();
        let cluster = self.pager.get().cluster();
        Stats::new(
            self.pager.get().stats(),
            cluster.stats(),
            cluster.registered_memory(),
            self.sessions()
                .iter()
                .filter(|session| session.fallback().is_some())
                .count(),
        )
    }

    /// Returns the connections to the memory servers, for their figures and names. Their channels
    /// are for the runtime's threads alone, which have the descriptors. In a child made by `fork`:
    /// none, since the parent goes on using the connections.
    pub fn sessions(&self) -> &[Arc<Session>] {
        if self.pager.get().is_parents() {
            return &[];
        }
        self.pager.get().cluster().sessions()
    }
}

/// Returns the default page size of a region of `bytes` bytes: 64 KiB, and less for a region of
/// less than `PAGES_MIN` such pages, since a page moves and is reserved whole.
fn default_page_bytes(bytes: usize) -> usize {
    // Rounding up larger `bytes` may overflow, and would change nothing.
    (bytes.min(PAGES_MIN * (64 << 10)).next_power_of_two() / PAGES_MIN).clamp(4 << 10, 64 << 10)
}

/// Number of pages that a small array has at least, unless that takes pages below 4 KiB. Up to a
/// sixteenth of the array then moves unasked, which is little beside the cost of a request.
const PAGES_MIN: usize = 16;

fn sides(shape: &[usize]) -> Vec<u64> {
    shape.iter().map(|&side| side as u64).collect()
}
