//! [`Builder`]: the set-up of a runtime.

use std::{env, fmt::Display, path::PathBuf, str::FromStr, sync::Arc, time::Duration};

use bytesize::ByteSize;
use farpage_fabric::{Allowance, Link, SessionOptions};
use farpage_pager::PagerOptions;
use farpage_store::{Codec, Redundancy};
use farpage_vm::{KernelSpaceOptions, Transfer};
use farpage_wire::{Endpoint, UnitError, check_environment, is_known, parse_size, parse_time};

use crate::{
    BuildError, FaultMode, RegionOptions, Runtime,
    setup::{Setup, client_name},
};

/// Upper bound of deadlines, a year: longer ones overflow the clock.
const DEADLINE_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// Number of threads per core that can serve their own faults at once. More than one, because some
/// wait for completions; not many, because each holds a channel to every server.
const IN_THREAD_PER_CORE: usize = 2;

/// Sets up a [`Runtime`]. An option that is not set comes from the environment variable that its
/// documentation names, else it has its default. A variable that begins with `FARPAGE_` and that no
/// part of farpage reads is an error of [`build`](Self::build).
#[derive(Clone, Debug, Default)]
pub struct Builder {
    servers: Vec<String>,
    budget: Option<ByteSize>,
    page_size: Option<ByteSize>,
    /// Options of regions that do not set their own.
    regions: RegionOptions,
    fillers: Option<usize>,
    evictors: Option<usize>,
    run_length: Option<ByteSize>,
    high_water: Option<f64>,
    low_water: Option<f64>,
    deadline: Option<Duration>,
    link: Option<Arc<Link>>,
    transfer: Option<Transfer>,
    fault_mode: Option<FaultMode>,
    user_mode_only: Option<bool>,
    key_file: Option<PathBuf>,
    last_words: Option<bool>,
    starts_late: bool,
}

impl Runtime {
    /// Starts to set up a runtime.
    pub fn builder() -> Builder {
        Builder::default()
    }
}

impl Builder {
    /// Adds a memory server, `shm:///run/farpage.sock`, `tcp://host:7400`, `rdma://host:7400` or
    /// `auto://host:7400`, or several separated by commas. Pages are spread over all servers.
    ///
    /// `FARPAGE_SERVER`, several separated by commas. Default: none, so that only regions with a
    /// [`Store`](crate::Store) of their own work.
    pub fn server(mut self, endpoint: impl Into<String>) -> Self {
        self.servers.push(endpoint.into());
        self
    }

    /// Sets the bytes of pages that may be in local memory at once, over all regions of the
    /// runtime. The budget is never exceeded. It may be as large as the machine's memory, or as the
    /// control groups (v1 or v2) of this process allow.
    ///
    /// `FARPAGE_BUDGET`. Default: a quarter of the memory that is available when the runtime is
    /// built, within the groups' limits.
    pub fn budget(mut self, budget: ByteSize) -> Self {
        self.budget = Some(budget);
        self
    }

    /// Sets the page size of regions that do not set their own: a power of two, 4 KiB to 2 MiB.
    ///
    /// Small pages suit scattered accesses, large ones bulk transfers. `FARPAGE_PAGE_SIZE`.
    /// Default: 64 KiB, and less for arrays of less than 1 MiB, 4 KiB at least.
    pub fn page_size(mut self, page_size: ByteSize) -> Self {
        self.page_size = Some(page_size);
        self
    }

    /// Sets the number of shards, parts into which addresses of regions are divided for fills.
    ///
    /// Each shard has channels of its own, and one thread at a time serves it. There is one such
    /// thread per CPU that the program may use; those of CPUs that fault serve. `FARPAGE_FILLERS`
    /// (a number or `auto`). Default: one per core, and at most 4.
    pub fn fillers(mut self, fillers: usize) -> Self {
        self.fillers = Some(fillers);
        self
    }

    /// Sets the number of evictor threads, which write pages back and give them up.
    ///
    /// `FARPAGE_EVICTORS` (a number or `auto`). Default: as many as keep up with the fillers, up to
    /// one per core and 4.
    pub fn evictors(mut self, evictors: usize) -> Self {
        self.evictors = Some(evictors);
        self
    }

    /// Makes evictors start above the fraction `high` of the budget, and stop at the fraction
    /// `low`.
    ///
    /// `FARPAGE_HIGH_WATER`, `FARPAGE_LOW_WATER`. Default: 0.95 and 0.90.
    pub fn water_marks(mut self, low: f64, high: f64) -> Self {
        (self.low_water, self.high_water) = (Some(low), Some(high));
        self
    }

