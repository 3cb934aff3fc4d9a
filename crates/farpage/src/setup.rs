//! [`Setup`]: the complete options of a runtime, and the start of its workers.
//!
//! The rule it keeps: nothing is read from the environment, which a program may have changed since.

use std::{env, path::Path, process, sync::Arc};

use farpage_fabric::{Session, SessionOptions};
use farpage_pager::{Pager, PagerOptions, StartError};
use farpage_store::{Cluster, ClusterOptions};
use farpage_tables::{Held, Table};
use farpage_vm::{KernelSpace, KernelSpaceOptions};
use farpage_wire::Endpoint;

use crate::{BuildError, RegionOptions};

/// The complete options of a runtime.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) servers: Vec<Endpoint>,
    pub(crate) session: SessionOptions,
    pub(crate) space: KernelSpaceOptions,
    pub(crate) pager: PagerOptions,
    /// Options of regions that do not set their own.
    pub(crate) regions: RegionOptions,
}

impl Setup {
    /// Returns the options for a runtime of this process, a child made by `fork`. Fillers serve its
    /// faults. See [`Builder::starts_late`](crate::Builder::starts_late).
    pub(crate) fn for_child(&self, starts_late: bool) -> Setup {
        let mut setup = self.clone();
        setup.session.client = client_name();
        setup.space.in_thread = false;
        setup.pager.in_thread = 0;
        setup.pager.starts_late = starts_late;
        setup
    }

    /// Connects to the servers and starts the workers.
    pub(crate) fn start(&self) -> Result<Held<Arc<Pager<KernelSpace>>>, BuildError> {
        // In-thread faults, and stores that workers call, need the program's table.
        let new = || match self.space.in_thread || self.servers.is_empty() {
            true => Table::programs(),
            false => Table::private(),
        };
        let table = match Table::current() {
            Some(table) => Ok(table),
            None => Session::table_for(&self.servers, new),
        };
        let table = table.map_err(StartError::Os)?;
        if self.space.in_thread && table.is_private() {
            return Err(BuildError::Option(
                "faults cannot be served by the program's threads over RDMA here, whose devices another runtime has \
                 opened on a descriptor table of its own: build the runtime with in-thread faults first"
                    .to_owned(),
            ));
        }
        table.run(|| {
            let space = KernelSpace::new(self.space.clone())?;
            let mut sessions = Vec::new();
            for server in &self.servers {
                sessions.push(Session::connect(server, &self.session)?);
            }
            let cluster = Cluster::new(
                sessions,
                ClusterOptions {
                    deadline: self.session.deadline,
                    ..ClusterOptions::default()
                },
            );
            let pager = Pager::start(Arc::new(space), cluster, &self.pager)?;
            Ok(Held::new(pager))
        })
    }
}

/// Returns the name of this program for the servers' logs.
pub(crate) fn client_name() -> String {
    let program = env::args_os().next().unwrap_or_default();
    let program = Path::new(&program)
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    format!("{program}[{}]", process::id())
}
