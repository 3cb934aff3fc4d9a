//! The texts of errors, as programs print them: with `{}`, and with all their sources as `anyhow`
//! and `eyre` do.
//!
//! The rule it keeps: an error's text is whole, so that `{}` is enough, and no cause is said twice
//! where sources are printed, too. Each error that has a cause is made here with one.

mod common;

use std::{error::Error, io, path::PathBuf, sync::Arc, time::Duration};

use common::{Fabric, HookedStore, Memory, begin, builder};
use farpage::{BuildError, Codec, RegionOptions, Runtime, error as errors};
use farpage_fabric::{
    AllocError, ChannelError, ConnectError, ControlError, OpenNameError, PublishError,
    key::KeyError, patterns::SendError, regmem::RegError, server::BindError,
};
use farpage_memserver::{StartError as ServerError, config::ConfigError};
use farpage_pager::{FlushError, MapError, PageError, PinError, StartError};
use farpage_store::{
    CodecError, CreateError, FileStoreError, NamesError, OpenStoreError, PublishStoreError,
    StoreError,
};
use farpage_testkit::{KIB, MIB};
use farpage_vm::{DetachError, InstallErrorKind, UserfaultfdError};

/// Text of every cause.
const CAUSE: &str = "the moon is full";

/// Asserts that the text of `error` contains `cause` once, alone and with its sources, and that
/// `Debug` prints the text of `Display`.
fn says_once(cause: &str, error: impl Error + Send + Sync + 'static) {
    assert_eq!(format!("{error:?}"), error.to_string());
    internal_says_once(cause, error);
}

/// Asserts, for an error that programs do not meet, that its texts contain `cause` once.
fn internal_says_once(cause: &str, error: impl Error + Send + Sync + 'static) {
    let told = error.to_string();
    assert_eq!(told.matches(cause).count(), 1, "alone: {told}\n{error:?}");
    let told = format!("{:#}", anyhow::Error::new(error));
    assert_eq!(told.matches(cause).count(), 1, "with sources: {told}");
}

/// Asserts as [`says_once`] does that `error` says [`CAUSE`].
fn says_cause(error: impl Error + Send + Sync + 'static) {
    says_once(CAUSE, error);
}

fn io_error() -> io::Error {
    io::Error::other(CAUSE)
}

fn path() -> PathBuf {
    "/nowhere".into()
}

fn name() -> String {
    "squares".to_owned()
}

fn endpoint() -> String {
    "tcp://10.0.0.2:7400".to_owned()
}

fn channel() -> ChannelError {
    ChannelError::Disconnected {
        endpoint: endpoint(),
        reason: CAUSE.to_owned(),
    }
}

fn control() -> ControlError {
    ControlError::Refused {
        endpoint: endpoint(),
        attempt: "lend memory".to_owned(),
        reason: CAUSE.to_owned(),
    }
}

fn alloc() -> AllocError {
    control().into()
}

fn publish() -> PublishError {
    control().into()
}

fn open() -> OpenNameError {
    control().into()
}

fn connect() -> ConnectError {
    ConnectError::Unreachable {
        endpoint: endpoint(),
        source: io_error(),
    }
}

fn registered() -> RegError {
    RegError::Map {
        bytes: 4096,
        source: io_error(),
    }
}

fn region() -> Arc<str> {
    "array 3 (f64, 12.0 MiB)".into()
}

fn remote() -> StoreError {
    StoreError::Remote {
        region: region(),
        page: 5,
        server: endpoint().into(),
        operation: "fill",
        attempts: 3,
        retry: true,
        source: channel(),
    }
}

fn page() -> PageError {
    remote().into()
}

fn map() -> MapError {
    MapError::Os {
        bytes: 4096,
        source: io_error(),
    }
}

