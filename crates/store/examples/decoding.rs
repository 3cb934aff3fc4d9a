//! Prints what a page of a dead server costs, which is decoded from the rest of its parity set
//! (3+1): next to a page that is read, and next to three READs at once with their sum and hash by
//! themselves. Four servers, on threads of this process, are reached over tcp.

use std::{
    error::Error,
    sync::Arc,
    time::{Duration, Instant},
};

use farpage_fabric::{
    Channel, Completion, Endpoint, ExtentId, Link, Op, Session, SessionOptions, Verb,
    regmem::{RegBuf, RegPool, RegPoolOptions},
    server::ServerThread,
    sim::SimHost,
};
use farpage_store::{
    Cluster, ClusterOptions, Codec, IoQueue, PageIndex, PageStore, Redundancy, RemoteOptions,
    Reserve,
};
use nix::poll::{PollFd, PollTimeout};
use twox_hash::XxHash3_128;

/// Data extents of a parity set. There is one of parity.
const DATA: usize = 3;
const REGION_BYTES: usize = 32 << 20;
const SAMPLES: usize = 1000;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    println!(
        "{:>10} {:>10} {:>10} {:>10} {:>10} {:>14} {:>14}   (us, medians)",
        "delay us", "page KiB", "read", "decoded", "bare", "decoded/bare", "decoded/read"
    );
    let pages = [4 << 10, 64 << 10];
    let cases = [0, 200].map(|delay_us| pages.map(|page_bytes| (delay_us, page_bytes)));
    for (delay_us, page_bytes) in cases.into_iter().flatten() {
        let mut world = World::new(delay_us, page_bytes)?;
        let read = median((0..SAMPLES).map(|number| world.fill(number)))?;
        world.servers.pop();
        let (mut decoded, mut bare) = (Vec::new(), Vec::new());
        for number in 0.. {
            let (took, is_decoded) = world.is_decoded(number)?;
            if !is_decoded {
                continue;
            }
            decoded.push(Ok(took));
            bare.push(world.bare.read(number));
            if decoded.len() == SAMPLES {
                break;
            }
        }
        let (decoded, bare) = (median(decoded)?, median(bare)?);
        println!(
            "{delay_us:>10} {:>10} {read:>10.1} {decoded:>10.1} {bare:>10.1} {:>14.2} {:>14.2}",
            page_bytes >> 10,
            decoded / bare,
            decoded / read
        );
    }
    Ok(())
}

fn median(times: impl IntoIterator<Item = Result<Duration>>) -> Result<f64> {
    let mut times = times.into_iter().collect::<Result<Vec<_>>>()?;
    times.sort_unstable();
    Ok(times[times.len() / 2].as_secs_f64() * 1e6)
}

