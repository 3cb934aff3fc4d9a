//! [`Arena`]: the place of a benchmark's arrays, remote under a budget with a memory server as the
//! options say, or ordinary memory to compare with.
//!
//! The rule it keeps: a benchmark runs the same loops over the same slices in both places. The
//! runtime is closed before its server ends.

use std::ops::{Deref, DerefMut};

use anyhow::{Context, Result, ensure};
use farpage::{Advice, ByteSize, Pod, RegionOptions, RemoteArray, Runtime, Stats};
use farpage_wire::Endpoint;

use crate::{
    options::Paging,
    paging::PagingFigures,
    raw,
    report::Config,
    server::{self, MemoryServer},
    yardsticks::{Plain, Yardsticks},
};

/// Place of a benchmark's arrays.
pub struct Arena<'a> {
    /// Options of the run.
    pub paging: &'a Paging,
    /// Runtime with its memory server, dropped in this order; `None` for ordinary memory.
    remote: Option<(Runtime, MemoryServer)>,
    /// Servers that keep copies of pages. They end after the runtime.
    _others: Vec<MemoryServer>,
}

/// Array in an [`Arena`].
pub enum Array<T: Pod> {
    /// Pages on a memory server.
    Remote(RemoteArray<T>),
    /// Ordinary memory.
    Plain(Vec<T>),
}

impl<'a> Arena<'a> {
    /// Starts a runtime, and a server unless `--server` names one, for arrays that are used in
    /// full.
    pub fn start(paging: &'a Paging) -> Result<Self> {
        Self::for_pages(paging, paging.size_bytes())
    }

    /// Starts the same as [`Self::start`], unless the arrays are to be in `plain` memory.
    pub fn of_kind(plain: bool, paging: &'a Paging) -> Result<Self> {
        if !plain {
            return Self::start(paging);
        }
        server::ensure_room(paging.size_bytes(), paging.common.force)?;
        Ok(Self {
            paging,
            remote: None,
            _others: Vec::new(),
        })
    }

    /// Starts the same as [`Self::start`], for arrays of whose pages `used_bytes` are used.
    pub fn for_pages(paging: &'a Paging, used_bytes: u64) -> Result<Self> {
        let common = &paging.common;
        if common.at.server.is_none() {
            let copies = paging.redundancy.copies() as u64;
            let bytes = (used_bytes.saturating_mul(copies)).saturating_add(paging.budget_bytes());
            server::ensure_room(bytes, common.force)?;
        }
        // Pages are written out of place, so a server holds more than the arrays for a while. It
        // takes no memory before a page is written.
        let capacity_bytes = paging.size_bytes().saturating_mul(2);
        let capacity_bytes = capacity_bytes.saturating_add(256 << 20);
        let server = MemoryServer::start(&common.at, capacity_bytes)?;
        let others = (1..paging.redundancy.servers())
            .map(|number| MemoryServer::another(common.at.fabric, capacity_bytes, number, None))
            .collect::<Result<Vec<_>>>()?;
        let mut builder = Runtime::builder()
            .server(server.endpoint().to_string())
            .budget(ByteSize::b(paging.budget_bytes()))
            .page_size(common.page_size)
            .fault_mode(paging.fault_mode.into())
            .codec(paging.codec)
            .redundancy(paging.redundancy);
        for other in &others {
            builder = builder.server(other.endpoint().to_string());
        }
        if let Some(fillers) = common.fillers {
            builder = builder.fillers(fillers.into());
        }
        if let Some(evictors) = paging.evictors {
            builder = builder.evictors(evictors.into());
        }
        if let Some(run_length) = paging.run_length {
            builder = builder.run_length(run_length);
        }
        if let Some(pages) = paging.read_ahead {
            builder = builder.read_ahead(pages as usize);
        }
        if let Some(link) = common.link() {
            builder = builder.link(link);
        }
        let runtime = builder.build().context("cannot start farpage")?;
        Ok(Self {
            paging,
            remote: Some((runtime, server)),
            _others: others,
        })
    }

