//! [`rdma_devices`]: the network adapters of this machine that the fabric `rdma` can use, for
//! people and for tests.
//!
//! The rule it keeps: it changes nothing; connections find their device by themselves.

use std::{
    fs,
    net::{IpAddr, Ipv6Addr},
    path::Path,
};

use crate::rdma;

/// An RDMA device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaDevice {
    /// Name, as `ibv_devices` prints it.
    pub name: String,
    /// Addresses of servers on this device: the identifiers (GIDs) of its ports, as far as they are
    /// addresses, as with RoCE. Link-local ones are left out.
    pub addresses: Vec<IpAddr>,
}

/// Returns the RDMA devices of this machine, at least one.
///
/// # Errors
/// The reason why there is none, and the remedy: RDMA was not built in, or no device was found.
pub fn rdma_devices() -> Result<Vec<RdmaDevice>, String> {
    let names = rdma::devices()?.into_iter();
    Ok(names
        .map(|name| RdmaDevice {
            addresses: addresses(Path::new("/sys/class/infiniband").join(&name).join("ports")),
            name,
        })
        .collect())
}

/// Reads the addresses of all ports below `ports`. Each port has a folder `gids` with a file per
/// identifier, in the notation of IPv6 without abbreviations.
fn addresses(ports: impl AsRef<Path>) -> Vec<IpAddr> {
    let files = fs::read_dir(ports).into_iter().flatten().flatten();
    let gids = files.flat_map(|port| fs::read_dir(port.path().join("gids")).into_iter().flatten());
    let mut addresses: Vec<IpAddr> = gids
        .flatten()
        .filter_map(|gid| fs::read_to_string(gid.path()).ok()?.trim().parse().ok())
        .filter_map(address)
        .collect();
    addresses.sort();
    addresses.dedup();
    addresses
}

fn address(gid: Ipv6Addr) -> Option<IpAddr> {
    match gid.to_ipv4_mapped() {
        Some(v4) => Some(v4.into()),
        // The identifiers of InfiniBand begin like link-local addresses and are none.
        None if gid.is_unspecified() || gid.is_unicast_link_local() => None,
        None => Some(gid.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_addresses_where_they_can_be() {
        let ports = tempfile::tempdir().expect("a folder");
        let gids = ports.path().join("1/gids");
        fs::create_dir_all(&gids).expect("a folder");
        for (i, gid) in [
            "fe80:0000:0000:0000:b872:4fff:fe02:1943",
            "0000:0000:0000:0000:0000:ffff:0a63:0001",
            "2001:0db8:0000:0000:0000:0000:0000:0007",
            "0000:0000:0000:0000:0000:0000:0000:0000",
        ]
        .iter()
        .enumerate()
        {
            fs::write(gids.join(i.to_string()), format!("{gid}\n")).expect("a file");
        }
        let expected: [IpAddr; 2] =
            ["10.99.0.1", "2001:db8::7"].map(|text| text.parse().expect("an address"));
        assert_eq!(addresses(ports.path()), expected);
        assert!(addresses("/nowhere").is_empty());
    }
}