    /// Sets the most bytes of neighbouring pages that move together. A page always moves whole.
    ///
    /// `FARPAGE_RUN_LENGTH`. Default: 512 KiB and at most 64 pages; less over links that take more
    /// than 0.75 ms for a run.
    pub fn run_length(mut self, run_length: ByteSize) -> Self {
        self.run_length = Some(run_length);
        self
    }

    /// Sets the most pages that are read ahead of sequential access; 0 switches read-ahead off.
    /// Regions may set their own.
    ///
    /// `FARPAGE_READ_AHEAD`. Default: 1 MiB and at most 256 pages; up to 8 MiB over links with a
    /// long delay.
    pub fn read_ahead(mut self, pages: usize) -> Self {
        self.regions = self.regions.read_ahead(pages);
        self
    }

    /// Sets the codec of pages of remote regions. Regions may set their own. A region whose
    /// elements the codec does not fit cannot be created.
    ///
    /// `FARPAGE_CODEC` (`raw`, `lz4`, `shuffle`, `zfp:accuracy=1e-6`, ...: see [`Codec`]). Default:
    /// raw.
    pub fn codec(mut self, codec: Codec) -> Self {
        self.regions = self.regions.codec(codec);
        self
    }

    /// Sets how pages of remote regions outlive the death of servers: copies on several servers, or
    /// parity. Regions may set their own. Regions with a [name](crate::RegionOptions::name) have
    /// one copy of each page where this default is parity.
    ///
    /// `FARPAGE_REDUNDANCY` (`none`, `copies=2` to `copies=4`, `parity=2+1` to `parity=8+2`).
    /// Default: none, one server.
    pub fn redundancy(mut self, redundancy: Redundancy) -> Self {
        self.regions = self.regions.redundancy(redundancy);
        self
    }

    /// Sets how long a page operation is tried before it fails: see [the crate's words on lost
    /// memory](crate#when-memory-is-lost).
    ///
    /// `FARPAGE_DEADLINE`, such as `500ms` or `2min`; a plain number is seconds. Default: 10 s.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Slows all transfers of the runtime down to the rate and delay of `link`, for measurements.
    /// Default: no limit.
    pub fn link(mut self, link: Arc<Link>) -> Self {
        self.link = Some(link);
        self
    }

    /// Sets how pages enter and leave the address space. Default: the fastest way that the kernel
    /// offers.
    pub fn transfer(mut self, transfer: Transfer) -> Self {
        self.transfer = Some(transfer);
        self
    }

    /// Sets the threads that serve the program's page faults.
    ///
    /// `FARPAGE_FAULT_MODE` (`filler` or `in-thread`). Default: the runtime's filler threads.
    pub fn fault_mode(mut self, fault_mode: FaultMode) -> Self {
        self.fault_mode = Some(fault_mode);
        self
    }

    /// Catches only faults of the program's own instructions. This needs no privilege, but a system
    /// call that is given absent memory fails with EFAULT.
    ///
    /// `FARPAGE_USER_MODE_ONLY` (`1` or `0`). Default: false.
    pub fn user_mode_only(mut self, user_mode_only: bool) -> Self {
        self.user_mode_only = Some(user_mode_only);
        self
    }

    /// Promises for all regions that do not say otherwise that no device writes into their memory,
    /// see [`RegionOptions::no_direct_io`](crate::RegionOptions::no_direct_io).
    ///
    /// `FARPAGE_NO_DIRECT_IO` (`1` or `0`). Default: false.
    pub fn no_direct_io(mut self, promised: bool) -> Self {
        self.regions = self.regions.no_direct_io(promised);
        self
    }

    /// Sets the user's key file: named arrays belong to its key, and other users cannot open,
    /// replace, list or remove them. The file is made when a name is first used. Users that have a
    /// copy of it share the names.
    ///
    /// `FARPAGE_KEY_FILE`. Default: `farpage/key` in `$XDG_CONFIG_HOME` or `~/.config`.
    pub fn key_file(mut self, key_file: impl Into<PathBuf>) -> Self {
        self.key_file = Some(key_file.into());
        self
    }

