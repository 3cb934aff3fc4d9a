//! `doctor`: everything that this machine lacks for farpage, each with the command that mends it.
//!
//! The rule it keeps: `doctor` changes nothing. Its verdict is that of a program whose settings all
//! come from the environment: it builds such a runtime and brings a page in.

use std::io;

use anyhow::{Context, Result, bail, ensure};
use farpage::{BuildError, RegionOptions, Runtime, Store, error::UserfaultfdError::NotPermitted};

use farpage_bench_kit::out::say;

pub(crate) fn run() -> Result<()> {
    let tried = one_page();
    let refused = tried.as_ref().is_err_and(|error| {
        let error = error.downcast_ref();
        matches!(error, Some(BuildError::Userfaultfd(NotPermitted { .. })))
    });
    // A userfaultfd that was not refused is enough for this program, whatever kind it asked for.
    let probe = farpage_vm::probe(!refused);
    say(probe.to_string().trim_end())?;
    match farpage_fabric::rdma_devices() {
        Ok(devices) => {
            for device in devices {
                let addresses: Vec<_> = device.addresses.iter().map(ToString::to_string).collect();
                let (name, addresses) = (device.name, addresses.join(", "));
                say(format_args!("rdma: device {name}, reached at {addresses}"))?;
            }
        }
        Err(reason) => say(format_args!("rdma: {reason}"))?,
    }
    if refused || !probe.usable() {
        bail!("farpage does not work here until what is MISSING above is mended");
    }
    tried.context("farpage does not work here with the settings of this environment")?;
    say(
        "farpage works here: a runtime with the settings of this environment has brought a page in.",
    )
}

/// Builds a runtime and brings a page in, as a program's first steps do.
fn one_page() -> Result<()> {
    let runtime = Runtime::builder().build()?;
    let region = runtime.region_with(1, RegionOptions::new().store(OneByte))?;
    region.prefetch_now(..)?;
    ensure!(region[0] == BYTE, "a page came with other bytes");
    Ok(())
}

const BYTE: u8 = 0x5a;

/// Store of one page, whose bytes are all [`BYTE`].
struct OneByte;

impl Store for OneByte {
    fn read(&self, _offset: u64, buf: &mut [u8]) -> io::Result<()> {
        buf.fill(BYTE);
        Ok(())
    }

    fn write(&self, _offset: u64, _buf: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn may_block(&self) -> bool {
        false
    }
}
