//! A runtime with its memory server, as the options say.
//!
//! The rule it keeps: the runtime is closed before its server ends. The use of the arrays is left
//! to the benchmarks.

use anyhow::{Context, Result, ensure};
use farpage::{Advice, ByteSize, Pod, RegionOptions, RemoteArray, Runtime, Stats};

use crate::{
    options::{Common, FaultMode, Paging},
    report::{Config, PagingFigures},
    server::{self, MemoryServer},
    yardsticks::Yardsticks,
};

/// Runtime with its memory server. Fields are dropped in this order.
pub struct Remote {
    runtime: Runtime,
    server: MemoryServer,
}

/// Copy of the runtime's counters.
pub struct Mark(Stats);

impl Remote {
    /// Starts the runtime, and a server unless `--server` names one, for arrays that are used in
    /// full.
    pub fn start(common: &Common, paging: &Paging) -> Result<Self> {
        Self::for_pages(common, paging, paging.size_bytes(common))
    }

    /// Starts the same as [`Self::start`], for arrays of whose pages `used_bytes` are used.
    pub fn for_pages(common: &Common, paging: &Paging, used_bytes: u64) -> Result<Self> {
        let size_bytes = paging.size_bytes(common);
        if common.at.server.is_none() {
            let budget_bytes = paging.budget_bytes(common);
            server::ensure_room(used_bytes.saturating_add(budget_bytes), common.force)?;
        }
        // Pages are written out of place, so a server holds more than the arrays for a while. It
        // takes no memory before a page is written.
        let capacity_bytes = size_bytes.saturating_mul(2).saturating_add(256 << 20);
        let server = MemoryServer::start(&common.at, capacity_bytes)?;
        let mut builder = Runtime::builder()
            .server(server.endpoint().to_string())
            .budget(ByteSize::b(paging.budget_bytes(common)))
            .page_size(common.page_size)
            .fault_mode(match paging.fault_mode {
                FaultMode::Filler => farpage::FaultMode::Filler,
                FaultMode::InThread => farpage::FaultMode::InThread,
            })
            .codec(paging.codec);
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
        Ok(Self { runtime, server })
    }

    /// Returns the settings of the run.
    pub fn config(&self, common: &Common, paging: &Paging) -> Config {
        Config::new(common, Some(paging), self.server.endpoint())
    }

    /// Makes an array of `len` elements, used as `advice` says.
    pub fn array<T: Pod>(&self, len: u64, advice: Advice) -> Result<RemoteArray<T>> {
        ensure!(
            len > 0,
            "--size is too small for this benchmark: there would be no elements"
        );
        let len = usize::try_from(len).context("the array is larger than the address space")?;
        self.array_of_shape(&[len], advice)
    }

    /// Makes an array of `shape`, the slowest dimension first, used as `advice` says.
    pub fn array_of_shape<T: Pod>(
        &self,
        shape: &[usize],
        advice: Advice,
    ) -> Result<RemoteArray<T>> {
        let options = RegionOptions::new().shape(shape);
        let array = self
            .runtime
            .array_with(shape.iter().product(), options)
            .context("cannot create a remote array")?;
        array.advise(.., advice).context("cannot advise")?;
        Ok(array)
    }

    /// Measures the server's raw fabric with `measure`. A failure only prints a warning and returns
    /// `None`: the benchmark has its own figures, and a full server has no room to measure.
    pub fn yardsticks(
        &self,
        measure: impl FnOnce(&MemoryServer) -> Result<Yardsticks>,
    ) -> Option<Yardsticks> {
        measure(&self.server)
            .inspect_err(|error| {
                eprintln!("not compared with anything: cannot measure the raw fabric: {error:#}");
            })
            .ok()
    }

    /// Returns a copy of the counters.
    pub fn mark(&self) -> Mark {
        Mark(self.runtime.stats())
    }

    /// Returns the pager's work from `begin` to `end`.
    pub fn figures(begin: &Mark, end: &Mark) -> PagingFigures {
        let (pager, store) = (&end.0.pager, &end.0.store);
        let (pager_0, store_0) = (&begin.0.pager, &begin.0.store);
        let plain = store.bytes_plain - store_0.bytes_plain;
        let stored = store.bytes_stored - store_0.bytes_stored;
        PagingFigures {
            faults: pager.faults - pager_0.faults,
            fills: pager.fills - pager_0.fills,
            evictions: pager.evictions - pager_0.evictions,
            steals: pager.steals - pager_0.steals,
            prefetches: pager.prefetches - pager_0.prefetches,
            starved: pager.starved - pager_0.starved,
            clean_evictions: pager.clean_evictions - pager_0.clean_evictions,
            bytes_read: store.bytes_read - store_0.bytes_read,
            bytes_written: store.bytes_written - store_0.bytes_written,
            compression_ratio: (stored > 0).then(|| plain as f64 / stored as f64),
            budget_bytes: pager.budget_bytes,
            peak_resident_bytes: pager.peak_resident_bytes,
        }
    }
}