    /// Prints a line on standard error before SIGBUS ends a program that touches lost memory: the
    /// array, page and server, the cause, and the remedy. Once for each cause.
    ///
    /// `FARPAGE_LAST_WORDS` (`1` or `0`). Default: true.
    pub fn last_words(mut self, last_words: bool) -> Self {
        self.last_words = Some(last_words);
        self
    }

    /// Starts the workers' threads when the first region comes under paging, instead of with the
    /// runtime. Default: false.
    #[doc(hidden)]
    pub fn starts_late(mut self, late: bool) -> Self {
        self.starts_late = late;
        self
    }

    /// Connects to the servers and starts the workers.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn build(self) -> Result<Runtime, BuildError> {
        let setup = self.setup()?;
        Ok(Runtime::new(setup.start()?, setup))
    }

    /// Completes the options by variables and defaults.
    fn setup(self) -> Result<Setup, BuildError> {
        check_environment().map_err(|error| BuildError::Option(error.to_string()))?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let (shards, _) = workers(self.fillers, "FARPAGE_FILLERS", cores)?;
        let (evictors, tune_evictors) = workers(self.evictors, "FARPAGE_EVICTORS", cores)?;
        let allowance = Allowance::of_this_process();
        let budget = parsed(self.budget, "FARPAGE_BUDGET", parse_size)?
            .unwrap_or(ByteSize(allowance.available_bytes / 4));
        if budget.as_u64() > allowance.bytes {
            return Err(BuildError::Option(format!(
                "a budget of {budget} does not fit: {allowance}. Pages beyond the budget are on the servers, so that it may be much smaller than the arrays"
            )));
        }
        let budget = budget.as_u64();
        let deadline = parsed(self.deadline, "FARPAGE_DEADLINE", parse_time)?
            .unwrap_or(Duration::from_secs(10));
        if deadline.is_zero() || deadline > DEADLINE_MAX {
            return Err(BuildError::Option(format!(
                "a deadline of {deadline:?}: need more than zero and at most {DEADLINE_MAX:?}"
            )));
        }
        for (workers, what) in [(shards, "fillers"), (evictors, "evictors")] {
            if !(1..=64).contains(&workers) {
                return Err(BuildError::Option(format!(
                    "{workers} {what}: need 1 to 64"
                )));
            }
        }
        let mut pager_options = PagerOptions::new(budget);
        pager_options.evictors = evictors;
        pager_options.tune_evictors = tune_evictors;
        let run_length = parsed(self.run_length, "FARPAGE_RUN_LENGTH", parse_size)?;
        pager_options.run_bytes = run_length.map(|length| length.as_u64() as usize);
        let marks = [&mut pager_options.low_water, &mut pager_options.high_water];
        let given = [
            (self.low_water, "FARPAGE_LOW_WATER"),
            (self.high_water, "FARPAGE_HIGH_WATER"),
        ];
        for (mark, (given, variable)) in marks.into_iter().zip(given) {
            *mark = set(given, variable)?.unwrap_or(*mark);
        }
        pager_options.deadline = deadline;
        pager_options.starts_late = self.starts_late;
        pager_options.crash_message =
            switch(self.last_words, "FARPAGE_LAST_WORDS")?.unwrap_or(true);
        let fault_mode = set(self.fault_mode, "FARPAGE_FAULT_MODE")?;
        let in_thread = fault_mode.unwrap_or_default() == FaultMode::InThread;
        if in_thread {
            pager_options.in_thread = IN_THREAD_PER_CORE * cores;
        }

        let mut regions = self.regions;
        let page_size = parsed(self.page_size, "FARPAGE_PAGE_SIZE", parse_size)?;
        regions.page_bytes = page_size.map(page_bytes).transpose()?;
        let (remote, paging) = (&mut regions.remote, &mut regions.paging);
        paging.read_ahead = set(paging.read_ahead, "FARPAGE_READ_AHEAD")?;
        remote.codec = set(remote.codec, "FARPAGE_CODEC")?;
        remote.redundancy = set(remote.redundancy, "FARPAGE_REDUNDANCY")?;
        paging.no_direct_io = switch(paging.no_direct_io, "FARPAGE_NO_DIRECT_IO")?;
        let codec = remote.codec.unwrap_or_default();
        (codec.check()).map_err(|error| BuildError::Option(error.to_string()))?;

        let space = KernelSpaceOptions {
            shards,
            frame_bytes_max: budget as usize,
            transfer: self.transfer,
            user_mode_only: switch(self.user_mode_only, "FARPAGE_USER_MODE_ONLY")?.unwrap_or(false),
            in_thread,
        };
        let session = SessionOptions {
            deadline,
            link: self.link,
            client: client_name(),
            key_file: self.key_file,
            ..SessionOptions::default()
        };
        let servers: Vec<Endpoint> = (servers(self.servers).iter())
            .map(|server| server.parse())
            .collect::<Result<_, _>>()?;
        Ok(Setup {
            servers,
            session,
            space,
            pager: pager_options,
            regions,
        })
    }
}