    /// Makes an array of `len` zeros. `advice` says how a remote one is used.
    pub fn array<T: Pod>(&self, len: u64, advice: Advice) -> Result<Array<T>> {
        let too_small = "--size is too small for this benchmark: there would be no elements";
        ensure!(len > 0, too_small);
        let len = usize::try_from(len).context("the array is larger than the address space")?;
        self.array_of_shape(&[len], advice)
    }

    /// Makes an array of `shape`, the slowest dimension first, used as `advice` says.
    pub fn array_of_shape<T: Pod>(&self, shape: &[usize], advice: Advice) -> Result<Array<T>> {
        let len = shape.iter().product();
        let Some((runtime, _)) = &self.remote else {
            return Ok(Array::Plain(vec![T::zeroed(); len]));
        };
        let options = RegionOptions::new().shape(shape);
        let array = runtime.array_with(len, options);
        let array = Array::Remote(array.context("cannot create a remote array")?);
        array.advise(advice)?;
        Ok(array)
    }

    /// Returns the settings of the run.
    pub fn config(&self) -> Config {
        let server = self.remote.as_ref();
        let server = server.map(|(_, server)| server.endpoint().to_string());
        let server = server.unwrap_or_else(|| "none, plain memory".to_owned());
        Config::new(&self.paging.common, server).with_paging(self.paging)
    }

    /// Returns a copy of the counters; `None` for ordinary memory.
    pub fn mark(&self) -> Option<Stats> {
        Some(self.remote.as_ref()?.0.stats())
    }

    /// Returns the pager's work since `begin`; `None` for ordinary memory.
    pub fn since(&self, begin: &Option<Stats>) -> Option<PagingFigures> {
        Some(PagingFigures::between(begin.as_ref()?, &self.mark()?))
    }

    /// Measures the server's raw fabric with `measure`; `None` for ordinary memory. A failure only
    /// prints a warning: the benchmark has its own figures, and a full server has no room to
    /// measure.
    pub fn yardsticks(
        &self,
        measure: impl FnOnce(&MemoryServer) -> Result<Yardsticks>,
    ) -> Option<Yardsticks> {
        measure(&self.remote.as_ref()?.1)
            .inspect_err(|error| {
                eprintln!("not compared with anything: cannot measure the raw fabric: {error:#}");
            })
            .ok()
    }

    /// Compares work that `paged` in `seconds` with the raw fabric, and `figure` with `plain`
    /// memory.
    pub fn compare(
        &self,
        paged: &Option<PagingFigures>,
        seconds: f64,
        figure: f64,
        plain: impl FnOnce() -> Plain,
    ) -> Option<Yardsticks> {
        let moved = paged.as_ref()?.counts;
        self.yardsticks(|server| {
            let fabric = raw::yardstick(&self.paging.common, server)?;
            let plain = plain();
            Ok(Yardsticks::of_transfers(
                figure, plain, moved, seconds, fabric,
            ))
        })
    }
}

/// Starts a runtime with `budget_bytes` for pages of `page_bytes`, at one server.
pub fn runtime(server: &Endpoint, budget_bytes: u64, page_bytes: u64) -> Result<Runtime> {
    Runtime::builder()
        .server(server.to_string())
        .budget(ByteSize::b(budget_bytes))
        .page_size(ByteSize::b(page_bytes))
        .build()
        .context("cannot start farpage")
}

impl<T: Pod> Array<T> {
    /// Says how the whole array will be used.
    pub fn advise(&self, advice: Advice) -> Result<()> {
        match self {
            Self::Remote(array) => array.advise(.., advice).context("cannot advise"),
            Self::Plain(_) => Ok(()),
        }
    }
}

impl<T: Pod> Deref for Array<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Remote(array) => array,
            Self::Plain(array) => array,
        }
    }
}

impl<T: Pod> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Remote(array) => array,
            Self::Plain(array) => array,
        }
    }
}
