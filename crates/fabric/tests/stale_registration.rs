//! Registrations that are cached by address go stale: memory that is freed and mapped again has the
//! old address and other pages.
//!
//! The rule: the adapter here is a model of real ones. When memory is registered it looks up the
//! physical pages there, once, and from then on it moves bytes to and from these. Physical memory
//! is a memfd that the adapter maps for itself. Where there is an RDMA device, the same is shown
//! with it.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which fail by panicking"
)]

use std::{
    collections::HashMap,
    fs::File,
    io,
    num::NonZeroUsize,
    ptr::NonNull,
    slice,
    sync::{Arc, Mutex},
};

use farpage_fabric::regmem::{
    Access, DomainId, Keys, MemoryRegistration, RegBuf, RegPool, RegPoolOptions, Registrar,
};
use nix::sys::{
    memfd::{MFdFlags, memfd_create},
    mman::{MapFlags, ProtFlags, mmap, mmap_anonymous},
};

const PAGE_BYTES: usize = 4096;
const PAGES: usize = 4;

/// Physical memory, the pages at each address, and the adapter's registrations.
#[derive(Debug)]
struct Machine {
    memory: File,
    /// Address of the adapter's own view of physical memory.
    bus: usize,
    /// Start of the program's addresses.
    addresses: usize,
    mapped: Mutex<HashMap<usize, usize>>,
    registered: Mutex<Vec<usize>>,
    domain: DomainId,
}

/// A page of the program.
struct Page {
    machine: Arc<Machine>,
    at: usize,
}

/// Maps physical pages, at an address of the machine's own range or anywhere.
fn map(memory: &File, at: Option<usize>, pages: usize, first: usize) -> usize {
    let length = NonZeroUsize::new(pages * PAGE_BYTES).unwrap();
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let mut flags = MapFlags::MAP_SHARED;
    flags.set(MapFlags::MAP_FIXED, at.is_some());
    let (at, offset) = (at.and_then(NonZeroUsize::new), (first * PAGE_BYTES) as i64);
    // SAFETY: it replaces nothing, or an address that the machine has reserved and that nobody
    // uses.
    let mapped = unsafe { mmap(at, length, protection, flags, memory, offset).unwrap() };
    mapped.as_ptr() as usize
}

/// Reserves addresses, or takes them back. No other mapping gets them, whatever other threads map
/// meanwhile.
fn reserve(at: Option<usize>, pages: usize) -> usize {
    let length = NonZeroUsize::new(pages * PAGE_BYTES).unwrap();
    let mut flags = MapFlags::MAP_PRIVATE;
    flags.set(MapFlags::MAP_FIXED, at.is_some());
    let at = at.and_then(NonZeroUsize::new);
    // SAFETY: new addresses, or the mapping of a page that is being dropped.
    let mapped = unsafe { mmap_anonymous(at, length, ProtFlags::PROT_NONE, flags).unwrap() };
    mapped.as_ptr() as usize
}

impl Machine {
    fn new() -> Arc<Self> {
        let memory = File::from(memfd_create(c"physical", MFdFlags::MFD_CLOEXEC).unwrap());
        memory.set_len((PAGES * PAGE_BYTES) as u64).unwrap();
        Arc::new(Self {
            bus: map(&memory, None, PAGES, 0),
            addresses: reserve(None, PAGES),
            memory,
            mapped: Mutex::default(),
            registered: Mutex::default(),
            domain: DomainId::unique(),
        })
    }

    /// Maps a physical page at the program's address with this number.
    fn map(self: &Arc<Self>, number: usize, physical: usize) -> Page {
        let at = map(
            &self.memory,
            Some(self.addresses + number * PAGE_BYTES),
            1,
            physical,
        );
        self.mapped.lock().unwrap().insert(at, physical);
        Page {
            machine: Arc::clone(self),
            at,
        }
    }

    /// Lets the adapter receive. It knows the key, and the pages at the time of the registration.
    fn receive(&self, key: u32, byte: u8) {
        let physical = self.registered.lock().unwrap()[key as usize];
        let at = (self.bus + physical * PAGE_BYTES) as *mut u8;
        // SAFETY: a page of the adapter's own mapping, which nobody unmaps.
        unsafe { at.write_bytes(byte, PAGE_BYTES) };
    }
}

impl Registrar for Machine {
    fn domain(&self) -> DomainId {
        self.domain
    }