/// Returns the servers of `given`, split at commas; else the environment's.
fn servers(given: Vec<String>) -> Vec<String> {
    if given.is_empty() {
        let text = env::var("FARPAGE_SERVER").unwrap_or_default();
        return each_server(&text);
    }
    let servers = |text: &String| match each_server(text) {
        // A text that is no list is an endpoint, whose error says what is wrong with it.
        none if none.is_empty() => vec![text.clone()],
        servers => servers,
    };
    given.iter().flat_map(servers).collect()
}

/// Splits a text at commas that another endpoint follows: paths of sockets may have commas, too.
fn each_server(text: &str) -> Vec<String> {
    let mut servers: Vec<String> = Vec::new();
    for part in text.split(',').map(str::trim) {
        match servers.last_mut() {
            _ if part.is_empty() => {}
            Some(server) if !part.contains("://") => {
                server.push(',');
                server.push_str(part);
            }
            _ => servers.push(part.to_owned()),
        }
    }
    servers
}

/// Returns the value `given`, else the environment's.
fn set<T: FromStr<Err: Display>>(
    given: Option<T>,
    variable: &str,
) -> Result<Option<T>, BuildError> {
    read(given, variable, |text| {
        text.parse().map_err(|e| format!("{variable}={text}: {e}"))
    })
}

/// Returns the value `given`, else the environment's, as `parse` reads it.
fn parsed<T>(
    given: Option<T>,
    variable: &str,
    parse: impl Fn(&str) -> Result<T, UnitError>,
) -> Result<Option<T>, BuildError> {
    read(given, variable, |text| {
        parse(text).map_err(|error| format!("{variable}: {error}"))
    })
}

/// Returns the value `given`, else the environment's, which is `1` or `0`.
fn switch(given: Option<bool>, variable: &str) -> Result<Option<bool>, BuildError> {
    read(given, variable, |text| match text {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err(format!("{variable}={text}: need 1 or 0")),
    })
}

fn read<T>(
    given: Option<T>,
    variable: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, BuildError> {
    debug_assert!(is_known(variable), "{variable} is not listed");
    match (given, env::var(variable)) {
        (None, Ok(text)) => parse(&text).map(Some).map_err(BuildError::Option),
        (given, _) => Ok(given),
    }
}

/// Checks that pages can have the size `size`, and returns it in bytes.
fn page_bytes(size: ByteSize) -> Result<usize, BuildError> {
    let bytes = size.as_u64();
    if bytes.is_power_of_two() && (4 << 10..=2 << 20).contains(&bytes) {
        return Ok(bytes as usize);
    }
    Err(BuildError::Option(format!(
        "a page size of {size}: need a power of two from 4 KiB to 2 MiB"
    )))
}

/// Returns the most threads of a kind, and whether their number follows the load.
fn workers(
    given: Option<usize>,
    variable: &str,
    cores: usize,
) -> Result<(usize, bool), BuildError> {
    if given.is_none() && env::var(variable).is_ok_and(|text| text != "auto") {
        return Ok((set(None, variable)?.unwrap_or(0), false));
    }
    Ok(given.map_or((cores.clamp(1, 4), true), |workers| (workers, false)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_separated_by_commas_which_paths_may_have_too() {
        let given = |texts: &[&str]| servers(texts.iter().map(|&text| text.to_owned()).collect());
        let (tcp, shm) = ("tcp://a:1", "shm:///tmp/a,b/socket");
        for texts in [
            &["tcp://a:1,shm:///tmp/a,b/socket"][..],
            &["tcp://a:1", "shm:///tmp/a,b/socket"],
            &[" tcp://a:1 , shm:///tmp/a,b/socket, "],
        ] {
            assert_eq!(given(texts), [tcp, shm], "{texts:?}");
        }
        assert_eq!(given(&["a:1,b:2"]), ["a:1,b:2"]);
        for nothing in ["", ", "] {
            assert_eq!(given(&[nothing]), [nothing]);
        }
    }
}