#[test]
fn errors_of_transports_and_servers_say_their_cause_once() {
    says_cause(connect());
    says_cause(alloc());
    says_cause(publish());
    says_cause(open());
    says_cause(registered());
    let (bytes, source) = (4096, io_error());
    let (registrar, advice) = ("mlx5_0".to_owned(), String::new());
    says_cause(RegError::Register {
        bytes,
        registrar,
        source,
        advice,
    });
    says_cause(SendError::Lost(channel()));
    says_cause(SendError::from(registered()));
    let (path, source) = (path(), io_error());
    let attempt = "read";
    says_cause(KeyError::Io {
        path,
        attempt,
        source,
    });
    let bind = || BindError::Io {
        endpoint: endpoint(),
        source: io_error(),
    };
    says_cause(bind());
    says_cause(ServerError::from(bind()));
    says_cause(ServerError::from(io_error()));
    let (path, source) = (self::path(), io_error());
    says_cause(ConfigError::Read { path, source });
}

#[test]
fn errors_of_the_kernels_memory_say_their_cause_once() {
    says_cause(UserfaultfdError::Os(io_error()));
    says_cause(UserfaultfdError::Pagemap(io_error()));
    internal_says_once(CAUSE, DetachError::Os(io_error()));
    internal_says_once(CAUSE, InstallErrorKind::Os(io_error()));
}

#[test]
fn errors_of_stores_say_their_cause_once() {
    says_cause(remote());
    let (region, page) = (region(), 5);
    let source = alloc();
    says_cause(StoreError::Full {
        region: region.clone(),
        page,
        held_bytes: 4096,
        source,
    });
    let source = Arc::new(registered());
    says_cause(StoreError::Memory {
        region: region.clone(),
        page,
        source,
    });
    let (attempt, path, source) = ("open", path(), io_error());
    says_cause(FileStoreError::Io {
        attempt,
        path,
        source,
    });
    let source = open();
    says_cause(NamesError::Remove {
        name: name(),
        source,
    });
    says_cause(NamesError::from(control()));
    for create in [no_memory(), CreateError::Claim(publish())] {
        says_cause(create);
    }
    let codec: CodecError = "zip".parse::<Codec>().expect_err("no codec of that name");
    let cause = codec.to_string();
    let source = codec;
    says_once(&cause, CreateError::Codec { region, source });
}

fn no_memory() -> CreateError {
    CreateError::Alloc {
        region: region(),
        bytes: 4096,
        needed_bytes: 8192,
        named: true,
        source: alloc(),
    }
}

#[test]
fn errors_of_named_regions_say_their_cause_once() {
    let name = name();
    macro_rules! publishing {
        ($variant:ident, $source:expr) => {
            says_cause(PublishStoreError::$variant {
                name: name.clone(),
                source: $source,
            })
        };
    }
    publishing!(Alloc, alloc());
    publishing!(Memory, registered());
    publishing!(Connect, connect());
    publishing!(Map, channel());
    publishing!(Persist, control());
    publishing!(Publish, publish());
    macro_rules! opening {
        ($variant:ident, $source:expr) => {
            says_cause(OpenStoreError::$variant {
                name: name.clone(),
                source: $source,
            })
        };
    }
    opening!(Open, open());
    opening!(Claim, publish());
    opening!(Alloc, alloc());
    opening!(Memory, registered());
    opening!(Connect, connect());
    opening!(Map, channel());
}

#[test]
fn errors_of_paging_say_their_cause_once() {
    says_cause(page());
    says_cause(StartError::from(connect()));
    says_cause(StartError::from(io_error()));
    says_cause(map());
    says_cause(FlushError::from(page()));
    says_cause(FlushError::Durable(io_error()));
    says_cause(PinError::from(page()));
}

#[test]
fn errors_that_a_program_meets_say_their_cause_once() {
    says_cause(BuildError::from(connect()));
    says_cause(BuildError::from(UserfaultfdError::Os(io_error())));
    says_cause(BuildError::from(StartError::from(connect())));
    says_cause(errors::CreateError::from(no_memory()));
    says_cause(errors::CreateError::from(map()));
    let (name, source) = (name(), open());
    says_cause(errors::OpenError::from(OpenStoreError::Open {
        name,
        source,
    }));
    says_cause(errors::OpenError::from(map()));
    says_cause(errors::FlushError::from(FlushError::from(page())));
    let (name, source) = (self::name(), alloc());
    says_cause(errors::FlushError::from(PublishStoreError::Alloc {
        name,
        source,
    }));
}

