//! Codecs as a program meets them: an array with a shape, a bound, and a server that says how much
//! its pages take.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

mod common;

use std::time::Duration;

use common::{Fabric, Memory, begin};
use farpage::{Advice, ByteSize, Codec, Runtime, ZfpMode};
use farpage_memserver::Server;
use farpage_testkit::wait_until;

#[test]
fn a_field_keeps_its_bound_and_takes_less_room_than_it_has_bytes() {
    let Some(_watchdog) = begin(60) else { return };
    let lease = Duration::from_millis(300);
    let set = |server: Server| server.capacity(64 << 20).lease(lease);
    let memory = Memory::start_as(Fabric::Shm, set);
    let runtime = Runtime::builder()
        .server(&memory.url)
        .budget(ByteSize::mib(1))
        .codec(Codec::zfp(ZfpMode::Accuracy(1e-6)))
        .build()
        .unwrap();
    let value =
        |at: usize| ((at % 128) as f64 * 0.02).sin() * ((at / 128) as f64 * 0.01).cos() + 2.0;
    let mut field = runtime.array_nd::<f64>("field", [16, 128, 128]).unwrap();
    for (at, x) in field.iter_mut().enumerate() {
        *x = value(at);
    }
    field.advise(.., Advice::DontNeed).unwrap();
    let worst = (field.iter().enumerate())
        .map(|(at, x)| (x - value(at)).abs())
        .fold(0.0, f64::max);
    assert!(worst > 0.0 && worst <= 1e-6, "{worst}");
    let stats = runtime.stats();
    assert!(stats.largest_error() >= worst && stats.largest_error() <= 1e-6);
    assert_eq!(
        (stats.store.write_backs_zfp, stats.store.zfp_declined),
        (32, 0)
    );
    assert_eq!(field.shape(), [16, 128, 128]);
    assert!(runtime.array::<u32>(100).is_err(), "no codec for them");

    let mut stat = memory.server.stat();
    wait_until("the server is told of all pages", || {
        stat = memory.server.stat();
        stat.logical_bytes == 2 << 20
    });
    assert!(
        stat.stored_bytes > 0 && stat.stored_bytes * 2 < stat.logical_bytes,
        "{stat:?}"
    );
}