/// Sleeps until a descriptor is ready, or until a time.
fn sleep(fds: &mut [PollFd<'_>], until: Option<Instant>) -> Result<()> {
    let left = until.map_or(PollTimeout::NONE, |until| {
        let left = until.saturating_duration_since(Instant::now());
        PollTimeout::try_from(left.as_millis()).unwrap_or(PollTimeout::MAX)
    });
    nix::poll::poll(fds, left)?;
    Ok(())
}

/// Returns a number below `most` that follows no order.
fn shuffled(number: usize, most: usize) -> usize {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % most
}

/// Servers, a region with parity, and READs without the store.
struct World {
    servers: Vec<ServerThread>,
    store: Arc<PageStore>,
    io: IoQueue<usize, Vec<u8>>,
    bare: BareReads,
    page_bytes: usize,
}

impl World {
    /// Starts servers to which each operation takes `delay_us` more than it does.
    fn new(delay_us: u32, page_bytes: usize) -> Result<Self> {
        let link = (delay_us > 0).then(|| Arc::new(Link::new(25.0, delay_us.into())));
        let session_options = SessionOptions {
            link,
            ..SessionOptions::default()
        };
        let endpoint: Endpoint = "tcp://127.0.0.1:0".parse()?;
        let start = |_| ServerThread::start(&endpoint, Arc::new(SimHost::new(1 << 30)));
        let servers = (0..DATA + 1)
            .map(start)
            .collect::<std::result::Result<Vec<_>, _>>()?;
        let connect = |it: &ServerThread| Session::connect(it.endpoint(), &session_options);
        let sessions = servers.iter().map(connect);
        let sessions = sessions.collect::<std::result::Result<Vec<_>, _>>()?;
        let bare = BareReads::new(&servers[..DATA], &session_options, page_bytes)?;
        let options = ClusterOptions {
            seal_after: Duration::ZERO,
            repair_rate: None,
            ..ClusterOptions::default()
        };
        let cluster = Cluster::new(sessions, options);
        let redundancy = Redundancy::Parity {
            data: DATA as u8,
            parity: 1,
        };
        let remote = RemoteOptions {
            codec: Some(Codec::Raw),
            reserve: Reserve::OnDemand,
            redundancy: Some(redundancy),
            ..RemoteOptions::default()
        };
        let bytes = REGION_BYTES as u64;
        let store = PageStore::remote(&cluster, "region", bytes, page_bytes, &remote)?;
        let io = IoQueue::new(&cluster)?;
        let mut world = Self {
            servers,
            store,
            io,
            bare,
            page_bytes,
        };
        for page in 0..world.pages() {
            let bytes = (0..page_bytes).map(|i| (page * 31 + i * i) as u8).collect();
            world
                .io
                .write_back(&world.store, PageIndex(page), bytes, page);
            world.wait()?;
        }
        let began = Instant::now();
        while world.store.stats().sealed_bytes < bytes * 3 / 4 {
            if began.elapsed() > Duration::from_secs(60) {
                return Err("the pages get no parity".into());
            }
            std::thread::yield_now();
        }
        Ok(world)
    }

    fn pages(&self) -> usize {
        REGION_BYTES / self.page_bytes
    }

    /// Waits for a request.
    fn wait(&mut self) -> Result<()> {
        loop {
            self.io.begin_turn();
            if self.io.poll() {
                let done = self.io.take_ended().expect("one has ended");
                return match done.failed.into_iter().next() {
                    Some((_, error)) => Err(error.into()),
                    None => Ok(()),
                };
            }
            let mut fds = Vec::new();
            let until = self.io.wait(&mut fds);
            sleep(&mut fds, until)?;
        }
    }

    /// Returns the time that a page took to come.
    fn fill(&mut self, number: usize) -> Result<Duration> {
        let page = shuffled(number, self.pages());
        let frame = vec![0; self.page_bytes];
        let began = Instant::now();
        self.io.fill(&self.store, PageIndex(page), frame, page);
        self.wait()?;
        Ok(began.elapsed())
    }

    /// Returns the time that a page took to come, and true if it was decoded.
    fn is_decoded(&mut self, number: usize) -> Result<(Duration, bool)> {
        let before = self.store.stats().failovers;
        let took = self.fill(number)?;
        Ok((took, self.store.stats().failovers > before))
    }
}

/// READs of several servers at once, whose bytes are summed up and hashed.
struct BareReads {
    sources: Vec<(Box<dyn Channel<RegBuf>>, ExtentId)>,
    free: Vec<RegBuf>,
    sum: Vec<u8>,
    done: Vec<Completion<RegBuf>>,
    _sessions: Vec<Arc<Session>>,
}

impl BareReads {
    fn new(servers: &[ServerThread], options: &SessionOptions, page_bytes: usize) -> Result<Self> {
        let pool = RegPool::new([], RegPoolOptions::default());
        let (mut sources, mut free, mut sessions) = (Vec::new(), Vec::new(), Vec::new());
        for server in servers {
            let session = Session::connect(server.endpoint(), options)?;
            sources.push((session.channel()?, session.grant(REGION_BYTES as u64)?.id));
            free.push(pool.acquire(page_bytes)?);
            sessions.push(session);
        }
        Ok(Self {
            sources,
            free,
            sum: vec![0; page_bytes],
            done: Vec::new(),
            _sessions: sessions,
        })
    }

    /// Returns the time that the bytes took to come.
    fn read(&mut self, number: usize) -> Result<Duration> {
        let len = self.sum.len();
        let offset = (shuffled(number, REGION_BYTES / len) * len) as u64;
        let began = Instant::now();
        for ((channel, extent), buf) in self.sources.iter_mut().zip(self.free.drain(..)) {
            let op = Op {
                tag: 0,
                verb: Verb::Read,
                extent: *extent,
                offset,
                len: len as u32,
                buf,
            };
            assert!(channel.post(op).is_ok(), "a channel takes one operation");
        }
        self.sum.fill(0);
        while self.free.len() < self.sources.len() {
            for (channel, _) in &mut self.sources {
                channel.poll(&mut self.done);
            }
            for Completion { buf, result, .. } in self.done.drain(..) {
                result?;
                let bytes = self.sum.iter_mut().zip(buf.as_ref());
                bytes.for_each(|(sum, byte)| *sum ^= byte);
                self.free.push(buf);
            }
            if self.free.len() < self.sources.len() {
                let waits = || self.sources.iter().map(|(channel, _)| channel.wait());
                let until = waits().filter_map(|wait| wait.until).min();
                let mut fds: Vec<_> = waits().filter_map(|wait| wait.poll_fd()).collect();
                sleep(&mut fds, until)?;
            }
        }
        std::hint::black_box(XxHash3_128::oneshot_with_seed(1, &self.sum));
        Ok(began.elapsed())
    }
}
