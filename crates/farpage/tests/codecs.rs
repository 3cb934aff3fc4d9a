//! Codecs as a program meets them: an array with a shape, a bound, and a server that says how much
//! its pages take.
#![allow(clippy::unwrap_used, reason = "a test that fails here says where")]

use std::time::{Duration, Instant};

use farpage::{Advice, ByteSize, Codec, Runtime, ZfpMode};
use farpage_memserver::Server;

#[test]
fn a_field_keeps_its_bound_and_takes_less_room_than_it_has_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let endpoint = format!("shm://{}", directory.path().join("s").display());
    let server = Server::builder()
        .listen(endpoint.parse().unwrap())
        .capacity(64 << 20)
        .lease(Duration::from_millis(300))
        .start()
        .unwrap();
    let runtime = Runtime::builder()
        .server(endpoint)
        .budget(ByteSize::mib(1))
        .codec(Codec::zfp(ZfpMode::Accuracy(1e-6)))
        .build();
    let runtime = match runtime {
        Err(error) if error.to_string().contains("userfaultfd") => {
            eprintln!(
                "SKIPPED: a_field_keeps_its_bound_and_takes_less_room_than_it_has_bytes: {error}"
            );
            return;
        }
        runtime => runtime.unwrap(),
    };
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

    let began = Instant::now();
    let stat = loop {
        let stat = server.stat();
        if stat.logical_bytes == 2 << 20 {
            break stat;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{stat:?}");
        std::thread::yield_now();
    };
    assert!(
        stat.stored_bytes > 0 && stat.stored_bytes * 2 < stat.logical_bytes,
        "{stat:?}"
    );
}