    unsafe fn register(
        &self,
        memory: NonNull<[u8]>,
        _access: Access,
    ) -> io::Result<MemoryRegistration> {
        let at = memory.as_ptr().cast::<u8>() as usize;
        let mapped = self
            .mapped
            .lock()
            .map_err(|_| io::Error::other("poisoned"))?;
        let physical = *mapped.get(&at).ok_or(io::ErrorKind::NotFound)?;
        let mut registered = self
            .registered
            .lock()
            .map_err(|_| io::Error::other("poisoned"))?;
        registered.push(physical);
        let key = registered.len() as u32 - 1;
        let keys = Keys {
            lkey: key,
            rkey: key,
        };
        Ok(MemoryRegistration::new(keys, ()))
    }
}

impl AsRef<[u8]> for Page {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: mapped until `self` is dropped; the adapter writes only while the test does not
        // look.
        unsafe { slice::from_raw_parts(self.at as *const u8, PAGE_BYTES) }
    }
}

impl AsMut<[u8]> for Page {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.at as *mut u8, PAGE_BYTES) }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        if let Ok(mut mapped) = self.machine.mapped.lock() {
            mapped.remove(&self.at);
        }
        reserve(Some(self.at), 1);
    }
}

/// A cache that farpage does not have: registrations by address, kept when the memory is freed.
struct ByAddress {
    machine: Arc<Machine>,
    known: HashMap<usize, MemoryRegistration>,
}

impl ByAddress {
    fn look_up(&mut self, page: &Page) -> u32 {
        let register = || {
            let start = NonNull::new(page.at as *mut u8).expect("not address zero");
            let memory = NonNull::slice_from_raw_parts(start, PAGE_BYTES);
            // SAFETY: not kept, which is the mistake; this adapter has its own mapping of the
            // pages.
            unsafe { self.machine.register(memory, Access::Local) }.expect("mapped")
        };
        let registration = self.known.entry(page.at).or_insert_with(register);
        registration.keys().lkey
    }
}

#[test]
fn a_cache_by_address_receives_into_memory_that_was_freed() {
    let machine = Machine::new();
    let mut cache = ByAddress {
        machine: Arc::clone(&machine),
        known: HashMap::new(),
    };
    let first = machine.map(0, 0);
    machine.receive(cache.look_up(&first), 1);
    assert_eq!(first.as_ref(), [1; PAGE_BYTES], "at first all is well");

    drop(first);
    let again = machine.map(0, 1);
    let stranger = machine.map(1, 0);
    machine.receive(cache.look_up(&again), 2);
    assert_eq!(
        again.as_ref(),
        [0; PAGE_BYTES],
        "what was received is not there"
    );
    assert_eq!(
        stranger.as_ref(),
        [2; PAGE_BYTES],
        "it is in somebody else's page"
    );
}

#[test]
fn a_buffer_is_registered_as_long_as_it_is_mapped_and_no_longer() {
    let machine = Machine::new();
    let pool = RegPool::new([Arc::clone(&machine) as _], RegPoolOptions::default());
    let receive = |buf: &RegBuf, byte| {
        let keys = buf.keys(machine.domain).unwrap().expect("its adapter");
        machine.receive(keys.lkey, byte);
    };
    let first = machine.map(0, 0);
    let first = pool.import(first).unwrap();
    receive(&first, 1);
    assert_eq!(first.as_ref(), [1; PAGE_BYTES]);

    // The buffer owns the mapping: the only way to free one is to end the registration as well.
    drop(first);
    let again = pool.import(machine.map(0, 1)).unwrap();
    let stranger = machine.map(1, 0);
    assert_eq!(again.as_ptr() as usize, machine.addresses);
    receive(&again, 2);
    assert_eq!(again.as_ref(), [2; PAGE_BYTES]);
    assert_eq!(
        stranger.as_ref(),
        [1; PAGE_BYTES],
        "nobody else's page is touched"
    );
}

/// A real adapter in place of the model: a connection between two real queue pairs.
#[cfg(feature = "rdma")]
mod rdma {
    use std::{collections::hash_map::Entry, time::Duration};

    use farpage_fabric::{
        Channel, ExtentId, Session, SessionOptions, Verb, server::ServerThread, sim::SimHost,
    };
    use farpage_testkit::{op, transfer};

    use super::*;

    /// A page of the kernel's at an address of our choice.
    struct Mapping(usize);

    impl Mapping {
        /// Maps a page at `at`. No other mapping gets the address meanwhile: [`reserve`] holds it.
        fn new(at: usize) -> Self {
            let length = NonZeroUsize::new(PAGE_BYTES).unwrap();
            let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED;
            // SAFETY: it replaces a page that was reserved and that nobody uses.
            unsafe { mmap_anonymous(NonZeroUsize::new(at), length, protection, flags).unwrap() };
            Self(at)
        }
    }

