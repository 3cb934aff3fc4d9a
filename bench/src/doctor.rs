//! `doctor`: what this machine lacks for farpage, with the command that mends each.
//!
//! The rule it keeps: it changes nothing, and exits with 1 only if farpage cannot work here at all.

use std::process::ExitCode;

pub(crate) fn run() -> ExitCode {
    let probe = farpage_vm::probe();
    print!("{probe}");
    match farpage_fabric::rdma_devices() {
        Ok(devices) => {
            for device in devices {
                let addresses: Vec<_> = device.addresses.iter().map(ToString::to_string).collect();
                println!(
                    "rdma: device {}, reached at {}",
                    device.name,
                    addresses.join(", ")
                );
            }
        }
        Err(reason) => println!("rdma: {reason}"),
    }
    if probe.usable() {
        println!("farpage works here.");
        ExitCode::SUCCESS
    } else {
        println!("farpage does not work here until what is MISSING above is mended.");
        ExitCode::FAILURE
    }
}