#[test]
fn server_that_is_not_there_is_said_once() {
    let port = free_port();
    let built = Runtime::builder()
        .server(format!("tcp://127.0.0.1:{port}"))
        .build();
    let error = built.expect_err("nobody listens there");
    says_once(&io::Error::from_raw_os_error(111).to_string(), error);
}

#[test]
fn array_that_no_server_has_room_for_is_told_what_the_server_lends() {
    let Some(_watchdog) = begin(60) else { return };
    // Both arrays are longer than the longest extent.
    let server = Memory::start(Fabric::Tcp, 6 << 30);
    let runtime = server.runtime(MIB, 64 * KIB);
    let said = runtime.array::<f64>(4 << 30).unwrap_err().to_string();
    for part in [
        "array 1 (f64, 32.0 GiB), which needs 34360786944 bytes",
        "no room for 32.0 GiB: 6.0 GiB left of its capacity of 6.0 GiB",
        "(`Reserve::OnDemand`)",
    ] {
        assert!(said.contains(part), "{part} is not in: {said}");
    }
    // No part of the arrays was kept.
    runtime.array::<u8>(5 << 30).unwrap().close().unwrap();
}

#[test]
fn main_that_returns_an_error_prints_what_it_says() {
    let port = free_port();
    let main = || -> Result<(), Box<dyn Error>> {
        Runtime::builder()
            .server(format!("tcp://127.0.0.1:{port}"))
            .build()?;
        Ok(())
    };
    let printed = format!("Error: {:?}", main().expect_err("nobody listens there"));
    let begins = format!("Error: cannot connect to tcp://127.0.0.1:{port}: ");
    assert!(printed.starts_with(&begins), "{printed}");
}

#[test]
fn servers_may_be_named_in_one_text() {
    let port = free_port();
    let list = format!("tcp://127.0.0.1:{port}, tcp://127.0.0.1:{port}");
    let said = Runtime::builder().server(&list).build();
    let said = said.expect_err("nobody listens there").to_string();
    assert!(said.contains("cannot connect"), "{said}");
}

/// Returns the port of a listener that is gone.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("loopback has ports")
        .port()
}

#[test]
fn what_has_no_name_is_called_by_its_kind_its_number_and_its_size() {
    let Some(_watchdog) = begin(60) else { return };
    let runtime = builder(MIB, 4 * KIB)
        .deadline(Duration::from_secs(2))
        .build()
        .unwrap();
    // A region that cannot be created for want of a server has a number as well.
    let said = runtime.array::<f64>(1 << 20).unwrap_err().to_string();
    assert!(said.starts_with("array 1 (f64, 8.0 MiB) needs"), "{said}");
    let said = runtime.region(5000).unwrap_err().to_string();
    assert!(said.starts_with("region 2 (4.9 KiB) needs"), "{said}");

    let broken = || RegionOptions::new().store(HookedStore::new(MIB, |_, _| Err(io_error())));
    let array = runtime.array_with::<u32>(1 << 18, broken()).unwrap();
    let said = array.prefetch_now(..1).unwrap_err().to_string();
    let page = "page 0 of array 3 (u32, 1.0 MiB) failed";
    assert!(said.contains(page) && said.contains(CAUSE), "{said}");
}

#[test]
fn what_has_a_name_is_called_by_it() {
    let Some(_watchdog) = begin(60) else { return };
    let server = Memory::start(Fabric::Tcp, 4 * MIB);
    let runtime = server.runtime(MIB, 4 * KIB);
    let named = || RegionOptions::new().name("squares");
    let said = runtime.array_with::<f64>(1 << 20, named()).unwrap_err();
    let said = said.to_string();
    assert!(said.contains("for array `squares`, which"), "{said}");
    let said = runtime.region_with(8 * MIB, named()).unwrap_err();
    let said = said.to_string();
    assert!(said.contains("for region `squares`, which"), "{said}");
    runtime.array::<f64>(1).unwrap().close().unwrap();
}