    impl AsMut<[u8]> for Mapping {
        fn as_mut(&mut self) -> &mut [u8] {
            // SAFETY: mapped until `self` is dropped, and nobody else's.
            unsafe { slice::from_raw_parts_mut(self.0 as *mut u8, PAGE_BYTES) }
        }
    }

    impl Drop for Mapping {
        /// Frees the page, and keeps its address for the next.
        fn drop(&mut self) {
            reserve(Some(self.0), 1);
        }
    }

    /// A cache that farpage does not have, before an adapter that is real.
    #[derive(Debug)]
    struct ByAddress {
        adapter: Arc<dyn Registrar>,
        known: Mutex<HashMap<usize, MemoryRegistration>>,
    }

    impl Registrar for ByAddress {
        fn domain(&self) -> DomainId {
            self.adapter.domain()
        }

        unsafe fn register(
            &self,
            memory: NonNull<[u8]>,
            access: Access,
        ) -> io::Result<MemoryRegistration> {
            let mut known = self.known.lock().unwrap();
            let registration = match known.entry(memory.as_ptr().cast::<u8>() as usize) {
                Entry::Occupied(known) => known.into_mut(),
                // SAFETY: not kept, which is the mistake. The kernel keeps pages that an adapter
                // knows, so that nothing else is harmed.
                Entry::Vacant(new) => new.insert(unsafe { self.adapter.register(memory, access) }?),
            };
            Ok(MemoryRegistration::new(registration.keys(), ()))
        }
    }

    fn one(channel: &mut dyn Channel<RegBuf>, verb: Verb, extent: ExtentId, buf: RegBuf) -> RegBuf {
        transfer(channel, op(verb, extent, 0, buf)).unwrap()
    }

    /// READs 1 into a page, frees it, maps its address again and READs 2 into that, then WRITEs 3
    /// from it. Returns the bytes in the buffer after each READ, and at the server at last. All
    /// operations use buffers of a pool before which `registrar` stands.
    fn received_and_sent(
        registrar: impl FnOnce(Arc<dyn Registrar>) -> Arc<dyn Registrar>,
    ) -> Option<[u8; 3]> {
        let endpoint = farpage_testkit::rdma()?;
        let host = Arc::new(SimHost::new(1 << 20));
        let mut server = ServerThread::start(&endpoint, Arc::clone(&host) as _).unwrap();
        let options = SessionOptions {
            deadline: Duration::from_secs(5),
            ..SessionOptions::default()
        };
        let session = Session::connect(server.endpoint(), &options).unwrap();
        let extent = session.grant(PAGE_BYTES as u64).unwrap().id;
        let memory = host.memory(extent).unwrap();
        let mut channel = session.channel::<RegBuf>().unwrap();
        let pool = RegPool::new([registrar(session.registrar())], RegPoolOptions::default());

        let at = reserve(None, 1);
        let mut fetch = |byte: u8| {
            memory.copy_in(0, &[byte; PAGE_BYTES]).unwrap();
            let mut buf = pool.import(Mapping::new(at)).unwrap();
            assert_eq!(buf.as_ptr() as usize, at);
            buf.as_mut().fill(9);
            one(&mut *channel, Verb::Read, extent, buf)
        };
        let first = all(fetch(1).as_ref());
        let mut buf = fetch(2);
        let second = all(buf.as_ref());
        buf.as_mut().fill(3);
        one(&mut *channel, Verb::Write, extent, buf);
        let mut sent = [0; PAGE_BYTES];
        memory.copy_out(0, &mut sent).unwrap();

        drop((channel, session));
        server.end().unwrap();
        Some([first, second, all(&sent)])
    }

    fn all(bytes: &[u8]) -> u8 {
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "mixed bytes");
        bytes[0]
    }

    #[test]
    fn a_cache_by_address_moves_bytes_of_freed_memory() {
        let found = received_and_sent(|adapter| {
            let known = Mutex::default();
            Arc::new(ByAddress { adapter, known })
        });
        if let Some(found) = found {
            // The second READ has gone to the freed page, nothing has come into the buffer, and
            // that freed page is what was sent.
            assert_eq!(found, [1, 9, 2]);
        }
    }

    #[test]
    fn a_buffer_moves_its_own_bytes() {
        let found = received_and_sent(|adapter| adapter);
        if let Some(found) = found {
            assert_eq!(found, [1, 2, 3]);
        }
    }
}
